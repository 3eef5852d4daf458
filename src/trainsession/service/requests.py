"""What doors hand to the service, and what they get back: plain values, already decoded.

A ``from_wire`` checks the envelope only. What is inside (datums, parameters) is checked by the
service, because a rejected operation must still consume its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest, TrainSessionError
from ..limits import LIMITS
from ..types import GAP_TIMEOUT_SECONDS, LoraConfig, SamplingParams, SessionInfo
from ..types.data import as_tokens

OperationKind = Literal[
    "forward",
    "forward_backward",
    "forward_keep",
    "backward",
    "skip",
    "optim_step",
    "zero_grad",
    "save_state",
    "save_weights",
    "snapshot",
    "load_state",
    "export",
]
KINDS: tuple[str, ...] = get_args(OperationKind)
OnFailure = Literal["continue", "skip"]
OperationState = Literal["queued", "done", "failed", "cancelled"]
MAX_KEY_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSession:
    """A new session.

    Attributes:
        base_model: Name as in `list_base_models`; may be empty with ``from_checkpoint``.
        lora: The adapter; default: that of ``from_checkpoint``, else ``LoraConfig()``.
        on_failure: What happens to operations that were queued behind a failed one when its turn came.
        gap_timeout: Seconds that operations wait for a sequence number before theirs; then it counts as
            one that failed. None: for ever.
        from_checkpoint: ``ts://`` path of the project's own checkpoint to start from.
        with_optimizer: Restore the moments too; an error where the checkpoint has none.
        idempotency_key: A second request with the same key returns the first session.
    """

    base_model: str = ""
    kind: Literal["trainer", "sampler"] = "trainer"
    lora: LoraConfig | None = None
    name: str = ""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    on_failure: OnFailure = "continue"
    gap_timeout: float | None = GAP_TIMEOUT_SECONDS
    from_checkpoint: str | None = None
    with_optimizer: bool = False
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequest:
    """One training operation, as submitted; ``params``, ``data`` and ``gradients`` as on the wire.

    ``seq=None`` takes the next free number and ``epoch=None`` the present one (doors whose clients
    know neither).
    """

    kind: str
    seq: int | None = None
    epoch: int | None = None
    idempotency_key: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    """A list of wire datums, or of `Datum`."""
    gradients: Any = None
    progress: Any = None

    @classmethod
    def from_wire(cls, body: Any) -> Self:
        """Raises `InvalidRequest` where the envelope itself is wrong: such a request has no number."""
        if not isinstance(body, Mapping):
            raise InvalidRequest("operation: expected a map")
        _known(
            body, {"seq", "epoch", "kind", "idempotency_key", "params", "data", "gradients", "progress"}, "operation"
        )
        kind = body.get("kind")
        if kind not in KINDS:
            raise InvalidRequest(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}", details={"key": "kind"})
        params = body.get("params") or {}
        if not isinstance(params, Mapping):
            raise InvalidRequest("params: expected a map", details={"key": "params"})
        return cls(
            kind=kind,
            seq=_integer(body, "seq", low=1),
            epoch=_integer(body, "epoch", low=0),
            idempotency_key=_text(body, "idempotency_key"),
            params=params,
            data=body.get("data"),
            gradients=body.get("gradients"),
            progress=body.get("progress"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """All samples of one prompt; see `trainsession.engine.api.SampleItem`."""

    prompt: npt.NDArray[np.int32]
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    session_id: str | None = None
    """The session that pays; default: the one whose weights these are."""

    @classmethod
    def from_wire(cls, body: Any) -> Self:
        if not isinstance(body, Mapping):
            raise InvalidRequest("request: expected a map")
        fields = {"prompt", "num_samples", "params", "prompt_logprobs", "topk_prompt_logprobs", "topk_logprobs"}
        _known(body, fields | {"session_id"}, "request")
        if "prompt" not in body:
            raise InvalidRequest("prompt: missing", details={"key": "prompt"})
        params = body.get("params") or {}
        if not isinstance(params, Mapping):
            raise InvalidRequest("params: expected a map", details={"key": "params"})
        num_samples = _integer(body, "num_samples", low=0)
        return cls(
            prompt=as_tokens(body["prompt"], "prompt"),
            num_samples=1 if num_samples is None else num_samples,
            params=SamplingParams.from_wire(params),
            prompt_logprobs=_flag(body, "prompt_logprobs"),
            topk_prompt_logprobs=_integer(body, "topk_prompt_logprobs", low=0) or 0,
            topk_logprobs=_integer(body, "topk_logprobs", low=0) or 0,
            session_id=_text(body, "session_id") or None,
        )

    def check(self) -> None:
        """Raise `LimitExceeded` for a bound of the service, `InvalidRequest` for an empty prompt."""
        if self.prompt.size == 0:
            raise InvalidRequest("prompt: it is empty; give at least one token", details={"key": "prompt"})
        LIMITS.check("max_num_samples", self.num_samples, "num_samples")
        LIMITS.check("max_topk_logprobs", self.topk_logprobs, "topk_logprobs")
        LIMITS.check("max_topk_logprobs", self.topk_prompt_logprobs, "topk_prompt_logprobs")
        LIMITS.check("max_sampled_tokens", self.num_samples * (self.params.max_tokens or 1), "num_samples * max_tokens")


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The end of one operation: ``value`` of a done one (`docs/wire.md`), else ``error``."""

    operation_id: str
    state: OperationState
    value: Any = None
    error: TrainSessionError | None = None

    def to_wire(self) -> dict[str, Any]:
        body: dict[str, Any] = {"operation_id": self.operation_id, "state": self.state}
        if self.error is not None:
            body["error"] = self.error.to_wire()
        else:
            body["value"] = self.value
        return body


@dataclass(frozen=True, slots=True)
class Results:
    """An answer to a poll: what ended, and how many operations stand before each that has not."""

    results: list[OperationResult]
    positions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Attached:
    """A session taken over: older epochs are fenced; ``unfetched`` are operations never acknowledged."""

    session: SessionInfo
    epoch: int
    next_seq: int
    unfetched: list[str]
    progress: Any = None


def _known(body: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(str(key) for key in body if key not in known)
    if unknown:
        raise InvalidRequest(
            f"{what}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}", details={"key": unknown[0]}
        )


def _integer(body: Mapping[str, Any], key: str, low: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**62:
        raise InvalidRequest(f"{key}: expected an integer >= {low}, got {value!r}", details={"key": key})
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{key}: expected true or false, got {value!r}", details={"key": key})
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_KEY_LENGTH:
        raise InvalidRequest(f"{key}: expected a string of at most {MAX_KEY_LENGTH} characters", details={"key": key})
    return value
