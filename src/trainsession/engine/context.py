"""What one forward pass needs beside its tokens: whose rows they are, and how they attend.

transformers' modules call our attention function and our linear layers with nothing but tensors;
both find the rest here. A pass is packed: its T rows are the tokens of many sequences in a row,
all rows of one adapter beside each other. Segments cover all T rows, in order.

Shapes: T rows, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .linear import MultiLoraLinear
    from .lora import Adapter


class Attention(Protocol):
    """How the rows of a pass attend to each other (training) or to a cache (sampling)."""

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention output (T, H, D).

        With a sliding ``window`` position i attends to i - window + 1 ... i.
        """
        ...


class RowAdapters(Protocol):
    """Adapters of a pass by row, where segments would change its shapes (static decode steps)."""

    def linear(self, layer: MultiLoraLinear, x: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N): the layer with every row's own adapter."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``start:stop`` belong to ``adapter`` (None: the base model)."""

    adapter: Adapter | None
    start: int
    stop: int


PASS_TILE = 128
"""Rows of one product in exact mode, in training and prefill passes."""
TRAINING_TILES = (PASS_TILE, 256, 512, 1024)
"""The same for training passes, by the size of the microbatches in them: larger is faster."""
DECODE_TILE = 32
"""The same for decode passes, which have few rows."""


@dataclass(frozen=True, slots=True)
class PassContext:
    segments: Sequence[Segment]
    attention: Attention
    tile: int = PASS_TILE
    """A property of the kind of pass, never of its number of rows (DESIGN section 4, "Rounding")."""
    sampling: bool = False
    """A pass of the sampler: no gradient will be asked for, so layers may use repacked weights."""
    row_adapters: RowAdapters | None = None
    """Takes the place of the segments' adapters."""
    ready: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Outputs that a layer computed for its siblings: by name, what they are of and what they are."""

    @property
    def rows(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def fits(self, rows: int) -> bool:
        """Whether a tensor of so many rows holds this pass, as it is or padded to whole tiles."""
        return rows in (self.rows, self.rows + -self.rows % self.tile)


_local = threading.local()


def maybe_current() -> PassContext | None:
    """The pass that runs on this thread, or None outside of one."""
    return getattr(_local, "context", None)


def current() -> PassContext:
    """The pass that runs on this thread."""
    context = maybe_current()
    if context is None:
        raise RuntimeError("no pass is running: use `running(context)` around the model's forward")
    return context


@contextmanager
def running(context: PassContext) -> Iterator[None]:
    previous = getattr(_local, "context", None)
    _local.context = context
    try:
        yield
    finally:
        _local.context = previous
