"""Static decode steps that fail half-way, or compute what is not finite: nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainsession.engine.api import SampleEvent, SampleItem
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.sampler.bank import AdapterBank
from trainsession.engine.sampler.runner import Runner
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import Tokenizer
from trainsession.types import LoraConfig, SampleResponse, SamplingParams

Finish = Callable[[Sampler], dict[str, SampleResponse]]
Tokens = dict[str, list[list[int]]]
PROMPTS = [(3 + np.arange(length) * 11 % 290).astype(np.int32) for length in (5, 8)]


class FailsAt(TorchDispatchMode):
    """No memory once, for the ``at``-th of the operations that ``chosen`` picks."""

    def __init__(self, at: int | None, chosen: Callable[[Any, Sequence[Any]], bool]) -> None:
        super().__init__()
        self.at, self.chosen, self.count = at, chosen, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.chosen(func, args):
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory (as a test)")
        return func(*args, **(kwargs or {}))


def _computes(func: Any, args: Sequence[Any]) -> bool:
    return not func.is_view


def _copies_tables(func: Any, args: Sequence[Any]) -> bool:
    return func.overloadpacket is torch.ops.aten.copy_ and args[0].dtype == torch.int32 and args[0].dim() == 2


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LoadedModel:
    return load_model(tiny_model, name="tiny", device="cpu", dtype="float32", exact=False)


@pytest.fixture(scope="module")
def adapters(model: LoadedModel) -> list[Adapter | None]:
    return [_adapter(model, seed) for seed in (1, 2)]


def _adapter(model: LoadedModel, seed: int) -> Adapter:
    adapter = new_adapter(LoraConfig(rank=4, seed=seed), model.lora_modules, model.device)
    generator = torch.Generator().manual_seed(seed)
    for pair in adapter.weights.values():
        pair.B.data.copy_(0.1 * torch.randn(pair.B.shape, generator=generator))
    return adapter.frozen_copy()


def _filled(model: LoadedModel, a: float, b: float, seed: int = 5) -> Adapter:
    """An adapter of scale 1 whose matrices hold plus and minus these numbers."""
    adapter = new_adapter(LoraConfig(rank=4, alpha=4, seed=seed), model.lora_modules, model.device)
    for pair in adapter.weights.values():
        pair.A.data.copy_(a * pair.A.data.sign())
        pair.B.data.fill_(b)
    return adapter.frozen_copy()


def _sampler(model: LoadedModel, tokenizer: Tokenizer, *, static: bool = True) -> Sampler:
    return Sampler(model, tokenizer, num_blocks=40, block_size=4, static=static)


def _submit(sampler: Sampler, owners: Sequence[Adapter | None], tag: str = "", **params: Any) -> None:
    """Two samples of a prompt for each owner, as requests 0, 1, ..."""
    for i, adapter in enumerate(owners):
        settings = SamplingParams(**{"max_tokens": 12, "seed": i, "stop": [], **params})
        weights = None if adapter is None else f"w{tag}{i}"
        item = SampleItem(request_id=f"{i}", prompt=PROMPTS[i], num_samples=2, params=settings, weights=weights)
        sampler.submit(item, adapter)


def _tokens(responses: dict[str, SampleResponse]) -> Tokens:
    return {key: [list(sample.tokens) for sample in response.sequences] for key, response in responses.items()}


@pytest.fixture(scope="module")
def expected(
    model: LoadedModel, adapters: list[Adapter | None], tiny_tokenizer: Tokenizer, finish: Finish
) -> dict[str, list[list[int]]]:
    """By the packed path."""
    sampler = _sampler(model, tiny_tokenizer, static=False)
    _submit(sampler, adapters)
    return _tokens(finish(sampler))


def _until_done(sampler: Sampler) -> Iterator[SampleEvent]:
    while sampler.has_work():
        yield from sampler.step()


def _seen(events: Iterator[SampleEvent]) -> list[tuple[Any, ...]]:
    return [(e.request_id, e.index, e.tokens, e.text_delta, e.stop_reason, e.text, e.done, e.error) for e in events]


def _is_finite(sampler: Sampler) -> bool:
    """Whether the cache holds nothing that would spread."""
    return all(bool(torch.isfinite(sampler._cache.layer(i)).all()) for i in range(sampler._cache.num_layers))


def _assert_clean(sampler: Sampler) -> None:
    assert _is_finite(sampler)
    sampler._blocks.check()
    assert sampler.stats()["free_blocks"] == 40


def test_an_adapter_that_was_copied_half_is_not_found(
    model: LoadedModel,
    adapters: list[Adapter | None],
    expected: Tokens,
    tiny_tokenizer: Tokenizer,
    finish: Finish,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bring_in = AdapterBank._bring_in

    def run(at: int | None) -> int:
        memory = FailsAt(at, _computes)

        def fail(bank: AdapterBank, adapter: Adapter) -> bool:
            with memory:
                return bring_in(bank, adapter)

        monkeypatch.setattr(AdapterBank, "_bring_in", fail)
        sampler = _sampler(model, tiny_tokenizer)
        _submit(sampler, adapters)
        assert _tokens(finish(sampler)) == expected, f"after operation {at}"
        return memory.count

    count = run(None)
    assert count > 100
    for at in [*range(0, count, 8), count - 1]:
        assert run(at) > at


def test_a_page_table_that_was_not_copied_is_copied_later(
    model: LoadedModel,
    adapters: list[Adapter | None],
    expected: Tokens,
    tiny_tokenizer: Tokenizer,
    finish: Finish,
) -> None:
    def run(at: int | None) -> int:
        sampler = _sampler(model, tiny_tokenizer)
        _submit(sampler, adapters)
        with FailsAt(at, _copies_tables) as memory:
            assert _tokens(finish(sampler)) == expected, f"after copy {at}"
        return memory.count

    count = run(None)
    assert count > 4
    for at in range(count):
        assert run(at) > at


@pytest.mark.parametrize("at", [0, 1, 5, 40, None])
def test_a_step_ahead_that_fails_fails_nobody(
    at: int | None,
    model: LoadedModel,
    adapters: list[Adapter | None],
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At its first, second ... operation, or after all of them."""
    sampler = _sampler(model, tiny_tokenizer)
    _submit(sampler, adapters)
    without = _seen(_until_done(sampler))
    run_ahead = Runner.run_ahead
    failures = 0

    def fail(*args: Any) -> None:
        nonlocal failures
        failures += 1
        with FailsAt(at, _computes):
            run_ahead(*args)
        raise RuntimeError("as a test")

    monkeypatch.setattr(Runner, "run_ahead", fail)
    sampler = _sampler(model, tiny_tokenizer)
    _submit(sampler, adapters)
    assert _seen(_until_done(sampler)) == without
    assert failures > 5
    _assert_clean(sampler)


