"""Rows of files, and errors that name the file and the line."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from cookbook.lib.config import UsageError
from cookbook.lib.rows import Row, read_rows

ROWS: list[dict[str, Any]] = [{"a": 1}, {"a": "é", "b": [{"c": None}]}]


def where(rows: list[Row], root: Path) -> list[str]:
    return [row.where.removeprefix(f"{root}/") for row in rows]


def test_json_lines_with_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"a": 1}\r\n\n' + json.dumps(ROWS[1]) + "\n")
    rows = read_rows(path)
    assert [row.values for row in rows] == ROWS
    assert where(rows, tmp_path) == ["rows.jsonl:1", "rows.jsonl:3"]
    (tmp_path / "rows.json").write_bytes(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    assert where(read_rows(tmp_path / "rows.json"), tmp_path) == ["rows.json:1", "rows.json:3"]


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert where(read_rows(path), tmp_path) == ["rows.jsonl.gz:1", "rows.jsonl.gz:2"]
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n')[:-9])
    with pytest.raises(UsageError, match=r"rows\.jsonl\.gz:\d: not a whole gzip file"):
        read_rows(path)


def test_a_json_list_knows_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text, lines in [
        (json.dumps(ROWS, indent=2), [2, 5]),
        (json.dumps(ROWS), [1, 1]),
        ("\n[\n\n{}\n,\n{}]", [4, 6]),
    ]:
        path.write_text(text)
        rows = read_rows(path)
        assert where(rows, tmp_path) == [f"rows.json:{line}" for line in lines]
    path.write_text(json.dumps(ROWS, indent=2))
    assert [row.values for row in read_rows(path)] == ROWS


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra: cookbook)")
    import pyarrow

    path = tmp_path / "rows.parquet"
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]
    table = pyarrow.Table.from_pylist([{"messages": messages, "n": index} for index in range(5)])
    parquet.write_table(table, path, row_group_size=2)
    rows = read_rows(path)
    assert where(rows, tmp_path) == [f"rows.parquet:row {number}" for number in range(1, 6)]
    assert [row.values for row in rows] == [{"messages": messages, "n": index} for index in range(5)]
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UsageError, match=r"rows\.parquet: not a whole Parquet file"):
        read_rows(path)


def test_a_directory_has_a_file_for_each_split(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}')
    (tmp_path / "test.json").write_text('[{"a": 2}]')
    assert [row.values["a"] for split in ("train", "test") for row in read_rows(tmp_path, split)] == [1, 2]
    with pytest.raises(FileNotFoundError, match=r"expected one of validation\.jsonl, .*validation\.parquet"):
        read_rows(tmp_path, "validation")
    (tmp_path / "test.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"test\.jsonl and test\.json: pass the one"):
        read_rows(tmp_path, "test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n\n{"a": \n', r"rows\.jsonl:3: not valid JSON"),
        ("rows.jsonl", b'{"a": 1}\n[1]\n', r"rows\.jsonl:2: expected a JSON object, got list"),
        ("rows.jsonl", b'{}\n{"a": "\xff"}\n', r"rows\.jsonl:2: not UTF-8: byte 8 of the line is 0xff"),
        ("rows.jsonl", b"[" * 200_000, r"rows\.jsonl:1: not valid JSON"),
        ("rows.jsonl", b"\n", r"rows\.jsonl: there are no rows"),
        ("rows.json", b"[]", r"rows\.json: there are no rows"),
        ("rows.json", b'[{"a": 1},\n\n {"a": }]', r"rows\.json:3: not valid JSON"),
        ("rows.json", b'[{"a": 1},\n 7]', r"rows\.json:2: expected a JSON object, got int"),
        ("rows.json", b'[{"a": 1}\n\n\n{}]', r"rows\.json:4: not valid JSON: expected ','"),
        ("rows.json", b'[{"a": 1},', r"rows\.json:1: not valid JSON"),
        ("rows.json", b"7", r"rows\.json:1: expected a list of objects"),
        ("rows.csv", b"a,b", r"rows\.csv: expected a file called \*\.jsonl, "),
    ],
)
def test_what_is_wrong_and_where(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_rows(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in (tmp_path / "rows.jsonl", "data/rows.jsonl", tmp_path / "rows"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            read_rows(name)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_a_data_set_of_the_hub_without_its_package_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"^openai/gsm8k is neither a file nor.*pip install datasets.*--data"):
        read_rows("openai/gsm8k:main")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_a_data_set_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # type: ignore[import-not-found]

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"openai/no-such-data \(train\) could not be loaded.*--data"):
        read_rows("openai/no-such-data")
