"""The inside of an operation: parsed and checked once, packed for the log, parsed again for replay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import wire
from ..engine.api import EngineInfo
from ..engine.loss_inputs import check_data
from ..errors import IncompatibleVersion, InvalidDatum, InvalidRequest
from ..types import AdamParams, Datum
from .requests import OperationRequest

BODY_SCHEMA = 1
"""Stands in every logged body; a later version still reads the older ones."""
TRAINING_KINDS = frozenset({"forward", "forward_backward", "forward_keep"})
SAVE_KINDS = frozenset({"save_state", "save_weights"})
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_PROGRESS_BYTES = 65_536
_UNKNOWN = 2**31 - 1
"""Stands for a bound that only a loaded engine knows; the engine then checks when it runs."""
_PARAMS: dict[str, frozenset[str]] = {
    "forward": frozenset({"loss_fn", "loss_fn_config"}),
    "forward_backward": frozenset({"loss_fn", "loss_fn_config"}),
    "forward_keep": frozenset(),
    "backward": frozenset({"forward_seq"}),
    "skip": frozenset({"incomplete"}),
    "zero_grad": frozenset(),
    "save_state": frozenset({"name", "overwrite", "ttl_seconds"}),
    "save_weights": frozenset({"name", "overwrite", "ttl_seconds"}),
    "snapshot": frozenset(),
    "load_state": frozenset({"path", "optimizer"}),
    "export": frozenset({"merged"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A checked operation body; which fields are set depends on the kind (`docs/wire.md`)."""

    params: Mapping[str, Any] = field(default_factory=dict)
    adam: AdamParams | None = None
    data: Sequence[Datum] = ()
    gradients: Sequence[npt.NDArray[np.float32]] = ()
    progress: Any = None

    @property
    def tokens(self) -> int:
        """Input positions of all datums."""
        return sum(datum.model_input.length for datum in self.data)


def pack_request(request: OperationRequest) -> bytes:
    """The bytes that the log keeps, equal for equal requests: number, epoch and key are not in them."""
    data = request.data
    if isinstance(data, Sequence) and data and isinstance(data[0], Datum):
        data = wire.datums_to_wire(data)
    return wire.pack(
        {
            "schema": BODY_SCHEMA,
            "kind": request.kind,
            "params": dict(sorted(request.params.items())),
            "data": data,
            "gradients": request.gradients,
            "progress": request.progress,
        }
    )


def parse_packed(data: bytes) -> Body:
    """The body of a logged operation."""
    body = wire.unpack(data)
    if body["schema"] != BODY_SCHEMA:
        raise IncompatibleVersion(f"an operation's body has schema {body['schema']}, this version reads {BODY_SCHEMA}")
    return parse_body(body["kind"], body["params"], body["data"], body["gradients"], body["progress"])


def parse_body(
    kind: str, params: Mapping[str, Any], data: Any, gradients: Any, progress: Any, info: EngineInfo | None = None
) -> Body:
    """Check an operation's inside; without ``info`` (no engine yet) all but vocabulary and context.

    Raises:
        InvalidRequest: names the key; `InvalidDatum` names the datum too.
    """
    if kind != "optim_step":
        unknown = sorted(set(params) - _PARAMS[kind])
        if unknown:
            known = ", ".join(sorted(_PARAMS[kind])) or "none"
            raise _invalid(f"{kind}: unknown parameter {unknown[0]!r}; known are {known}", unknown[0])
        if progress is not None:
            raise _invalid(f"{kind}: progress is committed with optim_step only", "progress")
    if kind not in TRAINING_KINDS and data:
        raise _invalid(f"{kind} takes no data", "data")
    if kind != "backward" and gradients:
        raise _invalid(f"{kind} takes no gradients", "gradients")
    if kind in TRAINING_KINDS:
        return _training_body(kind, params, data, info)
    if kind == "backward":
        _check_integer(params, "forward_seq")
        return Body(params=params, gradients=_check_gradients(gradients))
    if kind == "optim_step":
        return _optim_body(params, progress)
    if kind in SAVE_KINDS:
        _check_save(params)
    if kind == "load_state":
        if not isinstance(params.get("path"), str):
            raise _invalid("load_state: path is missing", "path")
        _check_flag(params, "optimizer")
    if kind == "export":
        _check_flag(params, "merged")
    if kind == "skip":
        _check_flag(params, "incomplete")
    return Body(params=params)


