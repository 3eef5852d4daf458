from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cookbook import arithmetic_rl
from cookbook.lib import gsm8k
from cookbook.lib.config import UsageError
from cookbook.lib.rows import Row

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed (extra: cookbook)"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" 63", 1), ("63", 1), (" 63 ", 1), (" 63\n", 1), (" 62", 0), (" 630", 0), (" 63.", 0), (" 6 3", 0), ("", 0)],
)
def test_a_sum_must_be_exact(text: str, expected: float):
    assert arithmetic_rl.reward(text, "63") == expected


@needs_math_verify
@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (" 12 + 60 = 72 apples.\n#### 72", "72", 1),
        ("#### 1,200", "1200", 1),
        ("#### $18", "18", 1),
        ("#### 18.00", "18", 1),
        ("#### -5", "-5", 1),
        ("####72.", "72", 1),
        ("#### 0.5", "0.50", 1),
        ("#### 72systemsystem", "72", 1),  # SmolLM2 after its warm start, special tokens skipped
        ("#### 72<|im_start|>", "72", 1),
        ("#### 72.system", "72", 1),
        ("#### 720system", "72", 0),
        ("#### 7system2", "72", 0),
        ("#### 70+2system", "72", 0),
        ("#### 71", "72", 0),
        ("the answer is 72", "72", 0),
        ("72", "72", 0),
        ("####", "72", 0),
        ("#### 71\n#### 72", "72", 0),  # the second guess earns nothing
        ("#### 70+2", "72", 0),  # an expression is no answer
        ("#### 9**9**9**9", "72", 0),  # and is never evaluated
        ("#### 7 2", "72", 0),
        ("", "72", 0),
    ],
)
def test_gsm8k_reward(text: str, answer: str, expected: float):
    assert gsm8k.reward(text, answer) == expected


@needs_math_verify
def test_gsm8k_reward_in_a_thread():
    """As an environment calls it; math-verify answers with False, or raises, where its time limit cannot be set."""
    gsm8k.equal_numbers.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(gsm8k.reward, "#### 1,234.50", "1234.5").result() == 1


def test_a_row_becomes_a_prompt_a_clean_rationale_and_an_answer():
    row = {
        "question": "How many?",
        "answer": "48/2 = <<48/2=24>>24 clips.\n24+1,000 = <<24+1000=1024>>1,024\n#### 1,024",
    }
    question = gsm8k.question_of_row(Row(row, "train.jsonl:1"))
    assert question.prompt == "Question: How many?\nAnswer:"
    assert question.rationale == " 48/2 = 24 clips.\n24+1,000 = 1,024\n#### 1,024"
    assert question.answer == "1,024"


@needs_math_verify
def test_the_reference_rationale_of_every_question_earns_its_reward():
    data = Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k"
    if not data.is_dir():
        pytest.skip("the GSM8K files are not at ../shared/data/gsm8k")
    train, test = gsm8k.load(str(data))
    assert (len(train), len(test)) == (7473, 1319)
    assert not {q.prompt for q in train} & {q.prompt for q in test}
    assert [q for q in test if gsm8k.reward(q.rationale, q.answer) != 1] == []


def test_a_missing_final_answer_is_an_error():
    with pytest.raises(UsageError, match=r"^train\.jsonl:7: no `#### N`"):
        gsm8k.question_of_row(Row({"question": "How many?", "answer": "None."}, "train.jsonl:7"))


def test_load_from_a_directory(tmp_path: Path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "#### 1"}) + "\n")
    train, test = gsm8k.load(str(tmp_path))
    assert (train[0].prompt, test[0].prompt) == ("Question: train\nAnswer:", "Question: test\nAnswer:")
    with pytest.raises(FileNotFoundError):
        gsm8k.load(str(tmp_path / "elsewhere"))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_the_public_data_set_without_its_package_says_what_to_do():
    with pytest.raises(UsageError, match=r"pip install datasets.*--data"):
        gsm8k.load(None)
