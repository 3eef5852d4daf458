from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trainsession.engine.api import AdapterState, SampleEvent, SampleItem, TrainItem, TrainOutput
from trainsession.engine.checkpoint import adapter_from_peft, adapter_to_peft, state_from_files, state_to_files
from trainsession.engine.engine import LocalEngine
from trainsession.errors import CheckpointMismatch, Conflict, InvalidRequest, NoGradients, NotFound
from trainsession.types import AdamParams, Datum, LoraConfig, SamplingParams

CONFIG = LoraConfig(rank=4, seed=1)
STEP = AdamParams(learning_rate=0.01)


@pytest.fixture
def engine(tiny_engine: LocalEngine) -> LocalEngine:
    tiny_engine.add_adapter("a", CONFIG)
    return tiny_engine


def _data(seed: int) -> list[Datum]:
    stream = np.random.default_rng(seed)
    rows = stream.integers(0, 300, size=(3, 13))
    return [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows]


def _forward_backward(engine: LocalEngine, seed: int, adapter_id: str = "a") -> TrainOutput:
    (output,) = engine.train([TrainItem(adapter_id=adapter_id, data=_data(seed), loss_fn="cross_entropy")])
    assert isinstance(output, TrainOutput), output
    return output


def _train(engine: LocalEngine, *seeds: int, adapter_id: str = "a") -> None:
    for seed in seeds:
        _forward_backward(engine, seed, adapter_id)
        engine.optim_step(adapter_id, STEP)


def _assert_same(left: AdapterState, right: AdapterState) -> None:
    assert left.tensors.keys() == right.tensors.keys()
    for key, value in left.tensors.items():
        assert np.array_equal(value, right.tensors[key]), key


def _sample(engine: LocalEngine, weights: str | None, seed: int = 0) -> tuple[list[int], list[float]]:
    engine.submit(
        SampleItem(
            request_id=f"r{seed}",
            prompt=np.arange(10, 30, dtype=np.int32),
            num_samples=1,
            params=SamplingParams(max_tokens=8, seed=seed, stop=[]),
            weights=weights,
        )
    )
    events: list[SampleEvent] = []
    while engine.has_work():
        events += engine.step()
    assert events[-1].done
    assert events[-1].error is None
    return [t for event in events for t in event.tokens], [lp for event in events for lp in event.logprobs]


def test_info_names_what_bit_equality_holds_under(engine: LocalEngine) -> None:
    info = engine.info
    assert (info.base_model, info.dtype, info.device, info.exact) == ("tiny-llama", "float32", "cpu", True)
    assert info.versions["torch"] == torch.__version__
    assert info.versions["threads"] == str(torch.get_num_threads())
    assert info.versions["instruction_set"]


def test_add_adapter_counts_its_parameters(engine: LocalEngine) -> None:
    # Per layer q: 64+64, k and v: 64+32, o: 64+64, gate and up: 64+96, down: 96+64; rank 4, 2 layers.
    size = 4 * 2 * (2 * 128 + 2 * 96 + 3 * 160)
    assert engine.add_adapter("b", CONFIG) == {"parameters": size, "modules": 14}
    with pytest.raises(Conflict, match="b exists"):
        engine.add_adapter("b", CONFIG)


def test_resume_is_bit_equal_with_the_optimizer_and_differs_without(engine: LocalEngine) -> None:
    """Three ways (bugs I-2, I-3): uninterrupted == resumed with optimizer != resumed without."""
    _train(engine, 1, 2)
    files = state_to_files(engine.capture("a", optimizer=True), "tiny")
    _train(engine, 3, 4)
    uninterrupted = engine.capture("a", optimizer=True)

    engine.add_adapter("warm", CONFIG)
    engine.restore("warm", state_from_files(files), optimizer=True)
    _train(engine, 3, 4, adapter_id="warm")
    _assert_same(engine.capture("warm", optimizer=True), uninterrupted)
    assert engine.capture("warm", optimizer=True).step == 4

    engine.add_adapter("cold", CONFIG)
    engine.restore("cold", state_from_files(files), optimizer=False)
    _train(engine, 3, 4, adapter_id="cold")
    cold = engine.capture("cold", optimizer=True)
    assert cold.step == 2
    key = next(key for key in cold.tensors if key.endswith("lora_B"))
    assert not np.array_equal(cold.tensors[key], uninterrupted.tensors[key])


