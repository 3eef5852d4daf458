"""One training item while it runs: its datums laid out as rows, its loss, its results.

Shapes: T rows (input tokens) and M target tokens (entries) of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..errors import NonFinite, TrainSessionError
from .api import TrainItem, TrainOutput
from .logprobs import Targets
from .lora import Adapter
from .loss_inputs import SIGNATURES, resolve_config
from .losses import LOSSES, LossMetrics, LossValue, TokenBatch
from .packing import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayout:
    """Where one microbatch lies in a pass; all tensors are on the CPU."""

    batch: Microbatch
    lengths: list[int]
    shapes: list[tuple[int, ...]]
    """Of each datum's ``target_tokens``."""
    rows: slice
    """Its rows in the pass."""
    entries: slice
    """Its target tokens in the pass."""
    input_T: torch.Tensor
    row_M: torch.Tensor
    """Row of each target token, counted within the microbatch."""
    token_M: torch.Tensor
    datum_M: torch.Tensor
    """Datum of each target token, counted within the microbatch."""
    temperature_T: torch.Tensor
    needs_T: torch.Tensor

    @staticmethod
    def merged(layouts: Sequence[TargetLayout]) -> Targets:
        """The targets of a whole pass."""
        return Targets(
            row_M=torch.cat([layout.row_M + layout.rows.start for layout in layouts]),
            token_M=torch.cat([layout.token_M for layout in layouts]),
            temperature_T=torch.cat([layout.temperature_T for layout in layouts]),
            needs_T=torch.cat([layout.needs_T for layout in layouts]),
        )

    def place(self, entry: int) -> tuple[int, int]:
        """(datum of the item, position in it) of an entry of this microbatch."""
        datum = int(self.datum_M[entry])
        first = sum(self.lengths[:datum])
        return self.batch.start + datum, int(self.row_M[entry]) - first


