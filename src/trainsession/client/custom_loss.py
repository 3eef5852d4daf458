"""A loss that is the caller's own Python function over logprobs.

It takes two numbers of the session: ``forward_keep``, whose graph stays in the engine, and
``backward``, which sends the gradient of the loss with respect to each logprob. Between the two the
function runs on one worker thread of this process, so what was queued behind goes on. If it raises,
the second number is consumed by a ``skip`` and the future raises the same exception.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest, NonFinite, TrainSessionError
from ..types import Datum, ForwardBackwardOutput, Usage
from ..wire import output_from_wire
from .answers import read
from .submitter import PendingOperation, Submitter
from .validation import captured

if TYPE_CHECKING:
    import torch

CustomLoss: TypeAlias = "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, Any]]]"
"""``fn(data, logprobs) -> (loss, metrics)``: ``logprobs[i]`` is float32 of the shape of datum ``i``'s
``target_tokens`` and requires grad; ``loss`` is a scalar tensor; ``metrics`` maps names to numbers."""

SENT_INPUTS = frozenset({"target_tokens", "temperature"})
"""All that the engine needs of a datum; other inputs of it are for the function."""


def operations(data: Sequence[Datum]) -> tuple[PendingOperation, PendingOperation]:
    return PendingOperation("forward_keep", {}, data=captured(data, SENT_INPUTS)), PendingOperation("backward", {})


async def forward_backward(
    submitter: Submitter,
    forward: PendingOperation,
    backward: PendingOperation,
    data: list[Datum],
    function: CustomLoss,
) -> ForwardBackwardOutput:
    """Both operations, with the function between them. ``data`` must be a copy."""
    try:
        output = output_from_wire(await submitter.outcome(forward))
        logprobs = [values.data for values in output.logprobs]
        loss, metrics, gradients = await asyncio.get_running_loop().run_in_executor(
            _worker(), evaluate, function, data, logprobs
        )
    except BaseException:
        backward.skip()
        await _consumed(submitter, backward)
        raise
    if not backward.is_cancelled:
        backward.body |= {"params": {"forward_seq": forward.seq}, "gradients": gradients}
    value = await submitter.outcome(backward)
    # The forward was charged as one; the backward turns that into training.
    usage = output.usage + read(Usage, value.get("usage") or {})
    return ForwardBackwardOutput(output.loss_fn_outputs, {**output.metrics, **metrics, "loss:sum": loss}, usage)


def evaluate(
    function: CustomLoss, data: list[Datum], logprobs: Sequence[npt.NDArray[np.float32]]
) -> tuple[float, dict[str, float], list[npt.NDArray[np.float32]]]:
    """The loss, its metrics, and its gradient with respect to each array of logprobs.

    Raises:
        InvalidRequest: the function returned something else than ``(scalar tensor, metrics)``, or a
            loss that does not depend on the logprobs.
        NonFinite: the loss or a gradient is NaN or infinite; names the datum.
    """
    import torch

    leaves = [torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in logprobs]
    with torch.enable_grad():
        returned = function(data, leaves)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise InvalidRequest(f"a custom loss returns (loss, metrics), got {type(returned).__name__}")
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InvalidRequest(f"a custom loss returns a scalar tensor, got {_shown(loss)}")
    if not loss.requires_grad:
        raise InvalidRequest("the custom loss does not depend on the logprobs: there is nothing to train")
    if not math.isfinite(loss.item()):
        raise NonFinite(f"the custom loss is {loss.item()}")
    gradients = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    arrays = [
        np.zeros_like(values) if gradient is None else gradient.to(torch.float32).contiguous().numpy()
        for gradient, values in zip(gradients, logprobs, strict=True)
    ]
    for index, array in enumerate(arrays):
        if not np.isfinite(array).all():
            raise NonFinite(
                f"datum {index}: the gradient of the custom loss holds NaN or inf", details={"datum": index}
            )
    return float(loss.item()), {str(name): _number(value) for name, value in metrics.items()}, arrays


def copied(data: Sequence[Datum]) -> list[Datum]:
    """Datums with arrays of their own, for a function that runs later."""
    return [
        Datum(wire["tokens"], wire["inputs"])  # type: ignore[arg-type]
        for wire in captured(data)
    ]


async def _consumed(submitter: Submitter, operation: PendingOperation) -> None:
    """Consume the number, whatever the service says to it: the first error is the one to raise."""
    try:
        await submitter.outcome(operation)
    except TrainSessionError:
        return


_executor: ThreadPoolExecutor | None = None


def _worker() -> ThreadPoolExecutor:
    """The one thread that custom losses of this process run on, in the order of their calls."""
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainsession-custom-loss")
    return _executor


def _after_fork() -> None:
    global _executor
    _executor = None


os.register_at_fork(after_in_child=_after_fork)


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def _number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)
