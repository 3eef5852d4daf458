"""`LocalEngine`: one base model on one device, with its adapters, snapshots, trainer and sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from ..errors import CheckpointMismatch, Conflict, NotFound, TrainSessionError
from ..tokenization import Tokenizer
from ..types import AdamParams, LoraConfig
from .api import AdapterState, EngineInfo, SampleEvent, SampleItem, TrainItem, TrainOutput
from .checkpoint import adapter_modules
from .lora import Adapter, LoraPair, new_adapter
from .merge import export_merged
from .model import LoadedModel, load_model
from .optim import AdamState, optim_step
from .sampler.sampler import Sampler
from .trainer import Trainer


@dataclass(slots=True)
class _Trained:
    """An adapter in training, with its optimizer."""

    adapter: Adapter
    optimizer: AdamState = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = AdamState.fresh(self.adapter)

    def names(self) -> list[str]:
        """``<module>.lora_A|lora_B``, in the order of the adapter's parameters."""
        return [f"{module}.{factor}" for module in self.adapter.weights for factor in ("lora_A", "lora_B")]


class LocalEngine:
    """Implements `trainsession.engine.api.Engine` in this process; one thread may use it.

    Args:
        model: The base model.
        tokenizer: Of the samples' text and stop strings.
    """

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self._trainer = Trainer(model)
        self._sampler = Sampler(model, tokenizer)
        self._trained: dict[str, _Trained] = {}
        self._snapshots: dict[str, Adapter] = {}
        self._info = EngineInfo(
            base_model=model.name,
            identity=model.identity,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            exact=model.exact,
            versions=_versions(model.device),
        )

    @classmethod
    def load(
        cls, path: str | Path, *, name: str, device: str = "auto", dtype: str = "auto", exact: bool | None = None
    ) -> LocalEngine:
        """Load a Hugging Face directory with its tokenizer; see `load_model`."""
        model = load_model(path, name=name, device=device, dtype=dtype, exact=exact)
        return cls(model, Tokenizer.from_directory(path))

    @property
    def info(self) -> EngineInfo:
        return self._info

    # --- adapters -------------------------------------------------------------------------
    def add_adapter(self, adapter_id: str, config: LoraConfig) -> dict[str, Any]:
        if adapter_id in self._trained:
            raise Conflict(f"adapter {adapter_id} exists", details={"adapter_id": adapter_id})
        adapter = new_adapter(config, self.model.lora_modules, self.model.device)
        self._trained[adapter_id] = _Trained(adapter)
        return {"parameters": sum(p.numel() for p in adapter.parameters()), "modules": len(adapter.weights)}

    def drop_adapter(self, adapter_id: str) -> None:
        """Forget an adapter; unknown ids are fine."""
        trained = self._trained.pop(adapter_id, None)
        if trained is not None:
            self._trainer.forget(trained.adapter)

    def capture(self, adapter_id: str, *, optimizer: bool, gradients: bool = False) -> AdapterState:
        """A copy in host memory.

        Args:
            adapter_id: Whose.
            optimizer: With moments and step.
            gradients: With the pending gradients, if there are any; the window is then ``open``.
        """
        trained = self._find(adapter_id)
        parameters = trained.adapter.parameters()
        tensors = _copies("weight", trained.names(), parameters)
        if optimizer:
            tensors |= _copies("exp_avg", trained.names(), trained.optimizer.exp_avg)
            tensors |= _copies("exp_avg_sq", trained.names(), trained.optimizer.exp_avg_sq)
        pending = _copies("grad", trained.names(), [p.grad for p in parameters]) if gradients else {}
        return AdapterState(
            config=trained.adapter.config,
            tensors=tensors | pending,
            step=trained.optimizer.step if optimizer else 0,
            has_optimizer=optimizer,
            base_identity=self.model.identity,
            window="open" if pending else "empty",
        )

    def restore(self, adapter_id: str, state: AdapterState, *, optimizer: bool) -> None:
        trained = self._find(adapter_id)
        adapter = trained.adapter
        self._check_fits(state)
        for key in ("rank", "scaled_alpha"):
            mine, theirs = getattr(adapter.config, key), getattr(state.config, key)
            if mine != theirs:
                name = key.removeprefix("scaled_")
                raise CheckpointMismatch(
                    f"the checkpoint has {name} {theirs:g}, this session {mine:g}", details={"key": name}
                )
        modules = set(adapter_modules(state))
        for module in sorted(modules ^ set(adapter.weights)):
            owner, other = ("checkpoint", "session") if module in modules else ("session", "checkpoint")
            raise CheckpointMismatch(f"the {owner} trains {module}, the {other} does not", details={"key": module})
        if optimizer and not state.has_optimizer:
            raise CheckpointMismatch(
                "the checkpoint holds no optimizer state: load its weights alone, or a checkpoint of kind state",
                details={"key": "optimizer"},
            )
        moments = AdamState.fresh(adapter)
        if optimizer:
            moments.step = state.step
            for index, name in enumerate(trained.names()):
                moments.exp_avg[index] = self._tensor(state, f"exp_avg/{name}")
                moments.exp_avg_sq[index] = self._tensor(state, f"exp_avg_sq/{name}")
        weights = [self._tensor(state, f"weight/{name}") for name in trained.names()]
        gradients = [
            self._tensor(state, f"grad/{name}") if f"grad/{name}" in state.tensors else None for name in trained.names()
        ]
        # Everything is there and fits: from here on nothing can fail.
        with torch.no_grad():
            for parameter, weight, gradient in zip(adapter.parameters(), weights, gradients, strict=True):
                parameter.copy_(weight)
                parameter.grad = gradient
        trained.optimizer = moments

    # --- training -------------------------------------------------------------------------
    def validate(self, item: TrainItem) -> None:
        self._trainer.validate(item, self._find(item.adapter_id).adapter)

    def train(self, items: Sequence[TrainItem]) -> list[TrainOutput | TrainSessionError]:
        return self._trainer.train(items, {item.adapter_id: self._find(item.adapter_id).adapter for item in items})

    def backward(self, forward_id: str, gradients: Sequence[npt.NDArray[np.float32]]) -> None:
        self._trainer.backward(forward_id, gradients)

    def drop_graph(self, forward_id: str) -> None:
        self._trainer.drop_graph(forward_id)

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        trained = self._find(adapter_id)
        return optim_step(trained.adapter, trained.optimizer, params)

    def zero_grad(self, adapter_id: str) -> None:
        for parameter in self._find(adapter_id).adapter.parameters():
            parameter.grad = None

    # --- frozen weights -------------------------------------------------------------------
    def freeze(self, adapter_id: str, snapshot_id: str) -> None:
        """Copy the adapter's weights as they are now; a snapshot id is used once."""
        adapter = self._find(adapter_id).adapter
        self._refuse_known_snapshot(snapshot_id)
        self._snapshots[snapshot_id] = adapter.frozen_copy()

    def capture_snapshot(self, snapshot_id: str) -> AdapterState:
        snapshot = self._find_snapshot(snapshot_id)
        names = [f"{module}.{factor}" for module in snapshot.weights for factor in ("lora_A", "lora_B")]
        return AdapterState(
            config=snapshot.config,
            tensors=_copies("weight", names, snapshot.parameters()),
            base_identity=self.model.identity,
        )

    def add_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        """Frozen weights from a checkpoint.

        Raises:
            CheckpointMismatch: of another base model.
        """
        self._refuse_known_snapshot(snapshot_id)
        self._check_fits(state)
        weights = {
            module: LoraPair(
                torch.nn.Parameter(self._tensor(state, f"weight/{module}.lora_A"), requires_grad=False),
                torch.nn.Parameter(self._tensor(state, f"weight/{module}.lora_B"), requires_grad=False),
            )
            for module in adapter_modules(state)
        }
        self._snapshots[snapshot_id] = Adapter(state.config, weights)

    def drop_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot; samples that run on it go on. Unknown ids are fine."""
        self._snapshots.pop(snapshot_id, None)

    def export_merged(self, adapter_id: str, directory: str) -> None:
        export_merged(self.model, self._find(adapter_id).adapter, directory)

    # --- sampling -------------------------------------------------------------------------
    def submit(self, item: SampleItem) -> None:
        self._sampler.submit(item, None if item.weights is None else self._find_snapshot(item.weights))

    def cancel(self, request_id: str) -> None:
        self._sampler.cancel(request_id)

    def has_work(self) -> bool:
        return self._sampler.has_work()

    def step(self) -> list[SampleEvent]:
        return self._sampler.step()

    def stats(self) -> dict[str, float]:
        return {**self._sampler.stats(), "adapters": len(self._trained), "snapshots": len(self._snapshots)}

    def close(self) -> None:
        """Drop adapters and snapshots; the model goes with the engine itself."""
        self._trained.clear()
        self._snapshots.clear()

    # --- inside ---------------------------------------------------------------------------
    def _find(self, adapter_id: str) -> _Trained:
        trained = self._trained.get(adapter_id)
        if trained is None:
            raise NotFound(f"no adapter {adapter_id} is loaded", details={"adapter_id": adapter_id})
        return trained

    def _find_snapshot(self, snapshot_id: str) -> Adapter:
        snapshot = self._snapshots.get(snapshot_id)
        if snapshot is None:
            raise NotFound(f"no snapshot {snapshot_id} is loaded", details={"snapshot_id": snapshot_id})
        return snapshot

    def _refuse_known_snapshot(self, snapshot_id: str) -> None:
        if snapshot_id in self._snapshots:
            raise Conflict(
                f"snapshot {snapshot_id} exists, and snapshots never change", details={"snapshot_id": snapshot_id}
            )

    def _check_fits(self, state: AdapterState) -> None:
        """Whether an adapter belongs on this base model: its identity, else its modules and shapes."""
        if state.base_identity and state.base_identity != self.model.identity:
            raise CheckpointMismatch(
                f"the checkpoint belongs to other base weights ({state.base_identity[:12]}) than "
                f"{self.model.name} ({self.model.identity[:12]})",
                details={"key": "base_identity"},
            )
        for module in adapter_modules(state):
            linear = self.model.lora_modules.get(module)
            if linear is None:
                raise CheckpointMismatch(f"{self.model.name} has no linear layer {module}", details={"key": module})
            rank = state.config.rank
            for factor, shape in (("lora_A", (rank, linear.in_features)), ("lora_B", (linear.out_features, rank))):
                found = state.tensors[f"weight/{module}.{factor}"].shape
                if found != shape:
                    raise CheckpointMismatch(
                        f"{module}.{factor} has shape {found} in the checkpoint, {shape} in {self.model.name}",
                        details={"key": f"{module}.{factor}"},
                    )

    def _tensor(self, state: AdapterState, key: str) -> torch.Tensor:
        value = state.tensors.get(key)
        if value is None:
            raise CheckpointMismatch(f"the checkpoint has no {key}", details={"key": key})
        return torch.tensor(value, dtype=torch.float32, device=self.model.device)


def _copies(
    group: str, names: Sequence[str], tensors: Sequence[torch.Tensor | None]
) -> dict[str, npt.NDArray[np.float32]]:
    """Host copies under ``<group>/<name>``; what is None is left out."""
    return {
        f"{group}/{name}": tensor.detach().to("cpu", torch.float32, copy=True).numpy()
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None
    }


def _versions(device: torch.device) -> Mapping[str, str]:
    """What bit-equality holds under."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        return {**versions, "cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    instructions = torch.backends.cpu.get_cpu_capability()
    return {**versions, "instruction_set": instructions, "threads": str(torch.get_num_threads())}
