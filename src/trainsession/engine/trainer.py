"""Forward and backward passes of many adapters over one base model.

A training call (item) is cut into microbatches; microbatches of different items travel in one
packed pass. Gradients of an item are collected beside its adapter's and added at its end, so that
an item either counts whole or not at all.

Shapes: T rows of a pass, M target tokens of it, E hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ..errors import InvalidDatum, InvalidRequest, NonFinite, NotFound, TrainSessionError
from .api import TrainItem, TrainOutput
from .context import PASS_TILE, TRAINING_TILES, PassContext, Segment
from .logprobs import target_logprobs
from .lora import Adapter
from .loss_inputs import check_data
from .model import LoadedModel
from .packing import Microbatch, plan, tile_of
from .run import Run, TargetLayout
from .varlen import VarlenAttention

CPU_BUDGET_BYTES = 2048
"""Tokens of a packed pass times the bytes of a number: 512 in float32 and 1,024 in bf16, so that
activations take equally much memory, below a gigabyte in a small model. In bf16 2,048 tokens of a
135M model took 6.5 s with 512 a pass, 5.1 s with 1,024 and no less with 2,048 (two AMX cores)."""
CUDA_TOKEN_BUDGET = 8192
KEPT_BUDGETS = 4
"""A kept forward of more than this many token budgets is computed again by its backward."""


@dataclass(frozen=True, slots=True)
class _PassOutput:
    """Of one pass, in the order of its rows."""

    logprobs_M: torch.Tensor
    entropy_T: torch.Tensor | None
    layouts: list[TargetLayout]


@dataclass(slots=True)
class _Kept:
    """A forward that waits for its gradients; ``passes`` is None where they are computed again."""

    item: TrainItem
    adapter: Adapter
    versions: list[int]
    shapes: list[tuple[int, ...]]
    tokens: int
    passes: list[_PassOutput] | None


class Trainer:
    """Training passes; an engine has one.

    Args:
        model: The base model.
        token_budget: Tokens of a packed pass; default 512 on the CPU (1,024 in half precision) and
            8,192 on CUDA. A longer sequence is a pass of its own.
    """

    def __init__(self, model: LoadedModel, *, token_budget: int | None = None) -> None:
        self.model = model
        on_cpu = model.device.type == "cpu"
        default = CPU_BUDGET_BYTES // model.dtype.itemsize if on_cpu else CUDA_TOKEN_BUDGET
        self.token_budget = default if token_budget is None else token_budget
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def validate(self, item: TrainItem, adapter: Adapter) -> None:
        """Refuse what could not run; no compute.

        Raises:
            InvalidRequest: no data, an unknown loss or configuration key, nothing to do, or a
                backward for an adapter that does not train.
            InvalidDatum: names the datum's index and the key.
        """
        if item.loss_fn is None and item.keep_graph is None and item.backward:
            raise InvalidRequest("a backward pass needs a loss_fn", details={"key": "loss_fn"})
        if (item.backward or item.keep_graph) and not any(p.requires_grad for p in adapter.parameters()):
            raise InvalidRequest(f"adapter {item.adapter_id} is frozen: it takes no gradients")
        check_data(
            item.data,
            item.loss_fn,
            item.loss_fn_config,
            context_length=self.model.context_length,
            vocab_size=self.model.vocab_size,
        )

    def train(
        self, items: Sequence[TrainItem], adapters: Mapping[str, Adapter]
    ) -> list[TrainOutput | TrainSessionError]:
        """Run items together; each result is its output, or the error that left its adapter as it was.

        Items of one adapter count in their order, as if they ran one after the other.
        """
        results: dict[int, TrainOutput | TrainSessionError] = {}
        runs: dict[int, Run] = {}
        for index, item in enumerate(items):
            adapter = adapters[item.adapter_id]
            try:
                self.validate(item, adapter)
            except InvalidRequest as error:
                results[index] = error
            else:
                runs[index] = Run(item, adapter)
        while runs:
            # One item of each adapter at a time: items that share `.grad` buffers cannot share a pass.
            turn: dict[str, int] = {}
            for index, run in runs.items():
                turn.setdefault(run.item.adapter_id, index)
            current = {index: runs.pop(index) for index in sorted(turn.values())}
            self._run(list(current.values()))
            results |= {index: run.output() for index, run in current.items()}
        return [results[index] for index in range(len(items))]

    def backward(self, forward_id: str, gradients: Sequence[npt.NDArray[np.float32]]) -> None:
        """Accumulate the gradients of a kept forward's logprobs, and forget the forward.

        Args:
            forward_id: The item's ``keep_graph``.
            gradients: Derivative of the loss by each datum's logprobs, of the same shapes.

        Raises:
            NotFound: no such forward is kept, or its adapter changed since.
            InvalidDatum: a gradient of another shape, NaN or infinite; the forward stays.
            NonFinite: a gradient of the adapter is NaN or infinite; nothing was accumulated.
        """
        kept = self._kept.get(forward_id)
        if kept is None or kept.versions != _versions(kept.adapter):
            self.drop_graph(forward_id)
            raise NotFound(f"no forward {forward_id} is kept", details={"forward_id": forward_id})
        if len(gradients) != len(kept.shapes):
            raise InvalidRequest(
                f"{len(gradients)} gradients for {len(kept.shapes)} datums", details={"key": "gradients"}
            )
        for index, (gradient, shape) in enumerate(zip(gradients, kept.shapes, strict=True)):
            details = {"datum": index, "key": "gradients"}
            if gradient.shape != shape:
                raise InvalidDatum(
                    f"datum {index}: gradient of shape {gradient.shape}, expected {shape}", details=details
                )
            if not np.isfinite(gradient).all():
                raise InvalidDatum(f"datum {index}: the gradient of its logprobs is NaN or infinite", details=details)
        self.drop_graph(forward_id)
        run = Run(replace(kept.item, keep_graph=None), kept.adapter, gradients=gradients)
        if kept.passes is None:
            self._run([run])
        else:
            with self._collecting([run]):
                for output in kept.passes:
                    self._flow([run], output)
        if run.error is not None:
            raise run.error

    def drop_graph(self, forward_id: str) -> None:
        """Forget a kept forward; unknown ids are fine."""
        self._kept.pop(forward_id, None)

    def forget(self, adapter: Adapter) -> None:
        """Drop what is kept for an adapter that goes away."""
        for forward_id in [key for key, kept in self._kept.items() if kept.adapter is adapter]:
            self.drop_graph(forward_id)

    def _run(self, runs: list[Run]) -> None:
        """Runs of different adapters: all their passes, and their gradients added at the end."""
        with self._collecting([run for run in runs if run.trains]):
            for trains in (True, False):
                self._run_packed([run for run in runs if run.trains == trains and run.item.keep_graph is None])
        for run in runs:
            if run.item.keep_graph is not None:
                self._run_kept(run)

    def _run_packed(self, runs: list[Run]) -> None:
        for batches in self._plan(runs):
            live = [batch for batch in batches if runs[batch.item].error is None]
            if live:
                self._flow(runs, self._forward(runs, live))

    def _plan(self, runs: list[Run]) -> list[list[Microbatch]]:
        tiles = TRAINING_TILES if self.model.exact else None
        return plan([run.lengths for run in runs], self.token_budget, tiles)

    def _run_kept(self, run: Run) -> None:
        forward_id = run.item.keep_graph
        assert forward_id is not None
        self.forget(run.adapter)
        fits = sum(run.lengths) <= KEPT_BUDGETS * self.token_budget
        outputs: list[_PassOutput] = []
        for batches in self._plan([run]):
            output = self._forward([run], batches, keep=fits)
            run.absorb(output.layouts[0], output.logprobs_M, output.entropy_T)
            if run.error is not None:
                return
            outputs.append(output)
        shapes = [logprobs.shape for logprobs in run.logprobs]
        self._kept[forward_id] = _Kept(
            run.item, run.adapter, _versions(run.adapter), shapes, sum(run.lengths), outputs if fits else None
        )
        self._evict_graphs()

    def _evict_graphs(self) -> None:
        """Turn the oldest kept graphs into recomputed ones until the rest fit."""
        held = [kept for kept in self._kept.values() if kept.passes is not None]
        room = KEPT_BUDGETS * self.token_budget
        for kept in reversed(held):
            room -= kept.tokens
            if room < 0:
                kept.passes = None

    def _forward(self, runs: list[Run], batches: Sequence[Microbatch], *, keep: bool = False) -> _PassOutput:
        """One packed pass up to its logprobs; with a graph where a gradient may flow back."""
        layouts: list[TargetLayout] = []
        segments: list[Segment] = []
        row = entry = 0
        for batch in batches:
            layout = runs[batch.item].layout(batch, row, entry)
            layouts.append(layout)
            segments.append(Segment(runs[batch.item].adapter, row, row + batch.tokens))
            row, entry = row + batch.tokens, entry + len(layout.token_M)
        lengths = [length for layout in layouts for length in layout.lengths]
        targets = TargetLayout.merged(layouts)
        graph = keep or bool(targets.needs_T.any())
        tokens_T = torch.cat([layout.input_T for layout in layouts]).to(self.model.device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(self.model.device)
        # All microbatches of a pass have the same tile.
        tile = tile_of(batches[0].tokens, TRAINING_TILES) if self.model.exact else PASS_TILE
        context = PassContext(segments, VarlenAttention(lengths, exact=self.model.exact), tile)
        with torch.set_grad_enabled(graph):
            h_TE = self.model.hidden(tokens_T, positions_T, context)
            logprobs_M, entropy_T = target_logprobs(
                self.model, h_TE, segments, targets, entropy=any(runs[batch.item].wants_entropy for batch in batches)
            )
        return _PassOutput(logprobs_M, entropy_T, layouts)

    def _flow(self, runs: list[Run], output: _PassOutput) -> None:
        """Hand each run its logprobs, and its loss's gradient back through the pass."""
        dlogprobs_M = torch.zeros(output.logprobs_M.shape, dtype=torch.float32)
        for layout in output.layouts:
            gradient = runs[layout.batch.item].absorb(layout, output.logprobs_M, output.entropy_T)
            if gradient is not None:
                dlogprobs_M[layout.entries] = gradient
        if output.logprobs_M.requires_grad and bool((dlogprobs_M != 0).any()):
            torch.autograd.backward(output.logprobs_M, dlogprobs_M.to(output.logprobs_M.device))

    @contextmanager
    def _collecting(self, runs: list[Run]) -> Iterator[None]:
        """Collect the gradients of these runs, and add them to their adapters' if they succeeded."""
        before = [[parameter.grad for parameter in run.adapter.parameters()] for run in runs]
        for run in runs:
            for parameter in run.adapter.parameters():
                parameter.grad = None
        finished = False
        try:
            yield
            for run, saved in zip(runs, before, strict=True):
                if run.error is None:
                    run.error = self._find_non_finite(run)
                if run.error is None:
                    _open_window(run.adapter, saved)
            # What needs memory is behind us: from here on nothing can fail.
            finished = True
        finally:
            for run, saved in zip(runs, before, strict=True):
                for parameter, old in zip(run.adapter.parameters(), saved, strict=True):
                    new = parameter.grad
                    if not finished or run.error is not None or new is None:
                        parameter.grad = old
                    else:
                        parameter.grad = new if old is None else old.add_(new)

    def _find_non_finite(self, run: Run) -> NonFinite | None:
        """The error of a run whose gradients are NaN or infinite though its loss is finite."""
        grads = [parameter.grad for parameter in run.adapter.parameters() if parameter.grad is not None]
        if not grads or bool(torch.isfinite(torch.stack([grad.abs().amax() for grad in grads])).all()):
            return None
        # Rare, so the datum is found by running each alone.
        for index in range(len(run.item.data)):
            if len(run.item.data) == 1:
                return NonFinite("datum 0: its gradient is NaN or infinite", details={"datum": 0})
            alone = run.alone(index)
            self._run([alone])
            if alone.error is not None:
                return NonFinite(
                    f"datum {index}: its gradient is NaN or infinite", details={"datum": index, "key": "gradient"}
                )
        return NonFinite("the sum of the datums' gradients overflows")


def _versions(adapter: Adapter) -> list[int]:
    """Changes with every change in place of a weight: a kept graph is then of other weights."""
    return [parameter._version for parameter in adapter.parameters()]


def _open_window(adapter: Adapter, before: Sequence[torch.Tensor | None]) -> None:
    """Gradients exist, if only zeros, once a backward succeeded: an optim_step may follow."""
    for parameter, old in zip(adapter.parameters(), before, strict=True):
        if parameter.grad is None and old is None:
            parameter.grad = torch.zeros_like(parameter)
