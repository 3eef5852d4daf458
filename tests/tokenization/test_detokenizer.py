"""Streaming text: the pieces are the whole, and no piece is half a character."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.tokenization import IncrementalDetokenizer, Tokenizer

_loaded: dict[Path, Tokenizer] = {}


def load(directory: Path) -> Tokenizer:
    if directory not in _loaded:
        _loaded[directory] = Tokenizer.from_directory(directory)
    return _loaded[directory]


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(detokenizer.add(token_id))
        assert detokenizer.text == "".join(pieces)
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("fixture", ["byte_level_dir", "sentencepiece_dir", "wordpiece_dir"])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_ids_are_the_whole_text(
    request: pytest.FixtureRequest, fixture: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = load(request.getfixturevalue(fixture))
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 1), max_size=40))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("fixture", ["byte_level_dir", "sentencepiece_dir"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="the a.日é👩\u200d\n", max_size=30))
def test_no_piece_of_valid_text_holds_half_a_character(request: pytest.FixtureRequest, fixture: str, text: str) -> None:
    tokenizer = load(request.getfixturevalue(fixture))
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, True)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_out_as_soon_as_it_is_final(byte_level_dir: Path) -> None:
    tokenizer = load(byte_level_dir)
    byte_ids = [index for byte in "👩".encode() if (index := _byte_id(tokenizer, byte)) is not None]
    assert stream(tokenizer, byte_ids, True) == ["", "", "", "👩", ""]
    assert stream(tokenizer, byte_ids[:2], True) == ["", "", "\ufffd"]
    assert stream(tokenizer, [*tokenizer.encode("a"), *byte_ids[:1], *tokenizer.encode("b")], True) == [
        "a",
        "",
        "\ufffdb",
        "",
    ]


def test_a_special_token_may_stand_first(sentencepiece_dir: Path) -> None:
    """The space of the first word is cut once, whatever stood before it."""
    tokenizer = load(sentencepiece_dir)
    the = tokenizer.token_to_id("▁the")
    assert the is not None
    assert stream(tokenizer, [1, the, the, 2, the], True) == ["", "the", " the", "", " the", ""]
    assert "".join(stream(tokenizer, [1, the, the, 2, the], False)) == tokenizer.decode([1, the, the, 2, the])


def test_the_cost_of_a_token_does_not_grow(byte_level_dir: Path, sentencepiece_dir: Path) -> None:
    for directory in (byte_level_dir, sentencepiece_dir):
        tokenizer = load(directory)
        ids = tokenizer.encode("the a the. ", add_special_tokens=False)
        times: list[float] = []
        detokenizer = IncrementalDetokenizer(tokenizer)
        for _ in range(6):
            began = time.thread_time()
            for token_id in (ids * 400)[:2000]:
                detokenizer.add(token_id)
            times.append(time.thread_time() - began)
        assert min(times[3:]) < 3 * max(min(times[:3]), 1e-3), times


def test_smollm2_streams_what_it_decodes(smollm2_dir: Path) -> None:
    tokenizer = load(smollm2_dir)
    text = "<|im_start|>user\nnaïve 日本語 👩‍👩‍👧, don't!\n\n  x<|im_end|>"
    for skip in (True, False):
        assert "".join(stream(tokenizer, tokenizer.encode(text), skip)) == tokenizer.decode(
            tokenizer.encode(text), skip
        )


def _byte_id(tokenizer: Tokenizer, byte: int) -> int | None:
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return tokenizer.token_to_id(chr(byte) if byte in printable else chr(256 + others.index(byte)))
