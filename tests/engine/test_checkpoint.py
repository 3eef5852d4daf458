from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from trainsession.engine.api import AdapterState
from trainsession.engine.checkpoint import (
    MANIFEST,
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    STATE_WEIGHTS,
    adapter_from_peft,
    adapter_modules,
    adapter_to_peft,
    checkpoint_kind,
    read_checkpoint,
    state_from_files,
    state_to_files,
)
from trainsession.engine.context import PassContext, Segment
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.selfcheck import SequenceAttention
from trainsession.errors import CheckpointMismatch
from trainsession.types import LoraConfig

Loaded = Callable[[str], LoadedModel]
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")


def _state(*, optimizer: bool = False, gradients: bool = False) -> AdapterState:
    stream = np.random.default_rng(0)
    tensors = {}
    groups = ["weight", *(["exp_avg", "exp_avg_sq"] if optimizer else []), *(["grad"] if gradients else [])]
    for group in groups:
        for module in MODULES:
            tensors[f"{group}/{module}.lora_A"] = stream.normal(size=(3, 8)).astype(np.float32)
            tensors[f"{group}/{module}.lora_B"] = stream.normal(size=(6, 3)).astype(np.float32)
    return AdapterState(
        config=LoraConfig(rank=3, alpha=5.0, seed=2**62, target_modules=("q_proj",)),
        tensors=tensors,
        step=7 if optimizer else 0,
        has_optimizer=optimizer,
        base_identity="abc",
        window="open" if gradients else "empty",
    )


def _assert_equal(left: AdapterState, right: AdapterState) -> None:
    assert left.tensors.keys() == right.tensors.keys()
    for key, value in left.tensors.items():
        assert np.array_equal(value, right.tensors[key]), key
    assert replace(left, tensors={}) == replace(right, tensors={})


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_state_files_hold_everything(optimizer: bool, gradients: bool) -> None:
    state = _state(optimizer=optimizer, gradients=gradients)
    files = state_to_files(state, "base")
    assert checkpoint_kind(files) == "state"
    _assert_equal(state_from_files(files), state)


def test_weights_files_keep_identity_and_seed_but_no_optimizer() -> None:
    files = adapter_to_peft(_state(optimizer=True, gradients=True), "base")
    assert checkpoint_kind(files) == "weights"
    _assert_equal(read_checkpoint(files), _state())


def test_the_bytes_are_the_same_each_time() -> None:
    assert state_to_files(_state(optimizer=True), "base") == state_to_files(_state(optimizer=True), "base")


def _adapter_state(adapter: Adapter) -> AdapterState:
    tensors = {}
    for name, pair in adapter.weights.items():
        tensors[f"weight/{name}.lora_A"] = pair.A.detach().numpy().copy()
        tensors[f"weight/{name}.lora_B"] = pair.B.detach().numpy().copy()
    return AdapterState(config=adapter.config, tensors=tensors)


