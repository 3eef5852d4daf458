"""Exact mode: a sample is bit-equal alone and in a crowd, however the scheduler cut the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainsession.engine.api import SampleItem
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import Tokenizer
from trainsession.types import LoraConfig, SampleResponse, SamplingParams

Finish = Callable[[Sampler], dict[str, SampleResponse]]
SHAPES: list[dict[str, Any]] = [
    {"num_blocks": 64, "block_size": 8, "chunk_tokens": 256},
    {"num_blocks": 64, "block_size": 8, "chunk_tokens": 8},
    {"num_blocks": 17, "block_size": 8, "chunk_tokens": 24, "max_running": 3},
]
"""One block size: it is part of what "exact" means. The last one is too small for everybody."""


@dataclass(frozen=True)
class Setup:
    model: LoadedModel
    tokenizer: Tokenizer
    adapters: dict[str | None, Adapter | None]
    finish: Finish

    def run(
        self, items: Sequence[SampleItem], sampler: Sampler | None = None, **shape: Any
    ) -> dict[str, SampleResponse]:
        sampler = sampler or Sampler(self.model, self.tokenizer, **(shape or SHAPES[0]))
        for item in items:
            sampler.submit(item, self.adapters[item.weights])
        return self.finish(sampler)


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def setup(
    request: pytest.FixtureRequest,
    loaded: Callable[[str], LoadedModel],
    tiny_tokenizer: Tokenizer,
    finish: Finish,
) -> Setup:
    model = loaded(request.param)
    assert model.exact
    adapters: dict[str | None, Adapter | None] = {None: None}
    for name, seed in (("first", 1), ("second", 2)):
        config = LoraConfig(rank=4, seed=seed, train_unembed=seed == 2)
        adapter = new_adapter(config, model.lora_modules, model.device)
        for pair in adapter.weights.values():
            torch.nn.init.normal_(pair.B, std=0.1, generator=torch.Generator().manual_seed(seed))
        adapters[name] = adapter.frozen_copy()
    return Setup(model, tiny_tokenizer, adapters, finish)


def crowd(seed: int = 0) -> list[SampleItem]:
    """Requests of many shapes; some share prefixes, prompts and lengths."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, 300, 40)
    items = []
    params: dict[str, Any]
    for number, (length, samples, weights, params) in enumerate(
        [
            (1, 1, None, {}),
            (8, 3, None, {"temperature": 0.7}),
            (17, 2, "first", {"top_p": 0.8}),
            (24, 1, "second", {"top_k": 5, "frequency_penalty": 0.5}),
            (33, 4, None, {"min_p": 0.05}),
            (33, 1, "first", {"temperature": 0.0}),
            (40, 2, "second", {"temperature": 1.5}),
            (40, 1, None, {"stop": []}),
        ]
    ):
        prompt = np.concatenate([shared[: length // 2], random.integers(3, 300, length - length // 2)])
        items.append(
            SampleItem(
                request_id=str(number),
                prompt=prompt.astype(np.int32),
                num_samples=samples,
                params=SamplingParams(max_tokens=6 + 2 * number, seed=100 * number, **params),
                weights=weights,
                prompt_logprobs=number % 2 == 0,
                topk_logprobs=number % 3,
            )
        )
    return items


def assert_equal(one: SampleResponse, other: SampleResponse) -> None:
    assert len(one.sequences) == len(other.sequences)
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert a.tokens == b.tokens
        assert a.logprobs == b.logprobs
        assert (a.text, a.stop_reason, a.topk_logprobs) == (b.text, b.stop_reason, b.topk_logprobs)
    assert one.prompt_logprobs == other.prompt_logprobs


@pytest.fixture(scope="session")
def alone(setup: Setup) -> dict[str, SampleResponse]:
    """Each request on a sampler of its own."""
    return {item.request_id: setup.run([item])[item.request_id] for item in crowd()}


@pytest.mark.parametrize("shape", SHAPES, ids=["large chunks", "one block a chunk", "preempting"])
def test_alone_equals_in_a_crowd(setup: Setup, alone: dict[str, SampleResponse], shape: dict[str, Any]) -> None:
    together = setup.run(crowd(), **shape)
    for request_id, response in together.items():
        assert_equal(response, alone[request_id])


def test_a_preempted_sample_goes_on_as_if_nothing_happened(setup: Setup, alone: dict[str, SampleResponse]) -> None:
    sampler = Sampler(setup.model, setup.tokenizer, **SHAPES[2])
    together = setup.run(crowd(), sampler)
    assert sampler.stats()["preemptions"] > 0
    for request_id, response in together.items():
        assert_equal(response, alone[request_id])


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(8)),
    steps=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    shape=st.sampled_from(SHAPES),
)
def test_any_order_of_arrival_gives_the_same(
    setup: Setup, alone: dict[str, SampleResponse], order: list[int], steps: list[int], shape: dict[str, Any]
) -> None:
    items = crowd()
    sampler = Sampler(setup.model, setup.tokenizer, **shape)
    events = []
    for number, wait in zip(order, steps, strict=True):
        sampler.submit(items[number], setup.adapters[items[number].weights])
        for _ in range(wait):
            events += sampler.step()
    tokens: dict[tuple[str, int], list[tuple[int, float]]] = {}
    while sampler.has_work():
        events += sampler.step()
    for event in events:
        tokens.setdefault((event.request_id, event.index), []).extend(zip(event.tokens, event.logprobs, strict=True))
    for request_id, response in alone.items():
        for index, sequence in enumerate(response.sequences):
            assert [token for token, _ in tokens[request_id, index]] == sequence.tokens
            assert [logprob for _, logprob in tokens[request_id, index]] == sequence.logprobs


def test_cached_equals_uncached(setup: Setup, alone: dict[str, SampleResponse]) -> None:
    sampler = Sampler(setup.model, setup.tokenizer, **SHAPES[0])
    setup.run(crowd(), sampler)
    cached_before = sampler.stats()["prefill_cached_tokens"]
    for request_id, response in setup.run(crowd(), sampler).items():
        assert_equal(response, alone[request_id])
    assert sampler.stats()["prefill_cached_tokens"] >= cached_before + 24


def test_the_cache_does_not_hold_what_decode_steps_computed(setup: Setup) -> None:
    """A later prompt that continues a sample is prefilled, so that its bits don't depend on history."""
    first = crowd()[4]
    sampler = Sampler(setup.model, setup.tokenizer, **SHAPES[0])
    sample = setup.run([first], sampler)["4"].sequences[0]
    continued = SampleItem(
        request_id="continued",
        prompt=np.concatenate([first.prompt, sample.tokens]).astype(np.int32),
        num_samples=1,
        params=SamplingParams(max_tokens=5, seed=3),
    )
    assert_equal(setup.run([continued], sampler)["continued"], setup.run([continued])["continued"])


def test_threads_do_not_change_a_bit(setup: Setup, alone: dict[str, SampleResponse]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        together = setup.run(crowd()[:5])
    finally:
        torch.set_num_threads(threads)
    for request_id, response in together.items():
        assert_equal(response, alone[request_id])


def test_the_adapters_differ(setup: Setup) -> None:
    """Otherwise the tests above would pass with no adapter at all."""
    prompt = crowd()[4].prompt
    params = SamplingParams(max_tokens=6, temperature=0, seed=0)
    logprobs = [
        setup.run([SampleItem(request_id="a", prompt=prompt, num_samples=1, params=params, weights=weights)])["a"]
        .sequences[0]
        .logprobs
        for weights in (None, "first", "second")
    ]
    assert logprobs[0] != logprobs[1] != logprobs[2] != logprobs[0]
