"""Results from the JSON of an answer; fields that this version does not know are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ..types import OptimStepResponse, SaveWeightsResponse, SessionInfo
from ..wire import output_from_wire, samples_from_wire

T = TypeVar("T")


def read(cls: type[T], body: Mapping[str, Any]) -> T:
    """A dataclass of results from an answer's map."""
    return cls(**{f.name: body[f.name] for f in fields(cls) if f.name in body})  # type: ignore[arg-type]


def read_session(body: Mapping[str, Any]) -> SessionInfo:
    return read(SessionInfo, {**body, "tags": tuple(body.get("tags", ()))})


def read_any(value: Any) -> Any:
    """The result value of an operation whose kind is not known any more (after `attach`)."""
    if not isinstance(value, Mapping):
        return value
    if "outputs" in value:
        return output_from_wire(value)
    if "sequences" in value:
        return samples_from_wire(value)
    if "size_bytes" in value:
        return read(SaveWeightsResponse, value)
    if set(value) == {"metrics"}:
        return OptimStepResponse(dict(value["metrics"]))
    return dict(value)
