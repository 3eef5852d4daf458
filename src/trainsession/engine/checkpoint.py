"""Adapters as files: PEFT's format, and ours with the optimizer. Imports no torch.

Two kinds, both maps of file name to content and both without pickle:

    weights    adapter_config.json, adapter_model.safetensors (PEFT's names), manifest.json
    state      state.safetensors (weights, moments, pending gradients), manifest.json

The manifest holds what PEFT's configuration has no place for: the base weights' identity, the
seed, the optimizer's step. A PEFT adapter from elsewhere has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from ..errors import CheckpointMismatch, InvalidRequest
from ..types import LoraConfig
from .api import AdapterState

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
STATE_WEIGHTS = "state.safetensors"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1

CheckpointKind = Literal["state", "weights"]
Tensors = dict[str, npt.NDArray[np.float32]]

_PEFT_PREFIX = "base_model.model."
_FACTORS = ("lora_A", "lora_B")
_OPTIMIZER = ("exp_avg", "exp_avg_sq")

_UNSUPPORTED_PEFT: dict[str, Any] = {
    "use_dora": False,
    "use_rslora": False,
    "use_qalora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
}
"""Keys that change what an adapter computes, with the one value that plain LoRA has."""
_BASE_CHANGING_INIT = ("pissa", "olora", "loftq", "corda")
"""``init_lora_weights`` that subtract the adapter's initial product from the base weights."""


def adapter_to_peft(state: AdapterState, base_model: str) -> dict[str, bytes]:
    """The ``weights`` files: a directory with them loads in PEFT with equal logits.

    Args:
        state: Its optimizer and gradients, if any, are left out.
        base_model: What PEFT calls ``base_model_name_or_path``.
    """
    config = state.config
    modules = adapter_modules(state)
    targets = config.target_modules or sorted({name.rsplit(".", 1)[-1] for name in modules})
    peft = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.scaled_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "init_lora_weights": True,
        **_UNSUPPORTED_PEFT,
    }
    tensors = {
        f"{_PEFT_PREFIX}{module}.{factor}.weight": state.tensors[f"weight/{module}.{factor}"]
        for module in modules
        for factor in _FACTORS
    }
    return {
        PEFT_CONFIG: _json_bytes(peft),
        PEFT_WEIGHTS: safetensors.numpy.save(tensors, metadata={"format": "pt"}),
        MANIFEST: _manifest("weights", state, base_model),
    }


def adapter_from_peft(files: Mapping[str, bytes]) -> AdapterState:
    """A plain LoRA adapter in PEFT's format, ours or anybody's.

    ``base_identity`` is empty where the files carry no manifest of ours: whether the adapter fits
    is then seen from its shapes alone.

    Raises:
        CheckpointMismatch: a missing file, a variant other than plain LoRA (named), an unexpected,
            missing or non-finite tensor (named).
    """
    peft = _read_json(files, PEFT_CONFIG)
    _refuse_variants(peft)
    rank, alpha = peft.get("r"), peft.get("lora_alpha", 8)
    if not isinstance(rank, int):
        raise CheckpointMismatch(f"{PEFT_CONFIG}: r: expected an integer, got {rank!r}", details={"key": "r"})
    tensors: Tensors = {}
    for key, value in _read_tensors(files, PEFT_WEIGHTS).items():
        module, _, factor = key.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if key != f"{_PEFT_PREFIX}{module}.{factor}.weight" or factor not in _FACTORS:
            raise _mismatch(PEFT_WEIGHTS, key, "is not a LoRA factor of a linear layer")
        tensors[f"weight/{module}.{factor}"] = value
    modules = _check_factors(PEFT_WEIGHTS, tensors, rank)
    try:
        config = LoraConfig(rank=rank, alpha=float(alpha), target_modules=_peft_targets(peft, modules))
        if MANIFEST in files:
            config = LoraConfig.from_wire(_read_manifest(files, "weights")["lora"])
    except (InvalidRequest, TypeError, ValueError) as error:
        raise CheckpointMismatch(f"{PEFT_CONFIG}: {error}") from None
    identity = _read_manifest(files, "weights")["base_identity"] if MANIFEST in files else ""
    if config.rank != rank:
        raise CheckpointMismatch(f"{MANIFEST} has rank {config.rank}, {PEFT_CONFIG} has {rank}", details={"key": "r"})
    return AdapterState(config=config, tensors=tensors, base_identity=identity)


