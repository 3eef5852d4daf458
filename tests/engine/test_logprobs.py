"""Chunked logprobs against log_softmax over whole logits, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainsession.engine import logprobs
from trainsession.engine.context import Segment
from trainsession.engine.logprobs import Targets, target_logprobs
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.types import LoraConfig

LoadModel = Callable[[str], LoadedModel]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and a last one that is not full, on tiny inputs."""
    monkeypatch.setattr(logprobs, "CPU_CHUNK_ROWS", 16)


def unembedding_adapter(model: LoadedModel) -> Adapter:
    config = LoraConfig(rank=4, seed=1, train_attn=False, train_mlp=False, train_unembed=True)
    adapter = new_adapter(config, model.lora_modules, model.device)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for pair in adapter.weights.values():
            pair.B.copy_(torch.randn(pair.B.shape, generator=generator) * 0.1)
    return adapter


def hidden(model: LoadedModel, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, model.hidden_size, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def make_targets(model: LoadedModel, widths: list[int], temperature: float = 1.0) -> Targets:
    generator = torch.Generator().manual_seed(3)
    rows = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))
    return Targets(
        row_M=rows,
        token_M=torch.randint(model.vocab_size, (len(rows),), generator=generator),
        temperature_T=torch.full((len(widths),), temperature),
        needs_T=torch.ones(len(widths), dtype=torch.bool),
    )


