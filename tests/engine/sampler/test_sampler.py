"""The sampler's life: sharing, cancelling, failing, refusing."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.sampling_events import assemble
from trainsession.engine.api import SampleEvent, SampleItem
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.sampler.sampler import Sampler
from trainsession.errors import EngineError, InvalidRequest, LimitExceeded, NonFinite, PromptTooLong
from trainsession.tokenization import Tokenizer
from trainsession.types import LoraConfig, SampleResponse, SamplingParams

Finish = Callable[[Sampler], dict[str, SampleResponse]]


@pytest.fixture(scope="session")
def model(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("llama")


@pytest.fixture
def sampler(model: LoadedModel, tiny_tokenizer: Tokenizer) -> Sampler:
    return Sampler(model, tiny_tokenizer, num_blocks=40, block_size=8)


def adapter_of(model: LoadedModel, seed: int) -> Adapter:
    adapter = new_adapter(LoraConfig(rank=2, seed=seed), model.lora_modules, model.device)
    for pair in adapter.weights.values():
        torch.nn.init.normal_(pair.B, std=0.2, generator=torch.Generator().manual_seed(seed))
    return adapter.frozen_copy()


def item(request_id: str = "a", *, prompt: int = 20, samples: int = 1, **fields: object) -> SampleItem:
    params = {"max_tokens": 6, "seed": 5, "stop": [], **{k: fields.pop(k) for k in list(fields) if k in PARAMS}}
    return SampleItem(
        request_id=request_id,
        prompt=(3 + np.arange(prompt) % 300).astype(np.int32),
        num_samples=samples,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


PARAMS = set(SamplingParams.__dataclass_fields__)


def events_of(sampler: Sampler) -> dict[str, list[SampleEvent]]:
    events: dict[str, list[SampleEvent]] = {}
    while sampler.has_work():
        for event in sampler.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def test_samples_share_one_prefill_and_the_blocks_come_back(sampler: Sampler, finish: Finish) -> None:
    sampler.submit(item(samples=8), None)
    response = finish(sampler)["a"]
    assert len(response.sequences) == 8
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) > 1
    stats = sampler.stats()
    assert stats["prefill_tokens"] == 20
    assert stats["sampled_tokens"] == 48
    assert stats["free_blocks"] == stats["num_blocks"] == 40
    assert not sampler.step()


def test_a_second_request_finds_the_prefix_of_its_own_salt_and_weights(
    sampler: Sampler, model: LoadedModel, finish: Finish
) -> None:
    def cached(request: SampleItem, adapter: Adapter | None) -> float:
        before = sampler.stats()["prefill_cached_tokens"]
        sampler.submit(request, adapter)
        finish(sampler)
        return sampler.stats()["prefill_cached_tokens"] - before

    first = adapter_of(model, 1)
    assert cached(item(), None) == 0
    assert cached(item(), None) == 16  # whole blocks of 8, and the last token is always computed
    assert cached(item(prompt=16), None) == 8
    assert cached(item(cache_salt="another project"), None) == 0
    assert cached(item(weights="w"), first) == 0
    assert cached(item(weights="w"), first) == 16
    assert cached(item(weights="w"), adapter_of(model, 2)) == 0  # same name, other weights
    assert cached(item(prompt_logprobs=True), None) == 0  # every position is wanted


def test_a_reused_name_gives_the_new_weights(sampler: Sampler, model: LoadedModel, finish: Finish) -> None:
    results = []
    for seed in (1, 2):
        sampler.submit(item(weights="w", temperature=0), adapter_of(model, seed))
        results.append(finish(sampler)["a"].sequences[0].logprobs)
    fresh = Sampler(model, sampler.tokenizer, num_blocks=40, block_size=8)
    fresh.submit(item(weights="w", temperature=0), adapter_of(model, 2))
    assert results[1] == finish(fresh)["a"].sequences[0].logprobs != results[0]


def test_cancel_ends_a_running_request_within_a_step(sampler: Sampler) -> None:
    sampler.submit(item("stays", max_tokens=12), None)
    sampler.submit(item("goes", samples=3, max_tokens=100), None)
    events = [event for _ in range(4) for event in sampler.step()]
    sampler.cancel("goes")
    sampler.cancel("goes")
    sampler.cancel("never heard of")
    ended = sampler.step()
    response = assemble([event for event in events + ended if event.request_id == "goes"])
    assert [sequence.stop_reason for sequence in response.sequences] == ["cancelled"] * 3
    assert [len(sequence.tokens) for sequence in response.sequences] == [4, 4, 4]
    assert events_of(sampler)["stays"][-1].done
    assert sampler.stats()["free_blocks"] == 40


def test_cancel_before_the_first_step(sampler: Sampler) -> None:
    sampler.submit(item(samples=2, prompt_logprobs=True), None)
    sampler.cancel("a")
    assert sampler.has_work()
    response = assemble(sampler.step())
    assert [(sequence.stop_reason, len(sequence.tokens)) for sequence in response.sequences] == [("cancelled", 0)] * 2
    assert response.prompt_logprobs is None
    assert not sampler.has_work()


def test_nan_fails_its_own_request_and_poisons_nobody(model: LoadedModel, sampler: Sampler, finish: Finish) -> None:
    sampler.submit(item("sound", samples=2), None)
    expected = finish(sampler)["sound"]
    broken = adapter_of(model, 3)
    broken.weights["model.layers.0.self_attn.v_proj"].B.data[0, 0] = float("nan")
    # Few blocks: what the broken request leaves behind is used again at once.
    small = Sampler(model, sampler.tokenizer, num_blocks=9, block_size=8)
    small.submit(item("broken", samples=2, weights="b"), broken)
    small.submit(item("sound", samples=2), None)
    events = events_of(small)
    assert isinstance(events["broken"][-1].error, NonFinite)
    assert events["broken"][-1].done
    for response in (assemble(events["sound"]), *(_again(small, finish) for _ in range(3))):
        for a, b in zip(response.sequences, expected.sequences, strict=True):
            assert a.logprobs == b.logprobs


def _again(sampler: Sampler, finish: Finish) -> SampleResponse:
    sampler.submit(item("again", samples=2), None)
    return finish(sampler)["again"]


def test_nan_in_prompt_logprobs_is_an_error_too(model: LoadedModel, sampler: Sampler) -> None:
    broken = adapter_of(model, 3)
    broken.weights["model.layers.1.mlp.down_proj"].A.data.fill_(float("nan"))
    sampler.submit(item(samples=0, weights="b", prompt_logprobs=True), broken)
    (event,) = events_of(sampler)["a"]
    assert isinstance(event.error, NonFinite)


def test_an_exception_in_a_shared_pass_fails_only_its_cause(
    model: LoadedModel, sampler: Sampler, finish: Finish
) -> None:
    sampler.submit(item("sound"), None)
    expected = finish(sampler)["sound"].sequences[0]
    misshapen = adapter_of(model, 1)
    pair = misshapen.weights["model.layers.0.self_attn.q_proj"]
    pair.A.data = pair.A.data[:, :-1]
    sampler.submit(item("sound"), None)
    sampler.submit(item("broken", weights="b"), misshapen)
    events = events_of(sampler)
    error = events["broken"][-1].error
    assert isinstance(error, EngineError)
    assert "Traceback" not in str(error)
    assert assemble(events["sound"]).sequences[0].logprobs == expected.logprobs
    assert sampler.stats()["free_blocks"] == 40


def test_events_are_made_of_plain_values(sampler: Sampler) -> None:
    sampler.submit(item(samples=1, prompt_logprobs=True, topk_logprobs=2, topk_prompt_logprobs=2), None)
    for event in events_of(sampler)["a"]:
        values = [event.tokens, event.logprobs, event.topk, event.prompt_logprobs, event.topk_prompt_logprobs]
        assert json.loads(json.dumps(values)) is not None


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"prompt": 0}, InvalidRequest, "prompt"),
        ({"prompt": 513, "samples": 0, "prompt_logprobs": True}, PromptTooLong, "context of 512"),
        ({"prompt": 300, "max_tokens": 300}, PromptTooLong, "max_tokens=300"),
        ({"prompt": 300, "max_tokens": 100}, LimitExceeded, "KV cache"),
        ({"samples": -1}, InvalidRequest, "num_samples"),
        ({"samples": 0}, InvalidRequest, "num_samples=0"),
        ({"samples": 2_000}, LimitExceeded, "max_num_samples"),
        ({"topk_logprobs": 1_000}, LimitExceeded, "max_topk_logprobs"),
        ({"topk_prompt_logprobs": 1_000}, LimitExceeded, "max_topk_logprobs"),
        ({"seed": None}, InvalidRequest, "seed"),
        ({"stop": [320]}, InvalidRequest, "stop"),
        ({"logit_bias": {999: 1.0}}, InvalidRequest, "logit_bias"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    sampler: Sampler, fields: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        sampler.submit(item(**fields), None)  # type: ignore[arg-type]
    assert not sampler.has_work()


def test_tokens_outside_the_vocabulary_are_named(sampler: Sampler) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\[17\]: token 320 is outside the vocabulary of 320"):
        sampler.submit(
            SampleItem(
                request_id="a",
                prompt=np.arange(303, 330, dtype=np.int32),
                num_samples=1,
                params=SamplingParams(max_tokens=1, seed=0),
            ),
            None,
        )


def test_a_request_id_in_use_is_refused(sampler: Sampler) -> None:
    sampler.submit(item(), None)
    with pytest.raises(InvalidRequest, match="already running"):
        sampler.submit(item(), None)


def test_a_full_context_and_a_full_cache_are_fine(
    model: LoadedModel, tiny_tokenizer: Tokenizer, finish: Finish
) -> None:
    sampler = Sampler(model, tiny_tokenizer, num_blocks=64, block_size=8)
    prompt = np.tile(np.arange(3, 103, dtype=np.int32), 5)
    params = SamplingParams(seed=0, stop=[])
    sampler.submit(SampleItem(request_id="a", prompt=prompt, num_samples=2, params=params), None)
    response = finish(sampler)["a"]
    assert [(len(s.tokens), s.stop_reason) for s in response.sequences] == [(12, "length")] * 2
