"""`openai_client()` of the SDK's clients: the right weights, the right payer, embedded and over HTTP."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.client.conftest import serving
from trainsession import AdamParams, Datum, InvalidRequest, SamplingParams, ServiceClient
from trainsession.client.training import TrainingClient
from trainsession.runtime.host import LocalHost
from trainsession.transport.embedded import EmbeddedService

PROMPT = "The capital of France"
PARAMS = SamplingParams(max_tokens=12, seed=3)


@pytest.fixture
def training(service: ServiceClient) -> Iterator[TrainingClient]:
    trainer = service.create_lora_training_client("tiny-llama", rank=8, seed=0)
    step(trainer)
    yield trainer
    trainer.close()


def step(trainer: TrainingClient) -> None:
    batch = [Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9]})]
    trainer.forward_backward(batch)
    trainer.optim_step(AdamParams(learning_rate=0.05)).result(60)


def text_of(client: openai.OpenAI, model: str) -> str:
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=12, seed=3).choices[0].text


def test_a_snapshot_stays_and_live_moves_on(service: ServiceClient, training: TrainingClient) -> None:
    frozen = training.save_weights_and_get_sampling_client()
    base = training.base_sampling_client()
    with frozen.openai_client() as client, training.openai_client() as of_session:
        first = text_of(client, frozen.openai_model)
        assert first == frozen.sample(PROMPT, 1, PARAMS).result(60).text
        assert first != text_of(client, base.openai_model) == base.sample(PROMPT, 1, PARAMS).result(60).text
        assert text_of(of_session, training.openai_model) == first
        for _ in range(3):
            step(training)
        newer = training.save_weights_and_get_sampling_client()
        assert text_of(client, frozen.openai_model) == first
        second = text_of(of_session, training.openai_model)
        assert second == newer.sample(PROMPT, 1, PARAMS).result(60).text
        assert second != first


def test_saved_weights_are_served_without_merging(service: ServiceClient, training: TrainingClient) -> None:
    saved = training.save_weights_for_sampler("door").result(60)
    sampler = service.create_sampling_client(path=saved.path)
    assert sampler.openai_model == saved.path
    with sampler.openai_client() as client:
        assert text_of(client, saved.path) == sampler.sample(PROMPT, 1, PARAMS).result(60).text
        assert saved.path in [model.id for model in client.models.list()]


def test_tokens_are_metered_for_the_clients_session(service: ServiceClient, training: TrainingClient) -> None:
    def metered(session_id: str | None) -> tuple[int, int]:
        total = service.usage(session_id).total
        return total.prefill, total.sample

    sampler = service.create_sampling_client("tiny-llama")
    reference = training.base_sampling_client()
    snapshot = training.save_weights_and_get_sampling_client()
    prompt = len(service.get_tokenizer("tiny-llama").encode(PROMPT))
    cases = ((sampler, sampler.session_id), (reference, training.session_id), (snapshot, training.session_id))
    for client, payer in cases:
        before = metered(payer)
        with client.openai_client() as door:
            usage = door.completions.create(model=client.openai_model, prompt=PROMPT, max_tokens=5, seed=1).usage
        assert usage is not None
        after = metered(payer)
        assert (after[0] - before[0], after[1] - before[1]) == (usage.prompt_tokens, usage.completion_tokens)
        assert usage.prompt_tokens == prompt
    sampler.close()


def test_the_asynchronous_client_streams(training: TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    model = sampler.openai_model
    expected = sampler.sample(PROMPT, 1, PARAMS).result(60).text

    async def ask() -> str:
        async with sampler.async_openai_client() as client:
            chunks = await client.completions.create(model=model, prompt=PROMPT, max_tokens=12, seed=3, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

    assert asyncio.run(ask()) == expected
    assert asyncio.run(ask()) == expected, "a client of its own for each event loop"


def test_streamed_top_logprobs_are_those_of_the_whole_sample(training: TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    whole = sampler.sample(PROMPT, 1, PARAMS, topk_logprobs=3).result(60).sequences[0]
    deltas = list(sampler.stream(PROMPT, 1, PARAMS, topk_logprobs=3))
    assert [row for delta in deltas for row in delta.topk_logprobs or []] == whole.topk_logprobs
    assert all(delta.topk_logprobs is None for delta in sampler.stream(PROMPT, 1, PARAMS))


def test_a_stream_read_after_a_restart_is_the_same(models: Path) -> None:
    home = models / "restarted"
    with serving(home, LocalHost) as url, ServiceClient(url) as service:
        sampler = service.create_sampling_client("tiny-llama")
        stream = sampler.stream(PROMPT, 1, PARAMS, topk_logprobs=2)
        deltas = list(stream)
        path = f"/v1/samples/{stream.operation_id}/stream"
    with serving(home, LocalHost) as url, ServiceClient(url) as service:

        async def frames() -> list[dict[str, Any]]:
            return [frame async for frame in service._connection.transport.stream(path)]

        whole, last = service._connection.io.run(frames())
    assert last["done"]
    assert whole["tokens"] == [token for delta in deltas for token in delta.tokens]
    assert whole["text_delta"] == "".join(delta.text for delta in deltas)
    topk = [row for delta in deltas for row in delta.topk_logprobs or []]
    assert [[tuple(entry) for entry in row] for row in whole["topk"]] == topk


def test_without_the_package_the_error_says_what_to_install(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    for make in (training.openai_client, training.async_openai_client):
        with pytest.raises(InvalidRequest, match=r"trainsession\[openai\]"):
            make()


def test_a_key_and_a_project_are_passed_on(training: TrainingClient) -> None:
    with ServiceClient("http://127.0.0.1:9", "tsk_1", project="p") as elsewhere:
        from trainsession.client import openai_clients

        with openai_clients.blocking(elsewhere._connection, "s_1") as client:
            assert str(client.base_url) == "http://127.0.0.1:9/openai/v1/"
            assert client.api_key == "tsk_1"
            sent = {name.lower(): value for name, value in client.default_headers.items()}
            assert (sent["x-trainsession-project"], sent["x-trainsession-session"]) == ("p", "s_1")


def test_the_client_follows_a_home_to_its_next_server(models: Path) -> None:
    """The process that serves a home ends; whoever asks next takes over, in the middle of its request."""
    home = models / "moving"
    first, second = (EmbeddedService(home, LocalHost) for _ in range(2))
    first._users = second._users = 1
    first.ensure()
    http: Any = httpx.Client(transport=second.blocking())
    with openai.OpenAI(base_url="http://trainsession/openai/v1", api_key="none", http_client=http) as client:
        text = text_of(client, "tiny-llama")
        assert (first.serves, second.serves) == (True, False)
        first.close()
        assert text_of(client, "tiny-llama") == text
        assert second.serves
    second.close()


def test_a_stopping_server_ends_streams_and_their_samples(models: Path) -> None:
    home = models / "stopping"
    with serving(home, LocalHost) as url:
        client = openai.OpenAI(base_url=f"{url}/openai/v1", api_key="none", max_retries=0)
        chunks = client.completions.create(
            model="tiny-llama", prompt=PROMPT, max_tokens=480, logit_bias={"2": -100}, stream=True
        )
        next(iter(chunks))
    with pytest.raises(openai.APIError, match="shutting down"):
        list(chunks)
    client.close()
    with serving(home, LocalHost) as url, ServiceClient(url) as service:
        # Nobody would read what the next process draws: it draws nothing.
        time.sleep(1)
        assert 0 < service.usage().total.sample < 480
