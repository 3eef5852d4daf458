"""The same code on a GPU: greedy tokens and logprobs against transformers on the same device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainsession.engine.api import SampleItem
from trainsession.engine.model import load_model
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import Tokenizer
from trainsession.types import SampleResponse, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
def test_logprobs_equal_transformers_on_the_gpu(
    dtype: str,
    tolerance: float,
    tiny_path: Callable[[str], Path],
    tiny_tokenizer: Tokenizer,
    finish: Callable[[Sampler], dict[str, SampleResponse]],
) -> None:
    model = load_model(tiny_path("qwen3"), name="tiny", device="cuda", dtype=dtype)
    sampler = Sampler(model, tiny_tokenizer, num_blocks=20, block_size=8)  # so few that samples are preempted
    prompts = [(3 + np.arange(length) * 11 % 290).astype(np.int32) for length in (1, 8, 30, 45)]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=20, seed=i, stop=[], temperature=0.0 if i % 2 else 1.0, top_p=0.9)
        sampler.submit(
            SampleItem(request_id=str(i), prompt=prompt, num_samples=3, params=params, prompt_logprobs=True), None
        )
    responses = finish(sampler)
    reference = AutoModelForCausalLM.from_pretrained(tiny_path("qwen3"), dtype=torch.float32).eval()
    torch.nn.Module.to(reference, "cuda")
    for i, prompt in enumerate(prompts):
        response = responses[str(i)]
        assert response.prompt_logprobs is not None
        for sequence in response.sequences:
            whole = torch.tensor(np.concatenate([prompt, np.array(sequence.tokens)])[None], device="cuda").long()
            with torch.inference_mode():
                logprobs = torch.log_softmax(reference(whole).logits[0].double(), -1)
            expected = logprobs[:-1].gather(1, whole[0, 1:, None])[:, 0].cpu().numpy()
            actual = np.array([*response.prompt_logprobs[1:], *sequence.logprobs], dtype=np.float64)
            assert np.abs(actual - expected).mean() < tolerance / 3
            assert np.abs(actual - expected).max() < tolerance * (1 if dtype == "float32" else 5)
    assert sampler.stats()["free_blocks"] == 20
