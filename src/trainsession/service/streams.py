"""The stream of a sample whose frames are no longer in memory: what is in its result, once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .. import wire
from ..errors import NotFound, ServiceUnavailable
from .log import OperationLog


async def replayed(log: OperationLog, project: str, operation_id: str) -> list[dict[str, Any]]:
    """All frames; one for each sequence, and the last.

    Raises:
        NotFound: no such sample.
        ServiceUnavailable: it is to be drawn here, and this server, which has just taken it over, has yet to begin.
    """
    result = (await log.results(project, [operation_id])).get(operation_id)
    if result is None:
        if await log.is_open_sample(project, operation_id):
            raise ServiceUnavailable(f"{operation_id} is being taken up; ask again", details={"id": operation_id})
        raise NotFound(f"no sample {operation_id} in this project", details={"id": operation_id})
    if result.error is not None:
        return [{"error": result.error.to_wire()}]
    if "sequences" not in result.value:
        raise NotFound(f"{operation_id} is no sample", details={"id": operation_id})
    return list(_frames(result.value))


def _frames(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for index, sequence in enumerate(wire.samples_from_wire(value).sequences):
        frame: dict[str, Any] = {
            "index": index,
            "tokens": sequence.tokens,
            "logprobs": sequence.logprobs,
            "text_delta": sequence.text,
            "stop_reason": sequence.stop_reason,
        }
        if sequence.topk_logprobs is not None:
            frame["topk"] = sequence.topk_logprobs
        yield frame
    yield {"done": True, "usage": value["usage"]}
