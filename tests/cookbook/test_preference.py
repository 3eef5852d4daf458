"""Losses of preference pairs against their formulas in float64, and the recipe on a tiny random model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainsession as ts
from cookbook import preference
from cookbook.lib import preferences
from cookbook.lib.config import UsageError
from cookbook.lib.preferences import METHODS, Pair, Preferred, pair_loss, with_reference
from cookbook.lib.rendering import Rendered
from tests.cookbook.test_chat_sl import failing_after
from tests.cookbook.test_recipes import check_files, rows

pytestmark = pytest.mark.usefixtures("home")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def formula(
    name: str, beta: float, chosen: list[float], rejected: list[float], reference: float
) -> tuple[float, float]:
    """Loss and margin of one pair, as the papers write them, from the logprobs of the replies' tokens."""
    ratio = sum(chosen) - sum(rejected) - reference
    means = [math.fsum(values) / len(values) for values in (chosen, rejected)]
    if name == "dpo":
        return -math.log(sigmoid(beta * ratio)), beta * ratio
    if name == "ipo":
        return (ratio - 1 / (2 * beta)) ** 2, beta * ratio
    if name == "simpo":
        return -math.log(sigmoid(beta * (means[0] - means[1]) - 0.5 * beta)), beta * (means[0] - means[1])
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
    return -means[0] - beta * math.log(sigmoid(math.log(odds[0] / odds[1]))), math.log(odds[0] / odds[1])