@torch.inference_mode()
def _logits(model: LoadedModel, adapter: Adapter, tokens: torch.Tensor) -> torch.Tensor:
    segments = [Segment(adapter, 0, len(tokens))]
    context = PassContext(segments, SequenceAttention((len(tokens),), {}))
    return model.logits(model.hidden(tokens, torch.arange(len(tokens)), context), segments)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"train_unembed": True}),
        ("llama", {"train_mlp": False, "alpha": 6.0}),
        ("qwen3", {"target_modules": ("lm_head", "layers.1.mlp.up_proj")}),
        ("qwen3_moe", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*", "ignore:.*tied.*")
def test_peft_loads_our_files_with_equal_logits(
    name: str, config: dict[str, Any], loaded: Loaded, tmp_path: Path
) -> None:
    model = loaded(name)
    adapter = new_adapter(LoraConfig(rank=4, seed=1, **config), model.lora_modules, torch.device("cpu"))
    with torch.no_grad():
        for pair in adapter.weights.values():
            pair.B.normal_(std=0.05, generator=torch.Generator().manual_seed(3))
    for file, content in adapter_to_peft(_adapter_state(adapter), str(model.path)).items():
        (tmp_path / file).write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(model.path)
    tokens = torch.arange(25)
    with torch.inference_mode():
        plain = base(input_ids=tokens[None]).logits[0]
        peft = PeftModel.from_pretrained(base, str(tmp_path)).eval()
        expected = peft(input_ids=tokens[None]).logits[0]
    ours = _logits(model, adapter, tokens)
    assert not torch.allclose(plain, ours, atol=1e-2)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    trained = sorted(name for name, module in peft.named_modules() if name.endswith(".lora_A"))
    assert len(trained) == len(adapter.weights)


def _save_peft(path: Path, directory: Path, **options: Any) -> tuple[dict[str, bytes], Any]:
    base = AutoModelForCausalLM.from_pretrained(path)
    peft = get_peft_model(base, PeftLoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(3))
    peft.save_pretrained(str(directory))
    return {f: (directory / f).read_bytes() for f in (PEFT_CONFIG, PEFT_WEIGHTS)}, peft.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": "all-linear"},
    ],
)
def test_an_adapter_that_peft_saved_loads_here(options: dict[str, Any], loaded: Loaded, tmp_path: Path) -> None:
    model = loaded("llama")
    files, peft = _save_peft(model.path, tmp_path, **options)
    state = adapter_from_peft(files)
    assert state.base_identity == ""
    seeded = replace(state.config, seed=0)
    adapter = new_adapter(seeded, model.lora_modules, torch.device("cpu"))
    assert sorted(adapter.weights) == sorted(adapter_modules(state))
    with torch.no_grad():
        for name, pair in adapter.weights.items():
            pair.A.copy_(torch.from_numpy(state.tensors[f"weight/{name}.lora_A"]))
            pair.B.copy_(torch.from_numpy(state.tensors[f"weight/{name}.lora_B"]))
    tokens = torch.arange(25)
    with torch.inference_mode():
        expected = peft(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(_logits(model, adapter, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("use_rslora", {"use_rslora": True}),
        ("use_dora", {"use_dora": True}),
        ("bias", {"bias": "all"}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("rank_pattern", {"rank_pattern": {"layers.1.self_attn.q_proj": 2}}),
        ("alpha_pattern", {"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}),
        ("trainable_token_indices", {"trainable_token_indices": [3]}),
        ("init_lora_weights", {"init_lora_weights": "pissa"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_adapters_are_refused_by_name(
    key: str, options: dict[str, Any], tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    files, _ = _save_peft(tiny_path("qwen3"), tmp_path, target_modules=["q_proj"], **options)
    with pytest.raises(CheckpointMismatch, match=key) as caught:
        adapter_from_peft(files)
    assert caught.value.details["key"] == key


def test_half_precision_adapters_are_read_exactly() -> None:
    state = _state()
    files = adapter_to_peft(state, "base")
    tensors = safetensors.numpy.load(files[PEFT_WEIGHTS])
    files[PEFT_WEIGHTS] = safetensors.numpy.save({k: v.astype(np.float16) for k, v in tensors.items()})
    half = adapter_from_peft(files)
    key = f"weight/{MODULES[0]}.lora_A"
    assert np.array_equal(half.tensors[key], state.tensors[key].astype(np.float16).astype(np.float32))

    from safetensors.torch import save

    brain = {k: torch.from_numpy(v.copy()).bfloat16() for k, v in tensors.items()}
    files[PEFT_WEIGHTS] = save(brain)
    expected = torch.from_numpy(state.tensors[key]).bfloat16().float().numpy()
    assert np.array_equal(adapter_from_peft(files).tensors[key], expected)


def _edit_manifest(files: dict[str, bytes], **changes: Any) -> None:
    files[MANIFEST] = json.dumps({**json.loads(files[MANIFEST]), **changes}).encode()


def _edit_tensors(files: dict[str, bytes], name: str, changes: dict[str, Any]) -> None:
    tensors = {**safetensors.numpy.load(files[name]), **changes}
    files[name] = safetensors.numpy.save({k: v for k, v in tensors.items() if v is not None})


A = f"weight/{MODULES[0]}.lora_A"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.pop(STATE_WEIGHTS), "no state.safetensors"),
        (lambda f: f.pop(MANIFEST), "no manifest.json"),
        (lambda f: f.update({MANIFEST: b"{"}), "not valid JSON"),
        (lambda f: f.update({MANIFEST: b"[" * 100_000}), "not valid JSON"),
        (lambda f: f.update({MANIFEST: b"[]"}), "not a JSON map"),
        (lambda f: _edit_manifest(f, version=2), "version is 2"),
        (lambda f: _edit_manifest(f, format="trainsession-weights"), "format"),
        (lambda f: _edit_manifest(f, step="7"), "step"),
        (lambda f: _edit_manifest(f, step=-1), "step"),
        (lambda f: _edit_manifest(f, window="half"), "window"),
        (lambda f: _edit_manifest(f, lora={"rank": 0}), "rank"),
        (lambda f: _edit_manifest(f, lora={"rank": 4, "target_modules": ["q_proj"]}), "not of rank 4"),
        (lambda f: _edit_manifest(f, has_optimizer=None), "has_optimizer"),
        (lambda f: _edit_tensors(f, STATE_WEIGHTS, {A: None}), "lora_A is missing"),
        (lambda f: _edit_tensors(f, STATE_WEIGHTS, {A.replace("weight", "exp_avg"): None}), "exp_avg.*is missing"),
        (lambda f: _edit_tensors(f, STATE_WEIGHTS, {A: np.zeros((3, 9), np.float32)}), "exp_avg"),
        (lambda f: _edit_tensors(f, STATE_WEIGHTS, {A: np.zeros((3, 8), np.int64)}), "dtype I64"),
        (lambda f: _edit_tensors(f, STATE_WEIGHTS, {A: np.full((3, 8), np.nan, np.float32)}), "NaN"),
        (lambda f: _edit_tensors(f, STATE_WEIGHTS, {"junk/x": np.zeros(1, np.float32)}), "junk/x"),
        (lambda f: f.update({STATE_WEIGHTS: f[STATE_WEIGHTS][:-8]}), "not a valid safetensors"),
        (lambda f: f.update({STATE_WEIGHTS: struct.pack("<Q", 2**60) + b"{}"}), "not a valid safetensors"),
        (lambda f: f.update({STATE_WEIGHTS: b""}), "not a valid safetensors"),
    ],
)
def test_damaged_state_files_say_what_is_wrong(change: Callable[[dict[str, bytes]], Any], match: str) -> None:
    files = state_to_files(_state(optimizer=True), "base")
    change(files)
    with pytest.raises(CheckpointMismatch, match=match):
        state_from_files(files)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda f: _edit_tensors(
                f, PEFT_WEIGHTS, {"base_model.model.lm_head.lora_magnitude": np.ones(1, np.float32)}
            ),
            "lora_magnitude",
        ),
        (
            lambda f: _edit_tensors(f, PEFT_WEIGHTS, {f"base_model.model.{MODULES[0]}.lora_B.weight": None}),
            "lora_B is missing",
        ),
        (lambda f: f.update({PEFT_CONFIG: b'{"peft_type": "IA3"}'}), "IA3"),
        (lambda f: f.update({PEFT_CONFIG: b'{"peft_type": "LORA", "r": "3"}'}), "r: expected an integer"),
    ],
)
def test_damaged_adapters_say_what_is_wrong(change: Callable[[dict[str, bytes]], Any], match: str) -> None:
    files = adapter_to_peft(_state(), "base")
    del files[MANIFEST]
    change(files)
    with pytest.raises(CheckpointMismatch, match=match):
        adapter_from_peft(files)


def test_neither_kind() -> None:
    with pytest.raises(CheckpointMismatch, match=r"model\.bin"):
        checkpoint_kind(["model.bin"])


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, trainsession.engine.checkpoint, trainsession.engine.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
