"""Parameters of the calls: adapters, optimizer, sampling."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

import numpy as np

from ..errors import InvalidRequest
from ..limits import LIMITS

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]

GAP_TIMEOUT_SECONDS = 600.0
"""Default of a session's ``gap_timeout``: longer than a client tries to send one operation."""
MAX_GAP_TIMEOUT_SECONDS = 7 * 86_400.0


def check_gap_timeout(seconds: Any) -> None:
    """Raise `InvalidRequest` for what is no time to wait; None is for ever."""
    ok = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= MAX_GAP_TIMEOUT_SECONDS
    expected = f"expected seconds above 0 and at most {MAX_GAP_TIMEOUT_SECONDS:g}, or None for ever"
    _check(seconds is None or ok, f"gap_timeout: {expected}, got {seconds!r}", "gap_timeout")


def _check(condition: bool, message: str, key: str) -> None:
    if not condition:
        raise InvalidRequest(message, details={"key": key})


def _finite(params: Any, name: str) -> None:
    """Refuse what is no finite number; numpy's numbers become Python's."""
    value = getattr(params, name)
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    _check(ok, f"{name}: expected a finite number, got {value!r}", name)
    object.__setattr__(params, name, float(value))


def _integer(params: Any, name: str) -> None:
    value = getattr(params, name)
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _check(ok, f"{name}: expected an integer, got {value!r}", name)
    object.__setattr__(params, name, int(value))


def _boolean(params: Any, name: str) -> None:
    value = getattr(params, name)
    _check(isinstance(value, bool), f"{name}: expected True or False, got {value!r}", name)


class WireParams:
    """Dataclasses that travel as plain maps, with unknown keys refused."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Self:
        if not isinstance(body, Mapping):
            raise InvalidRequest(f"{cls.__name__}: expected a map of its parameters, got {type(body).__name__}")
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(body) - known, key=str)
        if unknown:
            raise InvalidRequest(
                f"{cls.__name__}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}",
                details={"key": unknown[0]},
            )
        try:
            return cls(**body)
        except TypeError as error:
            raise InvalidRequest(f"{cls.__name__}: {error}") from None


@dataclass(frozen=True, slots=True)
class AdamParams(WireParams):
    """AdamW, given anew with every step: schedules belong to the caller.

    Update (decoupled weight decay, Loshchilov & Hutter 2019, with bias correction):
    ``p -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)``.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Scale this session's gradients down to this global L2 norm; 0 is off."""
    lora_plus_ratio: float = 1.0
    """LoRA+ (Hayou et al. 2024): the learning rate of every B matrix is this times A's."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _finite(self, field.name)
        _check(self.learning_rate >= 0, f"learning_rate must be >= 0, got {self.learning_rate}", "learning_rate")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"{name} must be in [0, 1), got {value}", name)
        _check(self.eps > 0, f"eps must be > 0, got {self.eps}", "eps")
        _check(self.weight_decay >= 0, f"weight_decay must be >= 0, got {self.weight_decay}", "weight_decay")
        _check(
            self.grad_clip_norm >= 0,
            f"grad_clip_norm must be >= 0 (0 = off), got {self.grad_clip_norm}",
            "grad_clip_norm",
        )
        _check(self.lora_plus_ratio > 0, f"lora_plus_ratio must be > 0, got {self.lora_plus_ratio}", "lora_plus_ratio")


@dataclass(frozen=True, slots=True)
class LoraConfig(WireParams):
    """A LoRA adapter: ``W x + (alpha / rank) * B A x``; A is seeded, B starts at zero."""

    rank: int = 32
    alpha: float | None = None
    """Default 32, whatever the rank."""
    seed: int | None = None
    """Of A's initial values; a missing seed is drawn and logged by the service."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    target_modules: tuple[str, ...] | None = None
    """Module name endings (``"q_proj"``) in place of the three flags; each must match a module."""

    def __post_init__(self) -> None:
        for name in ("train_attn", "train_mlp", "train_unembed"):
            _boolean(self, name)
        _integer(self, "rank")
        _check(self.rank >= 1, f"rank must be >= 1, got {self.rank}", "rank")
        LIMITS.check("max_rank", self.rank, "rank")
        if self.alpha is None:
            object.__setattr__(self, "alpha", 32.0)
        _finite(self, "alpha")
        _check(self.scaled_alpha > 0, f"alpha must be > 0, got {self.alpha}", "alpha")
        if self.seed is not None:
            _integer(self, "seed")
            _check(0 <= self.seed < 2**63, f"seed must be in [0, 2**63), got {self.seed}", "seed")
        if self.target_modules is not None:
            names = self.target_modules
            are_names = not isinstance(names, (str, bytes, Mapping)) and isinstance(names, Iterable)
            names = tuple(names) if are_names else ()
            are_names = are_names and all(isinstance(name, str) and name for name in names)
            _check(
                are_names,
                f"target_modules: expected a list of module names, got {self.target_modules!r}",
                "target_modules",
            )
            object.__setattr__(self, "target_modules", names)
            _check(bool(names), "target_modules is empty: nothing would train", "target_modules")
        elif not (self.train_attn or self.train_mlp or self.train_unembed):
            raise InvalidRequest("at least one of train_attn, train_mlp, train_unembed must be true")

    @property
    def scaled_alpha(self) -> float:
        """Alpha with its default filled in."""
        return 32.0 if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        return self.scaled_alpha / self.rank


