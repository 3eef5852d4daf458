"""The harness, on a real service with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import trainsession as ts
from cookbook.lib.data import Problem, completion_datum
from cookbook.lib.estimates import WinRate
from cookbook.lib.evaluate import Graded, accuracy, grade_answers, mean_nll, win_rate

PROBLEMS = [Problem(f"What is {n}?", str(n)) for n in range(4)]


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.TrainingClient]:
    """One service for all: none of these tests depends on what the weights are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSESSION_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("TRAINSESSION_BASE_URL", raising=False)
        with (
            ts.ServiceClient() as service,
            service.create_lora_training_client(str(tiny_model), rank=2, seed=0) as trainer,
        ):
            yield trainer


def test_every_sample_is_graded_with_its_problems_answer(trainer: ts.TrainingClient):
    sampler = trainer.base_sampling_client()
    seen: list[tuple[str, str]] = []

    def grade(text: str, answer: str) -> float:
        seen.append((text, answer))
        return float(len(text) % 2)

    graded = grade_answers(sampler, PROBLEMS, grade, num_samples=3, max_tokens=4, seed=5)
    params = ts.SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    responses = sampler.sample([p.prompt for p in PROBLEMS], 3, params).result()
    texts = [[sample.text for sample in response.sequences] for response in responses]
    assert seen == [(text, p.answer) for p, row in zip(PROBLEMS, texts, strict=True) for text in row]
    assert graded.right == tuple(tuple(len(text) % 2 == 1 for text in row) for row in texts)
    assert graded.accuracy.value == pytest.approx(np.mean(graded.right))
    assert graded.pass_at(3).value == np.mean([any(row) for row in graded.right])


def test_pass_at_k_is_a_mean_over_problems():
    graded = Graded(((True, False, False), (False, False, False), (True, True, True)))
    assert [graded.pass_at(k).value for k in (1, 2, 3)] == pytest.approx([4 / 9, 5 / 9, 6 / 9])
    assert graded.pass_at(2).total == 3
    with pytest.raises(ValueError, match="needs at least 4"):
        graded.pass_at(4)


def test_accuracy_is_greedy_and_sampled(trainer: ts.TrainingClient):
    sampler = trainer.base_sampling_client()
    found = accuracy(sampler, PROBLEMS, lambda text, _: float(len(text) % 2), max_tokens=4, seed=5)
    greedy, sampled = (
        grade_answers(sampler, PROBLEMS, lambda text, _: float(len(text) % 2), max_tokens=4, temperature=t, seed=5)
        for t in (0.0, 1.0)
    )
    assert (found.greedy, found.sampled) == (greedy.accuracy, sampled.accuracy)
    assert found.greedy_right == tuple(right for (right,) in greedy.right)
    # Only 1 is right: part of a score is not.
    half = accuracy(sampler, PROBLEMS, lambda text, _: 0.5, max_tokens=4)
    assert half.greedy.successes == half.sampled.successes == 0


def test_nll_is_the_same_by_trainer_and_sampler(trainer: ts.TrainingClient):
    encode = trainer.get_tokenizer().encode
    datums = [completion_datum(encode("Is it so?"), encode(" yes")), completion_datum(encode("And"), encode(" no, no"))]
    expected = mean_nll(trainer, datums)
    assert expected > 0
    sampler = trainer.save_weights_and_get_sampling_client()
    assert mean_nll(sampler, datums) == pytest.approx(expected, rel=1e-5)
    inputs = {**datums[0].loss_fn_inputs, "target_tokens": [1] * datums[0].model_input.length}
    with pytest.raises(ValueError, match="datum 0: its target_tokens"):
        mean_nll(sampler, [ts.Datum(datums[0].model_input, inputs)])


def test_win_rate_asks_in_both_orders(trainer: ts.TrainingClient):
    baseline = trainer.base_sampling_client()
    trainer.forward_backward([completion_datum([1, 2, 3], [4, 5, 6, 7])], "cross_entropy")
    trainer.optim_step(ts.AdamParams(learning_rate=0.3))
    sampler = trainer.save_weights_and_get_sampling_client()
    prompts = [p.prompt for p in PROBLEMS]
    params = ts.SamplingParams(max_tokens=3, temperature=0.0)
    ours, theirs = (
        [response.text for response in client.sample(prompts, 1, params).result()] for client in (sampler, baseline)
    )
    assert ours != theirs
    asked: list[tuple[str, str, str]] = []

    def first_in_the_alphabet(prompt: str, a: str, b: str) -> float:
        asked.append((prompt, a, b))
        return 0.5 if a == b else float(a < b)

    found = win_rate(sampler, baseline, prompts, first_in_the_alphabet, max_tokens=3)
    pairs = list(zip(ours, theirs, strict=True))
    assert (found.wins, found.ties, found.losses) == tuple(
        sum(compare) for compare in zip(*[(a < b, a == b, a > b) for a, b in pairs], strict=True)
    )
    both = [(p, a, b) for p, (a, b) in zip(prompts, pairs, strict=True)]
    assert sorted(asked) == sorted(both + [(p, b, a) for p, a, b in both])
    # A judge that prefers what it reads first, or second, decides nothing.
    for constant in (0.0, 1.0):
        assert win_rate(sampler, baseline, prompts, lambda *_, c=constant: c, max_tokens=3) == WinRate(0, 4, 0)