def test_pending_gradients_survive_capture_and_restore(engine: LocalEngine) -> None:
    _train(engine, 1)
    _forward_backward(engine, 2)
    state = engine.capture("a", optimizer=True, gradients=True)
    assert state.window == "open"
    _forward_backward(engine, 3)
    engine.optim_step("a", STEP)

    engine.add_adapter("b", CONFIG)
    engine.restore("b", state_from_files(state_to_files(state, "tiny")), optimizer=True)
    _forward_backward(engine, 3, "b")
    engine.optim_step("b", STEP)
    _assert_same(engine.capture("b", optimizer=True), engine.capture("a", optimizer=True))


def test_restore_without_gradients_drops_the_pending_ones(engine: LocalEngine) -> None:
    clean = engine.capture("a", optimizer=True)
    assert clean.window == "empty"
    _forward_backward(engine, 1)
    engine.restore("a", clean, optimizer=True)
    with pytest.raises(NoGradients):
        engine.optim_step("a", STEP)


def test_a_capture_is_a_copy(engine: LocalEngine) -> None:
    _train(engine, 1)
    state = engine.capture("a", optimizer=True)
    before = {key: value.copy() for key, value in state.tensors.items()}
    _train(engine, 2)
    moved = engine.capture("a", optimizer=True).tensors
    for key, value in before.items():
        assert np.array_equal(state.tensors[key], value)
    assert not all(np.array_equal(moved[key], value) for key, value in before.items())


def test_a_snapshot_samples_the_same_after_later_steps(engine: LocalEngine) -> None:
    """Bug I-1: the frozen sampler was served from the live weights."""
    _train(engine, 1, 2)
    engine.freeze("a", "s")
    before, base = _sample(engine, "s"), _sample(engine, None)
    assert before[1] != base[1]
    _train(engine, 3, 4)
    assert _sample(engine, "s") == before
    engine.freeze("a", "later")
    assert _sample(engine, "later")[1] != before[1]
    with pytest.raises(Conflict, match="never change"):
        engine.freeze("a", "s")


def test_a_published_snapshot_samples_bit_equal_elsewhere(engine: LocalEngine, tiny_model: Path) -> None:
    _train(engine, 1, 2)
    engine.freeze("a", "s")
    files = adapter_to_peft(engine.capture_snapshot("s"), "tiny")
    other = LocalEngine.load(tiny_model, name="tiny-llama", device="cpu", dtype="float32")
    other.add_snapshot("copy", adapter_from_peft(files))
    assert _sample(other, "copy") == _sample(engine, "s")


def test_what_does_not_fit_is_refused_and_changes_nothing(engine: LocalEngine) -> None:
    _train(engine, 1)
    engine.add_adapter("b", replace(CONFIG, rank=8))
    engine.add_adapter("c", replace(CONFIG, alpha=1.0))
    engine.add_adapter("d", replace(CONFIG, train_mlp=False))
    state = engine.capture("a", optimizer=True)
    for adapter_id, key in (("b", "rank"), ("c", "alpha"), ("d", "gate_proj|up_proj|down_proj")):
        before = engine.capture(adapter_id, optimizer=True)
        with pytest.raises(CheckpointMismatch, match=key):
            engine.restore(adapter_id, state, optimizer=True)
        _assert_same(engine.capture(adapter_id, optimizer=True), before)
    with pytest.raises(CheckpointMismatch, match="no optimizer state"):
        engine.restore("a", engine.capture("a", optimizer=False), optimizer=True)
    foreign = replace(state, base_identity="0" * 64)
    with pytest.raises(CheckpointMismatch, match="other base weights"):
        engine.restore("a", foreign, optimizer=True)
    with pytest.raises(CheckpointMismatch, match="other base weights"):
        engine.add_snapshot("s", foreign)
    _assert_same(engine.capture("a", optimizer=True), state)


