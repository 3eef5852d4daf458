# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportInvalidTypeForm=false, reportOptionalMemberAccess=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""Flash decoding over a paged cache; see `kernels.paged_attention` for shapes and arguments."""

import triton
import triton.language as tl


@triton.jit
def attend(
    q_ptr,
    kv_ptr,
    tables_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    scale_log2,
    window,
    slots,
    table_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One sequence, one key/value head, one share of the keys. Exponents are of two."""
    b, g, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + b)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    start, stop = first // KEYS, (length + KEYS - 1) // KEYS
    share = (stop - start + SPLITS - 1) // SPLITS
    start = start + s * share
    stop = tl.minimum(start + share, stop)

    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)
    lanes = tl.arange(0, KEYS)
    heads = g * R + rows
    q_mask = (rows[:, None] < R) & (cols[None, :] < D)
    q = tl.load(q_ptr + (b * H + heads[:, None]) * D + cols[None, :], mask=q_mask, other=0.0)
    k_ptr = kv_ptr + tl.cast(g, tl.int64) * slots * D
    v_ptr = kv_ptr + tl.cast(G + g, tl.int64) * slots * D

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for part in range(start, stop):
        positions = part * KEYS + lanes
        seen = (positions < length) & (positions >= first)
        pages = tl.load(tables_ptr + b * table_stride + positions // PAGE, mask=seen, other=0)
        at = (pages.to(tl.int64) * PAGE + positions % PAGE) * D
        # What is not seen may be anything, NaN too: it is not read.
        mask = seen[:, None] & (cols[None, :] < D)
        k = tl.load(k_ptr + at[:, None] + cols[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A share that lies wholly outside of the window has seen nothing yet.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        probs = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(probs, 1)
        v = tl.load(v_ptr + at[:, None] + cols[None, :], mask=mask, other=0.0)
        acc = acc * fade[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
        top = new_top

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(
            parts_ptr + (b * H + heads[:, None]) * D + cols[None, :], acc.to(parts_ptr.dtype.element_ty), mask=q_mask
        )
    else:
        row = (b * H + heads) * SPLITS + s
        tl.store(parts_ptr + row[:, None] * D + cols[None, :], acc, mask=q_mask)
        tl.store(sums_ptr + row, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=rows < R)


@triton.jit
def combine(parts_ptr, sums_ptr, out_ptr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Add up the shares of one query row, each weighed by its part of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    splits, cols = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    sums = tl.load(sums_ptr + row * SPLITS + splits)
    weights = tl.exp2(sums - tl.max(sums, 0))
    at = (row * SPLITS + splits[:, None]) * D + cols[None, :]
    parts = tl.load(parts_ptr + at, mask=cols[None, :] < D, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * D + cols, out.to(out_ptr.dtype.element_ty), mask=cols < D)
