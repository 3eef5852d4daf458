"""GSM8K (Cobbe et al. 2021): questions, reference rationales and the reward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from . import formats
from .data import Problem
from .rows import Row, read_rows

HUB_NAME = "openai/gsm8k:main"
FINAL_ANSWER = re.compile(r"####\s*(\S+)")
NUMBER = re.compile(r"(-?\$?[\d,]*\.?\d+%?)[.,]?(?:[A-Za-z<].*)?")
"""A number, and the words that a model may run on into where it does not end its turn."""
CALCULATOR_MARK = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its reference solution."""

    problem: Problem
    rationale: str
    """What the warm start learns after the prompt; it begins with a space."""

    @property
    def prompt(self) -> str:
        return self.problem.prompt

    @property
    def answer(self) -> str:
        return self.problem.answer


def question_of_row(row: Row) -> Question:
    """From a row of the data set: ``question``, and an ``answer`` that ends with ``#### N``.

    Raises:
        UsageError: no final answer; names the row.
    """
    asked = formats.answered(row)
    found = FINAL_ANSWER.search(asked.answer)
    if found is None:
        raise row.error(f"no `#### N` in the answer {asked.answer!r:.60}")
    problem = Problem(f"Question: {asked.prompt}\nAnswer:", found.group(1))
    return Question(problem, " " + CALCULATOR_MARK.sub("", asked.answer))


def load(path: str | None) -> tuple[list[Question], list[Question]]:
    """Training and test questions.

    Args:
        path: A directory with ``train.jsonl`` and ``test.jsonl``, or a data set of the hub; None is
            the public one, which needs the package ``datasets`` and the Hugging Face hub (or its cache).

    Raises:
        FileNotFoundError: a file is missing.
        UsageError: the data set cannot be had here, or a row is wrong; says what to do.
    """
    train, test = ([question_of_row(row) for row in read_rows(path or HUB_NAME, split)] for split in ("train", "test"))
    return train, test


def reward(text: str, answer: str) -> float:
    """1 where the number behind the first ``####`` equals the reference, else 0.

    ``1,200``, ``$1200`` and ``1200.00`` are one number, and letters right behind it are no part of
    it (so does the data set's own grader read). Only the first mark counts: a list of guesses
    earns nothing for its second. What is no plain number earns nothing either, and is never
    handed to the symbolic parser: a model could write an expression that takes it minutes.
    """
    found = FINAL_ANSWER.search(text)
    number = NUMBER.fullmatch(found.group(1)) if found else None
    return float(number is not None and equal_numbers(number.group(1), answer))


@lru_cache(maxsize=1 << 16)  # a millisecond each, and a group repeats its few answers
def equal_numbers(given: str, reference: str) -> bool:
    """Whether math-verify takes the two for the same number.

    Without its time limits, which are signals, and so refused in an environment's thread; numbers need none.
    """
    from math_verify import ExprExtractionConfig, parse, verify

    left, right = (
        parse(text, [ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]  # its docstring allows it
        for text in (reference, given)
    )
    return bool(left) and bool(right) and verify(left, right, timeout_seconds=None)