def test_an_adapter_of_a_larger_model_is_refused_by_its_shape(engine: LocalEngine) -> None:
    state = engine.capture("a", optimizer=False)
    module = "model.layers.0.mlp.up_proj"
    tensors = {**state.tensors, f"weight/{module}.lora_A": np.zeros((4, 128), np.float32)}
    with pytest.raises(CheckpointMismatch, match=r"up_proj\.lora_A has shape \(4, 128\)"):
        engine.add_snapshot("s", replace(state, tensors=tensors, base_identity=""))
    tensors = {"weight/model.layers.7.x.lora_A": np.zeros((4, 8), np.float32)}
    with pytest.raises(CheckpointMismatch, match=r"no linear layer model\.layers\.7\.x"):
        engine.add_snapshot("s", replace(state, tensors=tensors, base_identity=""))


def test_unknown_names_are_not_found(engine: LocalEngine) -> None:
    for call in (
        lambda: engine.capture("x", optimizer=False),
        lambda: engine.freeze("x", "s"),
        lambda: engine.capture_snapshot("x"),
        lambda: engine.optim_step("x", STEP),
        lambda: engine.zero_grad("x"),
        lambda: engine.backward("x", []),
        lambda: _sample(engine, "x"),
        lambda: engine.train([TrainItem(adapter_id="x", data=_data(0), loss_fn="cross_entropy")]),
    ):
        with pytest.raises(NotFound, match="x"):
            call()
    engine.drop_adapter("x")
    engine.drop_snapshot("x")
    engine.cancel("x")


def test_dropped_adapters_and_snapshots_are_gone(engine: LocalEngine) -> None:
    engine.freeze("a", "s")
    assert (engine.stats()["adapters"], engine.stats()["snapshots"]) == (1, 1)
    engine.drop_adapter("a")
    engine.drop_snapshot("s")
    assert (engine.stats()["adapters"], engine.stats()["snapshots"]) == (0, 0)


def test_a_missing_seed_is_the_services_to_draw(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        engine.add_adapter("b", LoraConfig())


def test_adapters_do_not_touch_each_other(engine: LocalEngine) -> None:
    """Bug I-28: optim_step(A) updated B."""
    engine.add_adapter("b", replace(CONFIG, seed=2))
    before = engine.capture("b", optimizer=True)
    _forward_backward(engine, 1)
    _forward_backward(engine, 1, "b")
    engine.optim_step("a", STEP)
    _assert_same(engine.capture("b", optimizer=True), before)
    assert engine.capture("b", optimizer=False, gradients=True).window == "open"


def test_training_is_bit_equal_beside_neighbours(engine: LocalEngine) -> None:
    """Exact mode: the same item alone and in a packed pass with others."""
    for name in ("alone", "crowd", "n1", "n2"):
        engine.add_adapter(name, CONFIG if name in ("alone", "crowd") else replace(CONFIG, seed=9))
    _train(engine, 5, adapter_id="alone")

    def item(name: str, seed: int) -> TrainItem:
        return TrainItem(adapter_id=name, data=_data(seed), loss_fn="cross_entropy")

    engine.train([item("n1", 7), item("crowd", 5), item("n2", 8)])
    engine.optim_step("crowd", STEP)
    _assert_same(engine.capture("crowd", optimizer=True), engine.capture("alone", optimizer=True))


def test_moe_trains_and_samples(tiny_path: Callable[[str], Path]) -> None:
    engine = LocalEngine.load(tiny_path("qwen3_moe"), name="moe", device="cpu", dtype="float32")
    engine.add_adapter("a", CONFIG)
    assert not engine.info.exact
    first = _forward_backward(engine, 1).metrics["loss:sum"]
    engine.optim_step("a", STEP)
    for _ in range(4):
        _train(engine, 1)
    assert _forward_backward(engine, 1).metrics["loss:sum"] < 0.9 * first
    engine.freeze("a", "s")
    tokens, logprobs = _sample(engine, "s")
    assert len(tokens) == len(logprobs) == 8
