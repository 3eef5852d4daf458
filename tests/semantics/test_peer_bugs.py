"""Bugs that services like this one had, each as the right value, through the SDK.

`docs/testing.md` maps every report to its test; this file holds those that only the whole path can
show: names, flags and configurations that get lost between a user's call and the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import peft
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import trainsession as ts

from .loop import ADAM, MODEL, PROMPT, batch, datum, logprobs_of, new_trainer, rl_datum, step, tokens

Array = npt.NDArray[Any]
LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {},
    "ppo narrow": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
    "cispo": {},
    "cispo narrow": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {},
    "gspo narrow": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
    "gspo masked": {},
}


def formula(name: str, config: dict[str, float], lp: Array, inputs: dict[str, Array]) -> float:
    """The documented sums (docs/semantics.md), in float64."""
    w = inputs["weights"]
    if name == "cross_entropy":
        return float(-(w * lp).sum())
    q, A = inputs["logprobs"], inputs["advantages"]
    if name == "gspo":
        mask = inputs.get("sequence_ratio_mask", w)
        ratio = np.full_like(lp, np.exp((mask * (lp - q)).sum() / mask.sum()))
    else:
        ratio = np.exp(lp - q)
    low, high = {"cispo": (0.0, 4.0)}.get(name, (0.8, 1.2))
    clipped = np.clip(ratio, config.get("clip_low_threshold", low), config.get("clip_high_threshold", high))
    if name == "importance_sampling":
        return float(-(w * ratio * A).sum())
    if name in ("ppo", "gspo"):
        return float(-(w * np.minimum(ratio * A, clipped * A)).sum())
    if name == "cispo":
        return float(-(w * clipped * lp * A).sum())
    return float(-(w * (lp * A - config["beta"] / 2 * (lp - q) ** 2)).sum())


@pytest.fixture(scope="module")
def trained(service: ts.ServiceClient) -> ts.TrainingClient:
    """A session two steps away from the base model; its tests leave no gradient."""
    trainer = new_trainer(service)
    step(trainer)
    step(trainer)
    return trainer


def peft_model(service: ts.ServiceClient, model: Path, trainer: ts.TrainingClient, directory: Path) -> Any:
    """transformers' float32 model with the session's downloaded adapter in PEFT's own layers."""
    saved = trainer.save_weights_for_sampler(directory.name).result(60)
    service.download_checkpoint(saved.path, directory)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, str(directory), is_trainable=True)


def reference_logprobs(model: Any, data: list[ts.Datum]) -> list[torch.Tensor]:
    """Target logprobs by transformers' forward and ``log_softmax``."""
    found = []
    for one in data:
        logits = model(input_ids=torch.tensor(one.model_input.to_ints())[None]).logits[0].float()
        found.append(logits.log_softmax(-1).gather(1, one.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0])
    return found


@pytest.mark.parametrize("case", LOSSES)
def test_each_loss_arrives_as_itself_with_its_configuration(trained: ts.TrainingClient, case: str) -> None:
    """I-11 (every loss ran as cross_entropy), I-12 (defaults and sent configurations), I-14 (outputs of
    every loss), I-15 and I-16 (forward has forward_backward's loss and logprobs)."""
    name: Any = case.split()[0]
    config = LOSSES[case]
    draws = np.random.default_rng(3)
    data = []
    for length in (9, 5):
        ids = tokens(length + 1, length)
        heat = 0.7
        plain = ts.Datum(ids[:-1], {"target_tokens": ids[1:], "temperature": heat})
        inputs: dict[str, Any] = {
            "target_tokens": ids[1:],
            "temperature": heat,
            "weights": draws.choice([0, 0.5, 1], length),
        }
        if name != "cross_entropy":
            inputs["logprobs"] = logprobs_of(trained, [plain]) + draws.uniform(-0.4, 0.4, length)
            inputs["advantages"] = draws.normal(size=length)
        if case == "gspo masked":
            inputs["sequence_ratio_mask"] = np.arange(length) % 2
        data.append(ts.Datum(ids[:-1], inputs))
    forward = trained.forward(data, name, config or None).result(60)
    both = trained.forward_backward(data, name, config or None).result(60)
    trained.zero_grad()
    expected = 0.0
    for one, logprobs in zip(data, both.logprobs, strict=True):
        assert logprobs.shape == one.loss_fn_inputs["target_tokens"].shape
        inputs = {key: value.to_numpy().astype(np.float64) for key, value in one.loss_fn_inputs.items()}
        expected += formula(name, config, logprobs.to_numpy().astype(np.float64), inputs)
    assert both.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert forward.logprobs == both.logprobs
    assert forward.metrics == both.metrics
    assert all(key.rpartition(":")[2] in ("sum", "mean", "max") for key in both.metrics)
    if config and name != "dro":
        assert both.metrics["loss:sum"] != trained.forward(data, name).result(60).metrics["loss:sum"]


