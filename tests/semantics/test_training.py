"""The numerical contract of training (DESIGN section 4) on the CPU in float32.

Independent sources: transformers' own forward with PEFT, float64 formulas, finite differences.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.engine.lora import Adapter
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.optim import AdamState, optim_step
from trainsession.engine.trainer import Trainer
from trainsession.types import AdamParams, Datum

from .training import (
    LOSS_CONFIGS,
    arrays_equal,
    assert_close,
    data_for,
    equal,
    gradients,
    item,
    make_adapter,
    near_policy,
    rl_data,
    run,
    run_all,
    sft_data,
    take_gradients,
)

LoadModel = Callable[[str], LoadedModel]
LOSSES = list(LOSS_CONFIGS)
LENGTHS = (9, 4, 13, 1, 7)


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, loaded: LoadModel) -> LoadedModel:
    return loaded(request.param)


@pytest.fixture
def llama(loaded: LoadModel) -> LoadedModel:
    return loaded("llama")


# --- sums ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradients_are_sums_over_any_split(llama: LoadedModel, loss_fn: str) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = (
        near_policy(trainer, adapter, rl_data(llama, LENGTHS))
        if loss_fn != "cross_entropy"
        else sft_data(llama, LENGTHS)
    )
    whole = run(trainer, adapter, data, loss_fn)
    expected = take_gradients(adapter)
    losses = [run(trainer, adapter, part, loss_fn).metrics["loss:sum"] for part in (data[:2], data[2:])]
    assert_close(take_gradients(adapter), expected)
    assert sum(losses) == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
    losses = [run(trainer, adapter, [datum], loss_fn).metrics["loss:sum"] for datum in data]
    assert_close(take_gradients(adapter), expected)
    assert sum(losses) == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)


@pytest.mark.parametrize("budget", [1, 5, 16, 1000])
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_the_microbatch_budget_changes_nothing_but_rounding(llama: LoadedModel, loss_fn: str, budget: int) -> None:
    adapter = make_adapter(llama)
    data = data_for(loss_fn, llama, LENGTHS)
    whole, small = Trainer(llama), Trainer(llama, token_budget=budget)
    expected = run(whole, adapter, data, loss_fn)
    expected_grads = take_gradients(adapter)
    actual = run(small, adapter, data, loss_fn)
    assert_close(take_gradients(adapter), expected_grads)
    assert arrays_equal(actual.logprobs, expected.logprobs)
    assert actual.metrics == pytest.approx(expected.metrics, rel=1e-6)


def test_order_of_datums_does_not_matter(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = sft_data(llama, LENGTHS)
    expected = run(trainer, adapter, data, "cross_entropy")
    expected_grads = take_gradients(adapter)
    actual = run(trainer, adapter, data[::-1], "cross_entropy")
    assert_close(take_gradients(adapter), expected_grads)
    assert arrays_equal(actual.logprobs[::-1], expected.logprobs)


def test_gradients_accumulate_over_calls_until_the_step(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = sft_data(llama, LENGTHS)
    once = gradients(trainer, adapter, data, "cross_entropy")
    for _ in range(3):
        run(trainer, adapter, data, "cross_entropy")
    assert_close(take_gradients(adapter), [3 * grad for grad in once])
    run(trainer, adapter, data, "cross_entropy")
    optim_step(adapter, AdamState.fresh(adapter), AdamParams())
    assert all(parameter.grad is None for parameter in adapter.parameters())


# --- neighbours ---------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_in_exact_mode_a_call_has_the_same_bits_alone_in_a_crowd_and_twice(model: LoadedModel, loss_fn: str) -> None:
    assert model.exact
    trainer = Trainer(model, token_budget=24)
    mine, other, third = (make_adapter(model, seed) for seed in range(3))
    data = data_for(loss_fn, model, LENGTHS)
    alone = run(trainer, mine, data, loss_fn)
    alone_grads = take_gradients(mine)
    again = run(trainer, mine, data, loss_fn)
    assert equal(take_gradients(mine), alone_grads)
    outputs = run_all(
        trainer,
        [
            item(sft_data(model, (3, 20, 5), seed=5), "cross_entropy", "other"),
            item(data, loss_fn, "mine"),
            item(rl_data(model, (6,), seed=6), "cispo", "third"),
        ],
        {"mine": mine, "other": other, "third": third},
    )
    assert arrays_equal(again.logprobs, alone.logprobs)
    assert arrays_equal(outputs[1].logprobs, alone.logprobs)
    assert again.metrics == alone.metrics == outputs[1].metrics
    assert equal(take_gradients(mine), alone_grads)
    assert take_gradients(other)


@pytest.mark.parametrize("lengths", [(9, 4), (150, 60), (300, 200)], ids=["tile128", "tile256", "tile512"])
def test_bfloat16_on_the_cpu_is_exact_too(tiny_model: Path, lengths: tuple[int, ...]) -> None:
    model = load_model(tiny_model, name="tiny", device="cpu", dtype="bfloat16")
    assert model.exact
    trainer, mine, other = Trainer(model), make_adapter(model, 0), make_adapter(model, 1)
    data = rl_data(model, lengths)
    alone = run(trainer, mine, data, "ppo")
    alone_grads = take_gradients(mine)
    outputs = run_all(
        trainer,
        [item(sft_data(model, (20, 5), seed=5), "cross_entropy", "other"), item(data, "ppo", "mine")],
        {"mine": mine, "other": other},
    )
    assert arrays_equal(outputs[1].logprobs, alone.logprobs)
    assert outputs[1].metrics == alone.metrics
    assert equal(take_gradients(mine), alone_grads)


@settings(deadline=None, max_examples=15)
@given(
    own=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    crowd=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), max_size=3),
    place=st.integers(0, 3),
)
def test_any_neighbours_leave_the_bits_alone(
    loaded: LoadModel, own: list[int], crowd: list[list[int]], place: int
) -> None:
    model = loaded("llama")
    trainer = Trainer(model, token_budget=32)
    mine = make_adapter(model, 9)
    data = sft_data(model, own, seed=1)
    alone = run(trainer, mine, data, "cross_entropy")
    alone_grads = take_gradients(mine)
    items = [item(sft_data(model, lengths, seed=2), "cross_entropy", f"n{i}") for i, lengths in enumerate(crowd)]
    place = min(place, len(items))
    items.insert(place, item(data, "cross_entropy", "mine"))
    adapters = {"mine": mine, **{f"n{i}": make_adapter(model, i) for i in range(len(crowd))}}
    outputs = run_all(trainer, items, adapters)
    assert arrays_equal(outputs[place].logprobs, alone.logprobs)
    assert equal(take_gradients(mine), alone_grads)


def test_a_neighbours_gradients_and_step_are_its_own(llama: LoadedModel) -> None:
    """fb(A), fb(B), optim(A) leaves B's weights and gradients."""
    trainer, a, b = Trainer(llama), make_adapter(llama, 0), make_adapter(llama, 1)
    data = sft_data(llama, LENGTHS)
    expected_b = gradients(trainer, b, data, "cross_entropy")
    run_all(trainer, [item(data, "cross_entropy", "a"), item(data, "cross_entropy", "b")], {"a": a, "b": b})
    before = [parameter.detach().clone() for parameter in b.parameters()]
    optim_step(a, AdamState.fresh(a), AdamParams(grad_clip_norm=1.0))
    assert equal(before, b.parameters())
    assert equal(take_gradients(b), expected_b)


