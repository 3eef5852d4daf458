"""Paged attention in models of other head counts and with sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainsession.engine.api import SampleItem
from trainsession.engine.model import load_model
from trainsession.engine.sampler import windows
from trainsession.engine.sampler.attention import padded_blocks
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import Tokenizer
from trainsession.types import SampleResponse, SamplingParams

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one key head": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "as many key heads": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "three to one": ("LlamaConfig", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "sliding window": ("MistralConfig", {"sliding_window": 11}),
}
PROMPTS = [(3 + np.arange(length) * 11 % 290).astype(np.int32) for length in (1, 8, 30)]


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_transformers_and_to_itself_alone(
    name: str,
    make_tiny_model: Callable[..., Path],
    tiny_tokenizer: Tokenizer,
    finish: Callable[[Sampler], dict[str, SampleResponse]],
) -> None:
    config, overrides = MODELS[name]
    path = make_tiny_model(config, **overrides)
    model = load_model(path, name=name, device="cpu", dtype="float32")
    assert model.exact

    def run(indices: list[int], **shape: Any) -> dict[str, SampleResponse]:
        sampler = Sampler(model, tiny_tokenizer, num_blocks=64, block_size=8, **shape)
        for i in indices:
            params = SamplingParams(max_tokens=9, temperature=0, seed=0, stop=[])
            sampler.submit(
                SampleItem(request_id=str(i), prompt=PROMPTS[i], num_samples=1, params=params, prompt_logprobs=True),
                None,
            )
        return finish(sampler)

    everyone = list(range(len(PROMPTS)))
    together = run(everyone)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for i, prompt in enumerate(PROMPTS):
        response = together[str(i)]
        whole = np.concatenate([prompt, np.array(response.sequences[0].tokens)])
        with torch.inference_mode():
            logits = reference(torch.tensor(whole[None]).long()).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)
        assert response.sequences[0].tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        expected = logprobs[:-1].gather(1, torch.tensor(whole[1:]).long()[:, None])[:, 0].numpy()
        assert response.prompt_logprobs is not None
        actual = [*response.prompt_logprobs[1:], *response.sequences[0].logprobs]
        np.testing.assert_allclose(np.array(actual, dtype=np.float64), expected, atol=3e-5)
        for other in (run([i])[str(i)], run(everyone[::-1], chunk_tokens=8)[str(i)]):
            assert other.sequences[0].logprobs == response.sequences[0].logprobs
            assert other.prompt_logprobs == response.prompt_logprobs


def test_keys_kept_from_step_to_step_are_those_in_the_cache(
    make_tiny_model: Callable[..., Path],
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(make_tiny_model("LlamaConfig"), name="tiny", device="cpu", dtype="float32")

    def run(window_bytes: int) -> tuple[dict[tuple[str, int], list[tuple[int, float]]], int]:
        monkeypatch.setattr(windows, "_BYTES", window_bytes)
        # Few blocks: samples are preempted, and come back with what they had.
        sampler = Sampler(model, tiny_tokenizer, num_blocks=18, block_size=8, max_running=6)
        for i, length in enumerate((1, 3, 9, 14, 20)):
            params = SamplingParams(max_tokens=11 + 5 * (i % 3), temperature=1, seed=i, stop=[])
            prompt = (3 + np.arange(length) * 11 % 290).astype(np.int32)
            sampler.submit(SampleItem(request_id=str(i), prompt=prompt, num_samples=1 + i % 2, params=params), None)
        tokens: dict[tuple[str, int], list[tuple[int, float]]] = {}
        kept = 0
        while sampler.has_work():
            for event in sampler.step():
                assert event.error is None
                drawn = zip(event.tokens, event.logprobs, strict=True)
                tokens.setdefault((event.request_id, event.index), []).extend(drawn)
            kept = max(kept, len(sampler._runner._windows._windows))
        assert not sampler._runner._windows._windows
        return tokens, kept

    with_windows, kept = run(2**20)
    without, none = run(0)
    assert (kept > 1, none) == (True, 0)
    assert with_windows == without


def test_padding_to_shared_lengths_wastes_at_most_an_eighth() -> None:
    for blocks in range(1, 2_000):
        padded = padded_blocks(blocks)
        assert blocks <= padded <= max(blocks, blocks * 9 / 8)
        assert padded_blocks(padded) == padded
    assert len({padded_blocks(blocks) for blocks in range(1, 257)}) <= 48