@pytest.mark.parametrize("case", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_missing_weights_are_ones_and_all_zero_ones_a_step_of_nothing(service: ts.ServiceClient, case: Any) -> None:
    """I-38: no NaN, no division by an empty mask, in the loss, its metrics or the step."""
    make = datum if case == "cross_entropy" else rl_datum
    with new_trainer(service) as trainer:
        step(trainer)
        outputs = [
            trainer.forward([make(6, weights=weights)], case, LOSSES[case]).result(60) for weights in (None, np.ones(6))
        ]
        assert outputs[0].metrics == outputs[1].metrics
        before = logprobs_of(trainer, batch())
        nothing = trainer.forward_backward([make(6, weights=np.zeros(6))], case, LOSSES[case]).result(60)
        assert nothing.metrics["loss:sum"] == 0
        assert np.isfinite(list(nothing.metrics.values())).all()
        still = new_trainer(service)  # moments of zero: a step on nothing moves nothing
        still.forward_backward([make(6, weights=np.zeros(6))], case, LOSSES[case])
        assert still.optim_step(ADAM).result(60).metrics == {"grad_norm": 0.0, "update_norm": 0.0, "step": 1}
        still.close()
        np.testing.assert_array_equal(logprobs_of(trainer, batch()), before)


def test_logprobs_gradient_norm_and_weights_are_pefts(
    service: ts.ServiceClient, tiny_model: Path, tmp_path: Path
) -> None:
    """I-6 (plain sums), I-17 (no sampling temperature in training), I-31 (saved weights are not empty), I-32
    (alpha), I-36 (grad_norm is in the metrics), I-42 (only the adapter)."""
    with new_trainer(service, rank=4, alpha=12) as trainer:
        step(trainer)
        sampler = trainer.save_weights_and_get_sampling_client()
        sampler.sample(PROMPT, 2, ts.SamplingParams(max_tokens=4, temperature=0.3)).result(60)
        model = peft_model(service, tiny_model, trainer, tmp_path / "w")
        config = model.peft_config["default"]
        assert (config.r, config.lora_alpha) == (4, 12)
        arrays = load_file(tmp_path / "w" / "adapter_model.safetensors")
        assert len(arrays) == 2 * 7 * 2  # A and B of seven projections in two layers
        assert all(np.abs(value).max() > 0 for value in arrays.values())
        assert all(4 in value.shape for value in arrays.values())
        data = [datum(9, 4), datum(5, 5, weights=[1, 0, 0.5, 1, 1])]
        expected = reference_logprobs(model, data)
        output = trainer.forward_backward(data).result(60)
        for ours, theirs in zip(output.logprobs, expected, strict=True):
            np.testing.assert_allclose(ours.to_numpy(), theirs.detach().numpy(), atol=5e-5)
        weights = [torch.ones(9), torch.tensor([1, 0, 0.5, 1, 1])]
        total = -sum(((lp * w).sum() for lp, w in zip(expected, weights, strict=True)), start=torch.zeros(()))
        total.backward()
        assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
        metrics = trainer.optim_step(ts.AdamParams(grad_clip_norm=0.5)).result(60).metrics
        assert set(metrics) == {"grad_norm", "update_norm", "step"}
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_training_changes_the_adapter_and_nothing_else(service: ts.ServiceClient) -> None:
    """I-42 (a LoRA request that was a full fine-tune), I-58 (sampling the base model unnoticed)."""
    with new_trainer(service) as trainer, service.create_sampling_client(MODEL) as base:
        before = base.compute_logprobs(PROMPT).result(60)
        fresh = trainer.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result(60)
        assert fresh == before, "B is zero: a fresh adapter is the base model"
        step(trainer)
        stepped = trainer.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result(60)
        assert np.abs(np.array(stepped[1:]) - np.array(before[1:])).max() > 0.01
        assert base.compute_logprobs(PROMPT).result(60) == before
        assert trainer.base_sampling_client().compute_logprobs(PROMPT).result(60) == before


def test_seed_and_targets_arrive_at_the_engine(service: ts.ServiceClient, tmp_path: Path) -> None:
    """I-43: the same seed gives the same A whatever else is trained, and each flag trains its modules."""

    def saved(**options: Any) -> dict[str, Array]:
        with new_trainer(service, **options) as trainer:
            directory = tmp_path / trainer.session_id
            service.download_checkpoint(trainer.save_weights_for_sampler("w").result(60).path, directory)
            return load_file(directory / "adapter_model.safetensors")

    everything = saved(seed=3, train_unembed=True)
    attention = saved(seed=3, train_mlp=False)
    feed_forward = saved(seed=3, train_attn=False)
    two = saved(seed=3, target_modules=["q_proj", "v_proj"])
    other = saved(seed=4, train_mlp=False)
    assert all("self_attn" in key for key in attention)
    assert all("mlp" in key for key in feed_forward)
    assert {key.split(".")[-3] for key in two} == {"q_proj", "v_proj"}
    assert any("lm_head" in key for key in everything)
    for part in (attention, feed_forward, two):
        for key, value in part.items():
            np.testing.assert_array_equal(value, everything[key])
            assert ("lora_B" in key) == (not value.any())
    assert all(not np.array_equal(attention[key], other[key]) for key in attention if "lora_A" in key)


def test_a_missing_seed_is_drawn_told_and_enough_to_repeat_the_run(service: ts.ServiceClient) -> None:
    with new_trainer(service, seed=None) as one, new_trainer(service, seed=None) as two:
        assert one.lora is not None
        assert two.lora is not None
        assert one.lora.seed != two.lora.seed
        with new_trainer(service, seed=one.lora.seed) as again:
            assert step(again) == step(one) != step(two)
    with service.create_sampling_client(MODEL) as sampler:
        params = ts.SamplingParams(max_tokens=12, stop=[])
        drawn = {tuple(sampler.sample(PROMPT, 1, params).result(60).sequences[0].tokens) for _ in range(4)}
        assert len(drawn) == 4


def test_load_state_starts_the_optimizer_anew(service: ts.ServiceClient) -> None:
    """I-3 and I-55: loading weights alone neither keeps the live moments nor restores the saved ones."""
    with new_trainer(service) as trainer:
        step(trainer)
        state = trainer.save_state("one").result(60).path
        warm = step(trainer)
        trainer.load_state(state)
        loaded = [step(trainer), step(trainer)]
        trainer.load_state_with_optimizer(state)
        assert step(trainer) == warm
    with service.create_training_client_from_state(state) as cold:
        assert [step(cold), step(cold)] == loaded
    assert loaded[0]["update_norm"] != warm["update_norm"]
    assert loaded[0]["loss:sum"] == warm["loss:sum"]


def test_a_batch_is_the_sum_of_its_parts_and_comes_back_in_order(service: ts.ServiceClient) -> None:
    """I-5 and I-7 (only the last part's gradient), I-9 (results of uneven lengths in another order), I-35
    (padding a small batch with invented data)."""
    data = [datum(length, length) for length in (30, 2, 11, 1, 19)]
    with new_trainer(service) as whole, new_trainer(service) as parts:
        step(whole)
        step(parts)
        output = whole.forward_backward(data).result(60)
        alone = [parts.forward_backward([one]) for one in reversed(data)]
        for together, single in zip(output.logprobs, reversed(alone), strict=True):
            np.testing.assert_array_equal(together.to_numpy(), single.result(60).logprobs[0].to_numpy())
        total = sum(single.result(60).metrics["loss:sum"] for single in alone)
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)
        assert output.metrics["tokens:sum"] == 63
        one, two = whole.optim_step(ADAM).result(60).metrics, parts.optim_step(ADAM).result(60).metrics
        assert one == pytest.approx(two, rel=1e-5)
        np.testing.assert_allclose(logprobs_of(whole, data), logprobs_of(parts, data), atol=1e-4)
    with new_trainer(service) as trainer:
        single = trainer.forward_backward([datum(1)]).result(60)
        assert single.metrics["loss:sum"] == pytest.approx(-float(single.logprobs[0].to_numpy()[0]), rel=1e-6)
        assert single.metrics["tokens:sum"] == 1