@pytest.mark.parametrize("name", METHODS)
def test_losses_and_margins_are_the_papers(name: str, tiny_tokenizer: ts.Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    data: list[ts.Datum] = []
    logprobs: list[Any] = []
    expected: list[tuple[float, float]] = []
    for lengths in [(3, 5), (1, 1), (6, 2)]:
        chosen, rejected = (Rendered(tiny_tokenizer, [5] * (2 + n), [0.0, 0.0] + [1.0] * n) for n in lengths)
        base, policy = ([-rng.exponential(size=1 + n).astype(np.float32) for n in lengths] for _ in range(2))
        data += Pair(chosen, rejected, (base[0], base[1])).datums()
        logprobs += [torch.tensor(row, requires_grad=True) for row in policy]
        # The first is of the prompt's second token.
        reference = float(base[0][1:].sum() - base[1][1:].sum())
        expected.append(formula(name, 0.3, policy[0][1:].tolist(), policy[1][1:].tolist(), reference))
    loss, metrics = pair_loss(METHODS[name], 0.3)(data, logprobs)
    assert loss.item() == pytest.approx(np.mean([value for value, _ in expected]), rel=1e-4)
    assert metrics["margin:mean"] == pytest.approx(np.mean([margin for _, margin in expected]), rel=1e-4)
    assert metrics["accuracy:mean"] == pytest.approx(np.mean([margin > 0 for _, margin in expected]))
    loss.backward()
    for row, datum in zip(logprobs, data, strict=True):
        assert row.grad[0] == 0  # the prompt has no part in it
        assert row.grad.isfinite().all()
        assert len(row.grad) == len(datum.model_input.to_ints())


def test_a_certain_reply_has_finite_odds(tiny_tokenizer: ts.Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    reply = Rendered(tiny_tokenizer, [5, 6], [0.0, 1.0])
    pair = Pair(reply, reply)
    logprobs = [torch.tensor([value], requires_grad=True) for value in (0.0, -90.0)]
    loss, metrics = pair_loss(METHODS["orpo"], 0.1)(pair.datums(), logprobs)
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(row.grad.isfinite().all() for row in logprobs)
    assert metrics["accuracy:mean"] == 1


def test_no_preference_counts_as_half(tiny_tokenizer: ts.Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    reply = Rendered(tiny_tokenizer, [5, 6], [0.0, 1.0])
    pair = Pair(reply, reply)
    _, metrics = pair_loss(METHODS["dpo"], 0.1)(pair.datums(), [torch.tensor([-1.0])] * 2)
    assert metrics == {"margin:mean": 0, "accuracy:mean": 0.5}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{i}?", "chosen": "The quick brown fox.", "rejected": "No no no."} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(model: Path, data: Path, out: Path, **more: Any) -> preference.Config:
    sizes = {"steps": 3, "pairs": 4, "warmup": 1, "learning_rate": 1e-2, "rank": 4, "held_out": 0.2}
    return preference.Config(model=str(model), data=str(data), out=str(out), **{**sizes, **more})


def test_dpo_learns_to_prefer_and_resumes_bit_for_bit(
    tiny_model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: cookbook)")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    before, after = preference.main(config(tiny_model, data, whole))
    # Nothing is trained yet: the policy is the base model, so no reply is preferred.
    assert before == Preferred(pytest.approx(math.log(2)), 0.0, 0.5)  # type: ignore[arg-type]
    assert after.accuracy == 1
    assert after.loss < before.loss - 0.1
    check_files(whole, "dpo, beta 0.1", "10 pairs, 2 held out, 0 longer than")

    with monkeypatch.context() as patch:
        patch.setattr(ts.TrainingClient, "optim_step", failing_after(2, ts.TrainingClient.optim_step))
        with pytest.raises(KeyError, match="killed"):
            preference.main(config(tiny_model, data, parts))
    assert preference.main(preference.Config(resume=str(parts))) == (before, after)
    train = [[{**row, "seconds": 0} for row in rows(out, "train")] for out in (whole, parts)]
    assert train[0] == train[1]


def test_the_other_losses_learn_too(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: cookbook)")
    for loss in ("ipo", "simpo", "orpo"):
        settings = config(tiny_model, data, tmp_path / loss, loss=loss, steps=2, learning_rate=2e-3)
        before, after = preference.main(settings)
        assert after.loss < before.loss
        assert after.margin > before.margin


def test_the_reference_is_what_the_base_model_makes_of_the_replies(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ts.ServiceClient() as service,
        service.create_lora_training_client(str(tiny_model), rank=2, seed=0) as trainer,
    ):
        tokenizer = trainer.get_tokenizer()
        one, two = (tokenizer.encode(text) for text in ("The quick brown", "The capital"))
        pair = Pair(Rendered(tokenizer, one, [1.0] * len(one)), Rendered(tokenizer, two, [1.0] * len(two)))
        known = [with_reference(trainer, [pair], tmp_path / "reference.npy")[0].reference for _ in range(2)]
        base = trainer.base_sampling_client().compute_logprobs([one, two]).result()
        # More pairs than one request takes are computed in several.
        for name, limit, requests in (("PART_DATUMS", 4, 2), ("PART_TOKENS", len(one), 6), ("PART_TOKENS", 1, 6)):
            with monkeypatch.context() as patch:
                patch.setattr(preferences, name, limit)
                before = trainer.next_seq
                many = with_reference(trainer, [pair] * 3, tmp_path / f"{name}{limit}.npy")
                assert trainer.next_seq - before == requests
                known += [pair.reference for pair in many]
    for reference in known:  # computed, then read
        assert reference is not None
        for mine, theirs in zip(reference, base, strict=True):
            np.testing.assert_allclose(mine, np.asarray(theirs[1:], np.float32), atol=1e-5)


def test_wrong_settings_and_rows(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": 1}\n')
    with pytest.raises(UsageError, match="--loss: 'dop' is none of dpo, ipo, simpo, orpo"):
        preference.main(config(tiny_model, data, tmp_path / "one", loss="dop"))
    with pytest.raises(UsageError, match=r"pairs\.jsonl:1: 'rejected' is 1; must be"):
        preference.main(config(tiny_model, data, tmp_path / "two"))
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    with pytest.raises(UsageError, match="0 of 3 pairs have at most 4 tokens on both sides"):
        preference.main(config(tiny_model, data, tmp_path / "three", max_length=4))
