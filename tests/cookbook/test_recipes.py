"""Each recipe from its settings to its files, on a tiny random model in the embedded service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainsession as ts
from cookbook import arithmetic_rl, gsm8k_rl
from cookbook.lib.conversations import text_sequence
from cookbook.lib.data import completion_datum
from cookbook.lib.evaluate import mean_nll
from cookbook.lib.rl.advantages import dr_grpo
from cookbook.lib.rl.datums import policy_datums

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: cookbook)")
pytestmark = pytest.mark.usefixtures("home")


def rows(out: Path, phase: str) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["phase"] == phase]


def check_files(out: Path, *facts: str) -> None:
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    summary = (out / "summary.txt").read_text()
    for fact in (*facts, "ts://", "s engine", "total"):
        assert fact in summary


def test_arithmetic_rl(tiny_model: Path, tmp_path: Path):
    out = tmp_path / "run"
    config = arithmetic_rl.Config(
        model=str(tiny_model), steps=2, prompts=2, group_size=4, held_out=6, rank=2, random_rewards=True, out=str(out)
    )
    before, after = arithmetic_rl.main(config)
    assert before.greedy.total == after.sampled.total == 6
    train = rows(out, "train")
    assert [row["step"] for row in train] == [1, 2]
    assert all(row["datums"] > 0 and row["grad_norm"] > 0 for row in train)
    # Freshly sampled from the very weights that are trained: the policy ratio is one.
    assert all(row["ratio:mean"] == pytest.approx(1, abs=1e-3) for row in train)
    check_files(out, "random (control)", "6 held out", "lost of 6; 95% interval")


def test_arithmetic_rl_without_any_reward_takes_no_step(tiny_model: Path, tmp_path: Path):
    out = tmp_path / "run"
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "never this"}) + "\n" for i in range(6)))
    config = arithmetic_rl.Config(
        model=str(tiny_model), data=str(data), steps=2, prompts=2, group_size=2, held_out=2, rank=2, out=str(out)
    )
    arithmetic_rl.main(config)
    assert [(row["reward"], row["datums"]) for row in rows(out, "train")] == [(0, 0), (0, 0)]
    check_files(out, str(data))


def test_arithmetic_rl_repeats_itself(tiny_model: Path, tmp_path: Path):
    """The same seed gives the same run: split, batches, draws and adapter."""
    runs: list[list[dict[str, Any]]] = []
    for name in ("one", "two"):
        out = tmp_path / name
        config = arithmetic_rl.Config(
            model=str(tiny_model),
            steps=2,
            prompts=2,
            group_size=4,
            held_out=4,
            rank=2,
            random_rewards=True,
            out=str(out),
        )
        arithmetic_rl.main(config)
        runs.append([{**row, "seconds": 0} for row in rows(out, "train")])
    assert runs[0] == runs[1]


def test_gsm8k_rl(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("math_verify", reason="math-verify is not installed (extra: cookbook)")
    data, out = tmp_path / "gsm8k", tmp_path / "run"
    data.mkdir()
    for name in ("train", "test"):
        lines = [
            {"question": f"{name} {i}?", "answer": f"1+{i}=<<1+{i}={1 + i}>>{1 + i}\n#### {1 + i}"} for i in range(5)
        ]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # A random model never answers right: reward something that it does half of the time.
    monkeypatch.setattr(gsm8k_rl, "reward", lambda text, answer: float(len(text) % 2))
    config = gsm8k_rl.Config(
        model=str(tiny_model), data=str(data), steps=2, prompts=2, group_size=4, max_tokens=8, rank=2,
        sft_steps=2, sft_batch=2, held_out=3, out=str(out),
    )  # fmt: skip
    accuracies = gsm8k_rl.main(config)
    assert [found.greedy.total for found in accuracies] == [3, 3, 3]
    assert [row["step"] for row in rows(out, "sft")] == [1, 2]
    assert [row["step"] for row in rows(out, "grpo")] == [1, 2]
    assert all(0 <= row["mixed_groups"] <= 1 for row in rows(out, "grpo"))
    check_files(out, "5 training, 3 test questions", "GRPO", "lost of 3; 95% interval")


def test_merged_duplicates_train_like_all_samples(tiny_model: Path):
    """The service's own loss and gradient of a group, with equal samples merged and without."""
    with (
        ts.ServiceClient() as service,
        service.create_lora_training_client(str(tiny_model), rank=2, seed=0) as trainer,
    ):
        tokenizer = trainer.get_tokenizer()
        prompt = tokenizer.encode("What is 12 + 7?")
        params = ts.SamplingParams(max_tokens=2, temperature=0.5, seed=1)
        samples = trainer.base_sampling_client().sample(prompt, 16, params).result().sequences
        assert len({tuple(s.tokens) for s in samples}) < 16
        advantages = dr_grpo([[float(sum(s.tokens) % 3) for s in samples]])[0]
        apart = [
            completion_datum(prompt, s.tokens, logprobs=s.logprobs, advantages=float(a))
            for s, a in zip(samples, advantages, strict=True)
        ]
        merged = policy_datums(prompt, samples, advantages)
        assert len(merged) < len(apart)
        found: list[tuple[float, float]] = []
        for datums in (apart, merged):
            loss = trainer.forward_backward(datums, "importance_sampling")
            # A rate of 0 leaves the weights, so that both gradients are of the same ones.
            norm = trainer.optim_step(ts.AdamParams(learning_rate=0.0))
            found.append((loss.result().metrics["loss:sum"], norm.result().metrics["grad_norm"]))
        np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_mean_nll_is_that_of_the_logprobs(tiny_model: Path):
    with (
        ts.ServiceClient() as service,
        service.create_lora_training_client(str(tiny_model), rank=2, seed=0) as trainer,
    ):
        tokenizer = trainer.get_tokenizer()
        sequences = [text_sequence(tokenizer, text, " yes") for text in ("Is it?", "And is that so?")]
        sampler = trainer.base_sampling_client()
        logprobs = sampler.compute_logprobs([list(sequence.tokens) for sequence in sequences]).result()
        expected = [
            logprob
            for sequence, row in zip(sequences, logprobs, strict=True)
            for logprob, weight in zip(row, sequence.weights, strict=True)
            if weight and logprob is not None
        ]
        assert mean_nll(trainer, [sequence.datum() for sequence in sequences]) == pytest.approx(
            -np.mean(expected), rel=1e-5
        )


def test_prompts_of_one_call_draw_apart(tiny_model: Path):
    """With common draws an evaluation's errors would all point one way; a prompt's own seed is known."""
    params = ts.SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    with ts.ServiceClient() as service, service.create_sampling_client(base_model=str(tiny_model)) as sampler:
        listed = sampler.sample(["What is"] * 3, 2, params).result()
        texts = [tuple(sample.tokens) for response in listed for sample in response.sequences]
        assert len(set(texts)) == 6
        alone = sampler.sample("What is", 6, params).result()
    assert texts == [tuple(sample.tokens) for sample in alone.sequences]
