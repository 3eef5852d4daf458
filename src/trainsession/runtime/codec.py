"""What crosses to an engine in a process of its own: plain values and the dataclasses of `engine.api`.

msgpack, never pickle: what comes back can only be one of the types named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from .. import wire
from ..engine.api import AdapterState, EngineInfo, SampleEvent, SampleItem, TrainItem, TrainOutput
from ..errors import TrainSessionError, from_wire
from ..types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams, TensorData

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        AdamParams,
        AdapterState,
        EngineInfo,
        LoraConfig,
        SampleEvent,
        SampleItem,
        SamplingParams,
        TrainItem,
        TrainOutput,
    )
}
_TAG = "$"
_MAX_ITEMS = 1 << 24
"""Of one list: a prompt's logprobs are one number per position."""


def encode(value: Any) -> bytes:
    return wire.pack(_plain(value))


def decode(data: bytes) -> Any:
    """Arrays come back as read-only views of ``data``."""
    return _rich(wire.unpack(data, max_items=_MAX_ITEMS))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.ndarray)):
        return value
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return {_TAG: name, "of": [_plain(getattr(value, field.name)) for field in fields(value)]}
    if isinstance(value, Datum):
        return {_TAG: "Datum", "of": [value.model_input.tokens, _plain(value.loss_fn_inputs)]}
    if isinstance(value, TensorData):
        return {_TAG: "TensorData", "of": value.data}
    if isinstance(value, TrainSessionError):
        return {_TAG: "error", "of": value.to_wire()}
    if isinstance(value, Mapping):
        # As pairs: keys may be integers, and none can be taken for a tag.
        return {_TAG: "map", "of": [[key, _plain(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{name} cannot cross to an engine's process")


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag, of = value[_TAG], value["of"]
    if tag == "map":
        return {key: _rich(item) for key, item in of}
    if tag == "tuple":
        return tuple(_rich(item) for item in of)
    if tag == "Datum":
        return Datum(ModelInput.from_ints(of[0]), _rich(of[1]))
    if tag == "TensorData":
        return TensorData(of)
    if tag == "error":
        return from_wire(of)
    cls = _CLASSES[tag]
    return cls(**{field.name: _rich(item) for field, item in zip(fields(cls), of, strict=True)})