def reference(
    model: LoadedModel, h_TE: torch.Tensor, adapter: Adapter | None, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole logits by hand in float64."""
    logits = h_TE.double() @ model.lora_modules[model.unembedding_name].weight.double().t()
    if adapter is not None and model.unembedding_name in adapter.weights:
        pair = adapter.weights[model.unembedding_name]
        logits = logits + adapter.scale * (h_TE.double() @ pair.A.double().t()) @ pair.B.double().t()
    logprobs_TV = torch.log_softmax(logits / targets.temperature_T[:, None].double(), -1)
    entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV[targets.row_M, targets.token_M], entropy


WIDTHS = {"plain": [1] * 37, "soft": [3] * 37, "mixed": [1, 3, 2, 1, 1] * 7 + [1, 4]}


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("trains_unembedding", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_whole_logits(
    loaded: LoadModel, widths: list[int], trains_unembedding: bool, temperature: float
) -> None:
    model = loaded("llama")
    adapter = unembedding_adapter(model) if trains_unembedding else None
    h_TE = hidden(model, 37)
    targets = make_targets(model, widths, temperature)
    actual, entropy = target_logprobs(model, h_TE, [Segment(adapter, 0, 37)], targets, entropy=True)
    expected, expected_entropy = reference(model, h_TE, adapter, targets)
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=5e-5, rtol=1e-4)

    weights = torch.linspace(-1, 1, len(targets.row_M))
    leaves = [h_TE, *(adapter.parameters() if adapter is not None else [])]
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    actual.backward(weights)
    for leaf, gradient in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient.float(), atol=2e-5, rtol=1e-4)


def test_segments_of_both_kinds_keep_their_order(loaded: LoadModel) -> None:
    model = loaded("qwen3")
    adapter = unembedding_adapter(model)
    h_TE = hidden(model, 30)
    targets = make_targets(model, [1] * 10 + [2] * 5 + [1] * 15)
    segments = [Segment(adapter, 0, 8), Segment(None, 8, 20), Segment(adapter, 20, 24), Segment(None, 24, 30)]
    actual, entropy = target_logprobs(model, h_TE, segments, targets, entropy=True)
    with_lora, entropy_lora = reference(model, h_TE, adapter, targets)
    without, entropy_without = reference(model, h_TE, None, targets)
    trained = torch.zeros(30, dtype=torch.bool)
    trained[0:8] = trained[20:24] = True
    torch.testing.assert_close(
        actual.double(), torch.where(trained[targets.row_M], with_lora, without), atol=2e-5, rtol=1e-5
    )
    assert entropy is not None
    torch.testing.assert_close(
        entropy.double(), torch.where(trained, entropy_lora, entropy_without), atol=5e-5, rtol=1e-4
    )


def test_softcapped_logits_take_the_models_own_path(loaded: LoadModel, make_tiny_model: Callable[..., object]) -> None:
    from trainsession.engine.model import load_model

    path = make_tiny_model("Gemma2Config", final_logit_softcapping=2.0, attn_logit_softcapping=None)
    model = load_model(path, name="tiny-gemma2", device="cpu", dtype="float32")  # type: ignore[arg-type]
    assert model.plain_unembedding is None
    h_TE, targets = hidden(model, 20), make_targets(model, [1] * 20)
    actual, _ = target_logprobs(model, h_TE, [Segment(None, 0, 20)], targets, entropy=False)
    raw = h_TE.double() @ model.lora_modules[model.unembedding_name].weight.double().t()
    expected = torch.log_softmax(torch.tanh(raw / 2.0) * 2.0, -1)[targets.row_M, targets.token_M]
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)
    (wanted,) = torch.autograd.grad(expected.sum(), h_TE)
    (got,) = torch.autograd.grad(actual.sum(), h_TE)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_confident_predictions_keep_their_small_gradient(loaded: LoadModel) -> None:
    """``W[y] - E_p[W]`` cancels where p_y is near 1: it must be formed from ``onehot - p``."""
    model = loaded("llama")
    weight = model.lora_modules[model.unembedding_name].weight
    h_TE = (weight[1:21] / weight[1:21].norm(dim=1, keepdim=True) * 12).detach().requires_grad_()
    targets = make_targets(model, [1] * 20)
    best = (h_TE @ weight.t()).argmax(-1)
    targets = Targets(row_M=targets.row_M, token_M=best, temperature_T=targets.temperature_T, needs_T=targets.needs_T)
    actual, _ = target_logprobs(model, h_TE, [Segment(None, 0, 20)], targets, entropy=False)
    expected, _ = reference(model, h_TE, None, targets)
    (wanted,) = torch.autograd.grad(expected.sum(), h_TE)
    (got,) = torch.autograd.grad(actual.sum(), h_TE)
    assert wanted.norm(dim=1).min() < 1e-2
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("trains_unembedding", [False, True])
@pytest.mark.parametrize("widths", [[1] * 5, [2] * 5], ids=["plain", "soft"])
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(
    loaded: LoadModel, trains_unembedding: bool, widths: list[int]
) -> None:
    model = loaded("llama")
    assert model.exact
    adapter = unembedding_adapter(model) if trains_unembedding else None
    own, neighbours = hidden(model, 5), hidden(model, 18, seed=9)
    targets = make_targets(model, widths)
    alone, alone_entropy = target_logprobs(model, own, [Segment(adapter, 0, 5)], targets, entropy=True)
    (alone_grad,) = torch.autograd.grad(alone.sum(), own)

    other = make_targets(model, [1] * 18)
    crowd_targets = Targets(
        row_M=torch.cat([other.row_M, targets.row_M + 18]),
        token_M=torch.cat([other.token_M, targets.token_M]),
        temperature_T=torch.cat([other.temperature_T * 0.5, targets.temperature_T]),
        needs_T=torch.cat([other.needs_T, targets.needs_T]),
    )
    own_crowd = own.detach().clone().requires_grad_()
    segments = [Segment(None, 0, 18), Segment(adapter, 18, 23)]
    crowd, crowd_entropy = target_logprobs(
        model, torch.cat([neighbours, own_crowd]), segments, crowd_targets, entropy=True
    )
    (crowd_grad,) = torch.autograd.grad(crowd.sum(), own_crowd)
    assert torch.equal(crowd[18:], alone)
    assert torch.equal(crowd_grad, alone_grad)
    assert alone_entropy is not None
    assert crowd_entropy is not None
    assert torch.equal(crowd_entropy[18:], alone_entropy)


def test_forward_alone_has_the_bits_of_forward_with_gradients(loaded: LoadModel) -> None:
    model = loaded("llama")
    for adapter in (None, unembedding_adapter(model)):
        h_TE, targets = hidden(model, 20), make_targets(model, [1] * 20)
        with_graph, _ = target_logprobs(model, h_TE, [Segment(adapter, 0, 20)], targets, entropy=False)
        with torch.no_grad():
            without, _ = target_logprobs(model, h_TE, [Segment(adapter, 0, 20)], targets, entropy=True)
        assert torch.equal(with_graph, without)


def test_rows_that_need_no_gradient_get_none_and_cost_no_product(
    loaded: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("llama")
    h_TE, targets = hidden(model, 48), make_targets(model, [1] * 48)
    targets.needs_T[:40] = False
    products: list[int] = []
    scatter = torch.Tensor.scatter_add_
    monkeypatch.setattr(
        torch.Tensor, "scatter_add_", lambda self, *args: (products.append(len(self)), scatter(self, *args))[1]
    )
    actual, _ = target_logprobs(model, h_TE, [Segment(None, 0, 48)], targets, entropy=False)
    assert products == [16]  # one chunk of three
    (gradient,) = torch.autograd.grad(actual.sum(), h_TE)
    assert (gradient[:40] == 0).all()
    assert (gradient[40:] != 0).any(dim=1).all()


def test_an_odd_vocabulary_does_not_change_a_rows_bits(make_tiny_model: Callable[..., object]) -> None:
    from trainsession.engine.model import load_model

    path = make_tiny_model("LlamaConfig", vocab_size=307)
    model = load_model(path, name="tiny-odd", device="cpu", dtype="float32")  # type: ignore[arg-type]
    row = hidden(model, 1).detach()
    h_TE = row.repeat(40, 1).requires_grad_()
    targets = make_targets(model, [1] * 40)
    targets.token_M.fill_(5)
    actual, entropy = target_logprobs(model, h_TE, [Segment(None, 0, 40)], targets, entropy=True)
    (gradient,) = torch.autograd.grad(actual.sum(), h_TE)
    assert entropy is not None
    for values in (actual, entropy, gradient):
        assert torch.equal(values, values[:1].expand_as(values))


def test_memory_holds_no_logits_of_the_whole_pass(loaded: LoadModel) -> None:
    """What autograd keeps is a vector per row of the hidden size, not of the vocabulary."""
    model = loaded("llama")
    saved: list[int] = []
    h_TE, targets = hidden(model, 64), make_targets(model, [1] * 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        target_logprobs(model, h_TE, [Segment(None, 0, 64)], targets, entropy=True)
    assert max(saved) == 64 * model.hidden_size < 64 * model.vocab_size
