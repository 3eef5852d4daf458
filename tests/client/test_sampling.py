"""What is a prompt, what comes back, and which weights a sample is bound to."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.client.fake import FakeService, f32, i32, i64
from trainsession import (
    Cancelled,
    ConnectionFailed,
    Datum,
    ModelInput,
    OperationFuture,
    RateLimited,
    SampleDelta,
    SampleResponse,
    SamplingClient,
    SamplingParams,
    StorageError,
)
from trainsession.client.training import TrainingClient


class TinyTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return [ord(message["content"]) for message in messages] + [0]


@pytest.fixture
def sampler(trainer: TrainingClient) -> SamplingClient:
    client = trainer.base_sampling_client()
    client._connection._tokenizers["tiny"] = TinyTokenizer()  # type: ignore[assignment]
    return client


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (i64([1, 2]), [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        (ModelInput.from_ints([1, 2]), [1, 2]),
        ("ab", [97, 98]),
        ([{"role": "user", "content": "a"}], [97, 0]),
    ],
)
def test_every_kind_of_prompt_alone_and_in_a_list(
    fake: FakeService, sampler: SamplingClient, prompt: Any, tokens: list[int]
) -> None:
    assert isinstance(sampler.sample(prompt).result(10), SampleResponse)
    both: Any = sampler.sample([prompt, prompt]).result(10)
    assert [type(response) for response in both] == [SampleResponse] * 2
    assert [sample["prompt"].tolist() for sample in fake.samples] == [tokens] * 3
    assert fake.samples[0]["prompt"].dtype == np.int32


def test_a_list_is_accepted_in_one_request_and_keeps_its_order(fake: FakeService, sampler: SamplingClient) -> None:
    fake.hold = {"sample"}
    future = sampler.sample([[index] for index in range(20)], num_samples=2)
    while len(future.operation_ids) < 20:
        time.sleep(0.005)
    assert fake.calls.count(("POST", "/v1/samples")) == 1
    for index in reversed(range(20)):
        one = {"tokens": i32([index]), "logprobs": f32([-1]), "stop_reason": "stop", "text": str(index)}
        value = {"sequences": [{**one, "topk": None}], "prompt_logprobs": None, "topk_prompt": None, "usage": {}}
        sampler._connection.io.call_soon(fake._end, f"smp_{index}", {"state": "done", "value": value})
    assert [response.text for response in future.result(10)] == [str(index) for index in range(20)]


def test_what_is_sent(fake: FakeService, sampler: SamplingClient) -> None:
    params = SamplingParams(max_tokens=7, temperature=0.5, stop=["\n", 3], seed=9)
    sampler.sample([1], 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_logprobs=1).result(10)
    (sent,) = fake.samples
    assert sent["num_samples"] == 3
    assert sent["params"]["stop"] == ["\n", 3]
    assert sent["params"]["seed"] == 9
    assert (sent["prompt_logprobs"], sent["topk_prompt_logprobs"], sent["topk_logprobs"]) == (True, 2, 1)
    assert sent["session_id"] == "ses_1"
    assert sent["weights"] == {"base_model": "tiny"}


def test_compute_logprobs_starts_with_none(fake: FakeService, sampler: SamplingClient) -> None:
    assert sampler.compute_logprobs([1, 2]).result(10) == [None, -0.5]
    assert sampler.compute_logprobs([[1, 2], [3, 4]]).result(10) == [[None, -0.5], [None, -0.5]]
    assert {sample["num_samples"] for sample in fake.samples} == {0}


def test_async_twins_return_results(sampler: SamplingClient) -> None:
    async def loop() -> None:
        response = await sampler.sample_async([1, 2], num_samples=2)
        assert len(response.sequences) == 2
        many = await asyncio.gather(*(sampler.sample_async([1, index]) for index in range(5)))
        assert len(many) == 5
        assert await sampler.compute_logprobs_async([1, 2]) == [None, -0.5]

    asyncio.run(loop())


def test_a_sampling_client_is_bound_to_its_place_in_the_queue_and_returns_at_once(
    fake: FakeService, trainer: TrainingClient, batch: list[Datum]
) -> None:
    fake.hold = {"forward_backward"}
    fake.submit_seconds = 0.05
    trainer.forward_backward(batch)
    started = time.monotonic()
    sampler = trainer.save_weights_and_get_sampling_client()
    trainer.optim_step()
    assert time.monotonic() - started < 1
    future = sampler.sample([1, 2])
    assert future.result(10).sequences
    assert fake.samples[0]["weights"] == {"operation_id": "op_2"}
    assert [body["kind"] for body in fake.submits[:2]] == ["forward_backward", "snapshot"]
    assert "number 2" in repr(sampler)


def test_a_snapshot_that_could_not_be_submitted_is_the_error_of_the_first_sample(
    fake: FakeService, trainer: TrainingClient
) -> None:
    fake.refuse[1] = [StorageError("the disk is full")]
    sampler = trainer.save_weights_and_get_sampling_client()
    with pytest.raises(StorageError, match="full"):
        sampler.sample([1, 2]).result(10)
    with pytest.raises(StorageError, match="full"):
        sampler.compute_logprobs([1, 2]).result(10)


def test_cancel_stops_a_running_sample_with_what_it_has(fake: FakeService, sampler: SamplingClient) -> None:
    fake.hold = {"sample"}
    future = sampler.sample([1])
    while future.operation_id is None:
        time.sleep(0.005)
    assert future.queue_position == 0
    assert future.cancel()
    assert future.result(10).sequences[0].stop_reason == "cancelled"


def test_cancel_before_the_submit_sends_nothing(fake: FakeService, trainer: TrainingClient) -> None:
    fake.submit_seconds = 0.2
    sampler = trainer.save_weights_and_get_sampling_client()
    future: OperationFuture[SampleResponse] = sampler.sample([1])
    assert future.cancel()
    with pytest.raises(Cancelled):
        future.result(10)
    assert fake.samples == []


FRAMES = [
    {"index": 0, "tokens": [5], "logprobs": [-1.0], "text_delta": "a", "stop_reason": None},
    {"index": 0, "tokens": [6], "logprobs": [-2.0], "text_delta": "b", "stop_reason": "length"},
    {"done": True, "usage": {"prefill": 1, "sample": 2}},
]


def test_a_stream_is_iterated_in_scripts_and_in_coroutines(fake: FakeService, sampler: SamplingClient) -> None:
    fake.frames = FRAMES
    stream = sampler.stream([1])
    assert list(stream) == [
        SampleDelta(0, [5], [-1.0], "a"),
        SampleDelta(0, [6], [-2.0], "b", "length"),
    ]
    assert stream.usage is not None
    assert stream.usage.sample == 2

    async def loop() -> str:
        return "".join([delta.text async for delta in sampler.stream([1])])

    assert asyncio.run(loop()) == "ab"
    assert fake.cancelled == []


def test_leaving_a_stream_early_stops_its_samples(fake: FakeService, sampler: SamplingClient) -> None:
    fake.frames = FRAMES[:1] * 1000
    fake.hold = {"sample"}
    with sampler.stream([1]) as stream:
        next(stream)
    assert fake.cancelled == ["smp_0"]
    for delta in sampler.stream([1]):
        assert delta.text == "a"
        break
    deadline = time.monotonic() + 5
    while len(fake.cancelled) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.cancelled == ["smp_0", "smp_1"]


def test_a_service_that_is_gone_is_an_error_of_the_sample(fake: FakeService, sampler: SamplingClient) -> None:
    fake.hold = {"sample"}
    fake.break_poll = ConnectionFailed("no service answers")
    with pytest.raises(ConnectionFailed):
        sampler.sample([[1], [2]]).result(10)


def test_a_limit_is_waited_for_under_one_idempotency_key(fake: FakeService, sampler: SamplingClient) -> None:
    fake.limited = [RateLimited("full", details={"retry_after": 1}), RateLimited("full")]
    assert sampler.sample([1]).result(10).sequences
    assert len(fake.sample_keys) == 3
    assert len(set(fake.sample_keys)) == 1
