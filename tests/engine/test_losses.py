"""Each loss against its formula in float64 numpy, its gradient against finite differences."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from trainsession.engine.loss_inputs import SIGNATURES, resolve_config
from trainsession.engine.losses import LOSSES, LossMetrics, LossValue, TokenBatch

LENGTHS = (5, 3, 1)
CONFIGS: dict[str, dict[str, float]] = {"dro": {"beta": 0.05}}
RL = [name for name in LOSSES if name != "cross_entropy"]


def config_of(name: str) -> dict[str, float]:
    return resolve_config(name, CONFIGS.get(name, {}))


def draw(seed: int = 0) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(seed)
    size = sum(LENGTHS)
    lp = -stream.uniform(0.1, 4, size)
    return {
        "lp": lp,
        "q": lp - stream.uniform(-0.6, 0.6, size),
        "A": stream.normal(size=size),
        "w": stream.choice([0.0, 0.5, 1.0, 2.0], size),
        "mask": stream.choice([0.0, 1.0], size),
    }


def batch_of(values: dict[str, Any], logprobs: torch.Tensor | None = None, *, mask: bool = False) -> TokenBatch:
    tensors = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in values.items()}
    return TokenBatch(
        logprobs_M=tensors["lp"].requires_grad_() if logprobs is None else logprobs,
        weights_M=tensors["w"],
        datum_M=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[: len(tensors["lp"])],
        num_datums=len(LENGTHS),
        sampler_logprobs_M=tensors["q"],
        advantages_M=tensors["A"],
        ratio_mask_M=tensors["mask"] if mask else None,
    )


def one_token(lp: float, q: float, advantage: float = 1.0, weight: float = 1.0) -> TokenBatch:
    return batch_of({"lp": [lp], "q": [q], "A": [advantage], "w": [weight]})


def clip(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


def formula(name: str, v: dict[str, np.ndarray]) -> float:
    """The sum as the documentation writes it."""
    lp, q, A, w = v["lp"], v["q"], v["A"], v["w"]
    r = np.exp(lp - q)
    if name == "cross_entropy":
        return float(-(w * lp).sum())
    if name == "importance_sampling":
        return float(-(w * r * A).sum())
    if name == "ppo":
        return float(-(w * np.minimum(r * A, clip(r, 0.8, 1.2) * A)).sum())
    if name == "cispo":
        return float(-(w * clip(r, 0, 4) * lp * A).sum())
    if name == "dro":
        return float(-(w * (lp * A - 0.5 * 0.05 * (lp - q) ** 2)).sum())
    bounds = np.cumsum([0, *LENGTHS])
    total = 0.0
    for start, stop in pairwise(bounds):
        own = slice(start, stop)
        count = v["mask"][own].sum()
        s = math.exp(float((v["mask"][own] * (lp - q)[own]).sum() / count)) if count else 1.0
        objective = np.minimum(s * A[own], clip(np.array(s), 0.8, 1.2) * A[own])
        total -= float((w[own] * objective).sum())
    return total


def gradient(name: str, batch: TokenBatch) -> torch.Tensor:
    value = LOSSES[name](batch, config_of(name))
    return torch.autograd.grad(value.loss_M.sum(), batch.logprobs_M)[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_value_is_the_formula(name: str, seed: int) -> None:
    values = draw(seed)
    value = LOSSES[name](batch_of(values, mask=True), config_of(name))
    assert value.loss_M.sum().item() == pytest.approx(formula(name, values), rel=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradient_is_the_formulas_finite_difference(name: str) -> None:
    values = draw(1)
    actual = gradient(name, batch_of(values)).numpy()
    for index in range(len(values["lp"])):
        sides = []
        for step in (1e-6, -1e-6):
            moved = {**values, "lp": values["lp"].copy()}
            moved["lp"][index] += step
            sides.append(formula(name, moved))
        assert actual[index] == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)


def test_cispo_stops_the_gradient_of_its_ratio() -> None:
    v = draw(2)
    v["q"][0] = v["lp"][0] - 3  # a ratio of 20, clipped to 4: the token still learns
    expected = -v["w"] * clip(np.exp(v["lp"] - v["q"]), 0, 4) * v["A"]
    np.testing.assert_allclose(gradient("cispo", batch_of(v)).numpy(), expected, rtol=1e-12)


def test_gspo_gives_each_token_the_sequences_ratio_as_slope() -> None:
    v = draw(3)
    bounds = np.cumsum([0, *LENGTHS])
    expected = np.zeros(sum(LENGTHS))
    for start, stop in pairwise(bounds):
        own = slice(start, stop)
        s = np.exp((v["w"][own] * (v["lp"] - v["q"])[own]).sum() / max(v["w"][own].sum(), 1e-9))
        free = np.where(v["A"][own] > 0, s <= 1.2, s >= 0.8)
        expected[own] = np.where(free, -v["w"][own] * s * v["A"][own], 0)
    np.testing.assert_allclose(gradient("gspo", batch_of(v)).numpy(), expected, rtol=1e-12)


def test_ppo_without_config_clips_at_its_documented_thresholds() -> None:
    assert resolve_config("ppo", {}) == resolve_config("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    # A ratio of e with a positive advantage is clipped at 1.2; unclipped it would be e.
    batch = one_token(-1.0, -2.0)
    assert LOSSES["ppo"](batch, config_of("ppo")).loss_M.item() == pytest.approx(-1.2)
    assert LOSSES["importance_sampling"](batch, {}).loss_M.item() == pytest.approx(-math.e)


def test_importance_sampling_is_not_cross_entropy() -> None:
    v = draw(5)
    assert formula("importance_sampling", v) != pytest.approx(formula("cross_entropy", v))


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_of_one_half_halves_the_loss_and_is_not_squared(name: str) -> None:
    v = draw(6)
    v["w"] = np.ones_like(v["w"])
    whole = LOSSES[name](batch_of(v), config_of(name)).loss_M.sum().item()
    v["w"] = np.full_like(v["w"], 0.5)
    assert LOSSES[name](batch_of(v), config_of(name)).loss_M.sum().item() == pytest.approx(whole / 2, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [91.0, -91.0, 2000.0, -2000.0])
def test_masked_extremes_leave_no_trace(name: str, log_ratio: float) -> None:
    v = draw(7)
    v["w"] = np.ones_like(v["w"])
    v["w"][2] = 0.0
    v["mask"] = v["w"]
    calm = gradient(name, batch_of(v, mask=True)), LOSSES[name](batch_of(v, mask=True), config_of(name)).loss_M
    v["q"] = v["q"].copy()
    v["q"][2] = v["lp"][2] - log_ratio
    wild = gradient(name, batch_of(v, mask=True)), LOSSES[name](batch_of(v, mask=True), config_of(name)).loss_M
    assert torch.equal(calm[0], wild[0])
    assert torch.equal(calm[1], wild[1])


@pytest.mark.parametrize("log_ratio", [91.0, 2000.0])
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_clipped_extreme_ratio_is_finite_with_zero_gradient(name: str, log_ratio: float) -> None:
    batch = one_token(-1.0, -1.0 - log_ratio, advantage=2.0)
    assert LOSSES[name](batch, config_of(name)).loss_M.item() == pytest.approx(-2.4)
    assert gradient(name, batch).item() == 0.0


@pytest.mark.parametrize("name", RL)
@pytest.mark.parametrize("log_ratio", [91.0, -91.0, 2000.0, -2000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_never_give_nan(name: str, log_ratio: float, advantage: float) -> None:
    batch = one_token(-1.0, -1.0 - log_ratio, advantage=advantage)
    value = LOSSES[name](batch, config_of(name))
    assert not value.loss_M.isnan().any()
    assert not gradient(name, batch).isnan().any()


def test_ratio_of_exp_91_is_exact() -> None:
    assert LOSSES["importance_sampling"](one_token(0.0, -91.0), {}).loss_M.item() == pytest.approx(-math.exp(91))


@pytest.mark.parametrize("name", LOSSES)
def test_all_weights_zero_is_a_loss_of_zero(name: str) -> None:
    v = draw(8)
    v["w"] = np.zeros_like(v["w"])
    batch = batch_of(v)
    value = LOSSES[name](batch, config_of(name))
    assert value.loss_M.tolist() == [0.0] * sum(LENGTHS)
    assert gradient(name, batch).tolist() == [0.0] * sum(LENGTHS)
    metrics = measured(value, batch)
    assert metrics["tokens:sum"] == 0
    assert all(math.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_what_silences_a_position_gives_it_no_gradient(name: str) -> None:
    """`Run` computes no slope for these rows, so this must be true of every loss."""
    key = {"weights": "w", "advantages": "A"}
    for silent in SIGNATURES[name].zero_silences:
        v = draw(9)
        v["w"] = np.ones_like(v["w"])
        v[key[silent]][4] = 0.0
        assert gradient(name, batch_of(v))[4].item() == 0.0


def measured(value: LossValue, batch: TokenBatch, entropy: torch.Tensor | None = None) -> dict[str, float]:
    metrics = LossMetrics()
    size = len(batch.weights_M)
    metrics.add(value, batch.weights_M, torch.arange(size), torch.zeros(size) if entropy is None else entropy)
    return metrics.result()


def test_rl_metrics_are_means_over_weighted_tokens() -> None:
    v = draw(10)
    batch = batch_of(v)
    entropy = torch.linspace(0, 1, sum(LENGTHS), dtype=torch.float64)
    metrics = measured(LOSSES["ppo"](batch, config_of("ppo")), batch, entropy)
    keep = v["w"] != 0
    r = np.exp(v["lp"] - v["q"])[keep]
    clipped = np.where(v["A"][keep] > 0, r > 1.2, r < 0.8)
    assert metrics["loss:sum"] == pytest.approx(formula("ppo", v))
    assert metrics["tokens:sum"] == keep.sum()
    assert metrics["ratio:mean"] == pytest.approx(r.mean())
    assert metrics["ratio:max"] == pytest.approx(r.max())
    assert metrics["clip_fraction:mean"] == pytest.approx(clipped.mean())
    assert metrics["kl:mean"] == pytest.approx((r - 1 - np.log(r)).mean())
    assert metrics["entropy:mean"] == pytest.approx(entropy.numpy()[keep].mean())


def test_metrics_of_microbatches_combine_to_those_of_the_whole() -> None:
    v = draw(11)
    whole = batch_of(v)
    combined = LossMetrics()
    for part in (slice(0, 5), slice(5, 9)):
        own = batch_of({key: value[part] for key, value in v.items()})
        size = len(own.weights_M)
        combined.add(LOSSES["cispo"](own, config_of("cispo")), own.weights_M, torch.arange(size), torch.ones(size))
    expected = measured(LOSSES["cispo"](whole, config_of("cispo")), whole, torch.ones(sum(LENGTHS)))
    assert combined.result() == pytest.approx(expected)


def test_soft_targets_count_positions_not_entries() -> None:
    batch = batch_of({"lp": [-1.0] * 6, "q": [0.0] * 6, "A": [0.0] * 6, "w": [0.5, 0.5, 0.0, 0.0, 1.0, 0.0]})
    metrics = LossMetrics()
    metrics.add(LOSSES["cross_entropy"](batch, {}), batch.weights_M, torch.tensor([0, 0, 1, 1, 2, 2]), None)
    assert metrics.result() == {"loss:sum": 2.0, "tokens:sum": 2.0}
