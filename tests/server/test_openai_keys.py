"""The OpenAI door of a service with keys, with the real client: what each key can reach, and until when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

import trainsession as ts
from bench.null_engine import MODEL as NULL
from tests.server.keyed import keyed, make_key, revoke
from tests.server.owner import SpokenHost
from trainsession.runtime.host import LocalHost

MODEL = "tiny-llama"
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
LONG = 20_000
"""Tokens of a sample that would take the null engine far longer than any test waits."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def url(home: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real engine behind keys."""
    models = tmp_path_factory.mktemp("models")
    (models / MODEL).symlink_to(tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSESSION_MODEL_CACHE", str(models))
        for name in ("TRAINSESSION_API_KEY", "TRAINSESSION_BASE_URL", "OPENAI_API_KEY"):
            patch.delenv(name, raising=False)
        with keyed(home, LocalHost) as url:
            yield url


@pytest.fixture(scope="module")
def owner(url: str, home: Path) -> Iterator[ts.ServiceClient]:
    with ts.ServiceClient(url, make_key(home, "owner")) as client:
        yield client


def door(url: str, key: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/openai/v1", api_key=key, max_retries=0, **options)


def calls(client: openai.OpenAI, model: str, **options: Any) -> list[Callable[[], object]]:
    """Every way to sample."""
    text: dict[str, Any] = {"model": model, "prompt": "a", "max_tokens": 2, **options}
    chat: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 2, **options}
    return [
        lambda: client.completions.create(**text),
        lambda: client.chat.completions.create(**chat),
        lambda: list(client.completions.create(**text, stream=True)),
        lambda: list(client.chat.completions.create(**chat, stream=True)),
    ]


def refused(client: openai.OpenAI, model: str, error: type[openai.APIStatusError], code: str) -> set[str]:
    """What the refusals say, with the model's name taken out."""
    said = set()
    for call in calls(client, model):
        with pytest.raises(error) as raised:
            call()
        assert raised.value.code == code
        assert raised.value.request_id
        said.add(raised.value.message.replace(model, "MODEL"))
    return said


def trained(owner: ts.ServiceClient) -> tuple[ts.TrainingClient, ts.SamplingClient, str]:
    """A trainer, its snapshot and its saved weights."""
    trainer = owner.create_lora_training_client(MODEL, rank=2)
    trainer.forward_backward([ts.Datum([5, 6, 7], {"target_tokens": [6, 7, 8]})], "cross_entropy")
    trainer.optim_step(ts.AdamParams(learning_rate=0.05)).result(60)
    sampler = trainer.save_weights_and_get_sampling_client()
    return trainer, sampler, trainer.save_weights_for_sampler("final").result(60).path


def test_no_key_and_wrong_keys(url: str, home: Path) -> None:
    late = make_key(home, valid_seconds=0.05)
    gone = make_key(home)
    revoke(home, gone)
    time.sleep(0.1)
    keyless: dict[str, Any] = {"extra_headers": {"Authorization": openai.Omit()}}
    keys = {
        "": "asks for an API key",
        "sk-1": "no API key",
        f"ts-{'0' * 12}-{'0' * 64}": "not known",
        late: "has expired",
        gone: "was revoked",
    }
    for key, said in keys.items():
        with door(url, key or "none") as client:
            options = {} if key else keyless
            listing = [partial(client.models.list, **options), partial(client.models.retrieve, MODEL, **options)]
            for call in (*calls(client, MODEL, **options), *listing):
                with pytest.raises(openai.AuthenticationError) as raised:
                    call()
                assert (raised.value.code, raised.value.type) == ("invalid_api_key", "invalid_request_error")
                assert raised.value.response.headers["WWW-Authenticate"] == "Bearer"
                assert said in raised.value.message
                assert not key[20:] or key[20:] not in raised.value.message


def test_a_read_key_lists_models_and_samples_nothing(url: str, home: Path, owner: ts.ServiceClient) -> None:
    trainer, sampler, saved = trained(owner)
    before = owner.usage().total
    with door(url, make_key(home, "owner", scope="read")) as client:
        assert {MODEL, saved} <= {model.id for model in client.models.list()}
        assert client.models.retrieve(trainer.openai_model).owned_by == trainer.session_id
        for model in (MODEL, saved, trainer.openai_model, sampler.openai_model, "nobody/knows"):
            (said,) = refused(client, model, openai.PermissionDeniedError, "permission_denied")
            assert "has scope read, and this call needs full or sample" in said
    assert owner.usage().total == before


def test_a_key_of_one_session_samples_that_session_and_nothing_else(
    url: str, home: Path, owner: ts.ServiceClient
) -> None:
    trainer, sampler, saved = trained(owner)
    other, others_sampler, foreign = trained(owner)
    strange = [other.openai_model, others_sampler.openai_model, foreign]
    stranger = "s_" + "0" * 26
    sessions = {session.session_id for session in owner.list_sessions()}
    key = make_key(home, "owner", scope="sample", session_id=trainer.session_id)
    with door(url, key) as client, trainer.openai_client() as full:
        ask: dict[str, Any] = {"prompt": "The capital", "max_tokens": 6, "seed": 1}
        for model in (trainer.openai_model, sampler.openai_model, saved):
            before = owner.usage(trainer.session_id).total.sample
            for call in calls(client, model):
                call()
            assert owner.usage(trainer.session_id).total.sample == before + 8
            text = client.completions.create(model=model, **ask).choices[0].text
            assert text == full.completions.create(model=model, **ask).choices[0].text
            assert client.models.retrieve(model).owned_by == trainer.session_id
        assert {model.id for model in client.models.list()} == {trainer.openai_model, saved}

        # Live moves on with the training, for this key too.
        older = client.completions.create(model=trainer.openai_model, **ask).choices[0].text
        for _ in range(3):
            trainer.forward_backward([ts.Datum([5, 6, 7], {"target_tokens": [6, 7, 8]})], "cross_entropy")
            trainer.optim_step(ts.AdamParams(learning_rate=0.05))
        trainer.save_weights_and_get_sampling_client().sample("a", 1, ts.SamplingParams(max_tokens=1)).result(60)
        assert client.completions.create(model=trainer.openai_model, **ask).choices[0].text != older

        spent = owner.usage(other.session_id).total, owner.usage().total
        for model in strange:
            unknown = model.replace(other.session_id, stranger)
            said = refused(client, model, openai.NotFoundError, "model_not_found")
            also = refused(client, unknown, openai.NotFoundError, "model_not_found")
            ids = (other.session_id, "S"), (stranger, "S")
            assert {text.replace(*ids[0]) for text in said} == {text.replace(*ids[1]) for text in also}
            for name in (model, unknown):
                with pytest.raises(openai.NotFoundError):
                    client.models.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(MODEL)
        # Another's snapshot under its own session's name, weights that are not there, and the base model.
        mixed = others_sampler.openai_model.replace(other.session_id, trainer.session_id)
        state = trainer.save_state("whole").result(60).path
        for model in (mixed, saved + "-none", state, MODEL):
            refused(client, model, openai.PermissionDeniedError, "permission_denied")
        with door(url, key, default_headers={"X-TrainSession-Session": other.session_id}) as elsewhere:
            for model in (MODEL, saved, trainer.openai_model):
                refused(elsewhere, model, openai.PermissionDeniedError, "permission_denied")
        assert (owner.usage(other.session_id).total, owner.usage().total) == spent
    assert {session.session_id for session in owner.list_sessions()} == sessions, "no session was made for it"


def test_a_key_of_a_sampler_session_samples_its_base_model(url: str, home: Path, owner: ts.ServiceClient) -> None:
    _, _, saved = trained(owner)
    with owner.create_sampling_client(MODEL) as sampler:
        assert sampler.session_id is not None
        key = make_key(home, "owner", scope="sample", session_id=sampler.session_id)
        with door(url, key) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            for call in calls(client, MODEL):
                call()
            assert owner.usage(sampler.session_id).total.sample == 8
            refused(client, saved, openai.NotFoundError, "model_not_found")
        sampler.close()
        with door(url, key) as client:
            assert list(client.models.list()) == []


def test_a_sample_key_of_a_project_samples_what_the_project_has(url: str, home: Path, owner: ts.ServiceClient) -> None:
    trainer, sampler, saved = trained(owner)
    with door(url, make_key(home, "owner", scope="sample")) as client:
        assert {MODEL, saved} <= {model.id for model in client.models.list()}
        for model in (MODEL, saved, trainer.openai_model, sampler.openai_model):
            for call in calls(client, model):
                call()


def test_another_projects_models_are_not_found(url: str, home: Path, owner: ts.ServiceClient) -> None:
    trainer, sampler, saved = trained(owner)
    for fields in ({}, {"scope": "sample"}):
        with door(url, make_key(home, "stranger", **fields)) as client:
            for model in (saved, trainer.openai_model, sampler.openai_model):
                refused(client, model, openai.NotFoundError, "model_not_found")
                with pytest.raises(openai.NotFoundError):
                    client.models.retrieve(model)
            assert not [model.id for model in client.models.list() if model.id.startswith("ts://")]
    with ts.ServiceClient(url, make_key(home, "stranger")) as stranger:
        assert stranger.usage().total == ts.Usage()


def _drawn(*answers: Completion) -> int:
    """Tokens of answers, which may end before ``max_tokens``."""
    return sum(answer.usage.completion_tokens for answer in answers if answer.usage is not None)


def test_the_sdks_clients_pass_their_key_on(url: str, home: Path) -> None:
    key = make_key(home, "passing")
    with ts.ServiceClient(url, key, project="passing") as service:
        trainer, sampler, saved = trained(service)
        with trainer.openai_client() as client, sampler.openai_client() as of_sampler:
            asked = [(client, trainer.openai_model), (client, MODEL), (of_sampler, sampler.openai_model)]
            answers = [of.completions.create(model=model, prompt="a", max_tokens=3) for of, model in asked]
            assert service.usage(trainer.session_id).total.sample == _drawn(*answers)
            assert key.rpartition("-")[2] not in repr(client)
            bound = make_key(home, "passing", scope="sample", session_id=trainer.session_id)
            with (
                ts.ServiceClient(url, bound) as agent,
                agent.create_sampling_client(path=saved) as theirs,
                theirs.openai_client() as of_agent,
            ):
                answers.append(of_agent.completions.create(model=theirs.openai_model, prompt="a", max_tokens=3))
                with pytest.raises(openai.PermissionDeniedError):
                    of_agent.completions.create(model=MODEL, prompt="a", max_tokens=3)
            assert service.usage(trainer.session_id).total.sample == _drawn(*answers)
            revoke(home, key)
            with pytest.raises(openai.AuthenticationError, match="was revoked"):
                client.models.list()


# --- a key that is revoked in the middle -----------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A real service whose engine counts instead of computing, so that a sample can be long."""
    with keyed(tmp_path / "home", SpokenHost.opener(tmp_path / "tokenizer")) as url:
        yield tmp_path / "home", url


@pytest.mark.parametrize("scope", ["full", "sample", "session"])
def test_a_stream_and_its_sample_end_when_the_key_is_revoked(slow: tuple[Path, str], scope: str) -> None:
    home, url = slow
    with ts.ServiceClient(url, make_key(home)) as owner:
        sampler = owner.create_sampling_client(NULL)
        bound = {"full": {}, "sample": {"scope": "sample"}}.get(
            scope, {"scope": "sample", "session_id": sampler.session_id}
        )
        key = make_key(home, **bound)
        headers = {"X-TrainSession-Session": str(sampler.session_id)}
        with door(url, key, default_headers=headers) as client:
            chunks = client.completions.create(model=NULL, prompt="a", max_tokens=LONG, stream=True)
            next(iter(chunks))
            revoke(home, key)
            revoked = time.monotonic()
            with pytest.raises(openai.APIError, match="was revoked") as raised:
                list(chunks)
            assert time.monotonic() - revoked < 5
            assert raised.value.code == "invalid_api_key"
        deadline = time.monotonic() + 10
        while not owner.usage().total.sample and time.monotonic() < deadline:
            time.sleep(0.05)  # a sample is charged when it has ended
        assert 0 < owner.usage().total.sample < LONG


def test_a_whole_answer_is_withheld_when_the_key_is_revoked(slow: tuple[Path, str]) -> None:
    home, url = slow
    key = make_key(home)
    ended: list[Exception] = []

    def ask() -> None:
        with door(url, key) as client:
            try:
                client.completions.create(model=NULL, prompt="a", max_tokens=10_000)
            except openai.APIError as error:
                ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    assert asking.is_alive(), "the sample was too short for this test"
    revoke(home, key)
    asking.join(60)
    (error,) = ended
    assert isinstance(error, openai.AuthenticationError)
    assert "was revoked" in error.message