def check_ids(info: EngineInfo, tokens: npt.NDArray[Any], what: str, details: dict[str, Any]) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= info.vocab_size:
        raise InvalidDatum(
            f"{what}: token id {low if low < 0 else high} is outside the vocabulary of {info.vocab_size} "
            f"({info.base_model})",
            details=details,
        )


def check_name(name: Any) -> str:
    """A checkpoint name, which never touches a path of the file system."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or set(name) == {"."}:
        raise _invalid(f"name: expected 1 to 128 of A-Z a-z 0-9 . _ -, got {name!r}", "name")
    return name


def check_training(kind: str, body: Body, info: EngineInfo | None) -> None:
    """Check a pass over data; see `trainsession.engine.loss_inputs.check_data`."""
    check_data(
        body.data,
        None if kind == "forward_keep" else body.params["loss_fn"],
        body.params.get("loss_fn_config") or {},
        context_length=_UNKNOWN if info is None else info.context_length,
        vocab_size=_UNKNOWN if info is None else info.vocab_size,
    )


def _training_body(kind: str, params: Mapping[str, Any], data: Any, info: EngineInfo | None) -> Body:
    if data is not None and not isinstance(data, Sequence):
        raise _invalid("data: expected a list of datums", "data")
    datums = data if data and isinstance(data[0], Datum) else wire.datums_from_wire(data or [])
    if kind != "forward_keep" and not isinstance(params.get("loss_fn"), str):
        raise _invalid(f"loss_fn: expected a name, got {params.get('loss_fn')!r}", "loss_fn")
    if not isinstance(params.get("loss_fn_config") or {}, Mapping):
        raise _invalid("loss_fn_config: expected a map", "loss_fn_config")
    body = Body(params=params, data=datums)
    check_training(kind, body, info)
    return body


def _check_gradients(gradients: Any) -> list[npt.NDArray[np.float32]]:
    if not isinstance(gradients, Sequence) or not gradients:
        raise _invalid("gradients: expected one float32 tensor per datum of the forward", "gradients")
    arrays: list[npt.NDArray[np.float32]] = []
    for index, gradient in enumerate(gradients):
        array = gradient
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            raise InvalidDatum(
                f"gradients[{index}]: expected a float32 tensor", details={"datum": index, "key": "gradients"}
            )
        if not np.isfinite(array).all():
            raise InvalidDatum(
                f"gradients[{index}]: holds NaN or infinity", details={"datum": index, "key": "gradients"}
            )
        arrays.append(array)
    return arrays


def _optim_body(params: Mapping[str, Any], progress: Any) -> Body:
    _check_flag(params, "allow_incomplete")
    adam = AdamParams.from_wire({key: value for key, value in params.items() if key != "allow_incomplete"})
    if progress is not None and len(wire.pack(progress)) > _MAX_PROGRESS_BYTES:
        raise _invalid(
            f"progress: more than {_MAX_PROGRESS_BYTES} bytes; keep a checkpoint for large state", "progress"
        )
    return Body(params=params, adam=adam, progress=progress)


def _check_save(params: Mapping[str, Any]) -> None:
    if params.get("name") is not None:
        check_name(params["name"])
    _check_flag(params, "overwrite")
    ttl = params.get("ttl_seconds")
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < 1e10):
        raise _invalid(f"ttl_seconds: expected a number of seconds > 0, got {ttl!r}", "ttl_seconds")


def _check_flag(params: Mapping[str, Any], key: str) -> None:
    if not isinstance(params.get(key, False), bool):
        raise _invalid(f"{key}: expected true or false, got {params[key]!r}", key)


def _check_integer(params: Mapping[str, Any], key: str) -> None:
    value = params.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _invalid(f"{key}: expected a sequence number, got {value!r}", key)


def _invalid(message: str, key: str) -> InvalidRequest:
    return InvalidRequest(message, details={"key": key})
