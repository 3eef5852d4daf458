"""Attention of one new position of each sequence to its keys in the paged cache.

The kernel reads keys and values where they lie (flash decoding, Dao et al. 2023): nothing is gathered
or padded, a sequence costs what its own length costs. The query heads that share a key/value head are
rows of one product. Where there are too few sequences to fill the device, a sequence's keys are split
among several programs, whose results a second kernel adds up.

Shapes: B sequences, H query heads, G key/value heads, R = H / G, D head dimension, P pages of a table,
N slots of the cache (pages times positions).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_KEYS = 64
"""Keys of one product."""
_MIN_ROWS = 16
"""Query rows of one product: what the tensor cores take at least."""
_PROGRAMS = 528
"""Programs that a launch should have, four for each multiprocessor of an H200."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer, and where those of each sequence lie.

    Attributes:
        kv_2GND: The cache.
        tables_BP: int32, the page of each run of ``size`` positions; beyond a sequence's own, anything.
        lengths_B: int32, keys of each sequence, at least 1.
        size: Positions of a page.
    """

    kv_2GND: torch.Tensor
    tables_BP: torch.Tensor
    lengths_B: torch.Tensor
    size: int


def paged_attention(q_BHD: torch.Tensor, pages: Pages, *, scale: float, window: int | None) -> torch.Tensor:
    """Attention output (B, H, D) of the last position of each sequence.

    On CUDA by the Triton kernel, elsewhere by `paged_attention_in_torch`.

    Args:
        q_BHD: Queries.
        scale: Of the scores.
        window: Only so many last positions are attended to.
    """
    attend = launch if q_BHD.is_cuda else paged_attention_in_torch
    return attend(q_BHD, pages, scale=scale, window=window)


def paged_attention_in_torch(q_BHD: torch.Tensor, pages: Pages, *, scale: float, window: int | None) -> torch.Tensor:
    """The same sequence by sequence, in float32."""
    groups = pages.kv_2GND.shape[1]
    out_BHD = torch.empty_like(q_BHD)
    for i, length in enumerate(pages.lengths_B.tolist()):
        first = 0 if window is None else max(0, length - window)
        positions = torch.arange(first, length, device=q_BHD.device)
        slots = pages.tables_BP[i, positions // pages.size].long() * pages.size + positions % pages.size
        k_GLD, v_GLD = pages.kv_2GND[:, :, slots].float()
        q_GRD = q_BHD[i].float().view(groups, -1, q_BHD.shape[-1])
        probs_GRL = torch.softmax(q_GRD @ k_GLD.transpose(1, 2) * scale, dim=-1)
        out_BHD[i] = (probs_GRL @ v_GLD).view(q_BHD.shape[1:]).to(q_BHD.dtype)
    return out_BHD


def why_not(heads: int, groups: int, dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernel cannot be used for these shapes; "" where a trial of it ran."""
    try:
        q_BHD = torch.zeros(1, heads, dim, dtype=dtype, device=device)
        pages = Pages(
            kv_2GND=torch.zeros(2, groups, _KEYS, dim, dtype=dtype, device=device),
            tables_BP=torch.zeros(1, 1, dtype=torch.int32, device=device),
            lengths_B=torch.ones(1, dtype=torch.int32, device=device),
            size=_KEYS,
        )
        for splits in (1, 2):
            launch(q_BHD, pages, scale=1.0, window=None, splits=splits)
    except ImportError:
        return "Triton is not installed"
    except Exception as error:  # of Triton's compiler, or the card has too little shared memory
        return f"the attention kernel does not run here: {error}"
    return ""


def splits_of(sequences: int, heads: int) -> int:
    """Programs that share the keys of one sequence and head; a power of two, by the launch's size alone."""
    splits = 1
    while splits < 16 and sequences * heads * splits * 2 <= _PROGRAMS:
        splits *= 2
    return splits


def launch(
    q_BHD: torch.Tensor, pages: Pages, *, scale: float, window: int | None, splits: int | None = None
) -> torch.Tensor:
    """`paged_attention` by the Triton kernel; under Triton's interpreter on the CPU, too.

    Args:
        splits: See `splits_of`, the default.
    """
    attend, combine = _kernels()
    batch, heads, dim = q_BHD.shape
    groups, slots = pages.kv_2GND.shape[1:3]
    splits = splits or splits_of(batch, groups)
    q_BHD = q_BHD.contiguous()
    out_BHD = torch.empty_like(q_BHD)
    rows = max(_MIN_ROWS, _power_of_two(heads // groups))
    width = max(16, _power_of_two(dim))
    if splits == 1:
        parts, sums = out_BHD, out_BHD
    else:
        parts = q_BHD.new_empty(batch, heads, splits, dim, dtype=torch.float32)
        sums = q_BHD.new_empty(batch, heads, splits, dtype=torch.float32)
    attend[(batch, groups, splits)](
        q_BHD,
        pages.kv_2GND,
        pages.tables_BP,
        pages.lengths_B,
        parts,
        sums,
        scale * 1.4426950408889634,
        0 if window is None else window,
        slots,
        pages.tables_BP.stride(0),
        H=heads,
        R=heads // groups,
        G=groups,
        D=dim,
        ROWS=rows,
        WIDTH=width,
        PAGE=pages.size,
        KEYS=_KEYS,
        SPLITS=splits,
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32",
        num_warps=4,
        # Keys and values of a stage must fit into shared memory.
        num_stages=3 if width * q_BHD.element_size() <= 256 else 1,
    )
    if splits > 1:
        combine[(batch * heads,)](parts, sums, out_BHD, D=dim, WIDTH=width, SPLITS=splits)
    return out_BHD


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


@cache
def _kernels() -> tuple[Any, Any]:
    # Triton compiles from a function's source file, so the kernels stand in a module of their own,
    # which only this import reads: it cannot be imported without Triton.
    from .triton import paged_attention as kernels

    return kernels.attend, kernels.combine
