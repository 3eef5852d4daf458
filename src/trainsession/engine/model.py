"""The base model: transformers' own module with our attention and our linear layers.

No model code of ours: attention comes in through transformers' registry of attention functions
(without a mask function of that name it builds no masks), adapters by replacing ``nn.Linear``.
Dropout is off in every pass, so that training and sampling see the same policy.

Shapes: T rows, E hidden size, V vocabulary, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ..errors import EngineError, InvalidRequest
from . import context
from .activations import ExactActivation
from .context import PASS_TILE, PassContext, RowAdapters, Segment
from .identity import weights_identity
from .linear import LinearGroup, MultiLoraLinear
from .norms import install_norms
from .selfcheck import can_pack, check_against_transformers, find_inexact, plain_logits

logger = logging.getLogger(__name__)

ATTENTION = "trainsession"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HARMLESS = {"is_causal", "position_ids", "output_attentions", "output_hidden_states", "use_cache", "cache_position"}
"""Keywords of the attention call that change nothing here."""
_PER_SEQUENCE_ROPE = {"dynamic", "longrope"}
"""Rotary variants whose frequencies depend on a sequence's length; the rows of a pass share theirs."""


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, H, T, D) in, (1, T, H, D) out."""
    unknown = {name: value for name, value in features.items() if value is not None and name not in _HARMLESS}
    if dropout:
        unknown["dropout"] = dropout
    if attention_mask is not None:
        unknown["attention_mask"] = "a mask that the model builds itself"
    if features.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown["is_causal"] = False
    if unknown:
        raise EngineError(
            f"{type(module).__name__} uses attention features that this engine does not have: "
            f"{', '.join(sorted(unknown))}",
            details={"features": sorted(unknown)},
        )
    current = context.current()
    rows = current.rows
    out_THD = current.attention.attend(
        cast(int, module.layer_idx),
        query[0, :, :rows].transpose(0, 1),
        key[0, :, :rows].transpose(0, 1),
        value[0, :, :rows].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
    )
    padding = query.shape[2] - rows
    if padding:
        out_THD = nn.functional.pad(out_THD, (0, 0, 0, 0, 0, padding))
    return out_THD.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class _NoAttention:
    """Of a pass through the unembedding alone."""

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        raise RuntimeError("the unembedding does not attend")


class LoadedModel:
    """A base model on its device, frozen, whose passes are packed rows of many sequences.

    Attributes:
        exact: Rows are bit-equal alone and in a crowd (DESIGN section 4, "Rounding").
        context_length: Positions the model was trained for.
        vocab_size: Rows of the embedding.
        eos_token_ids: End tokens of the generation config, else of the model's.
        identity: Hash of weights and configuration.
        lora_modules: Every linear layer by module name, the unembedding last.
        causal: transformers' module, for exports and checks.
        path: The directory it was loaded from.
    """

    def __init__(self, causal: PreTrainedModel, *, name: str, path: Path, identity: str, exact: bool) -> None:
        self.causal = causal
        self.name = name
        self.path = path
        self.identity = identity
        config = causal.config.get_text_config()
        parameter = next(causal.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.vocab_size: int = cast(nn.Embedding, causal.get_input_embeddings()).weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // self.num_heads
        self.context_length: int = config.max_position_embeddings
        self.eos_token_ids: tuple[int, ...] = _eos_token_ids(causal)
        self._body = cast(nn.Module, causal.base_model)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_factor: float = getattr(config, "logit_scale", None) or 1.0 / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.lora_modules = _install_linears(causal)
        self._unembedding = self.lora_modules[_unembedding_name(causal)]
        self.exact = False
        self.set_exact(exact)

    def set_exact(self, exact: bool) -> None:
        """Compute in fixed row tiles, or freely; set once, by `load_model`."""
        self.exact = exact
        for module in self.lora_modules.values():
            module.exact = exact
        if exact and self.device.type == "cpu":
            _install_exact_activations(self.causal)

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, context: PassContext) -> torch.Tensor:
        """Final hidden states (T, E), after the last norm, of one packed pass.

        Args:
            tokens_T: Token ids, int64.
            positions_T: Each token's position in its own sequence.
            context: Whose rows these are, and how they attend.
        """
        rows = tokens_T.shape[0]
        if rows != context.rows:
            raise ValueError(f"{rows} tokens in a pass whose segments cover {context.rows} rows")
        if self.exact:
            # Whole tiles from the start: no layer has to pad, elementwise loops see whole vectors.
            padding = (0, -rows % context.tile)
            tokens_T = nn.functional.pad(tokens_T, padding)
            positions_T = nn.functional.pad(positions_T, padding)
        with _running(context):
            output = self._body(
                input_ids=tokens_T.unsqueeze(0),
                position_ids=positions_T.unsqueeze(0),
                attention_mask=None,
                use_cache=False,
            )
        return output.last_hidden_state[0, :rows]

    def logits(
        self,
        h_TE: torch.Tensor,
        segments: Sequence[Segment],
        *,
        tile: int = PASS_TILE,
        sampling: bool = False,
        row_adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        """Logits (T, V) in the model's dtype: unembedding with its LoRA, scaling and softcap.

        Args:
            h_TE: Any rows of `hidden`.
            segments: Whose rows those are, counted in ``h_TE``.
            tile, sampling, row_adapters: As in `PassContext`.
        """
        with _running(PassContext(segments, _NoAttention(), tile, sampling, row_adapters)):
            logits_TV = self._unembedding(h_TE)
        if self._logit_factor != 1.0:
            logits_TV = logits_TV * self._logit_factor
        if self._softcap is not None:
            logits_TV = torch.tanh(logits_TV / self._softcap) * self._softcap
        return logits_TV

    @property
    def plain_unembedding(self) -> torch.Tensor | None:
        """The unembedding's weight (V, E) where logits are ``h W^T`` and nothing else (but LoRA)."""
        if self._unembedding.bias is not None or self._softcap is not None or self._logit_factor != 1.0:
            return None
        return self._unembedding.weight

    @property
    def unembedding_name(self) -> str:
        """Its key in `lora_modules` and `Adapter.weights`."""
        return self._unembedding.name