def _poisoned(path: Path, token: int) -> LoadedModel:
    """The model with NaN where it looks this token up; its own logits stay as they are."""
    model = load_model(path, name="tiny", device="cpu", dtype="float32", exact=False)
    embedding = model.causal.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    with torch.no_grad():
        embedding[token] = torch.nan
    return model


@pytest.mark.parametrize("ends", ["by its stop token", "cancelled"])
def test_what_a_step_ahead_wrote_for_a_sample_that_ended_reaches_nobody(
    ends: str, make_tiny_model: Callable[..., Path], tiny_tokenizer: Tokenizer, finish: Finish
) -> None:
    path = make_tiny_model("LlamaConfig", tie_word_embeddings=False)
    whole, at = _whole(path, tiny_tokenizer, finish)
    token = whole["0"][0][at]
    sampler = _sampler(_poisoned(path, token), tiny_tokenizer)
    _submit(sampler, [None, None], stop=[token] if ends == "by its stop token" else [])
    seen: dict[tuple[str, int], list[int]] = {}
    while sampler.has_work():
        events = sampler.step()
        for event in events:
            assert event.error is None
            seen.setdefault((event.request_id, event.index), []).extend(event.tokens)
        if ends == "cancelled" and any(event.tokens == [token] for event in events):
            assert not _is_finite(sampler), "no step was in flight"
            sampler.cancel("0")
        else:
            assert _is_finite(sampler)
    assert seen["0", 0] == whole["0"][0][: at + 1]
    assert [seen["1", 0], seen["1", 1]] == whole["1"]
    _assert_clean(sampler)
    _submit(sampler, [None, None], max_tokens=at)
    assert _tokens(finish(sampler)) == {key: [s[:at] for s in samples] for key, samples in whole.items()}


