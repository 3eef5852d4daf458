"""Training bugs that systems like this one had, each as the right value (CPU, float32)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.optim import AdamState, optim_step
from trainsession.engine.trainer import Trainer
from trainsession.types import AdamParams, Datum, LoraConfig

from .training import (
    LOSS_CONFIGS,
    assert_close,
    data_for,
    equal,
    gradients,
    make_adapter,
    near_policy,
    rl_data,
    run,
    sft_data,
    take_gradients,
)

LOSSES = list(LOSS_CONFIGS)
LENGTHS = (9, 4, 13, 1, 7)


@pytest.fixture
def llama(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("llama")


def test_ppo_without_config_is_ppo_at_its_defaults_and_not_importance_sampling(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = near_policy(trainer, adapter, rl_data(llama, LENGTHS), spread=1.0)
    plain = gradients(trainer, adapter, data, "ppo", loss_fn_config={})
    named = gradients(
        trainer, adapter, data, "ppo", loss_fn_config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    )
    unclipped = gradients(trainer, adapter, data, "importance_sampling")
    assert equal(plain, named)
    assert not equal(plain, unclipped)


def test_every_loss_is_itself(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = near_policy(trainer, adapter, rl_data(llama, LENGTHS), spread=1.0)
    plain = [Datum(d.model_input, {k: d.loss_fn_inputs[k] for k in ("target_tokens", "weights")}) for d in data]
    values = {name: run(trainer, adapter, data, name).metrics["loss:sum"] for name in LOSSES[1:]}
    values["cross_entropy"] = run(trainer, adapter, plain, "cross_entropy").metrics["loss:sum"]
    assert len({round(value, 4) for value in values.values()}) == len(LOSSES)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_weight_of_one_half_counts_half(llama: LoadedModel, loss_fn: str) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)

    def weighted(weight: float) -> list[Datum]:
        data = data_for(loss_fn, llama, LENGTHS)
        return [
            Datum(d.model_input, {**d.loss_fn_inputs, "weights": np.full(d.model_input.length, weight)}) for d in data
        ]

    whole = gradients(trainer, adapter, weighted(1.0), loss_fn)
    half = gradients(trainer, adapter, weighted(0.5), loss_fn)
    assert_close(half, [grad / 2 for grad in whole])


def test_missing_weights_are_ones(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    without = gradients(trainer, adapter, sft_data(llama, (6,)), "cross_entropy")
    ones = gradients(trainer, adapter, sft_data(llama, (6,), weights=np.ones(6)), "cross_entropy")
    assert equal(without, ones)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_all_zero_weights_are_a_loss_and_gradient_of_zero(llama: LoadedModel, loss_fn: str) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = [
        Datum(d.model_input, {**d.loss_fn_inputs, "weights": np.zeros(d.model_input.length)})
        for d in data_for(loss_fn, llama, LENGTHS)
    ]
    output = run(trainer, adapter, data, loss_fn)
    assert output.metrics["loss:sum"] == output.metrics["tokens:sum"] == 0
    assert all(np.isfinite(logprobs).all() for logprobs in output.logprobs)
    assert all((grad == 0).all() for grad in take_gradients(adapter))


@pytest.mark.parametrize("loss_fn", LOSSES[1:])
def test_a_masked_token_of_any_ratio_leaves_the_bits_alone(llama: LoadedModel, loss_fn: str) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    results = []
    for q in (-1.0, 91.0, -91.0, -3000.0):
        (datum,) = rl_data(llama, (9,))
        logprobs = datum.loss_fn_inputs["logprobs"].data.copy()
        logprobs[1] = q  # position 1 is of the prompt: weight 0
        inputs = {**datum.loss_fn_inputs, "logprobs": logprobs}
        results.append(gradients(trainer, adapter, [Datum(datum.model_input, inputs)], loss_fn))
    assert all(equal(result, results[0]) for result in results)


def test_packed_sequences_do_not_see_each_other(llama: LoadedModel) -> None:
    """Changing one datum changes no logprob of the others, nor do labels leak across the border."""
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = sft_data(llama, LENGTHS)
    before = run(trainer, adapter, data, None, keep_graph="x").logprobs
    data[1] = sft_data(llama, (LENGTHS[1],), seed=99)[0]
    after = run(trainer, adapter, data, None, keep_graph="x").logprobs
    changed = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [False, True, False, False, False]


def test_the_same_seed_gives_the_same_a_and_b_starts_at_zero(llama: LoadedModel) -> None:
    def fresh(seed: int) -> Adapter:
        return new_adapter(LoraConfig(rank=4, seed=seed), llama.lora_modules, llama.device)

    assert equal(fresh(3).parameters(), fresh(3).parameters())
    assert not equal(fresh(3).parameters(), fresh(4).parameters())
    assert all((pair.B == 0).all() for pair in fresh(3).weights.values())


def test_training_lowers_the_loss_of_what_it_trains_on(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    state, data = AdamState.fresh(adapter), sft_data(llama, (20, 12))
    losses = []
    for _ in range(30):
        losses.append(run(trainer, adapter, data, "cross_entropy").metrics["loss:sum"])
        optim_step(adapter, state, AdamParams(learning_rate=1e-2))
    assert losses[-1] < 0.2 * losses[0]