# `hidden` has an argument of the module's name.
_running = context.running


def load_model(
    path: str | Path,
    *,
    name: str,
    device: str = "auto",
    dtype: str = "auto",
    exact: bool | None = None,
) -> LoadedModel:
    """Load a Hugging Face directory and check our passes against the module's own forward.

    Args:
        path: Directory with ``config.json`` and safetensors weights.
        name: The base model's name, for messages.
        device: ``"auto"``: CUDA where there is one, else the CPU.
        dtype: ``"auto"``: bfloat16 on CUDA and on CPUs that have it natively, else float32.
        exact: Exact mode; default: on the CPU, where the model's layers allow it.

    Raises:
        InvalidRequest: an unknown dtype, or exact mode asked of a model that cannot have it.
        EngineError: the architecture has a feature that this engine lacks, or its passes differ
            from transformers'; names it.
    """
    path = Path(path)
    on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = _choose_dtype(dtype, on)
    config = own_config(path)
    _refuse_config(config, name)
    with without_progress_bars():
        causal = cast(
            PreTrainedModel,
            AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=kind, local_files_only=True, use_safetensors=True
            ),
        )
    causal = causal.to(on).eval().requires_grad_(False)  # type: ignore[arg-type]
    expected = plain_logits(causal)
    causal.set_attn_implementation(ATTENTION)
    if causal.config.get_text_config()._attn_implementation != ATTENTION:
        raise EngineError(f"{name}: {type(causal).__name__} does not let its attention be replaced")
    if on.type == "cpu":
        install_norms(causal)
    model = LoadedModel(causal, name=name, path=path, identity=weights_identity(path), exact=False)
    check_against_transformers(model, expected)
    if exact or (exact is None and on.type == "cpu"):
        model.set_exact(True)
        reason = find_inexact(model)
        if reason is not None:
            model.set_exact(False)
            if exact:
                raise InvalidRequest(f"{name} cannot run in exact mode: {reason}", details={"key": "exact"})
            logger.warning("%s does not run in exact mode: %s", name, reason)
    packs = can_pack(model)
    for module in model.lora_modules.values():
        module.packs = packs
    return model


def default_mode() -> tuple[str, str, bool]:
    """Device, dtype and exactness that `load_model` takes for a model that allows exact mode."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device.type, str(_choose_dtype("auto", device)).removeprefix("torch."), device.type == "cpu"


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws a bar per load; ours is the runtime's to draw."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_has_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype: expected auto, {', '.join(DTYPES)}, got {dtype!r}", details={"key": "dtype"})
    return DTYPES[dtype]


def _cpu_has_bfloat16() -> bool:
    """Whether products in bfloat16 are native (AVX-512 BF16, AMX or Arm's BF16)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def own_config(path: Path) -> Any:
    """A model's configuration, without what it says of who computes attention and experts.

    That is not the model's to say: a name with a slash is a kernel that transformers would fetch from the hub and run.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part._attn_implementation = None
        part._experts_implementation = None
    return config


def _refuse_config(config: Any, name: str) -> None:
    """What the attention call does not show, refused by name."""
    config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(f"{name}: encoder-decoder models are not supported, only causal ones")
    layer_types = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unknown:
        raise EngineError(
            f"{name}: layers of type {', '.join(unknown)} are not supported", details={"features": unknown}
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _PER_SEQUENCE_ROPE:
            kind = parameters["rope_type"]
            raise EngineError(
                f"{name}: rotary embeddings of type {kind} are not supported", details={"features": [kind]}
            )


def _eos_token_ids(causal: PreTrainedModel) -> tuple[int, ...]:
    for config in (causal.generation_config, causal.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return ()


def _unembedding_name(causal: PreTrainedModel) -> str:
    unembedding = causal.get_output_embeddings()
    return next(name for name, module in causal.named_modules() if module is unembedding)


def _install_linears(causal: PreTrainedModel) -> dict[str, MultiLoraLinear]:
    """Replace every linear layer by one that knows adapters."""
    unembedding = _unembedding_name(causal)
    owners = dict(causal.named_modules())
    found = [(name, module) for name, module in owners.items() if isinstance(module, nn.Linear)]
    installed: dict[str, MultiLoraLinear] = {}
    for name, linear in found:
        parent, _, attribute = name.rpartition(".")
        group: LinearGroup = "unembed" if name == unembedding else _group(parent, owners)
        installed[name] = MultiLoraLinear(linear, name, group)
        setattr(owners[parent], attribute, installed[name])
    installed[unembedding] = installed.pop(unembedding)
    return installed


def _group(parent: str, owners: Mapping[str, nn.Module]) -> LinearGroup:
    """Attention or MLP, by the class of the nearest ancestor that says so."""
    while parent:
        kind = type(owners[parent]).__name__.lower()
        if "attention" in kind:
            return "attn"
        if "mlp" in kind or "feedforward" in kind:
            return "mlp"
        parent = parent.rpartition(".")[0]
    return "other"


def _install_exact_activations(causal: PreTrainedModel) -> None:
    kinds = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
    activations = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module))
    for module in list(causal.modules()):
        if isinstance(module, ExactActivation):
            continue
        for attribute, child in list(module.named_children()):
            if isinstance(child, activations):
                setattr(module, attribute, ExactActivation(child))
