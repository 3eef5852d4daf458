"""A post-training loop in plain Python; the heavy calls run on a GPU that you never manage.

import trainsession as ts

service = ts.ServiceClient()
trainer = service.create_lora_training_client("HuggingFaceTB/SmolLM2-135M-Instruct", rank=16)
fb = trainer.forward_backward(batch, loss_fn="cross_entropy")
step = trainer.optim_step(ts.AdamParams(learning_rate=1e-4))
sampler = trainer.save_weights_and_get_sampling_client()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__
from .client import (
    OperationFuture,
    SampleDelta,
    SampleStream,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    as_completed,
)
from .errors import (
    AuthenticationFailed,
    BlobsUnavailable,
    BudgetExceeded,
    Cancelled,
    CheckpointExists,
    CheckpointMismatch,
    Conflict,
    ConnectionFailed,
    DatabaseUnavailable,
    EngineError,
    EngineLost,
    IncompatibleVersion,
    IncompleteGradients,
    InvalidDatum,
    InvalidRequest,
    LimitExceeded,
    NoGradients,
    NonFinite,
    NotFound,
    OperationSkipped,
    PayloadTooLarge,
    PermissionDenied,
    PromptTooLong,
    RateLimited,
    RequestTimeout,
    ResultTimeout,
    SequenceConflict,
    ServiceUnavailable,
    SessionClosed,
    SessionFenced,
    SnapshotLost,
    StorageError,
    StorageUnavailable,
    TrainSessionError,
    UnknownModel,
    UnsupportedMediaType,
)
from .limits import LIMITS, Limits
from .types import (
    AdamParams,
    BaseModel,
    Budget,
    Checkpoint,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    LoraConfig,
    LossName,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
    SessionInfo,
    StopReason,
    TensorData,
    Usage,
    UsageReport,
    UsageRow,
)

if TYPE_CHECKING:
    from .tokenization import RenderedChat, Tokenizer

__all__ = [
    "LIMITS",
    "AdamParams",
    "AuthenticationFailed",
    "BaseModel",
    "BlobsUnavailable",
    "Budget",
    "BudgetExceeded",
    "Cancelled",
    "Checkpoint",
    "CheckpointExists",
    "CheckpointMismatch",
    "Conflict",
    "ConnectionFailed",
    "DatabaseUnavailable",
    "Datum",
    "EncodedTextChunk",
    "EngineError",
    "EngineLost",
    "ForwardBackwardOutput",
    "IncompatibleVersion",
    "IncompleteGradients",
    "InvalidDatum",
    "InvalidRequest",
    "LimitExceeded",
    "Limits",
    "LoraConfig",
    "LossName",
    "ModelInput",
    "NoGradients",
    "NonFinite",
    "NotFound",
    "OperationFuture",
    "OperationSkipped",
    "OptimStepResponse",
    "PayloadTooLarge",
    "PermissionDenied",
    "PromptTooLong",
    "RateLimited",
    "RenderedChat",
    "RequestTimeout",
    "ResultTimeout",
    "SampleDelta",
    "SampleResponse",
    "SampleStream",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveWeightsResponse",
    "SequenceConflict",
    "ServiceClient",
    "ServiceUnavailable",
    "SessionClosed",
    "SessionFenced",
    "SessionInfo",
    "SnapshotLost",
    "StopReason",
    "StorageError",
    "StorageUnavailable",
    "TensorData",
    "Tokenizer",
    "TrainSessionError",
    "TrainingClient",
    "UnknownModel",
    "UnsupportedMediaType",
    "Usage",
    "UsageReport",
    "UsageRow",
    "__version__",
    "as_completed",
]


_OF_TOKENIZATION = ("RenderedChat", "Tokenizer")


def __getattr__(name: str) -> object:
    """`Tokenizer` on first use: it alone would double the time that the import takes."""
    if name in _OF_TOKENIZATION:
        from . import tokenization

        return getattr(tokenization, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_TOKENIZATION])