def state_to_files(state: AdapterState, base_model: str) -> dict[str, bytes]:
    """The ``state`` files: everything that a session resumes from."""
    return {
        STATE_WEIGHTS: safetensors.numpy.save(dict(state.tensors)),
        MANIFEST: _manifest("state", state, base_model),
    }


def state_from_files(files: Mapping[str, bytes]) -> AdapterState:
    """The inverse of `state_to_files`.

    Raises:
        CheckpointMismatch: not such files, or damaged ones; names the file and the key.
    """
    manifest = _read_manifest(files, "state")
    try:
        config = LoraConfig.from_wire(manifest["lora"])
    except InvalidRequest as error:
        raise CheckpointMismatch(f"{MANIFEST}: {error.message}", details={"key": "lora"}) from None
    tensors = _read_tensors(files, STATE_WEIGHTS)
    for key in tensors:
        if key.partition("/")[0] not in ("weight", "grad", *_OPTIMIZER):
            raise _mismatch(STATE_WEIGHTS, key, "is not part of a state")
    modules = _check_factors(STATE_WEIGHTS, tensors, config.rank)
    names = [f"{module}.{factor}" for module in modules for factor in _FACTORS]
    has_optimizer = manifest["has_optimizer"]
    for group in _OPTIMIZER if has_optimizer else ():
        for name in names:
            if f"{group}/{name}" not in tensors:
                raise _mismatch(STATE_WEIGHTS, f"{group}/{name}", "is missing")
    for key, value in tensors.items():
        weight = tensors.get(f"weight/{key.partition('/')[2]}")
        if weight is None or weight.shape != value.shape:
            raise _mismatch(STATE_WEIGHTS, key, f"of shape {value.shape} belongs to no weight of that shape")
    return AdapterState(
        config=config,
        tensors=tensors,
        step=manifest["step"],
        has_optimizer=has_optimizer,
        base_identity=manifest["base_identity"],
        window=manifest["window"],
    )


def checkpoint_kind(files: Iterable[str]) -> CheckpointKind:
    """Which kind a set of file names is.

    Raises:
        CheckpointMismatch: neither.
    """
    names = set(files)
    if STATE_WEIGHTS in names:
        return "state"
    if {PEFT_CONFIG, PEFT_WEIGHTS} <= names:
        return "weights"
    raise CheckpointMismatch(
        f"not a checkpoint: expected {STATE_WEIGHTS} and {MANIFEST}, or {PEFT_CONFIG} and {PEFT_WEIGHTS}; "
        f"got {', '.join(sorted(names)) or 'no files'}"
    )


def read_checkpoint(files: Mapping[str, bytes]) -> AdapterState:
    """The adapter of either kind."""
    return state_from_files(files) if checkpoint_kind(files) == "state" else adapter_from_peft(files)


def adapter_modules(state: AdapterState) -> list[str]:
    """Names of the modules that an adapter trains, in its tensors' order."""
    suffix = ".lora_A"
    return [
        key.removeprefix("weight/").removesuffix(suffix)
        for key in state.tensors
        if key.startswith("weight/") and key.endswith(suffix)
    ]


def _mismatch(file: str, key: str, what: str) -> CheckpointMismatch:
    return CheckpointMismatch(f"{file}: {key} {what}", details={"file": file, "key": key})


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        raise CheckpointMismatch(f"the checkpoint has no {name}", details={"file": name})
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError):
        raise CheckpointMismatch(f"{name} is not valid JSON", details={"file": name}) from None
    if not isinstance(value, dict):
        raise CheckpointMismatch(f"{name} is not a JSON map", details={"file": name})
    return value


def _manifest(kind: CheckpointKind, state: AdapterState, base_model: str) -> bytes:
    return _json_bytes(
        {
            "format": f"trainsession-{kind}",
            "version": FORMAT_VERSION,
            "base_model": base_model,
            "base_identity": state.base_identity,
            "lora": state.config.to_wire(),
            "step": state.step,
            "has_optimizer": state.has_optimizer and kind == "state",
            "window": state.window if kind == "state" else "empty",
        }
    )


_MANIFEST_TYPES: dict[str, type | tuple[type, ...]] = {
    "base_identity": str,
    "lora": dict,
    "step": int,
    "has_optimizer": bool,
    "window": str,
}