def test_a_step_of_one_session_is_none_of_anothers(service: ts.ServiceClient) -> None:
    """I-28: fb(A), fb(B), optim(A), optim(B) has for each the bits of its own loop."""
    with new_trainer(service) as one, new_trainer(service, seed=2) as two:
        alone = [step(one), step(two)]
    with new_trainer(service) as one, new_trainer(service, seed=2) as two:
        losses = [one.forward_backward(batch()), two.forward_backward(batch())]
        steps = [one.optim_step(ADAM), two.optim_step(ADAM)]
        beside = [a.result(60).metrics | b.result(60).metrics for a, b in zip(losses, steps, strict=True)]
    assert beside == alone


def test_a_live_sampler_is_no_checkpoint_and_a_name_moves_with_overwrite(service: ts.ServiceClient) -> None:
    """I-50 (what an ephemeral sampler leaves behind), I-44 (old weights under a name that was reloaded)."""
    with new_trainer(service) as trainer:
        first = trainer.save_weights_and_get_sampling_client()
        step(trainer)
        second = trainer.save_weights_and_get_sampling_client()
        values: list[Any] = [sampler.compute_logprobs(PROMPT).result(60) for sampler in (first, second)]
        assert service.list_checkpoints(trainer.session_id) == []
        live = service.create_sampling_client(path=f"ts://{trainer.session_id}/live")
        assert live.compute_logprobs(PROMPT).result(60) == values[1]
        path = trainer.save_weights_for_sampler("policy").result(60).path
        old = service.create_sampling_client(path=path).compute_logprobs(PROMPT).result(60)
        step(trainer)
        assert trainer.save_weights_for_sampler("policy", overwrite=True).result(60).path == path
        new = service.create_sampling_client(path=path).compute_logprobs(PROMPT).result(60)
        assert old == values[1] != new
        assert first.compute_logprobs(PROMPT).result(60) == values[0]
        assert len(service.list_checkpoints(trainer.session_id)) == 1


