"""The data model: plain values, no I/O, no torch."""

from .data import Datum, EncodedTextChunk, ModelInput, TensorData
from .params import GAP_TIMEOUT_SECONDS, AdamParams, LoraConfig, LossName, SamplingParams, check_gap_timeout
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
from .usage import BUDGET_PERIODS, USAGE_GROUPS, Budget, BudgetPeriod, UsageGroup, UsageReport, UsageRow

__all__ = [
    "BUDGET_PERIODS",
    "GAP_TIMEOUT_SECONDS",
    "USAGE_GROUPS",
    "AdamParams",
    "BaseModel",
    "Budget",
    "BudgetPeriod",
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
    "check_gap_timeout",
]
