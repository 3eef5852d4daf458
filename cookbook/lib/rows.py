"""Rows of data, each with where it came from: JSON Lines, JSON, Parquet, or a data set of the hub by name."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ResumableConfig, UsageError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<configuration>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        values: Its fields.
        where: ``train.jsonl:17`` (the line), or the number of the row where a file has no lines.
    """

    values: Mapping[str, Any]
    where: str

    def error(self, message: str) -> UsageError:
        """An error about this row."""
        return UsageError(f"{self.where}: {message}")


def read_rows(source: str | Path, split: str = "train") -> list[Row]:
    """All rows of a file, of a directory's file for a split, or of a data set of the Hugging Face hub.

    Args:
        source: ``rows.jsonl`` (also ``.jsonl.gz``, ``.json``, ``.parquet``); a directory that holds
            ``train.jsonl`` or another of these; or ``owner/name``, ``owner/name:configuration`` of the hub.
        split: Which file of a directory, which split of a data set.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it cannot be read; names the file and the line.
    """
    path = Path(source)
    if path.is_dir():
        return _rows_of_file(_file_of_split(path, split))
    named = _HUB_NAME.fullmatch(str(source))
    if path.exists() or _suffix(path) is not None or named is None:
        return _rows_of_file(path)
    return _hub_rows(named["name"], named["configuration"], split)


def rows_for(config: ResumableConfig, smoke: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of ``config.data``; in a smoke run a few of them, or ``smoke`` where there is no ``--data``."""
    if config.data is not None:
        rows = read_rows(config.data)
        return rows[:40] if config.smoke else rows
    if not config.smoke:
        raise UsageError("needs --data, a file of rows; see --help for what they may look like")
    return [Row(values, f"smoke row {number}") for number, values in enumerate(smoke, start=1)]


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def _file_of_split(directory: Path, split: str) -> Path:
    found = [directory / f"{split}{suffix}" for suffix in SUFFIXES if (directory / f"{split}{suffix}").is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{directory} has {' and '.join(path.name for path in found)}: pass the one that is meant")
    names = ", ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    raise FileNotFoundError(f"{directory}: expected one of {names} in this directory")


def _rows_of_file(path: Path) -> list[Row]:
    readers = {".jsonl": _lines, ".jsonl.gz": _lines, ".json": _json, ".parquet": _parquet}
    suffix = _suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if suffix is None:
        raise UsageError(f"{path}: expected a file called {', '.join('*' + name for name in SUFFIXES)}")
    rows = list(readers[suffix](path))
    if not rows:
        raise UsageError(f"{path}: there are no rows in it")
    return rows


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return Row(value, where)


def _lines(path: Path) -> Iterator[Row]:
    """Blank lines are skipped."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield _row(_parsed(_decoded(line, where), where), where)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path}:{number + 1}: not a whole gzip file: {error}") from None


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        ) from None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from None


def _json(path: Path) -> Iterator[Row]:
    """A list of objects; each is read by itself, so that its line is known."""
    text = _decoded(path.read_bytes(), f"{path}:1")
    if text.lstrip()[:1] == "{":  # JSON Lines under another name
        yield from _lines(path)
        return
    decoder, space = json.JSONDecoder(), re.compile(r"\s*")
    at, line, counted = _skip(space, text, 0), 1, 0
    if text[at : at + 1] != "[":
        raise UsageError(f"{path}:1: expected a list of objects, or a JSON object on each line")
    at = _skip(space, text, at + 1)
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        where = f"{path}:{line}"
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not valid JSON: {error}") from None
        yield _row(value, where)
        at = _skip(space, text, at)
        if text[at : at + 1] == ",":
            at = _skip(space, text, at + 1)
        elif text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            raise UsageError(f"{path}:{line}: not valid JSON: expected ',' or ']' behind the object")


def _skip(space: re.Pattern[str], text: str, at: int) -> int:
    match = space.match(text, at)
    return match.end() if match else at


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found]
    except ImportError:
        raise UsageError(f"{path}: Parquet is read with pyarrow: pip install 'trainsession[cookbook]'") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for number, value in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020 (goes on counting)
                    yield Row(value, f"{path}:row {number}")
    except (ArrowException, OSError) as error:
        raise UsageError(f"{path}: not a whole Parquet file: {error}") from None


def _hub_rows(name: str, configuration: str | None, split: str) -> list[Row]:
    instead = "or download it and pass --data with the file (*.jsonl, *.json, *.parquet)"
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError:
        raise UsageError(
            f"{name} is neither a file nor, without `pip install datasets`, a data set that can be loaded: "
            f"install it, {instead}"
        ) from None
    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(name, configuration, split=split)
    except (OSError, ValueError) as error:  # no connection, no such data set; no such configuration or split
        raise UsageError(
            f"{name} ({split}) could not be loaded from the Hugging Face hub: {error}; see to that, {instead}"
        ) from error
    return [Row(dict(value), f"{name} {split} row {number}") for number, value in enumerate(rows, start=1)]