def test_items_of_one_adapter_count_as_one_after_the_other(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    one, two = sft_data(llama, (5, 8)), sft_data(llama, (12,), seed=3)
    run(trainer, adapter, one, "cross_entropy")
    run(trainer, adapter, two, "cross_entropy")
    expected = take_gradients(adapter)
    run_all(trainer, [item(one, "cross_entropy"), item(two, "cross_entropy")], {"a": adapter})
    assert equal(take_gradients(adapter), expected)


# --- forward ------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_forward_has_the_bits_of_forward_backward_and_leaves_no_gradient(model: LoadedModel, loss_fn: str) -> None:
    trainer, adapter = Trainer(model), make_adapter(model)
    data = data_for(loss_fn, model, LENGTHS)
    forward = run(trainer, adapter, data, loss_fn, backward=False)
    assert all(parameter.grad is None for parameter in adapter.parameters())
    both = run(trainer, adapter, data, loss_fn)
    assert arrays_equal(forward.logprobs, both.logprobs)
    assert forward.metrics == both.metrics
    assert forward.metrics["loss:sum"] != 0


def test_no_global_random_state_is_touched(llama: LoadedModel) -> None:
    before = torch.get_rng_state()
    run(Trainer(llama), make_adapter(llama), sft_data(llama, LENGTHS), "cross_entropy")
    assert torch.equal(before, torch.get_rng_state())


# --- independent sources --------------------------------------------------------------------


def with_peft(model: LoadedModel, adapter: Adapter) -> Any:
    """transformers' own model with this adapter's weights in PEFT's layers."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32, attn_implementation="eager")
    names = list(adapter.weights)
    wrapped: Any = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM")
    )
    modules: dict[str, Any] = dict(wrapped.base_model.model.named_modules())
    with torch.no_grad():
        for name, pair in adapter.weights.items():
            modules[name].lora_A["default"].weight.copy_(pair.A)
            modules[name].lora_B["default"].weight.copy_(pair.B)
    return wrapped


def peft_gradients(wrapped: Any, adapter: Adapter) -> list[torch.Tensor]:
    modules: dict[str, Any] = dict(wrapped.base_model.model.named_modules())
    grads = []
    for name in adapter.weights:
        for layer in (modules[name].lora_A, modules[name].lora_B):
            grads.append(layer["default"].weight.grad)
    return grads


@pytest.mark.parametrize("train_unembed", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_logprobs_loss_and_gradients_equal_transformers_with_peft(
    model: LoadedModel, train_unembed: bool, temperature: float | None
) -> None:
    adapter = make_adapter(model, train_unembed=train_unembed)
    heat = {} if temperature is None else {"temperature": temperature}
    stream = np.random.default_rng(4)
    data = [
        Datum(d.model_input, {**d.loss_fn_inputs, **heat, "weights": stream.choice([0, 0.5, 1], d.model_input.length)})
        for d in sft_data(model, LENGTHS)
    ]
    output = run(Trainer(model, token_budget=16), adapter, data, "cross_entropy")
    wrapped = with_peft(model, adapter)
    total = torch.zeros(())
    for datum, logprobs in zip(data, output.logprobs, strict=True):
        logits = wrapped(input_ids=torch.tensor(datum.model_input.tokens)[None].long()).logits[0].float()
        expected = torch.log_softmax(logits / (temperature or 1.0), -1)
        expected = expected.gather(1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=5e-5)
        total = total - (expected * datum.loss_fn_inputs["weights"].to_torch()).sum()
    total.backward()
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    assert_close(take_gradients(adapter), peft_gradients(wrapped, adapter), 1e-4)


def test_soft_targets_equal_the_weighted_sum_of_single_ones(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    stream = np.random.default_rng(0)
    targets, weights = stream.integers(3, llama.vocab_size, (11, 4)), stream.uniform(0, 1, (11, 4))
    tokens = stream.integers(3, llama.vocab_size, 11)
    soft = run(trainer, adapter, [Datum(tokens, {"target_tokens": targets, "weights": weights})], "cross_entropy")
    soft_grads = take_gradients(adapter)
    assert soft.logprobs[0].shape == (11, 4)
    total = 0.0
    for k in range(4):
        datum = Datum(tokens, {"target_tokens": targets[:, k], "weights": weights[:, k]})
        single = run(trainer, adapter, [datum], "cross_entropy")
        total += single.metrics["loss:sum"]
        np.testing.assert_allclose(soft.logprobs[0][:, k], single.logprobs[0], atol=2e-5)
    assert soft.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert soft.metrics["tokens:sum"] == 11
    assert_close(soft_grads, take_gradients(adapter), 5e-5)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradient_is_the_finite_difference_through_a_lora_weight(llama: LoadedModel, loss_fn: str) -> None:
    """Central differences of ``loss:sum``; steps of 1e-2 keep float32 rounding below the tolerance.

    cispo and gspo stop gradients on purpose: for them the surrogate with that factor frozen at the
    present weights is differenced, as importance sampling on shifted inputs would be.
    """
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = data_for(loss_fn, llama, LENGTHS)
    if loss_fn != "cross_entropy":
        data = near_policy(trainer, adapter, data, spread=0.02)
    grads = gradients(trainer, adapter, data, loss_fn)
    frozen = run(trainer, adapter, data, None).logprobs

    def surrogate() -> float:
        if loss_fn not in ("cispo", "gspo"):
            return run(trainer, adapter, data, loss_fn, backward=False).metrics["loss:sum"]
        total = 0.0
        for datum, start, now in zip(data, frozen, run(trainer, adapter, data, None).logprobs, strict=True):
            q, A, w = (datum.loss_fn_inputs[key].data.astype(float) for key in ("logprobs", "advantages", "weights"))
            token_ratio = np.exp(start - q)
            if loss_fn == "cispo":
                total -= float((w * np.clip(token_ratio, 0, 4) * now * A).sum())
            else:
                s = np.exp((w * (start - q)).sum() / max(w.sum(), 1e-9))
                total -= float((w * s * np.exp(now.astype(float) - start) * A).sum())
        return total

    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        pair = adapter.weights[name]
        index = list(adapter.weights).index(name)
        for weight, grad in ((pair.A, grads[2 * index]), (pair.B, grads[2 * index + 1])):
            place = int(grad.abs().argmax())
            sides = []
            for step in (1e-2, -1e-2):
                with torch.no_grad():
                    weight.view(-1)[place] += step
                sides.append(surrogate())
                with torch.no_grad():
                    weight.view(-1)[place] -= step
            difference = (sides[0] - sides[1]) / 2e-2
            assert grad.view(-1)[place].item() == pytest.approx(difference, rel=2e-2, abs=2e-3)


def test_rl_metrics_equal_their_float64_formulas(llama: LoadedModel) -> None:
    trainer, adapter = Trainer(llama), make_adapter(llama)
    data = near_policy(trainer, adapter, rl_data(llama, LENGTHS), spread=0.5)
    output = run(trainer, adapter, data, "ppo", backward=False)
    wrapped = with_peft(llama, adapter)
    log_ratios, advantages, entropies = [], [], []
    for datum, logprobs in zip(data, output.logprobs, strict=True):
        keep = datum.loss_fn_inputs["weights"].data != 0
        logits = wrapped(input_ids=torch.tensor(datum.model_input.tokens)[None].long()).logits[0].double()
        full = torch.log_softmax(logits, -1)
        entropies.append(-(full.exp() * full).sum(-1).detach().numpy()[keep])
        log_ratios.append((logprobs.astype(float) - datum.loss_fn_inputs["logprobs"].data)[keep])
        advantages.append(datum.loss_fn_inputs["advantages"].data.astype(float)[keep])
    log_r, A = np.concatenate(log_ratios), np.concatenate(advantages)
    r = np.exp(log_r)
    assert output.metrics == pytest.approx(
        {
            "loss:sum": -np.minimum(r * A, np.clip(r, 0.8, 1.2) * A).sum(),
            "tokens:sum": len(r),
            "ratio:mean": r.mean(),
            "ratio:max": r.max(),
            "clip_fraction:mean": np.where(A > 0, r > 1.2, r < 0.8).mean(),
            "kl:mean": (r - 1 - log_r).mean(),
            "entropy:mean": np.concatenate(entropies).mean(),
        },
        rel=1e-5,
    )
