"""The contract between the service and an engine. Imports no torch.

An engine holds one base model on one device. All its methods are called from one thread (see
`trainsession.runtime.thread`), one at a time, and none of them blocks on anything but compute.
Methods that train or change an adapter either complete or raise and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import TrainSessionError
from ..types import AdamParams, Datum, LoraConfig, SamplingParams
from ..types.results import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the service must know of a loaded base model."""

    base_model: str
    identity: str
    """Hash of the base weights and the engine's dtype-independent configuration."""
    context_length: int
    vocab_size: int
    """Rows of the embedding: ids at or above it are refused."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    exact: bool
    """Bit-equal results alone, in a crowd and after replay (DESIGN section 4)."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """torch, transformers, instruction set, threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainItem:
    """One forward or forward_backward of one adapter; several may share a packed pass.

    ``loss_fn=None`` with ``keep_graph`` set is the forward half of a custom loss.
    """

    adapter_id: str
    data: Sequence[Datum]
    loss_fn: str | None
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True
    keep_graph: str | None = None
    """Id under which the graph stays for a later `Engine.backward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """Logprobs per datum (shape of its target_tokens) and metrics (``name:reduction``)."""

    logprobs: list[npt.NDArray[np.float32]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """An adapter captured in host memory: a copy that later steps don't touch.

    ``tensors`` keys: ``weight/<module>.lora_A|lora_B``, ``exp_avg/...``, ``exp_avg_sq/...``,
    ``grad/...`` (pending float32 gradients), each float32.
    """

    config: LoraConfig
    tensors: dict[str, npt.NDArray[np.float32]]
    step: int = 0
    has_optimizer: bool = False
    base_identity: str = ""
    window: Literal["empty", "open"] = "empty"
    """``open``: gradients are accumulated and not yet stepped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleItem:
    """All samples of one prompt.

    ``weights`` names a frozen snapshot, or None for the base model. ``params.seed`` and
    ``params.max_tokens`` are filled in by the service. ``num_samples=0`` computes prompt logprobs
    only. ``cache_salt`` separates the prefix caches of projects.
    """

    request_id: str
    prompt: npt.NDArray[np.int32]
    num_samples: int
    params: SamplingParams
    weights: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    cache_salt: str = ""


@dataclass(slots=True, kw_only=True)
class SampleEvent:
    """Tokens that one step added to one sample, or the end of a whole request.

    Token events: ``index``, ``tokens``, ``logprobs`` (``topk``) and, on the sample's last event,
    ``stop_reason`` and ``text`` (whole text of the sample). When the last sample of a request
    ends, one more event follows with ``done=True`` and the prompt's logprobs, or with ``error``.
    """

    request_id: str
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    text_delta: str = ""
    """Newly decodable text, without special tokens and never past a stop string."""
    stop_reason: StopReason | None = None
    text: str = ""
    done: bool = False
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    error: TrainSessionError | None = None


class Engine(Protocol):
    """One base model on one device: adapters, training passes, sampling."""

    @property
    def info(self) -> EngineInfo: ...

    # --- adapters -------------------------------------------------------------------------
    def add_adapter(self, adapter_id: str, config: LoraConfig) -> dict[str, Any]:
        """A fresh adapter (``config.seed`` set). Returns ``{"parameters": int, "modules": int}``.

        Raises:
            InvalidRequest: a target module that matches nothing; names it and what exists.
        """
        ...

    def drop_adapter(self, adapter_id: str) -> None: ...

    def capture(self, adapter_id: str, *, optimizer: bool, gradients: bool = False) -> AdapterState: ...

    def restore(self, adapter_id: str, state: AdapterState, *, optimizer: bool) -> None:
        """Load weights (and moments, step, pending gradients) into an existing adapter.

        Without ``optimizer`` moments and step start anew; pending gradients are dropped unless
        the state carries some.

        Raises:
            CheckpointMismatch: other base identity, rank, targets, or no optimizer in it.
        """
        ...

    # --- training -------------------------------------------------------------------------
    def validate(self, item: TrainItem) -> None:
        """Raise `InvalidDatum` / `InvalidRequest` for what could not run; cheap, no compute."""
        ...

    def train(self, items: Sequence[TrainItem]) -> list[TrainOutput | TrainSessionError]:
        """Run items in one packed pass; an item's error leaves that adapter as it was."""
        ...

    def backward(self, forward_id: str, gradients: Sequence[npt.NDArray[np.float32]]) -> None:
        """Accumulate the gradient of kept logprobs; frees the graph.

        Raises:
            NotFound: no such forward is kept (the service then re-runs it).
        """
        ...

    def drop_graph(self, forward_id: str) -> None: ...

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        """AdamW on the accumulated gradients, which it clears. Returns its metrics.

        Raises:
            NoGradients: nothing was accumulated since the last step.
            NonFinite: a gradient is NaN or inf; weights, moments and gradients stay as they were.
        """
        ...

    def zero_grad(self, adapter_id: str) -> None: ...

    # --- frozen weights -------------------------------------------------------------------
    def freeze(self, adapter_id: str, snapshot_id: str) -> None:
        """Copy the adapter's weights as they are now, for sampling."""
        ...

    def capture_snapshot(self, snapshot_id: str) -> AdapterState: ...

    def add_snapshot(self, snapshot_id: str, state: AdapterState) -> None: ...

    def drop_snapshot(self, snapshot_id: str) -> None: ...

    def export_merged(self, adapter_id: str, directory: str) -> None:
        """Write the base model with this adapter merged in as a Hugging Face directory.

        Tied embeddings are untied where the unembedding is trained.
        """
        ...

    # --- sampling -------------------------------------------------------------------------
    def submit(self, item: SampleItem) -> None:
        """Queue a request. Raises `InvalidRequest` for what could not run."""
        ...

    def cancel(self, request_id: str) -> None:
        """Its samples end within a step with ``stop_reason="cancelled"``."""
        ...

    def has_work(self) -> bool: ...

    def step(self) -> list[SampleEvent]:
        """One prefill chunk or decode step over all running samples."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters for metrics: running and waiting samples, cache hits, free blocks."""
        ...

    def close(self) -> None: ...


class EngineHost(Protocol):
    """Finds, loads and runs engines; the service's only way to them (runtime implements it)."""

    def list_base_models(self) -> list[Any]:
        """`BaseModel` entries; those that load without a hub first."""
        ...

    def resolve(self, base_model: str) -> str:
        """The canonical name. Raises `UnknownModel`, naming those that exist."""
        ...

    def context_length(self, base_model: str) -> int | None:
        """That of a canonical name; None where it is not known before the model was downloaded."""
        ...

    async def open(self, base_model: str) -> EngineHandle:
        """The running engine of that model; loads it on first use."""
        ...

    async def tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        """The tokenizer bundle: file name to content."""
        ...

    async def close(self) -> None: ...


class EngineHandle(Protocol):
    """Async access to one engine on its own thread or in its own process."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def busy_seconds(self) -> float:
        """Total time that the engine computed."""
        ...

    @property
    def alive(self) -> bool:
        """False once it is lost, with all that it held: every call then raises `EngineLost`."""
        ...

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run one `Engine` method between two decode steps; raises what it raises, or `EngineLost`."""
        ...

    def sample(self, item: SampleItem, on_event: Any) -> None:
        """Submit; ``on_event(SampleEvent)`` is called on the caller's event loop, in order.
        An error of the submit arrives as an event with ``error`` and ``done``."""
        ...

    def cancel(self, request_id: str) -> None: ...
