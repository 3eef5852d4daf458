"""What the calls return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .data import TensorData
from .display import samples_html, session_html, shortened

StopReason = Literal["stop", "length", "cancelled"]
"""``stop``: an end token, a stop token or a stop string; ``length``: max_tokens or the context."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Metered tokens by kind, and what they cost in the price table's currency.

    A prompt's tokens count once as ``prefill`` for all its samples (``prefill_cached`` where an
    earlier call had the same prefix), every returned token as ``sample``, and every input position
    of a ``forward_backward`` as ``train``. A bare ``forward`` is ``prefill``.
    """

    prefill: int = 0
    prefill_cached: int = 0
    sample: int = 0
    train: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tokens(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cost"}


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of ``forward`` and ``forward_backward``.

    Attributes:
        loss_fn_outputs: One map per datum; ``"logprobs"`` holds float32 of ``target_tokens``' shape.
        metrics: Names carry their reduction: ``loss:sum``, ``tokens:sum``, ``ratio:mean``, ...
        usage: What this call metered.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]
    usage: Usage = field(default_factory=Usage)

    @property
    def logprobs(self) -> list[TensorData]:
        """Each datum's target logprobs."""
        return [output["logprobs"] for output in self.loss_fn_outputs]

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v:.6g}" for k, v in self.metrics.items())
        return f"ForwardBackwardOutput({len(self.loss_fn_outputs)} datums, {shown})"


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """``metrics`` holds ``grad_norm`` (before clipping), ``update_norm`` and ``step``."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """Where a checkpoint went: ``ts://<session>/{state|weights}/<name>``."""

    path: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class SampledSequence:
    """One sample.

    Attributes:
        tokens: Token ids, the stop token included. A list, so that ``prompt + sample.tokens`` joins
            them (with an array it would add numbers).
        logprobs: One per token.
        stop_reason: ``stop``, ``length`` or ``cancelled``.
        text: The decoded tokens without special tokens; cut before a stop string.
        topk_logprobs: Per token, the ``topk`` most likely (token id, logprob), if asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str = ""
    topk_logprobs: list[list[tuple[int, float]]] | None = None

    def __repr__(self) -> str:
        return f"SampledSequence({shortened(self.text, 60)!r}, {len(self.tokens)} tokens, {self.stop_reason})"


@dataclass(frozen=True, slots=True, repr=False)
class SampleResponse:
    """The samples of one prompt.

    Attributes:
        sequences: ``num_samples`` of them, in order.
        prompt_logprobs: Of each prompt token at T=1, ``None`` first; if asked for.
        topk_prompt_logprobs: The same for the ``topk`` most likely tokens at each position.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    usage: Usage = field(default_factory=Usage)

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.sequences[0].text

    def __repr__(self) -> str:
        shown = ", ".join(repr(sequence) for sequence in self.sequences[:3])
        more = f", ... {len(self.sequences)} in all" if len(self.sequences) > 3 else ""
        return f"SampleResponse({shown}{more})"

    def _repr_html_(self) -> str:
        return samples_html(self)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model that the service can load.

    Attributes:
        name: What ``base_model=`` takes.
        available: Loads now, without a model hub.
        identity: Hash of its weights, once it was loaded or converted.
    """

    name: str
    available: bool = True
    context_length: int | None = None
    identity: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable checkpoint; ``kind`` is ``state`` (weights and optimizer) or ``weights``."""

    path: str
    kind: Literal["state", "weights"]
    base_model: str
    size_bytes: int
    created_at: float
    expires_at: float | None = None
    rank: int | None = None
    session_id: str = ""
    has_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the service sees it; times are seconds since the epoch."""

    session_id: str
    kind: Literal["trainer", "sampler"]
    base_model: str
    state: Literal["creating", "running", "paused", "closed", "failed"]
    created_at: float
    next_seq: int
    lora: Mapping[str, Any] | None = None
    name: str = ""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    progress: Any = None
    step: int = 0
    waiting_for: str = ""
    """Why nothing runs, e.g. ``"sequence number 7"`` when a gap blocks the queue."""
    waiting_since: float | None = None
    """When the first operation came that waits for that number."""
    waiting_until: float | None = None
    """When that number counts as failed (the session's ``gap_timeout``); None: never."""

    def _repr_html_(self) -> str:
        return session_html(self)
