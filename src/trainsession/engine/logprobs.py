"""Logprobs of target tokens without ever holding float32 logits of a whole pass.

Rows go through the unembedding in chunks of a constant number of rows. Where it is a plain frozen
matrix W and a row has one target, the derivative of that row's logprob by its hidden state is one
vector, ``(W[y] - E_p[W]) / temperature``: it is computed beside the logprob, while the chunk's
probabilities are at hand, so that a backward of any loss is a product by row and no chunk is
computed twice. Elsewhere (soft targets, LoRA on the unembedding, softcapped logits) the backward
recomputes each chunk under autograd.

Shapes: T rows of a pass, M target tokens in row order, E hidden size, V vocabulary, R rows of a
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from .context import Segment
from .lora import Adapter
from .model import LoadedModel

CPU_CHUNK_ROWS = 128
CUDA_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is asked of the T rows of a pass; tensors on the CPU.

    Attributes:
        row_M: Row of each target token, ascending; a row has one or, with soft targets, several.
        token_M: The target token ids.
        temperature_T: Logprobs are of ``softmax(logits / temperature)``.
        needs_T: Rows whose logprobs may get a gradient; others get none.
    """

    row_M: torch.Tensor
    token_M: torch.Tensor
    temperature_T: torch.Tensor
    needs_T: torch.Tensor


