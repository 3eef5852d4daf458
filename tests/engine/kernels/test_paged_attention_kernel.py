"""The Triton kernel against its twin in torch, and the twin against transformers' kind of attention.

On a GPU as compiled; on the CPU by Triton's interpreter, where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from trainsession.engine.kernels.paged_attention import Pages, launch, paged_attention_in_torch, splits_of

PAGE, PAGES = 32, 40


def _compare(heads: int, groups: int, dim: int, dtype: torch.dtype, splits: int, window: int | None) -> float:
    """Largest difference from the twin; what no sequence may read is NaN."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, groups, PAGES * PAGE, dim, generator=generator).to(dtype)
    kv[:, :, 35 * PAGE :] = float("nan")
    tables = torch.randperm(35, generator=generator)[:27].view(3, 9).int()
    lengths = torch.tensor([1, 77, 260], dtype=torch.int32)
    tables[0, 1:] = PAGES - 1
    for row, length in enumerate(lengths.tolist()):  # behind its end, a page holds anything
        kv[:, :, tables[row, length // PAGE] * PAGE + length % PAGE : (tables[row, length // PAGE] + 1) * PAGE] = float(
            "nan"
        )
    q = torch.randn(3, heads, dim, generator=generator).to(dtype)
    q, pages = q.to(device), Pages(kv.to(device), tables.to(device), lengths.to(device), PAGE)
    actual = launch(q, pages, scale=dim**-0.5, window=window, splits=splits)
    expected = paged_attention_in_torch(q, pages, scale=dim**-0.5, window=window)
    return float((actual.float() - expected.float()).abs().max())


def check_all(dtypes: dict[torch.dtype, float]) -> None:
    for dtype, tolerance in dtypes.items():
        for shape in ((9, 3, 64), (4, 4, 80), (16, 8, 128)):
            for splits in (1, 4):
                for window in (None, 50):
                    difference = _compare(*shape, dtype, splits, window)
                    assert difference < tolerance, (shape, dtype, splits, window, difference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_kernel_equals_its_twin_on_the_gpu() -> None:
    check_all({torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2})


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, and no GPU"
)
def test_the_kernel_equals_its_twin_in_tritons_interpreter() -> None:
    # Which of the two runs is decided when Triton is imported, hence a process of its own. Its bfloat16 is not torch's.
    program = (
        f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from {Path(__file__).stem} import check_all; check_all({{torch.float32: 1e-5, torch.float16: 2e-3}})"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("window", [None, 7])
def test_the_twin_equals_attention_over_the_gathered_keys(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 2, 6 * 4, 16, generator=generator)
    tables = torch.tensor([[3, 0, 5]], dtype=torch.int32)
    q = torch.randn(1, 6, 16, generator=generator)
    slots = torch.cat([torch.arange(4) + 4 * page for page in (3, 0, 5)])[:11]
    k, v = (x[None, :, slots].double() for x in kv)
    mask = torch.arange(11)[None] > 10 - (window or 11)
    expected = functional.scaled_dot_product_attention(
        q.double()[:, :, None], k, v, attn_mask=mask, scale=0.25, enable_gqa=True
    )
    pages = Pages(kv, tables, torch.tensor([11], dtype=torch.int32), 4)
    actual = paged_attention_in_torch(q, pages, scale=0.25, window=window)
    torch.testing.assert_close(actual.double(), expected[:, :, 0], rtol=1e-5, atol=1e-5)


def test_keys_are_split_only_where_sequences_are_few() -> None:
    assert splits_of(1, 8) == 16
    assert splits_of(16, 8) == 4
    assert splits_of(256, 8) == 1
