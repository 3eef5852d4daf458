"""What each built-in loss takes, and the check of a training call against it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import InvalidDatum, InvalidRequest
from ..limits import LIMITS
from ..types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSignature:
    """The inputs of one loss.

    Attributes:
        required: Input names that every datum must have.
        optional: Input names with a default.
        config: Configuration keys with their defaults; ``None`` has no default and is required.
        soft_targets: ``target_tokens`` may be (N, K), ``weights`` then too.
        zero_silences: Inputs whose zero at a position means that it gets no gradient.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ("weights", "temperature")
    config: Mapping[str, float | None] = field(default_factory=dict)
    soft_targets: bool = False
    zero_silences: tuple[str, ...] = ("weights",)


_RL_INPUTS = ("target_tokens", "logprobs", "advantages")
_BY_ADVANTAGE = ("weights", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")

SIGNATURES: Mapping[str, LossSignature] = {
    "cross_entropy": LossSignature(required=("target_tokens",), soft_targets=True),
    "importance_sampling": LossSignature(required=_RL_INPUTS, zero_silences=_BY_ADVANTAGE),
    "ppo": LossSignature(
        required=_RL_INPUTS,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        zero_silences=_BY_ADVANTAGE,
    ),
    "cispo": LossSignature(
        required=_RL_INPUTS,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        zero_silences=_BY_ADVANTAGE,
    ),
    "dro": LossSignature(required=_RL_INPUTS, config={"beta": None}),
    "gspo": LossSignature(
        required=_RL_INPUTS,
        optional=("weights", "temperature", "sequence_ratio_mask"),
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        zero_silences=_BY_ADVANTAGE,
    ),
}
"""The built-in losses by name; `losses` holds their formulas."""


def signature_of(loss_fn: str) -> LossSignature:
    """The signature of a built-in loss.

    Raises:
        InvalidRequest: no such loss; lists those that exist.
    """
    if loss_fn not in SIGNATURES:
        raise InvalidRequest(
            f"loss_fn: unknown loss {loss_fn!r}; known are {', '.join(SIGNATURES)}", details={"key": "loss_fn"}
        )
    return SIGNATURES[loss_fn]


def resolve_config(loss_fn: str, config: Mapping[str, float]) -> dict[str, float]:
    """The loss's whole configuration, defaults filled in.

    Raises:
        InvalidRequest: unknown or missing keys, values that are not finite numbers, clip thresholds
            that are negative or crossed, or a negative ``beta``. Names the key.
    """

    def refuse(key: str, message: str) -> InvalidRequest:
        return InvalidRequest(f"loss_fn_config of {loss_fn}: {message}", details={"key": key, "loss_fn": loss_fn})

    known = signature_of(loss_fn).config
    for key, value in config.items():
        if key not in known:
            raise refuse(key, f"unknown key {key!r}; known are: {', '.join(known) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise refuse(key, f"{key!r} must be a finite number, got {value!r}")
    resolved: dict[str, float] = {}
    for key, default in known.items():
        value = config.get(key, default)
        if value is None:
            raise refuse(key, f"{key!r} is required; it has no default")
        resolved[key] = float(value)
        if resolved[key] < 0:
            raise refuse(key, f"{key!r} must be >= 0, got {value!r}")
    if _CLIPS[0] in resolved and resolved[_CLIPS[0]] > resolved[_CLIPS[1]]:
        raise refuse(_CLIPS[0], f"{_CLIPS[0]} ({resolved[_CLIPS[0]]}) is above {_CLIPS[1]} ({resolved[_CLIPS[1]]})")
    return resolved


def check_data(
    data: Sequence[Datum], loss_fn: str | None, config: Mapping[str, float], *, context_length: int, vocab_size: int
) -> None:
    """Refuse what could not run: no compute, each error names the datum's index and the key.

    ``loss_fn=None`` is the forward half of a custom loss: it needs ``target_tokens``, (N,) or
    (N, K), may have ``temperature``, and leaves every other input to the caller's function.

    Args:
        context_length: Longest sequence that the model takes, in tokens.
        vocab_size: Token ids at or above it are refused.

    Raises:
        InvalidRequest: no data, an unknown loss, or a wrong configuration.
        LimitExceeded: too many datums.
        InvalidDatum: anything wrong with one datum.
    """
    if loss_fn is not None:
        resolve_config(loss_fn, config)
    elif config:
        raise InvalidRequest("loss_fn_config: only a built-in loss has one", details={"key": "loss_fn_config"})
    if not len(data):
        raise InvalidRequest("data is empty: a training call needs at least one datum", details={"key": "data"})
    LIMITS.check("max_datums", len(data), "data")
    signature = None if loss_fn is None else signature_of(loss_fn)
    for index, datum in enumerate(data):
        _DatumCheck(index, datum, loss_fn, signature).run(context_length, vocab_size)


class _DatumCheck:
    """One datum against one signature."""

    def __init__(self, index: int, datum: Datum, loss_fn: str | None, signature: LossSignature | None) -> None:
        self.index = index
        self.inputs = {key: tensor.data for key, tensor in datum.loss_fn_inputs.items()}
        self.tokens = datum.model_input.tokens
        self.loss_fn = loss_fn
        self.signature = signature

    def refuse(self, key: str, message: str) -> InvalidDatum:
        return InvalidDatum(f"datum {self.index}: {message}", details={"datum": self.index, "key": key})

    def run(self, context_length: int, vocab_size: int) -> None:
        length = len(self.tokens)
        if not length:
            raise self.refuse("model_input", "model_input is empty")
        if length > context_length:
            raise self.refuse(
                "model_input", f"model_input has {length} tokens, more than the model's context of {context_length}"
            )
        self._check_ids("model_input", self.tokens, vocab_size)
        self._check_names()
        self._check_targets(vocab_size)
        for key, values in self.inputs.items():
            if key not in ("target_tokens", "temperature") and self.signature is not None:
                self._check_values(key, values)
        if "temperature" in self.inputs:
            self._check_temperature()

    def _check_names(self) -> None:
        if "target_tokens" not in self.inputs:
            raise self.refuse("target_tokens", "loss_fn_inputs['target_tokens'] is missing")
        if self.signature is None:
            return
        known = (*self.signature.required, *self.signature.optional)
        for key in self.signature.required:
            if key not in self.inputs:
                raise self.refuse(
                    key,
                    f"loss_fn_inputs[{key!r}] is missing; {self.loss_fn} needs {', '.join(self.signature.required)}",
                )
        for key in self.inputs:
            if key not in known:
                raise self.refuse(
                    key, f"loss_fn_inputs[{key!r}] is not an input of {self.loss_fn}; known are {', '.join(known)}"
                )

    def _check_targets(self, vocab_size: int) -> None:
        targets, length = self.inputs["target_tokens"], len(self.tokens)
        soft = self.signature is None or self.signature.soft_targets
        if targets.ndim not in ((1, 2) if soft else (1,)) or targets.shape[0] != length:
            shapes = f"({length},){f' or ({length}, K)' if soft else ''}"
            raise self.refuse(
                "target_tokens",
                f"loss_fn_inputs['target_tokens'] has shape {targets.shape}, expected {shapes}: "
                "position i of model_input predicts target_tokens[i]",
            )
        if targets.dtype.kind not in "iu":
            raise self.refuse("target_tokens", f"loss_fn_inputs['target_tokens'] must be integers, not {targets.dtype}")
        if targets.ndim == 2:
            bound = LIMITS.max_topk_logprobs
            if not 1 <= targets.shape[1] <= bound:
                raise self.refuse(
                    "target_tokens",
                    f"loss_fn_inputs['target_tokens'] has {targets.shape[1]} targets a position, "
                    f"expected 1 to {bound} (limit max_topk_logprobs)",
                )
        self._check_ids("target_tokens", targets, vocab_size)

    def _check_ids(self, key: str, ids: npt.NDArray[np.integer], vocab_size: int) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0:  # -100, most often
            raise self.refuse(
                key, f"{key} has token id {low}; ids are >= 0, and a position that should not count has weight 0"
            )
        if high >= vocab_size:
            raise self.refuse(key, f"{key} has token id {high}, outside the vocabulary of {vocab_size}")

    def _check_values(self, key: str, values: npt.NDArray[np.floating]) -> None:
        expected = self.inputs["target_tokens"].shape
        if values.shape != expected:
            raise self.refuse(
                key, f"loss_fn_inputs[{key!r}] has shape {values.shape}, expected {expected} like target_tokens"
            )
        finite = np.isfinite(values)
        if not finite.all():
            where = int(np.argmin(finite.reshape(len(values), -1).all(axis=1)))
            raise self.refuse(key, f"loss_fn_inputs[{key!r}] is NaN or infinite at position {where}")
        if key == "sequence_ratio_mask" and (values < 0).any():
            raise self.refuse(key, f"loss_fn_inputs[{key!r}] has a negative value; a mask is >= 0")

    def _check_temperature(self) -> None:
        values = self.inputs["temperature"]
        if values.size != 1 or not np.isfinite(values).all() or values.item() <= 0:
            raise self.refuse(
                "temperature", "loss_fn_inputs['temperature'] must be one finite number above 0 for the whole datum"
            )
