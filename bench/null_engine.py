"""An engine that computes nothing: what the service itself costs, and what its tests count.

`NullEngine` keeps the promises of `trainsession.engine.api` with one number per adapter in place
of weights: ``forward_backward`` adds the sum of its tokens to the gradient, ``optim_step`` adds
learning rate times gradient to the weight. Every token of a sample is the prompt's last token
plus its index, so results can be checked by hand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainsession.engine.api import AdapterState, EngineInfo, SampleEvent, SampleItem, TrainItem, TrainOutput
from trainsession.errors import CheckpointMismatch, NoGradients, NotFound, TrainSessionError, UnknownModel
from trainsession.types import AdamParams, BaseModel, LoraConfig

MODEL = "null"
VOCABULARY = 50_000
CONTEXT = 65_536


@dataclass(slots=True)
class NullAdapter:
    config: LoraConfig
    weight: float = 0.0
    gradient: float = 0.0
    passes: int = 0
    """Forward-backwards since the last step."""
    step: int = 0


@dataclass(slots=True)
class _Running:
    item: SampleItem
    produced: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class NullEngine:
    """See the module. ``calls`` lists what was asked of it."""

    name: str = MODEL
    exact: bool = True
    seconds_per_pass: float = 0.0
    info: EngineInfo = field(init=False)
    adapters: dict[str, NullAdapter] = field(default_factory=dict)
    snapshots: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, tuple[str, int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    """Items of each training pass."""
    running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            base_model=self.name,
            identity=f"identity-of-{self.name}",
            context_length=CONTEXT,
            vocab_size=VOCABULARY,
            eos_token_ids=(2,),
            dtype="float32",
            device="cpu",
            exact=self.exact,
        )

    def add_adapter(self, adapter_id: str, config: LoraConfig) -> dict[str, Any]:
        self.adapters[adapter_id] = NullAdapter(config)
        return {"parameters": 1, "modules": 1}

    def drop_adapter(self, adapter_id: str) -> None:
        del self.adapters[adapter_id]

    def capture(self, adapter_id: str, *, optimizer: bool, gradients: bool = False) -> AdapterState:
        adapter = self.adapters[adapter_id]
        state = _state(self.info, adapter.config, adapter.weight)
        tensors = dict(state.tensors)
        if optimizer:
            tensors |= {f"{moment}/m.lora_{side}": _one(0.0) for moment in ("exp_avg", "exp_avg_sq") for side in "AB"}
        if gradients and adapter.passes:
            tensors |= {"grad/m.lora_A": _one(adapter.gradient), "grad/m.lora_B": _one(float(adapter.passes))}
        return AdapterState(
            config=adapter.config,
            tensors=tensors,
            step=adapter.step,
            has_optimizer=optimizer,
            base_identity=self.info.identity,
            window="open" if gradients and adapter.passes else "empty",
        )

    def restore(self, adapter_id: str, state: AdapterState, *, optimizer: bool) -> None:
        adapter = self.adapters[adapter_id]
        if state.base_identity and state.base_identity != self.info.identity:
            raise CheckpointMismatch("the checkpoint is of another base model")
        if optimizer and not state.has_optimizer:
            raise CheckpointMismatch("the checkpoint has no optimizer state")
        adapter.weight = float(state.tensors["weight/m.lora_B"][0, 0])
        adapter.step = state.step if optimizer else 0
        adapter.gradient, adapter.passes = 0.0, 0
        if "grad/m.lora_A" in state.tensors:
            adapter.gradient = float(state.tensors["grad/m.lora_A"][0, 0])
            adapter.passes = int(state.tensors["grad/m.lora_B"][0, 0])

    def validate(self, item: TrainItem) -> None:
        self.calls.append("validate")

    def train(self, items: Sequence[TrainItem]) -> list[TrainOutput | TrainSessionError]:
        self.merged.append(len(items))
        if self.seconds_per_pass:
            time.sleep(self.seconds_per_pass)
        outputs: list[TrainOutput | TrainSessionError] = []
        for item in items:
            kind = "forward_backward" if item.backward else "forward_keep" if item.keep_graph else "forward"
            self.calls.append(kind)
            adapter = self.adapters[item.adapter_id]
            total = sum(int(datum.model_input.tokens.sum()) for datum in item.data)
            if item.backward:
                adapter.gradient += total
                adapter.passes += 1
            if item.keep_graph:
                self.graphs[item.keep_graph] = (item.adapter_id, total)
            logprobs = [
                np.full(datum.loss_fn_inputs["target_tokens"].shape, -1.0 - adapter.weight, np.float32)
                for datum in item.data
            ]
            outputs.append(TrainOutput(logprobs=logprobs, metrics={"loss:sum": float(total)}))
        return outputs

    def backward(self, forward_id: str, gradients: Sequence[npt.NDArray[np.float32]]) -> None:
        self.calls.append("backward")
        if forward_id not in self.graphs:
            raise NotFound(f"no forward {forward_id}")
        adapter_id, total = self.graphs.pop(forward_id)
        self.adapters[adapter_id].gradient += total * float(gradients[0].reshape(-1)[0])
        self.adapters[adapter_id].passes += 1

    def drop_graph(self, forward_id: str) -> None:
        self.graphs.pop(forward_id, None)

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        self.calls.append("optim_step")
        adapter = self.adapters[adapter_id]
        if not adapter.passes:
            raise NoGradients()
        adapter.weight += params.learning_rate * adapter.gradient
        norm, adapter.gradient, adapter.passes = adapter.gradient, 0.0, 0
        adapter.step += 1
        return {"grad_norm": norm, "update_norm": params.learning_rate * norm, "step": float(adapter.step)}

    def zero_grad(self, adapter_id: str) -> None:
        self.calls.append("zero_grad")
        self.adapters[adapter_id].gradient, self.adapters[adapter_id].passes = 0.0, 0

    def freeze(self, adapter_id: str, snapshot_id: str) -> None:
        self.calls.append("freeze")
        self.snapshots[snapshot_id] = self.adapters[adapter_id].weight

    def capture_snapshot(self, snapshot_id: str) -> AdapterState:
        return _state(self.info, LoraConfig(rank=1, seed=7), self.snapshots[snapshot_id])

    def add_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        self.calls.append("add_snapshot")
        self.snapshots[snapshot_id] = float(state.tensors["weight/m.lora_B"][0, 0])

    def drop_snapshot(self, snapshot_id: str) -> None:
        del self.snapshots[snapshot_id]

    def export_merged(self, adapter_id: str, directory: str) -> None:
        with open(f"{directory}/model.safetensors", "wb") as file:
            file.write(str(self.adapters[adapter_id].weight).encode())

    def submit(self, item: SampleItem) -> None:
        self.calls.append("sample")
        if item.weights is not None and item.weights not in self.snapshots:
            raise NotFound(f"no snapshot {item.weights}")
        self.running[item.request_id] = _Running(item)

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.running[request_id].cancelled = True

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[SampleEvent]:
        events: list[SampleEvent] = []
        for request_id, run in list(self.running.items()):
            item = run.item
            limit = item.params.max_tokens or 1
            run.produced += 1
            last = run.cancelled or run.produced >= limit
            weight = 0.0 if item.weights is None else self.snapshots[item.weights]
            for index in range(item.num_samples):
                token = (int(item.prompt[-1]) + run.produced) % VOCABULARY
                reason = "cancelled" if run.cancelled else "length" if last else None
                text = " ".join(str((int(item.prompt[-1]) + k + 1) % VOCABULARY) for k in range(run.produced))
                events.append(
                    SampleEvent(
                        request_id=request_id,
                        index=index,
                        tokens=[token],
                        logprobs=[-1.0 - weight],
                        text_delta=f"{token} ",
                        stop_reason=reason,
                        text=text if last else "",
                    )
                )
            if last or not item.num_samples:
                logprobs = [None] + [-1.0 - weight] * (len(item.prompt) - 1) if item.prompt_logprobs else None
                events.append(SampleEvent(request_id=request_id, done=True, prompt_logprobs=logprobs))
                del self.running[request_id]
        return events

    def stats(self) -> dict[str, float]:
        return {"running": float(len(self.running))}

    def close(self) -> None:
        self.calls.append("close")


class NullHandle:
    """`EngineHandle` on the event loop itself: no thread, since nothing blocks."""

    def __init__(self, engine: NullEngine) -> None:
        self.engine = engine
        self.busy_seconds = 0.0
        self.alive = True
        self._sampling: asyncio.Task[None] | None = None
        self._listeners: dict[str, Callable[[SampleEvent], None]] = {}

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return getattr(self.engine, method)(*args, **kwargs)
        finally:
            self.busy_seconds += time.perf_counter() - started

    def sample(self, item: SampleItem, on_event: Callable[[SampleEvent], None]) -> None:
        try:
            self.engine.submit(item)
        except TrainSessionError as error:
            on_event(SampleEvent(request_id=item.request_id, done=True, error=error))
            return
        self._listeners[item.request_id] = on_event
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.get_running_loop().create_task(self._run())

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    async def _run(self) -> None:
        while self.engine.has_work():
            started = time.perf_counter()
            events = self.engine.step()
            self.busy_seconds += time.perf_counter() - started
            for event in events:
                self._listeners[event.request_id](event)
                if event.done:
                    del self._listeners[event.request_id]
            await asyncio.sleep(0)


class NullHost:
    """`EngineHost` with null engines; ``names`` are its base models."""

    def __init__(self, names: Sequence[str] = (MODEL,), **options: Any) -> None:
        self.engines: dict[str, NullEngine] = {}
        self._names = tuple(names)
        self._options = options
        self._handles: dict[str, NullHandle] = {}

    def list_base_models(self) -> list[BaseModel]:
        return [BaseModel(name, context_length=CONTEXT) for name in self._names]

    def resolve(self, base_model: str) -> str:
        if base_model not in self._names:
            raise UnknownModel(f"unknown base model {base_model!r}; available: {', '.join(self._names)}")
        return base_model

    def context_length(self, base_model: str) -> int | None:
        return CONTEXT

    async def open(self, base_model: str) -> NullHandle:
        if base_model not in self._handles:
            self.engines[base_model] = NullEngine(base_model, **self._options)
            self._handles[base_model] = NullHandle(self.engines[base_model])
        return self._handles[base_model]

    async def tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        return {"tokenizer.json": b"{}"}

    async def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def _one(value: float) -> npt.NDArray[np.float32]:
    return np.full((1, 1), value, np.float32)


def _state(info: EngineInfo, config: LoraConfig, weight: float) -> AdapterState:
    tensors: Mapping[str, npt.NDArray[np.float32]] = {"weight/m.lora_A": _one(1.0), "weight/m.lora_B": _one(weight)}
    return AdapterState(config=config, tensors=dict(tensors), base_identity=info.identity)