@dataclass(frozen=True, slots=True)
class SamplingParams(WireParams):
    """How to draw tokens.

    Logprobs are of ``softmax(logits / temperature)`` after penalties and ``logit_bias`` and before
    truncation (top-k, top-p, min-p). ``temperature=0`` is greedy; its logprobs are those of T=1.
    Sample ``j`` of ``num_samples`` draws from its own generator, seeded ``seed + j``.
    """

    max_tokens: int | None = None
    """At most this many tokens; default: what the model's context leaves."""
    min_tokens: int = 0
    """No stop token or stop string ends the sample before this many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    seed: int | None = None
    stop: str | int | Sequence[str | int] | None = None
    """Strings, token ids, or both mixed, beside the model's end tokens; ``[]``: nothing stops."""
    ignore_eos: bool = False
    """The model's own end tokens don't stop the sample."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that this sample already holds."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in this sample."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or sample (Keskar et al. 2019)."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer(self, "max_tokens")
            _check(self.max_tokens >= 1, f"max_tokens must be >= 1, got {self.max_tokens}", "max_tokens")
        _integer(self, "min_tokens")
        _check(self.min_tokens >= 0, f"min_tokens must be >= 0, got {self.min_tokens}", "min_tokens")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            _finite(self, name)
        _check(self.temperature >= 0, f"temperature must be >= 0, got {self.temperature}", "temperature")
        _check(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        _check(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}", "min_p")
        _check(
            self.repetition_penalty > 0,
            f"repetition_penalty must be > 0, got {self.repetition_penalty}",
            "repetition_penalty",
        )
        _integer(self, "top_k")
        _check(self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 (all) or >= 1, got {self.top_k}", "top_k")
        if self.seed is not None:
            _integer(self, "seed")
            _check(0 <= self.seed < 2**62, f"seed must be in [0, 2**62), got {self.seed}", "seed")
        self._check_stop()
        _boolean(self, "ignore_eos")
        if self.logit_bias is not None:
            self._check_logit_bias(self.logit_bias)

    def _check_logit_bias(self, given: Any) -> None:
        _check(isinstance(given, Mapping), "logit_bias: expected a map of token id to number", "logit_bias")
        LIMITS.check("max_logit_bias", len(given), "logit_bias")
        bias: dict[int, float] = {}
        for token, value in given.items():
            # JSON has no integer keys: "7" is token 7.
            is_id = (isinstance(token, (int, np.integer)) and int(token) >= 0) or (
                isinstance(token, str) and token.isdecimal()
            )
            _check(is_id and not isinstance(token, bool), f"logit_bias: {token!r} is not a token id", "logit_bias")
            ok = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            _check(ok, f"logit_bias[{token}]: expected a finite number, got {value!r}", "logit_bias")
            bias[int(token)] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        given: Any = self.stop
        if isinstance(given, (str, numbers.Integral)):
            given = (given,)
        listed = isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping))
        _check(listed, f"stop: expected strings or token ids, got {given!r}", "stop")
        stop = tuple(int(entry) if isinstance(entry, np.integer) else entry for entry in given)
        LIMITS.check("max_stop_sequences", len(stop), "stop")
        for entry in stop:
            ok = isinstance(entry, (str, int)) and not isinstance(entry, bool)
            _check(ok, f"stop: expected strings or token ids, got {entry!r}", "stop")
            if isinstance(entry, str):
                _check(entry != "", "stop: an empty string would stop at once", "stop")
                LIMITS.check("max_stop_length", len(entry), "stop string")
            else:
                _check(entry >= 0, f"stop: {entry} is not a token id", "stop")
        object.__setattr__(self, "stop", stop)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(entry for entry in self._stops() if isinstance(entry, str))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(entry for entry in self._stops() if isinstance(entry, int))

    @property
    def stops_at_eos(self) -> bool:
        """False with ``stop=[]`` or ``ignore_eos``."""
        return not self.ignore_eos and (self.stop is None or bool(self._stops()))

    def _stops(self) -> tuple[str | int, ...]:
        return self.stop if isinstance(self.stop, tuple) else ()