def test_blocks_are_zeroed_where_there_is_no_memory_and_the_step_keeps_its_events(
    make_tiny_model: Callable[..., Path], tiny_tokenizer: Tokenizer, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model("LlamaConfig", tie_word_embeddings=False)
    whole, at = _whole(path, tiny_tokenizer, finish)
    sampler = _sampler(_poisoned(path, whole["0"][0][at]), tiny_tokenizer)
    _submit(sampler, [None, None], stop=[whole["0"][0][at]])
    scrub, scrubbed = sampler._cache.scrub, list[int]()

    def without_memory(blocks: Sequence[int]) -> None:
        scrubbed.extend(blocks)
        with FailsAt(0, lambda func, args: not func.is_view and func.overloadpacket is not torch.ops.aten.zero_):
            scrub(blocks)

    monkeypatch.setattr(sampler._cache, "scrub", without_memory)
    events = list(_until_done(sampler))
    assert scrubbed
    assert {event.request_id for event in events if event.done} == {"0", "1"}
    assert all(event.error is None for event in events)
    assert whole["0"][0][at] in [token for event in events for token in event.tokens]
    _assert_clean(sampler)


def _whole(path: Path, tokenizer: Tokenizer, finish: Finish) -> tuple[Tokens, int]:
    """What the model draws, and where in the first sample a token is that nothing else has."""
    sampler = _sampler(load_model(path, name="tiny", device="cpu", dtype="float32", exact=False), tokenizer)
    _submit(sampler, [None, None])
    whole = _tokens(finish(sampler))
    return whole, next(i for i, token in enumerate(whole["0"][0]) if i >= 4 and _is_fresh(token, whole, i))


def _is_fresh(token: int, whole: Tokens, at: int) -> bool:
    """Drawn by the first sample of request 0 at ``at``, and by no other sample and in no prompt."""
    others = [*whole["0"][0][:at], *whole["0"][1], *whole["1"][0], *whole["1"][1]]
    return token not in others and all(token not in prompt for prompt in PROMPTS)


def test_an_adapter_that_overflows_for_another_request_changes_nothing(
    model: LoadedModel,
    adapters: list[Adapter | None],
    expected: Tokens,
    tiny_tokenizer: Tokenizer,
    finish: Finish,
) -> None:
    """A of the first layer's queries is so large that one token overflows, which only the other request feeds."""
    plain = _sampler(model, tiny_tokenizer, static=False)
    _submit(plain, [None, None])
    own = _tokens(finish(plain))["1"]
    fed = {*PROMPTS[1].tolist(), *own[0], *own[1]}
    token = next(token for token in expected["0"][0][1:-1] if token not in fed)
    layer = model.causal.base_model.get_submodule("layers.0.input_layernorm")
    embed = model.causal.get_input_embeddings()
    with torch.inference_mode():
        x_VE = layer(embed(torch.arange(model.vocab_size)))
    large = 3e38 / float((x_VE[[*fed]] @ x_VE[token]).abs().max())
    adapter = _filled(model, 0.0, 0.0)
    adapter.weights["model.layers.0.self_attn.q_proj"].A.data.copy_(large * x_VE[token])
    assert torch.isinf(large * x_VE[token] @ x_VE[token])

    sampler = _sampler(model, tiny_tokenizer)
    _submit(sampler, [adapters[0], adapter])
    assert _tokens(finish(sampler)) == {"0": expected["0"], "1": own}
    _assert_clean(sampler)


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        ("float32", float("inf"), 0.0),
        ("float32", 0.0, float("nan")),
        ("bfloat16", 3.4e38, 0.0),
        ("bfloat16", 0.0, 3.4e38),
    ],
)
def test_an_adapter_that_the_dtype_does_not_hold_takes_the_packed_way(
    dtype: str, a: float, b: float, tiny_model: Path
) -> None:
    model = load_model(tiny_model, name="tiny", device="cpu", dtype=dtype, exact=False)
    bank = AdapterBank(model.lora_modules)
    assert bank.place([_adapter(model, 1), _filled(model, a, b)]) is None
    assert bank.place([_filled(model, 3e38, 3e38)]) is not None
    assert all(bool(torch.isfinite(matrix).all()) for matrix in [*bank.a.values(), *bank.b.values()])


def test_a_scale_that_makes_an_adapter_overflow_takes_the_packed_way(model: LoadedModel) -> None:
    adapter = _filled(model, 3e38, 0.0)
    adapter.scale = 2.0
    assert AdapterBank(model.lora_modules).place([adapter]) is None


def test_a_block_of_a_request_that_failed_is_clean_before_a_step_ahead_writes_to_it(
    model: LoadedModel,
    adapters: list[Adapter | None],
    expected: Tokens,
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks are zeroed, as they may hold NaN: not after another sample took them and wrote."""
    decode = Runner.decode
    for last in range(1, 10):
        steps = 0

        def fail(runner: Runner, samples: Any, owners: Any, last: int = last) -> Any:
            nonlocal steps
            steps += 1
            if steps >= last and any(sample.request.id == "1" for sample in samples):
                raise RuntimeError("as a test")
            return decode(runner, samples, owners)

        monkeypatch.setattr(Runner, "decode", fail)
        sampler = _sampler(model, tiny_tokenizer)
        _submit(sampler, adapters)
        tokens: list[list[int]] = [[], []]
        failed = []
        for event in _until_done(sampler):
            if event.error is not None:
                failed.append(event.request_id)
            elif event.request_id == "0" and not event.done:
                tokens[event.index] += event.tokens
        assert failed == ["1"]
        assert tokens == expected["0"], f"after step {last}"
