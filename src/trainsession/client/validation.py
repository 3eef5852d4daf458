"""What can be known to be wrong before anything is sent, and the copy of what is sent.

Token ids beyond the vocabulary and prompts beyond the context are known to the service only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine.loss_inputs import check_data
from ..errors import InvalidDatum, InvalidRequest
from ..types import Datum

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


_UNKNOWN = 2**31 - 1
"""Stands for a bound that only the service knows."""


def check_batch(data: Sequence[Datum], loss_fn: str | None, config: Mapping[str, float] | None) -> dict[str, float]:
    """Refuse a training call that no engine would take; returns its configuration as plain floats.

    Args:
        loss_fn: None for a custom loss, whose function may use inputs of any name and shape.

    Raises:
        InvalidDatum: names the datum and the key.
        InvalidRequest: no data, an unknown loss (or a function in its place), or a wrong configuration key.
    """
    if callable(loss_fn):
        raise InvalidRequest(
            "loss_fn: expected a loss's name; forward_backward_custom takes a function", details={"key": "loss_fn"}
        )
    if isinstance(data, (Datum, Mapping, str)) or not isinstance(data, Sequence):
        raise InvalidRequest(f"data: expected a list of Datum, got {type(data).__name__}", details={"key": "data"})
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise InvalidDatum(f"datum {index}: expected a Datum, got {type(datum).__name__}", details={"datum": index})
    plain = {str(key): _number(value) for key, value in (config or {}).items()}
    check_data(data, loss_fn, plain, context_length=_UNKNOWN, vocab_size=_UNKNOWN)
    return plain


def captured(data: Sequence[Datum], only: frozenset[str] | None = None) -> list[dict[str, Any]]:
    """Wire datums with arrays of their own: what the caller does to its arrays later is not sent."""
    return [
        {
            "tokens": datum.model_input.tokens.copy(),
            "inputs": {
                key: value.data.copy() for key, value in datum.loss_fn_inputs.items() if only is None or key in only
            },
        }
        for datum in data
    ]


def check_name(name: str | None) -> None:
    """Raise `InvalidRequest` unless this can be the name of a checkpoint (None: the service makes one)."""
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidRequest(
            f"name: {name!r} is not a checkpoint name; use 1 to 128 of letters, digits, '.', '_' and '-'",
            details={"key": "name"},
        )


def check_path(path: str) -> None:
    """Raise `InvalidRequest` unless this looks like a checkpoint's path."""
    if not isinstance(path, str) or not path.startswith("ts://"):
        raise InvalidRequest(
            f"path: expected ts://<session>/<state|weights>/<name>, got {path!r}", details={"key": "path"}
        )


def check_ttl(ttl_seconds: float | None) -> None:
    """Raise `InvalidRequest` unless this is a number of seconds above 0, or None."""
    if ttl_seconds is None:
        return
    if isinstance(ttl_seconds, bool) or not isinstance(ttl_seconds, (int, float)) or not 0 < ttl_seconds < math.inf:
        raise InvalidRequest(
            f"ttl_seconds must be a number above 0, got {ttl_seconds!r}", details={"key": "ttl_seconds"}
        )


def json_copy(value: Any, what: str) -> Any:
    """A copy of a JSON value. Raises `InvalidRequest` where it is none (NaN included)."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what}: not a JSON value: {error}", details={"key": what}) from None


def _number(value: Any) -> Any:
    """numpy's and torch's scalars as Python's own."""
    return value.item() if hasattr(value, "item") else value


def model_name(name: Any) -> str:
    """A base model's name; a path as an absolute one, because the service may run in another directory."""
    if isinstance(name, Path) or (isinstance(name, str) and name.startswith((".", "~"))):
        return str(Path(name).expanduser().absolute())
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"base_model: expected a name as in list_base_models(), got {name!r}")
    return name


def check_session_id(session_id: Any) -> str:
    if not isinstance(session_id, str) or not session_id or "/" in session_id:
        raise InvalidRequest(f"session_id: expected a session's id, got {session_id!r}")
    return session_id
