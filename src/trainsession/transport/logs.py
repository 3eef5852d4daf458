"""Where the log of `trainsession serve` goes: stderr, as text for people or JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["json", "text"]
Say = Callable[[str], None]
_IN_MESSAGE = frozenset({"method", "route", "status"})


@contextmanager
def to_stderr(log_format: LogFormat) -> Iterator[None]:
    """Send this process' log to stderr: all of trainsession's from INFO on, of others warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root, ours = logging.getLogger(), logging.getLogger("trainsession")
    level = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(level)
        root.removeHandler(handler)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, and a record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level where it is none of the usual ones, message, and a record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname} "
        fields: dict[str, Any] = getattr(record, "fields", {})
        more = "".join(f" {key}={_plain(value)}" for key, value in fields.items() if key not in _IN_MESSAGE)
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{_time(record)} {level}{record.getMessage()}{more}{trace}"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
