"""The data model: plain values, no I/O, no torch."""

from .data import Datum, EncodedTextChunk, ModelInput, TensorData
from .params import AdamParams, LoraConfig, LossName, SamplingParams
from .results import (
    BaseModel,
    Checkpoint,
    ForwardBackwardOutput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsResponse,
    SessionInfo,
    StopReason,
    Usage,
)
from .usage import USAGE_GROUPS, UsageGroup, UsageReport, UsageRow

__all__ = [
    "USAGE_GROUPS",
    "AdamParams",
    "BaseModel",
    "Checkpoint",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "LoraConfig",
    "LossName",
    "ModelInput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsResponse",
    "SessionInfo",
    "StopReason",
    "TensorData",
    "Usage",
    "UsageGroup",
    "UsageReport",
    "UsageRow",
]
