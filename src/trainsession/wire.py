"""Bytes on the wire: msgpack with binary little-endian tensors, optionally zstd-compressed.

A tensor is the map ``{"dtype": str, "shape": [int], "bytes": bytes}``. Both sides of every data
call use these functions; neither pickles anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import zstandard

from .errors import InvalidRequest, PayloadTooLarge
from .limits import LIMITS
from .types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    TensorData,
    Usage,
)

PROTOCOL_VERSION = 1
VERSION_HEADER = "X-TrainSession-Protocol"
MEDIA_TYPE = "application/vnd.trainsession.v1+msgpack"
COMPRESS_ABOVE = 1 << 20
"""Client bodies above this many bytes are sent zstd-compressed when that is asked for."""

_DTYPES = {"int64": "<i8", "int32": "<i4", "float32": "<f4"}
_NAMES = {np.dtype(name): name for name in _DTYPES}
"""Looked up, since numpy makes the name of a dtype anew each time."""
_TENSOR_KEYS = {"dtype", "shape", "bytes"}
_MAX_ITEMS = 1 << 17
"""Of one list or map: bounds what a header alone can make a decoder reserve."""


def _pack_array(value: Any) -> Any:
    if isinstance(value, TensorData):
        value = value.data
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype)
        if name is None:
            raise InvalidRequest(f"a tensor must be one of {', '.join(_DTYPES)}, got {value.dtype}")
        data = np.ascontiguousarray(value, dtype=_DTYPES[name])
        return {"dtype": name, "shape": list(value.shape), "bytes": data.data.cast("B") if data.size else b""}
    if isinstance(value, np.generic):
        return value.item()
    raise InvalidRequest(f"{type(value).__name__} cannot be sent")


def _unpack_map(value: dict[Any, Any]) -> Any:
    if value.keys() != _TENSOR_KEYS:
        return value
    dtype, shape, data = value["dtype"], value["shape"], value["bytes"]
    if dtype not in _DTYPES or not isinstance(shape, list) or not isinstance(data, bytes):
        raise InvalidRequest(f"not a tensor: dtype {dtype!r}")
    if len(shape) > 8 or not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
        raise InvalidRequest("not a tensor: bad shape")
    kind = np.dtype(_DTYPES[dtype])
    if math.prod(shape) * kind.itemsize != len(data):
        raise InvalidRequest(f"a tensor of shape {shape} and dtype {dtype} has not {len(data)} bytes")
    return np.frombuffer(data, dtype=kind).reshape(shape)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise InvalidRequest(f"the body holds a msgpack extension (type {code}); none is known")


def pack(body: Any) -> bytes:
    """msgpack bytes of plain values, numpy arrays and `TensorData`.

    Raises:
        InvalidRequest: a value that cannot be sent, or an integer of more than 64 bits.
    """
    try:
        return msgpack.packb(body, default=_pack_array, use_bin_type=True)  # type: ignore[no-any-return]
    except (OverflowError, ValueError, TypeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"the body cannot be sent: {error}") from None


def unpack(data: bytes, max_items: int = _MAX_ITEMS) -> Any:
    """The inverse of `pack`; arrays come back as read-only views.

    Args:
        max_items: Of one list or map.

    Raises:
        InvalidRequest: not msgpack, or a tensor that does not fit its own header.
    """
    try:
        return msgpack.unpackb(
            data,
            object_hook=_unpack_map,
            raw=False,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_bin_len=len(data),
            max_str_len=len(data),
            max_array_len=min(max_items, len(data)),
            max_map_len=min(max_items, len(data)),
        )
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"the body is not valid msgpack: {type(error).__name__}") from None


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def decompress(data: bytes, limit: int = LIMITS.max_body_bytes) -> bytes:
    """zstd-decompress, reading at most ``limit`` bytes whatever the frame claims.

    Raises:
        PayloadTooLarge: more than ``limit`` bytes.
        InvalidRequest: not zstd.
    """
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(data) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not valid zstd: {error}") from None
    if len(plain) > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes decompressed", details={"bound": limit})
    return plain


def datums_to_wire(data: Sequence[Datum]) -> list[dict[str, Any]]:
    return [{"tokens": d.model_input.tokens, "inputs": d.loss_fn_inputs} for d in data]


def datums_from_wire(body: Any) -> list[Datum]:
    """Datums of a request body; shapes are as sent, values are checked by the service."""
    if not isinstance(body, list):
        raise InvalidRequest("data: expected a list of datums")
    data: list[Datum] = []
    for index, item in enumerate(body):
        if (
            not isinstance(item, Mapping)
            or set(item) != {"tokens", "inputs"}
            or not isinstance(item["inputs"], Mapping)
        ):
            raise InvalidRequest(f"datum {index}: expected the keys tokens and inputs", details={"datum": index})
        try:
            data.append(Datum(ModelInput.from_ints(item["tokens"]), item["inputs"]))
        except InvalidRequest as error:
            raise type(error)(f"datum {index}: {error.message}", details={"datum": index, **error.details}) from None
    return data


def output_to_wire(output: ForwardBackwardOutput) -> dict[str, Any]:
    return {"outputs": output.loss_fn_outputs, "metrics": output.metrics, "usage": asdict(output.usage)}


def output_from_wire(body: Mapping[str, Any]) -> ForwardBackwardOutput:
    outputs = [{key: TensorData(value) for key, value in item.items()} for item in body["outputs"]]
    return ForwardBackwardOutput(outputs, dict(body["metrics"]), _usage(body["usage"]))


def _usage(body: Mapping[str, Any]) -> Usage:
    """Kinds of tokens that this version does not know are ignored, as in every answer."""
    return Usage(**{field.name: body[field.name] for field in fields(Usage) if field.name in body})


def samples_to_wire(response: SampleResponse) -> dict[str, Any]:
    """Samples as arrays; ``None`` of the first prompt logprob is NaN on the wire."""
    return {
        "sequences": [
            {
                "tokens": np.array(s.tokens, dtype=np.int32),
                "logprobs": np.array(s.logprobs, dtype=np.float32),
                "stop_reason": s.stop_reason,
                "text": s.text,
                "topk": _topk_to_wire(s.topk_logprobs),
            }
            for s in response.sequences
        ],
        "prompt_logprobs": None
        if response.prompt_logprobs is None
        else np.array([np.nan if lp is None else lp for lp in response.prompt_logprobs], dtype=np.float32),
        "topk_prompt": _topk_to_wire(response.topk_prompt_logprobs),
        "usage": asdict(response.usage),
    }


def samples_from_wire(body: Mapping[str, Any]) -> SampleResponse:
    prompt = body["prompt_logprobs"]
    return SampleResponse(
        sequences=[
            SampledSequence(
                s["tokens"].tolist(),
                s["logprobs"].tolist(),
                s["stop_reason"],
                s["text"],
                _topk_from_wire(s["topk"]),
            )
            for s in body["sequences"]
        ],
        prompt_logprobs=None if prompt is None else [None, *prompt.tolist()[1:]][: prompt.size],
        topk_prompt_logprobs=_topk_from_wire(body["topk_prompt"], first_is_none=True),
        usage=_usage(body["usage"]),
    )


def _topk_to_wire(rows: Sequence[list[tuple[int, float]] | None] | None) -> dict[str, npt.NDArray[Any]] | None:
    if rows is None:
        return None
    width = max((len(row) for row in rows if row), default=0)
    ids = np.full((len(rows), width), -1, dtype=np.int32)
    logprobs = np.full((len(rows), width), np.nan, dtype=np.float32)
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            ids[index, column], logprobs[index, column] = token, logprob
    return {"ids": ids, "logprobs": logprobs}


def _topk_from_wire(body: Any, first_is_none: bool = False) -> Any:
    if body is None:
        return None
    rows: list[Any] = [
        [(token, lp) for token, lp in zip(ids, lps, strict=True) if token >= 0]
        for ids, lps in zip(body["ids"].tolist(), body["logprobs"].tolist(), strict=True)
    ]
    if first_is_none and rows:
        rows[0] = None
    return rows
