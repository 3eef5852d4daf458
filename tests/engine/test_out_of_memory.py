"""`torch.OutOfMemoryError` at the k-th allocation: the call fails, nothing of it remains, the next one is right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainsession.engine.api import SampleItem, TrainItem
from trainsession.engine.engine import LocalEngine
from trainsession.engine.model import load_model
from trainsession.engine.sampler.sampler import Sampler
from trainsession.errors import EngineError
from trainsession.tokenization import Tokenizer
from trainsession.types import AdamParams, Datum, LoraConfig, SamplingParams

TRIALS = 12
"""Of each call, evenly spread over its allocations."""
LORA = LoraConfig(rank=2, seed=3)
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.1, weight_decay=0.1)


class FullAt(TorchDispatchMode):
    """Memory for so many results of operations; what works in place or makes a view needs none."""

    def __init__(self, room: int | None) -> None:
        super().__init__()
        self.room, self.count = room, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func._schema.is_mutable and not func.is_view:
            if self.room is not None and self.count >= self.room:
                raise torch.OutOfMemoryError("CUDA out of memory (as a test)")
            self.count += 1
        return func(*args, **(kwargs or {}))


def _data(seed: int) -> list[Datum]:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(3, 300, size=20).tolist() for _ in range(3)]
    return [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows]


def _item(seed: int, **fields: Any) -> TrainItem:
    return replace(TrainItem(adapter_id="a", data=_data(seed), loss_fn="cross_entropy"), **fields)


def _all(engine: LocalEngine) -> tuple[dict[str, bytes], int, str]:
    state = engine.capture("a", optimizer=True, gradients=True)
    return {name: array.tobytes() for name, array in state.tensors.items()}, state.step, state.window


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def _rooms(count: int) -> list[int]:
    """Some of all allocations, and the last ones: what is half done then?"""
    return sorted({*range(0, count, max(1, count // TRIALS)), *range(max(0, count - 6), count)})


def _train_nothing(engine: LocalEngine) -> None:
    """No gradient reaches a weight, and yet a step may follow."""
    data = [Datum(item.model_input, {**item.loss_fn_inputs, "weights": [0.0] * 19}) for item in _data(2)]
    (result,) = engine.train([_item(2, data=data)])
    assert not isinstance(result, Exception), result


def _train(engine: LocalEngine) -> None:
    (result,) = engine.train([_item(2)])
    assert not isinstance(result, Exception), result


def _keep(engine: LocalEngine) -> None:
    (result,) = engine.train([_item(3, loss_fn=None, backward=False, keep_graph="f")])
    assert not isinstance(result, Exception), result


def _backward(engine: LocalEngine) -> None:
    engine.backward("f", [np.full(19, -0.5, np.float32)] * 3)


def _step(engine: LocalEngine) -> None:
    engine.optim_step("a", ADAM)


def _start(engine: LocalEngine, pending: bool = True) -> None:
    """Weights and moments that are not zero; gradients that wait for a step."""
    engine.drop_adapter("a")
    engine.add_adapter("a", LORA)
    engine.train([_item(1)])
    engine.optim_step("a", ADAM)
    if pending:
        engine.train([_item(1)])


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> LocalEngine:
    loaded = LocalEngine.load(tiny_model, name="tiny", device="cpu", dtype="float32")
    _start(loaded)  # what is made once is made
    _keep(loaded)
    _backward(loaded)
    return loaded


def _full_at(room: int | None, call: Callable[[LocalEngine], None], engine: LocalEngine) -> int:
    with FullAt(room) as memory:
        call(engine)
    return memory.count


@pytest.mark.parametrize(("call", "pending"), [(_train, True), (_train, False), (_train_nothing, False), (_step, True)])
def test_a_call_without_memory_changes_nothing_and_the_next_one_is_right(
    engine: LocalEngine, call: Callable[[LocalEngine], None], pending: bool
) -> None:
    _start(engine, pending)
    before = _all(engine)
    count = _full_at(None, call, engine)
    after = _all(engine)
    assert count > 20
    assert after != before
    tensors = _tensors()
    for room in _rooms(count):
        _start(engine, pending)
        with pytest.raises(torch.OutOfMemoryError):
            _full_at(room, call, engine)
        assert _all(engine) == before, f"after allocation {room} of {count}"
        call(engine)
        assert _all(engine) == after, f"after allocation {room} of {count}"
    assert _tensors() == tensors, "tensors stay behind"


def test_a_custom_loss_without_memory_in_either_half(engine: LocalEngine) -> None:
    _start(engine)
    before = _all(engine)
    forward, backward = _full_at(None, _keep, engine), _full_at(None, _backward, engine)
    after = _all(engine)
    for room in _rooms(forward):
        _start(engine)
        with pytest.raises(torch.OutOfMemoryError):
            _full_at(room, _keep, engine)
        assert _all(engine) == before
    for room in _rooms(backward):
        _start(engine)
        _keep(engine)
        with pytest.raises(torch.OutOfMemoryError):
            _full_at(room, _backward, engine)
        assert _all(engine) == before, f"after allocation {room} of {backward}"
        _keep(engine)  # as the service does where a graph is gone
        _backward(engine)
        assert _all(engine) == after


@pytest.mark.parametrize("static", [False, True])
def test_a_sample_without_memory_fails_alone_and_leaves_no_block(
    tiny_model: Path, tiny_tokenizer: Tokenizer, static: bool
) -> None:
    model = load_model(tiny_model, name="tiny", device="cpu", dtype="float32", exact=not static)
    sampler = Sampler(model, tiny_tokenizer, num_blocks=40, static=static)

    def draw(room: int | None, request_id: str) -> tuple[list[int], Any, int]:
        params = SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
        prompt = np.array([5, 6, 7], np.int32)
        sampler.submit(SampleItem(request_id=request_id, prompt=prompt, num_samples=2, params=params), None)
        tokens: list[int] = []
        error = None
        with FullAt(room) as memory:
            for _ in range(20):
                if not sampler.has_work():
                    break
                for event in sampler.step():
                    tokens += event.tokens
                    error = error or event.error
        return tokens, error, memory.count

    draw(None, "warm")
    expected, _, count = draw(None, "alone")
    blocks = sampler.stats()["free_blocks"] + sampler.stats()["cached_blocks"]
    for room in _rooms(count):
        try:
            _, error, _ = draw(room, f"r{room}")
        except torch.OutOfMemoryError:  # of the step itself: the thread cancels what runs (`EngineThread`)
            sampler.cancel(f"r{room}")
            while sampler.has_work():
                sampler.step()
        else:
            assert isinstance(error, EngineError), f"after allocation {room} of {count}"
        tokens, error, _ = draw(None, f"after{room}")
        assert error is None
        assert tokens == expected, f"after allocation {room} of {count}"
        assert sampler.stats()["requests"] == 0
        assert sampler.stats()["free_blocks"] + sampler.stats()["cached_blocks"] == blocks
