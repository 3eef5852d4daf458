"""The native wire as pydantic models: what JSON bodies are checked against, and the OpenAPI document.

Msgpack bodies are described by the same kind of model. Of those the envelope is checked by
`trainsession.service.requests` and the content by the service, since a rejected operation still
consumes its number.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel as PydanticModel
from pydantic import ConfigDict, Field, model_validator

from ..limits import LIMITS
from ..service.requests import CreateSession, OperationKind, OperationState
from ..types import GAP_TIMEOUT_SECONDS, USAGE_GROUPS, BaseModel, BudgetPeriod, Checkpoint, LoraConfig, SessionInfo


class Request(PydanticModel):
    """A body of which unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonRequest(Request):
    """A JSON body, without what Python's reader takes and JSON does not have: NaN, lone surrogates."""

    @model_validator(mode="before")
    @classmethod
    def _is_plain_json(cls, body: Any) -> Any:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
        return body


class Answer(PydanticModel):
    """A body of which unknown fields are ignored by the client."""


class ErrorBody(Answer):
    """Of every answer that is no success."""

    code: str
    message: str
    details: dict[str, Any]
    request_id: str


class Health(Answer):
    status: Literal["ok"]
    version: str


class Alive(Answer):
    status: Literal["ok"]


class Ready(Answer):
    ready: bool
    checks: dict[str, bool]
    engines_loaded: int


class Models(Answer):
    models: list[BaseModel]


class Lora(Request):
    rank: int = 32
    alpha: float | None = None
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    target_modules: list[str] | None = None


class CreateSessionBody(JsonRequest):
    base_model: str = ""
    kind: Literal["trainer", "sampler"] = "trainer"
    lora: Lora | None = None
    name: str = ""
    tags: list[str] = []
    metadata: dict[str, Any] = {}
    on_failure: Literal["continue", "skip"] = "continue"
    gap_timeout: Annotated[float | None, Field(description="Seconds; null: for ever.")] = GAP_TIMEOUT_SECONDS
    from_checkpoint: str | None = None
    with_optimizer: bool = False
    idempotency_key: str = ""

    def to_service(self) -> CreateSession:
        plain = self.model_dump(exclude={"lora", "tags"})
        lora = None if self.lora is None else LoraConfig.from_wire(self.lora.model_dump())
        return CreateSession(**plain, lora=lora, tags=tuple(self.tags))


class SessionOpened(Answer):
    session: SessionInfo
    epoch: int


class Sessions(Answer):
    sessions: list[SessionInfo]


class SessionAttached(SessionOpened):
    next_seq: int
    unfetched: list[str]
    progress: Any = None


class MetricsBody(Request):
    metrics: dict[str, Any]
    step: int | None = None


class LogRow(Answer):
    step: int | None
    time: float
    metrics: dict[str, Any]


class Log(Answer):
    rows: list[LogRow]


class Cancelled(Answer):
    cancelled: bool


class PollBody(JsonRequest):
    wait: list[str] = Field(default=[], max_length=LIMITS.max_poll_ids)
    ack: list[str] = Field(default=[], max_length=LIMITS.max_poll_ids)
    timeout: float = Field(default=0.0, ge=0.0, le=LIMITS.max_poll_seconds)


class SessionQuery(Request):
    session_id: str | None = None


class PathQuery(Request):
    path: str


class FileQuery(PathQuery):
    name: str


class Checkpoints(Answer):
    checkpoints: list[Checkpoint]


class CheckpointFile(Answer):
    name: str
    size: int
    sha256: str


class CheckpointFiles(Answer):
    files: list[CheckpointFile]


class UsageBody(Answer):
    prefill: int
    prefill_cached: int
    sample: int
    train: int
    cost: float


class UsageParams(PydanticModel):
    model_config = ConfigDict(extra="forbid")  # not strict: a query holds text only

    session_id: str | None = None
    by: Annotated[str | None, Field(description=f"Comma-separated, of {', '.join(USAGE_GROUPS)}.")] = None
    since: Annotated[float | None, Field(description="Seconds since 1970.")] = None
    until: Annotated[float | None, Field(description="Seconds since 1970; up to and without it.")] = None
    all_projects: bool = False
    format: Literal["json", "csv"] = "json"

    def grouping(self) -> dict[str, Any]:
        return {"by": self.by.split(",") if self.by else [], "since": self.since, "until": self.until}


class UsageRowBody(Answer):
    group: dict[str, str]
    usage: UsageBody
    cost: str
    currency: str
    engine_seconds: float | None


class BudgetBody(Answer):
    """Money as exact decimals; ``reserved`` is the most that unfinished work can still cost."""

    budget: str
    spent: str
    reserved: str
    left: str
    currency: str
    period: BudgetPeriod
    resets_at: float | None


class UsageReportBody(Answer):
    total: UsageBody
    by_session: dict[str, UsageBody]
    prices: dict[str, dict[str, float]]
    currency: str
    wall_seconds: float
    busy_seconds: float
    by: list[str]
    rows: list[UsageRowBody]
    costs: dict[str, str]
    budget: BudgetBody | None


# --- msgpack bodies: their logical structure ------------------------------------------------


class Tensor(Request):
    """A dense array: ``bytes`` are its little-endian values in C order."""

    dtype: Literal["int64", "int32", "float32"]
    shape: list[int]
    bytes: Annotated[str, Field(json_schema_extra={"format": "binary"})]


class WireDatum(Request):
    tokens: Tensor
    inputs: dict[str, Tensor]


class OperationBody(Request):
    kind: OperationKind
    seq: int | None = Field(default=None, ge=1)
    epoch: int | None = Field(default=None, ge=0)
    idempotency_key: str = ""
    params: dict[str, Any] = {}
    data: list[WireDatum] | None = None
    gradients: list[Tensor] | None = None
    progress: Any = None


class OperationAccepted(Answer):
    operation_id: str
    seq: int


class WireSampleRequest(Request):
    prompt: Tensor
    num_samples: int = 1
    params: dict[str, Any] = {}
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    session_id: str | None = None


class SamplesBody(Request):
    weights: dict[str, str]
    requests: list[WireSampleRequest]
    idempotency_key: str = ""


class SamplesAccepted(Answer):
    operation_ids: list[str]


class Result(Answer):
    operation_id: str
    state: OperationState
    value: Any = None
    error: dict[str, Any] | None = None


class ResultsBody(Answer):
    results: list[Result]
    positions: dict[str, int]


class TokenizerBundle(Answer):
    hash: str
    files: dict[str, Annotated[str, Field(json_schema_extra={"format": "binary"})]]


class AdapterBody(Request):
    base_model: str
    name: str
    files: dict[str, Annotated[str, Field(json_schema_extra={"format": "binary"})]]


class SavedBody(Answer):
    path: str
    size_bytes: int


DESCRIBED: tuple[type[PydanticModel], ...] = (
    OperationBody,
    SamplesBody,
    PollBody,
    AdapterBody,
    MetricsBody,
    TokenizerBundle,
    Log,
    ResultsBody,
    ErrorBody,
)
"""Bodies that OpenAPI names and FastAPI does not see, as it neither reads nor writes them."""