def target_logprobs(
    model: LoadedModel, h_TE: torch.Tensor, segments: Sequence[Segment], targets: Targets, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs (M,) float32, differentiable by ``h_TE`` and the unembedding's LoRA.

    Args:
        h_TE: Final hidden states.
        segments: Whose rows those are.
        entropy: Also compute each row's entropy (of the tempered distribution).

    Returns:
        Logprobs, and entropies (T,) float32 without gradient, or None.
    """
    groups = _route(model, segments, targets)
    parts = [_group_logprobs(model, h_TE, group, targets, entropy) for group in groups]
    if len(parts) == 1:
        return parts[0]
    logprobs_M = torch.cat([logprobs for logprobs, _ in parts])
    entries_M = torch.cat([group.entries for group in groups])
    logprobs_M = logprobs_M[torch.argsort(entries_M).to(h_TE.device)]
    if not entropy:
        return logprobs_M, None
    rows_T = torch.cat([group.rows for group in groups])
    entropy_T = torch.cat([part for _, part in parts if part is not None])
    return logprobs_M, entropy_T[torch.argsort(rows_T).to(h_TE.device)]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that take one path together: ``weight_VE`` set is the plain one."""

    rows: torch.Tensor
    entries: torch.Tensor
    weight_VE: torch.Tensor | None
    adapter: Adapter | None


def _route(model: LoadedModel, segments: Sequence[Segment], targets: Targets) -> list[_Group]:
    """Plain rows of all segments as one group, the others by segment.

    A row's path depends on its own datum and adapter alone, never on its neighbours.
    """
    weight_VE = model.plain_unembedding
    single_T = torch.bincount(targets.row_M, minlength=len(targets.temperature_T)) == 1
    plain_T = torch.zeros_like(single_T)
    groups: list[_Group] = []
    for segment in segments:
        span = slice(segment.start, segment.stop)
        trained = segment.adapter is not None and model.unembedding_name in segment.adapter.weights
        if weight_VE is not None and not trained:
            plain_T[span] = single_T[span]
        rest = torch.arange(segment.start, segment.stop)[~plain_T[span]]
        if len(rest):
            groups.append(_Group(rest, _entries_of(rest, targets), None, segment.adapter))
    plain = plain_T.nonzero()[:, 0]
    if len(plain):
        groups.append(_Group(plain, _entries_of(plain, targets), weight_VE, None))
    return groups


def _entries_of(rows: torch.Tensor, targets: Targets) -> torch.Tensor:
    wanted_T = torch.zeros(len(targets.temperature_T), dtype=torch.bool)
    wanted_T[rows] = True
    return wanted_T[targets.row_M].nonzero()[:, 0]


def _group_logprobs(
    model: LoadedModel, h_TE: torch.Tensor, group: _Group, targets: Targets, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = h_TE.device
    if len(group.rows) != h_TE.shape[0]:
        h_TE = h_TE.index_select(0, group.rows.to(device))
    tokens_M = targets.token_M[group.entries].to(device)
    temperature_T = targets.temperature_T[group.rows].to(device)
    if group.weight_VE is not None:
        needs_T = targets.needs_T[group.rows]
        logprobs, entropies = _PlainUnembedding.apply(
            h_TE, group.weight_VE, tokens_M, temperature_T, needs_T, entropy, model.exact
        )
        return logprobs, entropies
    # Positions within the group; its rows ascend, so the entries stay in row order.
    local_M = torch.searchsorted(group.rows, targets.row_M[group.entries])
    head = _Head(model, group.adapter, local_M, tokens_M, temperature_T)
    if not torch.is_grad_enabled():
        return head.forward(h_TE, entropy)
    # The unembedding's own LoRA gets its gradient inside the backward, even if nothing below trains.
    h_TE = h_TE if h_TE.requires_grad else h_TE.detach().requires_grad_()
    logprobs, entropies = _RecomputedUnembedding.apply(h_TE, head, entropy)
    return logprobs, entropies


def _chunk_rows(device: torch.device) -> int:
    return CPU_CHUNK_ROWS if device.type == "cpu" else CUDA_CHUNK_ROWS


def _padded(x: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    """``x`` with rows appended up to ``rows``: exact mode computes every chunk at one size."""
    missing = rows - x.shape[0]
    return x if missing <= 0 else functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value)


class _PlainUnembedding(torch.autograd.Function):
    """One target a row and logits ``h W^T``: the derivative by ``h`` is kept instead of any logits."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        h_TE, weight_VE, tokens_T, temperature_T, needs_T, entropy, exact = args
        rows, vocab = h_TE.shape[0], weight_VE.shape[0]
        chunk = _chunk_rows(h_TE.device) if exact else min(_chunk_rows(h_TE.device), rows)
        logprobs_T = h_TE.new_empty(rows, dtype=torch.float32)
        entropy_T = h_TE.new_empty(rows, dtype=torch.float32) if entropy else None
        slopes_TE = torch.zeros_like(h_TE) if ctx.needs_input_grad[0] else None
        logits_RV = h_TE.new_empty(chunk, vocab, dtype=torch.float32)
        probs_RV = torch.empty_like(logits_RV)
        for start in range(0, rows, chunk):
            stop = min(start + chunk, rows)
            size = chunk if exact else stop - start
            z_RV, p_RV = logits_RV[:size], probs_RV[:size]
            h_RE = _padded(h_TE[start:stop], size)
            if h_RE.dtype == torch.float32:
                torch.mm(h_RE, weight_VE.t(), out=z_RV)
            else:
                z_RV.copy_(h_RE @ weight_VE.t())
            tokens_R1 = _padded(tokens_T[start:stop], size)[:, None]
            heat_R1 = _padded(temperature_T[start:stop], size, 1.0)[:, None]
            z_RV /= heat_R1
            # softmax works row by row, so a row's bits don't depend on its place; at the largest
            # logit it is 1 / sum(exp(z - max)), which gives the log-sum-exp without another pass.
            top_R1, at_R1 = z_RV.max(dim=1, keepdim=True)
            torch.softmax(z_RV, dim=1, out=p_RV)
            lse_R1 = top_R1 - p_RV.gather(1, at_R1).log()
            logprobs_T[start:stop] = (z_RV.gather(1, tokens_R1) - lse_R1)[: stop - start, 0]
            if entropy_T is not None:
                mean_R = torch.linalg.vecdot(p_RV, z_RV)
                entropy_T[start:stop] = (lse_R1[:, 0] - mean_R).clamp_min(0)[: stop - start]
            if slopes_TE is not None and bool(needs_T[start:stop].any()):
                p_RV.scatter_add_(1, tokens_R1, -torch.ones_like(heat_R1))
                slopes_RE = (p_RV.to(h_RE.dtype) @ weight_VE) / -heat_R1
                slopes_TE[start:stop] = slopes_RE[: stop - start]
        if slopes_TE is not None:
            ctx.save_for_backward(slopes_TE, needs_T.to(h_TE.device))
        if entropy_T is not None:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slopes_TE, needs_T = ctx.saved_tensors
        dh_TE = torch.where(needs_T, grads[0], 0.0)[:, None] * slopes_TE
        return dh_TE.to(slopes_TE.dtype), None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Head:
    """Any unembedding, chunk by chunk through the model itself."""

    model: LoadedModel
    adapter: Adapter | None
    row_M: torch.Tensor
    """On the CPU: entries of a chunk are found without asking the device."""
    token_M: torch.Tensor
    temperature_T: torch.Tensor

    def chunks(self, rows: int) -> list[tuple[slice, slice]]:
        """(rows, entries) of each chunk."""
        chunk = _chunk_rows(self.token_M.device)
        starts = [*range(0, rows, chunk), rows]
        bounds = torch.searchsorted(self.row_M, torch.tensor(starts)).tolist()
        return [(slice(starts[i], starts[i + 1]), slice(bounds[i], bounds[i + 1])) for i in range(len(starts) - 1)]

    def chunk(
        self, h_RE: torch.Tensor, rows: slice, entries: slice, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logprobs of the chunk's entries and entropies of its rows."""
        size = _chunk_rows(h_RE.device) if self.model.exact else h_RE.shape[0]
        logits_RV = self.model.logits(_padded(h_RE, size), [Segment(self.adapter, 0, size)]).float()
        heat_R1 = _padded(self.temperature_T[rows], size, 1.0)[:, None]
        logprobs_RV = functional.log_softmax(logits_RV / heat_R1, dim=1)
        local = (self.row_M[entries] - rows.start).to(h_RE.device)
        logprobs = logprobs_RV[local, self.token_M[entries]]
        if not entropy:
            return logprobs, None
        probs_RV = torch.softmax(logprobs_RV.detach(), dim=1)
        return logprobs, -torch.linalg.vecdot(probs_RV, logprobs_RV.detach())[: h_RE.shape[0]]

    def forward(self, h_TE: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = [self.chunk(h_TE[rows], rows, entries, entropy) for rows, entries in self.chunks(h_TE.shape[0])]
        logprobs_M = torch.cat([logprobs for logprobs, _ in parts])
        return logprobs_M, torch.cat([part for _, part in parts if part is not None]) if entropy else None


class _RecomputedUnembedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        h_TE, head, entropy = args
        with torch.no_grad():
            logprobs_M, entropy_T = head.forward(h_TE, entropy)
        ctx.save_for_backward(h_TE)
        ctx.head = head
        if entropy_T is not None:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_M, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (h_TE,) = ctx.saved_tensors
        head: _Head = ctx.head
        dh_TE = torch.zeros_like(h_TE)
        for rows, entries in head.chunks(h_TE.shape[0]):
            dlogprobs = grads[0][entries]
            if not bool((dlogprobs != 0).any()):
                continue
            with torch.enable_grad():
                h_RE = h_TE[rows].detach().requires_grad_()
                logprobs, _ = head.chunk(h_RE, rows, entries, entropy=False)
                # Accumulates into the unembedding's LoRA on the way, as activation checkpointing does.
                torch.autograd.backward(logprobs, dlogprobs)
            assert h_RE.grad is not None
            dh_TE[rows] = h_RE.grad
        return dh_TE, None, None