class Run:
    """One item under way.

    Args:
        item: What was asked for; already validated.
        adapter: Whose gradients it makes.
        gradients: Of the logprobs, in place of a loss: the second half of a custom loss.
    """

    def __init__(
        self, item: TrainItem, adapter: Adapter, gradients: Sequence[npt.NDArray[np.float32]] | None = None
    ) -> None:
        self.item = item
        self.adapter = adapter
        self.gradients = gradients
        self.lengths = [datum.model_input.length for datum in item.data]
        self.logprobs: list[npt.NDArray[np.float32]] = []
        self.error: TrainSessionError | None = None
        self._metrics = LossMetrics()
        self._config = resolve_config(item.loss_fn, item.loss_fn_config) if item.loss_fn is not None else {}

    @property
    def trains(self) -> bool:
        """Whether it adds gradients to its adapter by itself."""
        return self.gradients is not None or (
            self.item.backward and self.item.loss_fn is not None and self.item.keep_graph is None
        )

    @property
    def wants_entropy(self) -> bool:
        return self.gradients is None and self.item.loss_fn not in (None, "cross_entropy")

    def alone(self, index: int) -> Run:
        """The same for one datum only."""
        item = TrainItem(
            adapter_id=self.item.adapter_id,
            data=[self.item.data[index]],
            loss_fn=self.item.loss_fn,
            loss_fn_config=self.item.loss_fn_config,
        )
        return Run(item, self.adapter, None if self.gradients is None else [self.gradients[index]])

    def output(self) -> TrainOutput | TrainSessionError:
        if self.error is not None:
            return self.error
        metrics = {} if self.item.loss_fn is None else self._metrics.result()
        return TrainOutput(logprobs=self.logprobs, metrics=metrics)

    def layout(self, batch: Microbatch, row: int, entry: int) -> TargetLayout:
        """The microbatch's rows and targets, placed at ``row`` and ``entry`` of a pass."""
        data = self.item.data[batch.start : batch.stop]
        lengths = self.lengths[batch.start : batch.stop]
        targets = [datum.loss_fn_inputs["target_tokens"].data for datum in data]
        widths = [array.size // length for array, length in zip(targets, lengths, strict=True)]
        width_T = torch.tensor(np.repeat(widths, lengths))
        row_M = torch.repeat_interleave(torch.arange(batch.tokens), width_T)
        heats = [
            float(datum.loss_fn_inputs["temperature"].data.item()) if "temperature" in datum.loss_fn_inputs else 1.0
            for datum in data
        ]
        token_M = _flat(targets).astype(np.int64)
        return TargetLayout(
            batch=batch,
            lengths=lengths,
            shapes=[array.shape for array in targets],
            rows=slice(row, row + batch.tokens),
            entries=slice(entry, entry + len(token_M)),
            input_T=torch.from_numpy(np.concatenate([datum.model_input.tokens for datum in data]).astype(np.int64)),
            row_M=row_M,
            token_M=torch.from_numpy(token_M),
            datum_M=torch.tensor(np.repeat(np.arange(len(data)), [array.size for array in targets])),
            temperature_T=torch.tensor(np.repeat(np.asarray(heats, dtype=np.float32), lengths)),
            needs_T=self._needs(batch, row_M),
        )

    def _needs(self, batch: Microbatch, row_M: torch.Tensor) -> torch.Tensor:
        """Rows that a gradient may reach."""
        needs_M = torch.full(row_M.shape, self.trains or self.item.keep_graph is not None)
        if self.gradients is not None:
            needs_M &= torch.from_numpy(_flat(self.gradients[batch.start : batch.stop])) != 0
        elif self.trains and self.item.loss_fn is not None:
            for key in SIGNATURES[self.item.loss_fn].zero_silences:
                needs_M &= self._input(batch, key, len(row_M)) != 0
        needs_T = torch.zeros(batch.tokens, dtype=torch.bool)
        needs_T[row_M[needs_M]] = True
        return needs_T

    def _input(self, batch: Microbatch, key: str, size: int) -> torch.Tensor:
        """A loss input (M,) in float64; ones where a datum leaves out an optional one."""
        arrays = [
            datum.loss_fn_inputs[key].data
            if key in datum.loss_fn_inputs
            else np.ones(datum.loss_fn_inputs["target_tokens"].shape)
            for datum in self.item.data[batch.start : batch.stop]
        ]
        flat = torch.from_numpy(_flat(arrays).astype(np.float64))
        assert len(flat) == size
        return flat

    def absorb(
        self, layout: TargetLayout, logprobs_M: torch.Tensor, entropy_T: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Take a microbatch's logprobs out of its pass; returns their gradient, float32 (M,), if any.

        A NaN or infinity sets ``error``, with the datum named, and returns None.
        """
        own_M = logprobs_M.detach()[layout.entries].float().cpu()
        if self._refuse_non_finite("logprob", own_M, layout):
            return None
        if self.gradients is not None:
            return torch.from_numpy(_flat(self.gradients[layout.batch.start : layout.batch.stop]))
        parts = own_M.numpy().copy()
        sizes = [int(np.prod(shape)) for shape in layout.shapes]
        for part, shape in zip(np.split(parts, np.cumsum(sizes)[:-1]), layout.shapes, strict=True):
            self.logprobs.append(part.reshape(shape))
        if self.item.loss_fn is None:
            return None
        with torch.enable_grad():
            leaf_M = own_M.double().requires_grad_(self.trains)
            batch = self._tokens(layout, leaf_M)
            value = LOSSES[self.item.loss_fn](batch, self._config)
            loss = value.loss_M.sum()
        if self._refuse_non_finite("loss", value.loss_M.detach(), layout):
            return None
        self._measure(layout, value, batch.weights_M, entropy_T)
        if not self.trains:
            return None
        (gradient_M,) = torch.autograd.grad(loss, leaf_M)
        gradient_M = gradient_M.float()
        return None if self._refuse_non_finite("loss's gradient", gradient_M, layout) else gradient_M

    def _tokens(self, layout: TargetLayout, logprobs_M: torch.Tensor) -> TokenBatch:
        def optional(key: str) -> torch.Tensor | None:
            present = any(key in datum.loss_fn_inputs for datum in self.item.data)
            return self._input(layout.batch, key, len(logprobs_M)) if present else None

        weights_M = self._input(layout.batch, "weights", len(logprobs_M))
        return TokenBatch(
            logprobs_M=logprobs_M,
            weights_M=weights_M,
            datum_M=layout.datum_M,
            num_datums=len(layout.lengths),
            sampler_logprobs_M=optional("logprobs"),
            advantages_M=optional("advantages"),
            ratio_mask_M=self._ratio_mask(layout, weights_M),
        )

    def _ratio_mask(self, layout: TargetLayout, weights_M: torch.Tensor) -> torch.Tensor:
        """gspo's mask; a datum without one uses its weights."""
        if self.item.loss_fn != "gspo":
            return weights_M
        data = self.item.data[layout.batch.start : layout.batch.stop]
        has_D = torch.tensor(["sequence_ratio_mask" in datum.loss_fn_inputs for datum in data])
        mask_M = self._input(layout.batch, "sequence_ratio_mask", len(weights_M))
        return torch.where(has_D[layout.datum_M], mask_M, weights_M)

    def _measure(
        self, layout: TargetLayout, value: LossValue, weights_M: torch.Tensor, entropy_T: torch.Tensor | None
    ) -> None:
        entropy_M = None
        if self.wants_entropy and entropy_T is not None:
            entropy_M = entropy_T[layout.rows].double().cpu()[layout.row_M]
        self._metrics.add(value, weights_M, layout.row_M, entropy_M)

    def _refuse_non_finite(self, what: str, values_M: torch.Tensor, layout: TargetLayout) -> bool:
        bad_M = ~torch.isfinite(values_M)
        if not bool(bad_M.any()):
            return False
        entry = int(bad_M.nonzero()[0, 0])
        datum, position = layout.place(entry)
        self.error = NonFinite(
            f"datum {datum}: the {what} at position {position} is {float(values_M[entry])}; no gradient was added",
            details={"datum": datum, "position": position, "key": what},
        )
        return True


def _flat(arrays: Sequence[npt.NDArray]) -> npt.NDArray:
    """One writable vector of all values, in order."""
    return np.concatenate([array.reshape(-1) for array in arrays])
