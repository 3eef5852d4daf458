from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cookbook import arithmetic_rl
from cookbook.lib.config import UsageError


def pair(prompt: str) -> frozenset[int]:
    example, asked = prompt.split("\n")
    assert example == "25 + 38 = 63"
    found = re.fullmatch(r"(\d+) \+ (\d+) =", asked)
    assert found, asked
    return frozenset(map(int, found.groups()))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_held_out_sum_is_trained_on_in_either_order(seed: int):
    train, test = arithmetic_rl.sums(50, 200, seed)
    held_out = [pair(p.prompt) for p in test]
    assert len(test) == len(set(held_out)) == 200
    assert not set(held_out) & {pair(p.prompt) for p in train}
    assert frozenset((25, 38)) not in set(held_out) | {pair(p.prompt) for p in train}
    assert len(train) == len({p.prompt for p in train})
    # All 51 * 51 ordered sums, less the example's two, less both orders of the held-out ones.
    assert len(train) == 51 * 51 - 2 - sum(len(numbers) for numbers in held_out)


def test_the_answers_are_the_sums():
    train, test = arithmetic_rl.sums(50, 200, 0)
    for problem in [*train, *test]:
        a, b = map(int, re.findall(r"\d+", problem.prompt.split("\n")[1]))
        assert problem.answer == str(a + b)


def test_the_split_depends_on_the_seed_alone():
    assert arithmetic_rl.sums(50, 200, 1) == arithmetic_rl.sums(50, 200, 1)
    assert set(arithmetic_rl.sums(50, 200, 1)[1]) != set(arithmetic_rl.sums(50, 200, 2)[1])


def test_rows_of_a_file_split_by_prompt(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"p{i % 10}", "answer": i} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = arithmetic_rl.problems_of_file(str(path), 3, seed=0)
    assert (len(train), len(test)) == (7, 3)
    assert {p.prompt: p.answer for p in [*train, *test]} == {f"p{i}": str(i) for i in range(10)}
    with pytest.raises(UsageError, match="10 different prompts, none left"):
        arithmetic_rl.problems_of_file(str(path), 10, seed=0)
