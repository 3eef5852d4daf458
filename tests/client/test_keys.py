"""The SDK against a service with keys: two projects, limits, a key for one session, a revoke."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainsession as ts
from bench.null_engine import MODEL
from tests.server.keyed import keyed, make_key, revoke, set_limit
from trainsession.transport import patience


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, keyed(home) as url:
        patch.delenv("TRAINSESSION_API_KEY", raising=False)
        patch.delenv("TRAINSESSION_BASE_URL", raising=False)
        yield url


def batch(tokens: list[int]) -> list[ts.Datum]:
    return [ts.Datum(tokens, {"target_tokens": tokens})]


def step(trainer: ts.TrainingClient) -> None:
    trainer.forward_backward(batch([1, 2, 3]), "cross_entropy").result()
    trainer.optim_step(ts.AdamParams()).result()


def test_a_loop_with_a_key_and_none_without(url: str, home: Path) -> None:
    key = make_key(home, "loop")
    with ts.ServiceClient(url, key, project="loop") as client:
        trainer = client.create_lora_training_client(MODEL, rank=1)
        step(trainer)
        sampler = trainer.save_weights_and_get_sampling_client()
        response = sampler.sample(ts.ModelInput.from_ints([1, 2]), 2, ts.SamplingParams(max_tokens=3)).result()
        assert len(response.sequences) == 2
        path = trainer.save_state("kept").result().path
        assert client.usage().total.train == 3
        assert key.rpartition("-")[2] not in repr(client) + repr(trainer) + repr(sampler)
    with ts.ServiceClient(url) as client, pytest.raises(ts.AuthenticationFailed, match="send `Authorization: Bearer"):
        client.list_sessions()
    with ts.ServiceClient(url, make_key(home, "stranger")) as client:
        assert list(client.list_sessions()) == []
        with pytest.raises(ts.NotFound):
            client.attach(trainer.session_id)
        with pytest.raises(ts.NotFound):
            client.create_training_client_from_state(path)
    with ts.ServiceClient(url, key, project="stranger") as client, pytest.raises(ts.PermissionDenied):
        client.list_sessions()


def test_a_key_with_its_lines_end_works_and_one_that_cannot_be_sent_is_not_repeated(url: str, home: Path) -> None:
    key = make_key(home, "pasted")
    with ts.ServiceClient(url, f" {key}\n") as client:
        assert list(client.list_sessions()) == []
    for broken in (f"{key}\nX-Other: 1", f"{key} {key}", f"{key}\0", f"{key}ü"):
        with ts.ServiceClient(url, broken) as client, pytest.raises(ts.InvalidRequest, match="api_key") as caught:
            client.list_sessions()
        assert key[20:] not in str(caught.value)


def test_a_read_key_looks_and_does_not_touch(url: str, home: Path) -> None:
    with ts.ServiceClient(url, make_key(home, "looked-at")) as owner:
        trainer = owner.create_lora_training_client(MODEL, rank=1)
        with ts.ServiceClient(url, make_key(home, "looked-at", scope="read")) as client:
            assert [session.session_id for session in client.list_sessions()] == [trainer.session_id]
            with pytest.raises(ts.PermissionDenied, match="scope read"):
                client.create_lora_training_client(MODEL, rank=1)


def test_a_key_of_one_session_makes_a_sampling_client_of_it(url: str, home: Path) -> None:
    params = ts.SamplingParams(max_tokens=2)
    prompt = ts.ModelInput.from_ints([5])
    with ts.ServiceClient(url, make_key(home, "agents")) as owner:
        trainer = owner.create_lora_training_client(MODEL, rank=1)
        other = owner.create_lora_training_client(MODEL, rank=1)
        path, foreign = (t.save_weights_for_sampler("final").result().path for t in (trainer, other))
        key = make_key(home, "agents", scope="sample", session_id=trainer.session_id)
        with ts.ServiceClient(url, key) as client:
            response = client.create_sampling_client(path=path).sample(prompt, 1, params).result()
            assert len(response.sequences[0].tokens) == 2
            with pytest.raises(ts.NotFound):
                client.create_sampling_client(path=foreign)
            with pytest.raises(ts.PermissionDenied):
                client.list_sessions()
        assert owner.usage(trainer.session_id).total.sample == 2


def test_a_revoke_ends_a_loop_in_its_middle_and_another_key_goes_on(url: str, home: Path) -> None:
    key, second = make_key(home, "handed-over"), make_key(home, "handed-over")
    with ts.ServiceClient(url, key) as client:
        trainer = client.create_lora_training_client(MODEL, rank=1)
        step(trainer)
        revoke(home, key)
        with pytest.raises(ts.AuthenticationFailed, match="was revoked"):
            step(trainer)
    with ts.ServiceClient(url, second) as client:
        taken_over = client.attach(trainer.session_id)
        step(taken_over)
        assert client.usage().total.train == 6


def test_a_rate_slows_a_loop_down_and_loses_nothing_of_it(
    url: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with ts.ServiceClient(url, make_key(home, "throttled")) as client:
        trainer = client.create_lora_training_client(MODEL, rank=1)
        set_limit(home, "throttled", max_tokens_per_minute=295)
        started = time.monotonic()
        trainer.forward_backward(batch(list(range(1, 301))), "cross_entropy").result()
        trainer.forward_backward(batch([1] * 10), "cross_entropy").result()  # the minute's share is used up
        trainer.optim_step(ts.AdamParams()).result()
        assert time.monotonic() - started >= 1.0
        assert client.usage().total.train == 310
        set_limit(home, "throttled", max_tokens_per_minute=None)
        step(trainer)


def test_too_many_sessions_and_too_large_a_body_say_which_limit(url: str, home: Path) -> None:
    key = make_key(home, "bounded")
    with ts.ServiceClient(url, key) as client:
        set_limit(home, "bounded", max_live_sessions=1, max_body_bytes=20_000)
        trainer = client.create_lora_training_client(MODEL, rank=1)
        with pytest.raises(ts.LimitExceeded, match="max_live_sessions = 1"):
            client.create_lora_training_client(MODEL, rank=1)
        with pytest.raises(ts.PayloadTooLarge, match="max_body_bytes = 20000") as caught:
            trainer.forward_backward(batch([1] * 10_000), "cross_entropy").result()
        assert caught.value.details["limit"] == "max_body_bytes"
        assert caught.value.request_id
        trainer.zero_grad().result()
        step(trainer)


def test_samples_wait_for_their_place_however_long_and_can_be_cancelled_meanwhile(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 2.0)
    with ts.ServiceClient(url, make_key(home, "crowded")) as client:
        sampler = client.create_sampling_client(base_model=MODEL)
        set_limit(home, "crowded", max_concurrent_samples=2)
        short, long = ts.SamplingParams(max_tokens=2), ts.SamplingParams(max_tokens=50_000)
        held = [sampler.sample([1, 2], 1, long) for _ in range(2)]
        wait_for(lambda: all(future.operation_id for future in held))
        waiting = [sampler.sample([1, 2], 1, short) for _ in range(3)]
        cancelled = sampler.sample([1, 2], 1, short)
        stream = sampler.stream([1, 2], 1, short)
        time.sleep(4)  # beyond the patience with a service that does not answer
        assert not any(future.done() for future in (*waiting, cancelled))
        started = time.monotonic()
        assert cancelled.cancel()
        with pytest.raises(ts.Cancelled):
            cancelled.result(5)
        assert time.monotonic() - started < 5
        with pytest.raises(ts.LimitExceeded, match="max_concurrent_samples"):
            sampler.sample([[1], [2], [3]], 1, short).result(10)
        for future in held:
            future.cancel()
        for future in waiting:
            assert len(future.result(30).sequences[0].tokens) == 2
        assert sum(len(delta.tokens) for delta in stream) == 2


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