def test_an_adapter_of_peft_samples_as_in_peft(service: ts.ServiceClient, tiny_model: Path, tmp_path: Path) -> None:
    """I-32 from the other side: the scale is that of the file, alpha / rank."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = peft.get_peft_model(base, config)
    model.save_pretrained(str(tmp_path))
    path = service.import_adapter(tmp_path, base_model=MODEL, name="from-peft").path
    found = service.create_sampling_client(path=path).compute_logprobs(PROMPT).result(60)
    expected = reference_logprobs(model, [ts.Datum(PROMPT[:-1], {"target_tokens": PROMPT[1:]})])[0]
    np.testing.assert_allclose(np.array(found[1:], float), expected.detach().numpy(), atol=5e-5)
    with service.create_training_client_from_state(path) as trainer:
        assert trainer.lora is not None
        assert (trainer.lora.rank, trainer.lora.alpha) == (3, 7)
        data = [ts.Datum(PROMPT[:-1], {"target_tokens": PROMPT[1:]})]
        np.testing.assert_allclose(logprobs_of(trainer, data), expected.detach().numpy(), atol=5e-5)


def test_no_global_generator_is_touched(service: ts.ServiceClient) -> None:
    """The embedded service lives in the user's process and leaves the user's random numbers alone."""
    import random

    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # type: ignore[index,union-attr]

    before = states()
    with new_trainer(service, seed=None) as trainer:
        step(trainer)
        trainer.save_weights_and_get_sampling_client().sample(PROMPT, 3, ts.SamplingParams(max_tokens=5)).result(60)
    assert states() == before
