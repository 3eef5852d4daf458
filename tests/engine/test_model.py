from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainsession.engine.context import DECODE_TILE, PASS_TILE
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.selfcheck import packed_pass
from trainsession.errors import EngineError, InvalidRequest

Loaded = Callable[[str], LoadedModel]

VOCAB_SIZE = 320


def _sequences(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def _plain(path: Path, sequences: list[torch.Tensor]) -> torch.Tensor:
    causal = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return torch.cat([causal(input_ids=tokens[None]).logits[0] for tokens in sequences])


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_packed_logits_are_transformers_own(name: str, loaded: Loaded, tiny_path: Callable[[str], Path]) -> None:
    sequences = _sequences(17, 1, 40)
    _, logits, _ = packed_pass(loaded(name), sequences)
    torch.testing.assert_close(logits, _plain(tiny_path(name), sequences), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("config_class", "overrides"),
    [
        ("MistralConfig", {"sliding_window": 5}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Gemma3TextConfig", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
        ("Phi3Config", {"sliding_window": None}),
        ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
        ("CohereConfig", {"logit_scale": 0.25}),
        ("Olmo2Config", {}),
        ("GPTNeoXConfig", {}),
    ],
)
def test_other_architectures(
    config_class: str, overrides: dict[str, object], make_tiny_model: Callable[..., Path]
) -> None:
    path = make_tiny_model(config_class, **overrides)
    sequences = _sequences(23, 12)
    model = load_model(path, name="tiny", device="cpu", dtype="float32")
    _, logits, attention = packed_pass(model, sequences)
    torch.testing.assert_close(logits, _plain(path, sequences), rtol=1e-4, atol=2e-5)
    assert model.exact
    if overrides.get("sliding_window"):
        assert 5 in attention.windows.values()


@pytest.mark.parametrize(
    ("config_class", "overrides", "feature"),
    [
        ("Gemma2Config", {"sliding_window": 5}, "softcap"),
        ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ("Llama4TextConfig", {"num_local_experts": 2, "intermediate_size_mlp": 64}, "chunked_attention"),
    ],
)
def test_missing_features_are_refused_by_name(
    config_class: str, overrides: dict[str, object], feature: str, make_tiny_model: Callable[..., Path]
) -> None:
    path = make_tiny_model(config_class, **overrides)
    with pytest.raises(EngineError, match=feature):
        load_model(path, name="tiny", device="cpu", dtype="float32")


def test_final_softcap(make_tiny_model: Callable[..., Path]) -> None:
    path = make_tiny_model("Gemma2Config", attn_logit_softcapping=None, final_logit_softcapping=2.0)
    model = load_model(path, name="tiny", device="cpu", dtype="float32")
    _, logits, _ = packed_pass(model, _sequences(9))
    torch.testing.assert_close(logits, _plain(path, _sequences(9)), rtol=1e-4, atol=2e-5)
    assert model.plain_unembedding is None


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("tile", [DECODE_TILE, PASS_TILE])
def test_exact_rows_are_bit_equal_in_any_crowd(name: str, tile: int, loaded: Loaded) -> None:
    model = loaded(name)
    assert model.exact
    (mine,) = _sequences(13, seed=5)
    alone_h, alone_logits, _ = packed_pass(model, [mine], tile)
    for crowd in ((), (1,), (50, 3), (200, 131)):
        others = _sequences(*crowd, seed=len(crowd))
        h, logits, _ = packed_pass(model, [*others, mine, *others], tile)
        start = sum(crowd)
        assert torch.equal(h[start : start + 13], alone_h)
        assert torch.equal(logits[start : start + 13], alone_logits)


def test_facts_of_the_configuration(loaded: Loaded) -> None:
    model = loaded("llama")
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (VOCAB_SIZE, 64, 2)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 16)
    assert (model.context_length, model.eos_token_ids) == (512, (2,))
    assert list(model.lora_modules)[-1] == model.unembedding_name == "lm_head"
    assert not any(parameter.requires_grad for parameter in model.causal.parameters())


def test_moe_says_that_it_is_not_exact(loaded: Loaded, tiny_path: Callable[[str], Path]) -> None:
    assert not loaded("qwen3_moe").exact
    with pytest.raises(InvalidRequest, match="exact"):
        load_model(tiny_path("qwen3_moe"), name="moe", device="cpu", dtype="float32", exact=True)


def test_bfloat16_loads_and_is_near_float32(tiny_model: Path, loaded: Loaded) -> None:
    sequences = _sequences(20, 7)
    half = load_model(tiny_model, name="tiny", device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    _, logits, _ = packed_pass(half, sequences)
    _, reference, _ = packed_pass(loaded("llama"), sequences)
    assert (logits.float() - reference).abs().max() < 0.05 * reference.abs().max()


def test_identity_ignores_dtype_and_sees_weights(tiny_model: Path, tmp_path: Path, loaded: Loaded) -> None:
    from trainsession.engine.identity import weights_identity

    causal = AutoModelForCausalLM.from_pretrained(tiny_model)
    causal.save_pretrained(tmp_path / "same")
    with torch.no_grad():
        causal.model.norm.weight[0] += 1
    causal.save_pretrained(tmp_path / "other")
    assert weights_identity(tmp_path / "same") == loaded("llama").identity
    assert weights_identity(tmp_path / "other") != loaded("llama").identity


def test_unknown_dtype_names_the_known(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="float32, bfloat16"):
        load_model(tiny_model, name="tiny", dtype="int8")


CODE = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model", "AutoTokenizer": ["foreign.T", None]}


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": CODE, "trust_remote_code": True, "architectures": ["foreign.Model"]},
        {"attn_implementation": "somebody/kernels:foreign", "experts_implementation": "somebody/kernels"},
        {"_attn_implementation": "somebody/kernels", "_attn_implementation_internal": "somebody/kernels"},
    ],
    ids=["code", "kernels", "private"],
)
def test_a_configuration_brings_no_code(
    tiny_model: Path, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    """CVE-2026-4372 and its like: fields of config.json that are taken for a place to get code from."""
    path, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model, path)
    (path / "foreign.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\nclass T: pass\n")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(str(path))
    model = load_model(path, name="tiny", device="cpu", dtype="float32")
    assert not ran.exists()
    _, logits, _ = packed_pass(model, _sequences(9))
    _, expected, _ = packed_pass(loaded("llama"), _sequences(9))
    assert torch.equal(logits, expected)
