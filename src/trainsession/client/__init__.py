"""The SDK: clients of a service, near or far."""

from .futures import OperationFuture, as_completed
from .sampling import SamplingClient
from .service import ServiceClient
from .streaming import SampleDelta, SampleStream
from .training import TrainingClient

__all__ = [
    "OperationFuture",
    "SampleDelta",
    "SampleStream",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "as_completed",
]
