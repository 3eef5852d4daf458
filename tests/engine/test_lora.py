from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainsession.engine.context import PassContext, Segment
from trainsession.engine.lora import Adapter, initial_a, new_adapter
from trainsession.engine.merge import export_merged
from trainsession.engine.model import LoadedModel
from trainsession.engine.selfcheck import SequenceAttention
from trainsession.errors import InvalidRequest
from trainsession.types import LoraConfig

Loaded = Callable[[str], LoadedModel]
CPU = torch.device("cpu")


def _adapter(model: LoadedModel, **config: object) -> Adapter:
    """An adapter whose B is not zero any more."""
    adapter = new_adapter(LoraConfig(rank=4, seed=3, **config), model.lora_modules, CPU)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for pair in adapter.weights.values():
            pair.B.copy_(0.05 * torch.randn(pair.B.shape, generator=generator))
    return adapter


@torch.inference_mode()
def _logits(model: LoadedModel, rows: list[tuple[Adapter | None, torch.Tensor]]) -> torch.Tensor:
    segments, start = [], 0
    for adapter, tokens in rows:
        segments.append(Segment(adapter, start, start + len(tokens)))
        start += len(tokens)
    attention = SequenceAttention(tuple(len(tokens) for _, tokens in rows), {})
    positions = torch.cat([torch.arange(len(tokens)) for _, tokens in rows])
    h = model.hidden(torch.cat([tokens for _, tokens in rows]), positions, PassContext(segments, attention))
    return model.logits(h, segments)


def test_initial_values_are_pefts_distribution_and_depend_on_seed_and_module_only() -> None:
    values = initial_a(1, "model.layers.0.mlp.up_proj", 64, 400)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 1 / math.sqrt(400)
    # Uniform in (-b, b): variance b^2 / 3.
    assert abs(values.var() / (1 / 400 / 3) - 1) < 0.02
    assert np.array_equal(values, initial_a(1, "model.layers.0.mlp.up_proj", 64, 400))
    assert not np.array_equal(values, initial_a(2, "model.layers.0.mlp.up_proj", 64, 400))
    assert not np.array_equal(values, initial_a(1, "model.layers.1.mlp.up_proj", 64, 400))


def test_the_same_seed_gives_the_same_a_whatever_else_is_trained(loaded: Loaded) -> None:
    modules = loaded("llama").lora_modules
    some = new_adapter(LoraConfig(rank=4, seed=5, train_mlp=False), modules, CPU)
    more = new_adapter(LoraConfig(rank=4, seed=5, train_unembed=True), modules, CPU)
    assert set(some.weights) < set(more.weights)
    for name, pair in some.weights.items():
        assert torch.equal(pair.A, more.weights[name].A)


@pytest.mark.parametrize(
    ("flags", "endings"),
    [
        ({"train_mlp": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False, "train_unembed": True}, {"lm_head"}),
        ({"target_modules": ("q_proj", "lm_head")}, {"q_proj", "lm_head"}),
    ],
)
def test_what_is_trained(flags: dict[str, object], endings: set[str], loaded: Loaded) -> None:
    adapter = new_adapter(LoraConfig(rank=2, seed=0, **flags), loaded("llama").lora_modules, CPU)  # type: ignore[arg-type]
    assert {name.rsplit(".", 1)[-1] for name in adapter.weights} == endings
    per_layer = len(endings - {"lm_head"})
    assert len(adapter.weights) == 2 * per_layer + ("lm_head" in endings)
    assert all(not pair.B.any() and pair.A.any() for pair in adapter.weights.values())


def test_fused_attention_and_moe_targets(loaded: Loaded, make_tiny_model: Callable[..., Path]) -> None:
    from trainsession.engine.model import load_model

    neox = load_model(make_tiny_model("GPTNeoXConfig"), name="neox", device="cpu", dtype="float32")
    adapter = new_adapter(LoraConfig(rank=2, seed=0, train_mlp=False), neox.lora_modules, CPU)
    assert {name.rsplit(".", 1)[-1] for name in adapter.weights} == {"query_key_value", "dense"}
    moe = new_adapter(LoraConfig(rank=2, seed=0), loaded("qwen3_moe").lora_modules, CPU)
    assert {name.rsplit(".", 1)[-1] for name in moe.weights} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(InvalidRequest, match="fused expert"):
        new_adapter(LoraConfig(rank=2, seed=0, train_attn=False), loaded("qwen3_moe").lora_modules, CPU)


def test_a_target_that_matches_nothing_is_named_with_what_exists(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequest, match=r"'c_attn' matches no module; .*q_proj") as caught:
        new_adapter(LoraConfig(seed=0, target_modules=("q_proj", "c_attn")), loaded("llama").lora_modules, CPU)
    assert "o_proj" in caught.value.details["available"]


def test_a_fresh_adapter_changes_no_bit_and_a_trained_one_does(loaded: Loaded) -> None:
    model = loaded("llama")
    tokens = torch.arange(20)
    base = _logits(model, [(None, tokens)])
    fresh = new_adapter(LoraConfig(rank=4, seed=3), model.lora_modules, CPU)
    assert torch.equal(_logits(model, [(fresh, tokens)]), base)
    assert not torch.allclose(_logits(model, [(_adapter(model), tokens)]), base, atol=1e-2)


def test_rows_of_mixed_adapters_equal_each_alone(loaded: Loaded) -> None:
    model = loaded("llama")
    first, second = _adapter(model), _adapter(model, train_unembed=True, alpha=8.0)
    tokens = [torch.arange(10, 27), torch.arange(3, 40), torch.arange(5)]
    rows = [(first, tokens[0]), (None, tokens[1]), (second, tokens[2])]
    mixed = _logits(model, rows).split([len(t) for t in tokens])
    alone = [_logits(model, [row]) for row in rows]
    assert not torch.allclose(alone[0], _logits(model, [(second, tokens[0])]), atol=1e-2)
    for crowd, single in zip(mixed, alone, strict=True):
        assert torch.equal(crowd, single)


def test_a_frozen_copy_does_not_move(loaded: Loaded) -> None:
    model = loaded("llama")
    adapter = _adapter(model)
    frozen = adapter.frozen_copy()
    tokens = torch.arange(8)
    before = _logits(model, [(frozen, tokens)])
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(1.0)
    assert torch.equal(_logits(model, [(frozen, tokens)]), before)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.parametrize(("name", "unembed"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_merged_export_has_equal_logits_in_transformers(
    name: str, unembed: bool, loaded: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = loaded(name)
    adapter = _adapter(model, train_unembed=unembed)
    capsys.readouterr()
    export_merged(model, adapter, tmp_path)
    assert capsys.readouterr().err == "", "transformers' progress bars"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(30)
    with torch.inference_mode():
        logits = merged(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits, _logits(model, [(adapter, tokens)]), rtol=1e-4, atol=1e-4)
    embedding = merged.get_parameter("model.embed_tokens.weight")
    unembedding = dict(merged.named_parameters(remove_duplicate=False))["lm_head.weight"]
    assert (unembedding is embedding) == (name == "llama" and not unembed)
    assert torch.equal(embedding, model.causal.get_parameter("model.embed_tokens.weight"))
    chat = [{"role": "user", "content": "hi"}]
    original = AutoTokenizer.from_pretrained(model.path).apply_chat_template(chat, tokenize=False)
    assert AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False) == original
