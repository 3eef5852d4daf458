"""Supervised fine-tuning on conversations, whole and in two parts, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainsession as ts
from cookbook import chat_sl
from cookbook.lib.config import UsageError
from cookbook.lib.order import Shuffled
from cookbook.lib.run import Run
from tests.cookbook.test_recipes import check_files, rows

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: cookbook)")
pytestmark = pytest.mark.usefixtures("home")

REPLY = {"role": "assistant", "content": "The quick brown fox."}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{i}?"}, REPLY] * (1 + i % 2)} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(model: Path, data: Path, out: Path, **more: Any) -> chat_sl.Config:
    sizes = {"steps": 6, "batch_tokens": 150, "warmup": 1, "learning_rate": 1e-2, "rank": 4}
    return chat_sl.Config(model=str(model), data=str(data), out=str(out), **{**sizes, **more})


def test_learns_its_rows(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before, after = chat_sl.main(config(tiny_model, data, out))
    assert after < before - 0.5
    assert [row["step"] for row in rows(out, "train")] == [1, 2, 3, 4, 5, 6]
    assert [row["nll"] for row in rows(out, "held-out")] == [before, after]
    assert (out / "mask.png").read_bytes().startswith(b"\x89PNG")
    check_files(out, "18 rows, 2 held out, 0 sequences longer than")


def test_a_resumed_run_equals_an_uninterrupted_one(
    tiny_model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in the second epoch, whether its end left a gradient without a step or a step without an answer."""
    settings = {"steps": 4, "batch_tokens": 600, "learn": "last"}
    whole = tmp_path / "whole"
    expected = chat_sl.main(config(tiny_model, data, whole, **settings))
    for lost, owner, name, calls in [
        ("gradient", ts.TrainingClient, "optim_step", 2),
        ("answer", Run, "log", 3),  # held-out, then two steps; the third is taken and nobody hears of it
    ]:
        parts = tmp_path / lost
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing_after(calls, getattr(owner, name)))
            with pytest.raises(KeyError, match="killed"):
                chat_sl.main(config(tiny_model, data, parts, **settings))
        assert [row["step"] for row in rows(parts, "train")] == [1, 2]
        assert chat_sl.main(chat_sl.Config(resume=str(parts))) == expected
        assert [{**row, "seconds": 0} for row in rows(parts, "train")] == [
            {**row, "seconds": 0} for row in rows(whole, "train") if lost == "gradient" or row["step"] != 3
        ]
    with pytest.raises(UsageError, match="is finished"):
        chat_sl.main(chat_sl.Config(resume=str(whole)))


def failing_after(calls: int, function: Any) -> Any:
    """The function, which does nothing but fail from its call number ``calls`` on."""
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise KeyError("killed")
        return function(*args, **kwargs)

    return counted


def test_smoke_needs_no_data(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before, after = chat_sl.main(chat_sl.Config(model=str(tiny_model), smoke=True, out=str(out)))
    assert after < before
    assert len(rows(out, "train")) == 4
    check_files(out, "sums: 18 rows, 2 held out")


def test_a_batch_is_a_number_of_tokens(tiny_tokenizer: ts.Tokenizer) -> None:
    from cookbook.lib.conversations import text_sequence

    items = [[text_sequence(tiny_tokenizer, "x" * length, "y")] for length in (3, 8, 20)]
    order = Shuffled(items, 0)
    lengths = [len(row[0]) for row in Shuffled(items, 0).take(30)]
    for tokens in (1, 10, 40):
        batch = [len(datum.model_input.to_ints()) + 1 for datum in chat_sl.next_batch(order, tokens)]
        assert batch == lengths[: len(batch)]
        assert sum(batch[:-1]) < tokens <= sum(batch)
        lengths = lengths[len(batch) :]


def test_rows_that_are_wrong_are_named(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n{"messages": [{"role": "asistant", "content": "x"}]}\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl:2: 'messages\[0\]\.role' is 'asistant'; must be one of"):
        chat_sl.main(config(tiny_model, data, tmp_path / "run"))
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}, REPLY]}))
    with pytest.raises(UsageError, match=r"rows\.jsonl:1: learn='lst': expected 'all', 'last'"):
        chat_sl.main(config(tiny_model, data, tmp_path / "other", learn="lst"))
    with pytest.raises(UsageError, match="holds no run"):
        chat_sl.main(chat_sl.Config(resume=str(tmp_path / "nowhere")))