def _read_manifest(files: Mapping[str, bytes], kind: CheckpointKind) -> dict[str, Any]:
    manifest = _read_json(files, MANIFEST)
    if manifest.get("format") != f"trainsession-{kind}":
        raise _mismatch(MANIFEST, "format", f"is {manifest.get('format')!r}, expected 'trainsession-{kind}'")
    version = manifest.get("version")
    if version != FORMAT_VERSION:
        raise _mismatch(MANIFEST, "version", f"is {version!r}; this release reads version {FORMAT_VERSION}")
    for key, kinds in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(key), kinds):
            raise _mismatch(MANIFEST, key, f"is {manifest.get(key)!r}, which is not valid")
    if manifest["step"] < 0 or manifest["window"] not in ("empty", "open"):
        raise _mismatch(MANIFEST, "step" if manifest["step"] < 0 else "window", "is not valid")
    return manifest


def _read_tensors(files: Mapping[str, bytes], name: str) -> Tensors:
    """Tensors as float32; safetensors itself refuses headers that don't fit the bytes."""
    if name not in files:
        raise CheckpointMismatch(f"the checkpoint has no {name}", details={"file": name})
    try:
        entries = safetensors.deserialize(files[name])
    except safetensors.SafetensorError as error:
        raise CheckpointMismatch(f"{name} is not a valid safetensors file: {error}", details={"file": name}) from None
    tensors: Tensors = {}
    for key, entry in entries:
        value = _as_float32(entry["dtype"], bytes(entry["data"]))
        if value is None:
            raise _mismatch(name, key, f"has dtype {entry['dtype']}; expected F32, F16 or BF16")
        if not np.isfinite(value).all():
            raise _mismatch(name, key, "holds NaN or infinity")
        tensors[key] = value.reshape(entry["shape"])
    return dict(sorted(tensors.items()))


def _as_float32(dtype: str, data: bytes) -> npt.NDArray[np.float32] | None:
    if dtype == "F32":
        return np.frombuffer(data, dtype="<f4").copy()
    if dtype == "F16":
        return np.frombuffer(data, dtype="<f2").astype(np.float32)
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return None


def _check_factors(file: str, tensors: Mapping[str, npt.NDArray[np.float32]], rank: int) -> list[str]:
    """The modules of ``weight/...``, each with an A (rank, K) and a B (N, rank)."""
    names = {key.removeprefix("weight/").rpartition(".")[0]: None for key in tensors if key.startswith("weight/")}
    if not names:
        raise CheckpointMismatch(f"{file} holds no adapter weights", details={"file": file})
    for module in names:
        for factor, axis in zip(_FACTORS, (0, 1), strict=True):
            key = f"weight/{module}.{factor}"
            value = tensors.get(key)
            if value is None:
                raise _mismatch(file, key, "is missing")
            if value.ndim != 2 or value.shape[axis] != rank:
                raise _mismatch(file, key, f"has shape {value.shape}, which is not of rank {rank}")
    return list(names)


def _refuse_variants(peft: Mapping[str, Any]) -> None:
    if peft.get("peft_type") != "LORA":
        raise _mismatch(PEFT_CONFIG, "peft_type", f"is {peft.get('peft_type')!r}; only 'LORA' is supported")
    if peft.get("task_type") not in (None, "CAUSAL_LM"):
        raise _mismatch(PEFT_CONFIG, "task_type", f"is {peft['task_type']!r}; only 'CAUSAL_LM' is supported")
    for key, plain in _UNSUPPORTED_PEFT.items():
        if peft.get(key) and peft[key] != plain:
            raise _mismatch(PEFT_CONFIG, key, f"is {peft[key]!r}; only plain LoRA ({plain!r}) is supported")
    init = peft.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INIT):
        raise _mismatch(PEFT_CONFIG, "init_lora_weights", f"is {init!r}, which changes the base weights: not supported")


def _peft_targets(peft: Mapping[str, Any], modules: list[str]) -> tuple[str, ...]:
    """PEFT's own list where it chooses exactly these modules by their endings, else the modules."""
    targets = peft.get("target_modules")
    narrowed = any(peft.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    if isinstance(targets, list) and not narrowed and all(isinstance(target, str) for target in targets):
        hits = {target: [m for m in modules if m == target or m.endswith("." + target)] for target in targets}
        if all(hits.values()) and {m for found in hits.values() for m in found} == set(modules):
            return tuple(sorted(targets))
    return tuple(modules)
