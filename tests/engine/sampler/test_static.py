"""Static decode steps against transformers with merged weights: on the CPU without graphs, on a GPU with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainsession.engine.api import SampleItem
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.sampler.bank import COLUMNS, AdapterBank
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import Tokenizer
from trainsession.types import LoraConfig, SampleResponse, SamplingParams

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
Finish = Callable[[Sampler], dict[str, SampleResponse]]


def _adapter(model: LoadedModel, seed: int, rank: int, **config: Any) -> Adapter:
    adapter = new_adapter(LoraConfig(rank=rank, seed=seed, **config), model.lora_modules, model.device)
    generator = torch.Generator().manual_seed(seed)
    for pair in adapter.weights.values():
        pair.B.data.copy_(0.1 * torch.randn(pair.B.shape, generator=generator))
    return adapter.frozen_copy()


def _logprobs(path: Path, adapter: Adapter | None, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Of the sampled tokens, by transformers in float32 with the adapter merged into its weights."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        for name, pair in [] if adapter is None else adapter.weights.items():
            weight = reference.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            assert adapter is not None
            weight += adapter.scale * (pair.B.detach().cpu() @ pair.A.detach().cpu())
        whole = torch.tensor(np.concatenate([prompt, tokens])[None]).long()
        logprobs = torch.log_softmax(reference(whole).logits[0].double(), -1)
    return logprobs[len(prompt) - 1 : -1].gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()


def _assert_fast(sampler: Sampler, device: str) -> None:
    """It was not right for want of what makes it fast."""
    decoder = sampler._runner._static
    assert decoder is not None
    assert decoder.taken_ahead > 0
    assert decoder._captures == (device == "cuda")
    assert bool(decoder._graphs) == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "overrides"), [("LlamaConfig", {}), ("MistralConfig", {"sliding_window": 11})])
def test_logprobs_of_mixed_adapters_equal_transformers_with_merged_weights(
    family: str,
    overrides: dict[str, Any],
    device: str,
    make_tiny_model: Callable[..., Path],
    tiny_tokenizer: Tokenizer,
    finish: Finish,
) -> None:
    path = make_tiny_model(family, **overrides)
    model = load_model(path, name="tiny", device=device, dtype="float32", exact=False)
    adapters = {
        None: None,
        "small": _adapter(model, 1, 2),
        "large": _adapter(model, 2, 20),
        "mlp": _adapter(model, 3, 8, train_attn=False),
        "head": _adapter(model, 4, 4, train_unembed=True),
    }
    # So few blocks that samples are preempted, and so many samples that steps have several sizes.
    sampler = Sampler(model, tiny_tokenizer, num_blocks=40, block_size=8, static=True)
    prompts = [(3 + np.arange(length) * 11 % 290).astype(np.int32) for length in (1, 8, 30, 45)]
    asked: dict[str, tuple[np.ndarray, Adapter | None]] = {}
    for name, adapter in adapters.items():
        for i, prompt in enumerate(prompts):
            request_id = f"{name}/{i}"
            params = SamplingParams(max_tokens=12 + 5 * i, seed=i, stop=[])
            sampler.submit(
                SampleItem(request_id=request_id, prompt=prompt, num_samples=2, params=params, weights=name), adapter
            )
            asked[request_id] = (prompt, adapter)
    responses = finish(sampler)
    assert sampler.stats()["preemptions"] > 0
    for request_id, (prompt, adapter) in asked.items():
        for sequence in responses[request_id].sequences:
            expected = _logprobs(path, adapter, prompt, list(sequence.tokens))
            np.testing.assert_allclose(sequence.logprobs, expected, atol=2e-4)
    assert sampler.stats()["free_blocks"] == 40
    _assert_fast(sampler, device)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_come_and_go(device: str, tiny_model: Path, tiny_tokenizer: Tokenizer, finish: Finish) -> None:
    model = load_model(tiny_model, name="tiny", device=device, dtype="float32", exact=False)
    sampler = Sampler(model, tiny_tokenizer, num_blocks=64, block_size=8, static=True)
    prompt = np.arange(3, 20, dtype=np.int32)
    params = SamplingParams(max_tokens=6, temperature=0, seed=0, stop=[])
    # More than fit at once, one after the other, of ranks that leave gaps; the first comes back.
    for turn, seed in enumerate([*range(12), 0]):
        adapter = _adapter(model, seed, [64, 16, 32, 48][seed % 4])
        item = SampleItem(request_id=f"{turn}", prompt=prompt, num_samples=3, params=params, weights=f"w{seed}")
        sampler.submit(item, adapter)
        for sequence in finish(sampler)[f"{turn}"].sequences:
            expected = _logprobs(tiny_model, adapter, prompt, list(sequence.tokens))
            np.testing.assert_allclose(sequence.logprobs, expected, atol=2e-4)
    _assert_fast(sampler, device)


def test_a_bank_gives_each_row_its_own_columns_and_refuses_more_than_it_has(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("llama")
    bank = AdapterBank(model.lora_modules)
    few = [_adapter(model, seed, 32) for seed in range(3)]
    hidden = bank.place([few[0], None, few[1], few[0]])
    assert hidden is not None
    assert hidden.shape[1] == 64
    assert hidden[1].all()
    assert ((~hidden).sum(1) == [32, 0, 32, 32]).all()
    assert (hidden[0] | hidden[2]).all()
    many = [_adapter(model, seed, 64) for seed in range(COLUMNS // 64 + 1)]
    assert bank.place(many) is None
    everyone = bank.place(many[1:])
    assert everyone is not None
    assert ((~everyone).sum(0) == 1).all()
