"""From logits to tokens: penalties, logprobs, truncation and the draw, batched over rows.

Every operation works on each row alone, and a row's random number comes from its own counter
(`uniform`), so a sample does not depend on the rows around it. No global generator is used.

Shapes: R rows (samples), V vocabulary, K most likely tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...types import SamplingParams

_FIRST_CANDIDATES = 512
"""Sorted candidates that top-p looks at first; more where they don't hold enough probability."""
_BLOCK = 256
"""Tokens of one part of the cumulative distribution."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the draw of one row depends on.

    ``uniform`` is in [0, 1); ``banned`` tokens cannot be drawn (end tokens before ``min_tokens``);
    ``topk`` alternatives are returned.
    """

    params: SamplingParams
    uniform: float
    prompt: Sequence[int]
    output: Sequence[int]
    banned: Sequence[int] = ()
    topk: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One row's token. ``logprob`` is not finite exactly if the row's logits were not numbers."""

    token: int
    logprob: float
    topk: list[tuple[int, float]]


def uniform(seed: int, position: int) -> float:
    """The random number for a sample's token ``position``: 48 bits of BLAKE2b(seed, position).

    A counter, not a stream: what was drawn before, or elsewhere, does not matter.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 16) * 2.0**-48


def draw(logits_RV: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Draw one token per row.

    In this order: repetition, presence and frequency penalties, ``logit_bias``, temperature; then
    logprobs are taken; then tokens that may not be drawn are left out (``banned``, top-k, top-p,
    min-p, each relative to what the one before it left). The draw inverts the cumulative
    distribution over the vocabulary. At temperature 0 the most likely token is taken
    (of equals the lowest id), with its logprob at temperature 1.

    Args:
        logits_RV: In any float dtype; not changed.
        rows: One per row.
    """
    device = logits_RV.device
    logits_RV = logits_RV.to(torch.float32, copy=True)
    _adjust(logits_RV, rows)
    temperatures = [row.params.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_RV /= torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    allowed_RV = _without_banned(logprobs_RV, rows)
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0]
    tokens_R = torch.zeros(len(rows), dtype=torch.int64, device=device)
    if greedy:
        tokens_R[greedy] = _rows(allowed_RV, greedy).argmax(dim=-1)
    if random:
        probs_RV = torch.softmax(_rows(allowed_RV, random), dim=-1)
        if any(truncates(rows[i].params, probs_RV.shape[-1]) for i in random):
            probs_RV = probs_RV.double()
            truncate(probs_RV, [rows[i].params for i in random])
        tokens_R[random] = _invert(probs_RV, [rows[i].uniform for i in random])
    chosen = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].tolist()
    alternatives = topk_logprobs(logprobs_RV, [row.topk for row in rows])
    return [
        Drawn(token, logprob, topk)
        for token, logprob, topk in zip(tokens_R.tolist(), chosen, alternatives, strict=True)
    ]


def topk_logprobs(logprobs_RV: torch.Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Each row's ``counts[i]`` most likely tokens, likeliest first, of equals the lowest id first."""
    most = min(max(counts, default=0), logprobs_RV.shape[-1])
    if most == 0:
        return [[] for _ in counts]
    values_RK, tokens_RK = logprobs_RV.topk(most, dim=-1)
    ranked = [
        sorted(zip(tokens, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        for tokens, values in zip(tokens_RK.tolist(), values_RK.tolist(), strict=True)
    ]
    return [row[:count] for row, count in zip(ranked, counts, strict=True)]


def truncates(params: SamplingParams, vocabulary: int) -> bool:
    """Whether `truncate` may leave a token out."""
    return params.top_p < 1 or 0 < params.top_k < vocabulary or params.min_p > 0


def truncate(probs_RV: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to zero, in place, what top-k, top-p and min-p leave out.

    - top-k keeps k tokens;
    - top-p the smallest set of the most likely ones whose probability, relative to what is left,
      is at least p (Holtzman et al. 2020), and at least one;
    - min-p those at least ``min_p`` times as likely as the most likely one (Nguyen et al. 2024).

    Of equally likely tokens at the boundary the lowest ids are kept.
    """
    vocabulary = probs_RV.shape[-1]
    cut = [i for i, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocabulary]
    if cut:
        probs_CV = probs_RV[cut]
        _keep_most_likely(
            probs_CV,
            top_k=[p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in (params[i] for i in cut)],
            top_p=[params[i].top_p for i in cut],
        )
        probs_RV[cut] = probs_CV
    floors = [p.min_p for p in params]
    if any(floors):
        floor_R1 = torch.tensor(floors, dtype=torch.float64, device=probs_RV.device)[:, None]
        probs_RV.masked_fill_(probs_RV < floor_R1 * probs_RV.amax(dim=-1, keepdim=True), 0.0)


def _keep_most_likely(probs_RV: torch.Tensor, top_k: list[int], top_p: list[float]) -> None:
    vocabulary = probs_RV.shape[-1]
    top_k_R1 = torch.tensor(top_k, device=probs_RV.device)[:, None]
    top_p_R1 = torch.tensor(top_p, dtype=torch.float64, device=probs_RV.device)[:, None]
    # A cumulative sum adds in one order at any number of rows; `sum` splits a single row by threads.
    mass_R1 = probs_RV.cumsum(dim=-1)[:, -1:]
    largest_k = max(k if k < vocabulary else 1 for k in top_k)
    candidates = min(vocabulary, max(largest_k, _FIRST_CANDIDATES if min(top_p) < 1 else 1))
    while True:
        sorted_RK = probs_RV.topk(candidates, dim=-1).values
        sums_RK = sorted_RK.cumsum(dim=-1)
        # Relative to the k kept tokens where k is given, to everything otherwise.
        kept_mass = sums_RK.gather(1, (top_k_R1 - 1).clamp(max=candidates - 1))
        target_R1 = top_p_R1 * torch.where(top_k_R1 < vocabulary, kept_mass, mass_R1)
        enough = (sums_RK[:, -1:] >= target_R1) | (top_k_R1 <= candidates)
        if candidates == vocabulary or bool(enough.all()):
            break
        candidates = min(vocabulary, candidates * 8)
    rank_K = torch.arange(candidates, device=probs_RV.device)
    before_RK = torch.cat([sums_RK.new_zeros(len(top_k), 1), sums_RK[:, :-1]], dim=-1)
    in_nucleus_RK = (before_RK < target_R1) | (top_p_R1 == 1)
    kept_RK = in_nucleus_RK & (rank_K < top_k_R1)
    kept_RK[:, 0] = True
    count_R1 = kept_RK.sum(dim=-1, keepdim=True)
    boundary_R1 = sorted_RK.gather(1, count_R1 - 1)
    above_R1 = (sorted_RK > boundary_R1).sum(dim=-1, keepdim=True)
    equal_RV = probs_RV == boundary_R1
    if bool((equal_RV.sum(dim=-1, keepdim=True) > count_R1 - above_R1).any()):
        equal_RV &= equal_RV.cumsum(dim=-1) <= count_R1 - above_R1
    probs_RV.masked_fill_(~((probs_RV > boundary_R1) | equal_RV), 0.0)


def _invert(probs_RV: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
    """The first token at which the cumulative distribution exceeds the row's random number.

    Summed in blocks of the vocabulary, then inside of the block that the number falls into: one
    cumulative sum over everything took 4% of a decode step. A token of probability zero adds
    nothing to a sum, so it is never the first. 48-bit random numbers keep the product below the
    total. NaN rows give some token; the caller sees its logprob.
    """
    vocabulary = probs_RV.shape[-1]
    whole = vocabulary - vocabulary % _BLOCK
    parts = [probs_RV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)] if whole else []
    if whole < vocabulary:
        parts.append(probs_RV[:, whole:].sum(dim=-1, keepdim=True))
    sums_RC = torch.cat(parts, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets_R1 = torch.tensor(uniforms, dtype=torch.float64, device=probs_RV.device)[:, None] * sums_RC[:, -1:]
    block_R1 = torch.searchsorted(sums_RC, targets_R1, right=True).clamp_(max=sums_RC.shape[-1] - 1)
    before_R1 = torch.where(block_R1 > 0, sums_RC.gather(1, (block_R1 - 1).clamp(min=0)), 0.0)
    tokens_RK = block_R1 * _BLOCK + torch.arange(_BLOCK, device=probs_RV.device)
    inside_RK = probs_RV.gather(1, tokens_RK.clamp(max=vocabulary - 1)).double()
    sums_RK = inside_RK.masked_fill_(tokens_RK >= vocabulary, 0.0).cumsum(dim=-1)
    at_R1 = torch.searchsorted(sums_RK, targets_R1 - before_R1, right=True)
    # The block's own sum rounds in float32: past its end, its last token that can be drawn.
    last_R1 = (sums_RK < sums_RK[:, -1:]).sum(dim=-1, keepdim=True)
    return (block_R1 * _BLOCK + torch.minimum(at_R1, last_R1))[:, 0].clamp_(max=vocabulary - 1)


def _adjust(logits_RV: torch.Tensor, rows: Sequence[Row]) -> None:
    """Penalties and bias, in place. Only the touched entries are visited."""
    repeated: list[tuple[int, int, float]] = []
    shifts: dict[tuple[int, int], float] = {}
    for i, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0:
            repeated += [(i, token, params.repetition_penalty) for token in {*row.prompt, *row.output}]
        if params.presence_penalty or params.frequency_penalty:
            for token, count in Counter(row.output).items():
                shifts[i, token] = -(params.presence_penalty + params.frequency_penalty * count)
        for token, bias in (params.logit_bias or {}).items():
            shifts[i, token] = shifts.get((i, token), 0.0) + bias
    device = logits_RV.device
    if repeated:
        row_index, tokens, factors = (torch.tensor(column, device=device) for column in zip(*repeated, strict=True))
        values = logits_RV[row_index, tokens]
        factors = factors.to(values.dtype)
        logits_RV[row_index, tokens] = torch.where(values > 0, values / factors, values * factors)
    if shifts:
        row_index, tokens = (torch.tensor(column, device=device) for column in zip(*shifts, strict=True))
        amounts = torch.tensor(list(shifts.values()), dtype=torch.float32, device=device)
        logits_RV[row_index, tokens] += amounts


def _without_banned(logprobs_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    banned = [(i, token) for i, row in enumerate(rows) for token in row.banned]
    if not banned:
        return logprobs_RV
    row_index, tokens = (torch.tensor(column, device=logprobs_RV.device) for column in zip(*banned, strict=True))
    allowed_RV = logprobs_RV.clone()
    allowed_RV[row_index, tokens] = float("-inf")
    return allowed_RV


def _rows(values_RV: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """These rows; the tensor itself where they are all."""
    return values_RV if len(indices) == values_RV.shape[0] else values_RV[indices]
