"""LoRA matrices of many adapters side by side, at addresses that never change.

A decode step that is captured once serves whatever adapters come and go: every adapter has columns of
its own in one A and one B per layer, and a row is zero at the columns of the others in between. So the
products of all rows and all adapters are two, ``(x A^T masked) B^T``, however they are mixed. Layers
that are called with the same tensor (query, key and value; gate and up) share the first. An adapter's
scale is part of its A here.

Shapes: T rows, K inputs, N outputs, C columns.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ..linear import MultiLoraLinear
from ..lora import Adapter

COLUMNS = 256
"""Of all adapters of one step together: eight of rank 32, or one of the largest rank."""
_STEPS = (32, 64, 128, 256)
"""Columns that a step may compute over."""
_GRAIN = 16
"""Columns are given out in multiples of it, which products run faster with."""


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """`context.RowAdapters` of a static pass: true at columns that are not of the row's adapter, (T, C); C may be 0."""

    bank: AdapterBank
    hidden_TC: torch.Tensor
    _low: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """What a layer computed for its siblings: by name, of which tensor, and their ``x A^T * mask``."""

    def linear(self, layer: MultiLoraLinear, x: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N): the layer with every row's own adapter."""
        out = functional.linear(x, layer.weight, layer.bias)
        b_NC = self.bank.b.get(layer.name)
        if b_NC is not None and self.hidden_TC.shape[1]:
            columns = self.hidden_TC.shape[1]
            out.view(-1, out.shape[-1]).addmm_(self._low_of(layer, x), b_NC[:, :columns].t())
        return out

    def _low_of(self, layer: MultiLoraLinear, x: torch.Tensor) -> torch.Tensor:
        ready = self._low.pop(layer.name, None)
        if ready is not None and ready[0] is x:
            return ready[1]
        a_SCK = self.bank.a[layer.siblings[0].name][:, : self.hidden_TC.shape[1]]
        # Filled, not multiplied: a row that overflows in another's columns must not become NaN by it.
        low_STC = (x.reshape(-1, x.shape[-1]) @ a_SCK.transpose(1, 2)).masked_fill_(self.hidden_TC, 0)
        for sibling, low_TC in zip(layer.siblings, low_STC, strict=True):
            self._low[sibling.name] = (x, low_TC)
        return self._low.pop(layer.name)[1]


@dataclass(slots=True)
class _Place:
    columns: slice
    first: weakref.ref[torch.nn.Parameter]
    """The adapter's first matrix: tells whether this is still that adapter's place."""
    used: int


class AdapterBank:
    """The places of adapters, and the matrices they stand in.

    Attributes:
        a: By the first of siblings, their A's (S, C, K), scaled, in the model's dtype.
        b: By layer, B (N, C), of those that an adapter trains.
        generation: Changes when matrices are added: what was captured before lacks them.
    """

    def __init__(self, layers: Mapping[str, MultiLoraLinear]) -> None:
        self.a: dict[str, torch.Tensor] = {}
        self.b: dict[str, torch.Tensor] = {}
        self.generation = 0
        self._layers = layers
        self._places: dict[int, _Place] = {}
        self._time = 0

    def place(self, owners: Sequence[Adapter | None]) -> npt.NDArray[np.bool_] | None:
        """Bring the rows' adapters in, and return what each row does not see (rows, columns of the step).

        None: they have more columns than there are, or one has numbers that the model's dtype does not hold.
        """
        self._time += 1
        wanted = {id(adapter): adapter for adapter in owners if adapter is not None}
        if sum(_width(adapter) for adapter in wanted.values()) > COLUMNS:
            return None
        for adapter in wanted.values():
            place = self._find(adapter)
            if place is not None:
                place.used = self._time
            elif not self._holds(adapter):
                return None
        if not all(self._find(adapter) or self._bring_in(adapter) for adapter in wanted.values()):
            self._places.clear()  # there is room, but in pieces
            for adapter in wanted.values():
                self._bring_in(adapter)
        spans = {key: self._places[_key(adapter)].columns for key, adapter in wanted.items()}
        last = max((span.stop for span in spans.values()), default=0)
        columns = 0 if last == 0 else next(step for step in _STEPS if step >= last)
        hidden = np.ones((len(owners), columns), dtype=np.bool_)
        for row, adapter in enumerate(owners):
            if adapter is not None:
                hidden[row, spans[id(adapter)]] = False
        return hidden

    def _find(self, adapter: Adapter) -> _Place | None:
        place = self._places.get(_key(adapter))
        return place if place is not None and place.first() is not None else None

    def _holds(self, adapter: Adapter) -> bool:
        """Whether all numbers stay finite here: an infinity times another row's zero would be NaN."""
        largest = torch.stack(torch._foreach_norm([p.detach() for p in adapter.parameters()], float("inf")))
        largest[::2] *= adapter.scale
        return bool(largest.max() <= torch.finfo(next(iter(self._layers.values())).weight.dtype).max)

    def _bring_in(self, adapter: Adapter) -> bool:
        """Copy an adapter into free columns, or into those of adapters that this step does not use."""
        start = self._free(_width(adapter))
        if start is None:
            return False
        columns = slice(start, start + _width(adapter))
        for name in adapter.weights.keys() - self.b.keys():
            self._add(self._layers[name])
        for name, b_NC in self.b.items():
            siblings = self._layers[name].siblings
            place = next(i for i, sibling in enumerate(siblings) if sibling.name == name)
            a_CK = self.a[siblings[0].name][place]
            a_CK[columns].zero_()
            b_NC[:, columns].zero_()
            pair = adapter.weights.get(name)
            if pair is not None:
                rank = pair.A.shape[0]
                a_CK[start : start + rank].copy_(pair.A * adapter.scale)
                b_NC[:, start : start + rank].copy_(pair.B)
        # Only now: an adapter that was copied half, for want of memory, must not be found.
        self._places[_key(adapter)] = _Place(columns, weakref.ref(adapter.parameters()[0]), self._time)
        return True

    def _free(self, width: int) -> int | None:
        """Where ``width`` columns are free; the longest unused adapters make room."""
        self._places = {key: place for key, place in self._places.items() if place.first() is not None}
        while True:
            start = 0
            for place in sorted(self._places.values(), key=lambda place: place.columns.start):
                if place.columns.start - start >= width:
                    return start
                start = place.columns.stop
            if COLUMNS - start >= width:
                return start
            unused = [key for key, place in self._places.items() if place.used < self._time]
            if not unused:
                return None
            del self._places[min(unused, key=lambda key: self._places[key].used)]

    def _add(self, layer: MultiLoraLinear) -> None:
        first, weight = layer.siblings[0].name, layer.weight
        if first not in self.a:
            self.a[first] = weight.new_zeros(len(layer.siblings), COLUMNS, layer.in_features)
        self.b[layer.name] = weight.new_zeros(layer.out_features, COLUMNS)
        self.generation += 1


def _key(adapter: Adapter) -> int:
    return id(adapter.parameters()[0])


def _width(adapter: Adapter) -> int:
    return -(-adapter.config.rank // _GRAIN) * _GRAIN
