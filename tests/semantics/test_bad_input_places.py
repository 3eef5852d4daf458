"""Models, adapters, sessions, checkpoints and disks that are not what a call needs, through the SDK.

As in `test_bad_input`: a clear typed error at once, nothing lost, the same numbers afterwards.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import trainsession as ts

from .loop import ADAM, CONTEXT, MODEL, PROMPT, assert_says, batch, datum, new_trainer, step

NAN = float("nan")
Error = type[ts.TrainSessionError]


# --- models, adapters, sessions -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 0}, ts.InvalidRequest, ("rank", ">= 1", "got 0")),
        ({"rank": -3}, ts.InvalidRequest, ("rank", ">= 1", "got -3")),
        ({"rank": 100_000}, ts.LimitExceeded, ("rank", "100000", "max_rank = 256")),
        ({"rank": 4.5}, ts.InvalidRequest, ("rank", "integer", "4.5")),
        ({"alpha": 0}, ts.InvalidRequest, ("alpha", "> 0")),
        ({"alpha": NAN}, ts.InvalidRequest, ("alpha", "finite")),
        ({"seed": -1}, ts.InvalidRequest, ("seed", "[0, 2**63)")),
        ({"train_attn": False, "train_mlp": False}, ts.InvalidRequest, ("train_attn", "at least one")),
        ({"target_modules": []}, ts.InvalidRequest, ("target_modules", "empty")),
        ({"on_failure": "retry"}, ts.InvalidRequest, ("on_failure", "'continue' or 'skip'", "'retry'")),
        ({"gap_timeout": 0}, ts.InvalidRequest, ("gap_timeout", "above 0", "None for ever", "got 0")),
        ({"gap_timeout": "10"}, ts.InvalidRequest, ("gap_timeout", "'10'")),
        ({"tags": "mine"}, ts.InvalidRequest, ("tags", "list of strings")),
        ({"metadata": {"x": NAN}}, ts.InvalidRequest, ("metadata", "JSON")),
        ({"metadata": {"x": "y" * 20_000}}, ts.LimitExceeded, ("metadata", "max_metadata_bytes = 16384")),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_makes_no_session(
    service: ts.ServiceClient, options: dict[str, Any], error: Error, words: tuple[str, ...]
) -> None:
    before = len(service.list_sessions())
    with pytest.raises(ts.TrainSessionError) as caught:
        new_trainer(service, **options)
    assert type(caught.value) is error
    assert_says(caught.value, words)
    assert len(service.list_sessions()) == before


def test_a_target_that_matches_nothing_is_named_with_what_exists(service: ts.ServiceClient) -> None:
    trainer = new_trainer(service, target_modules=["q_projj"])
    failed = trainer.forward_backward(batch())
    with pytest.raises(ts.InvalidRequest, match=r"q_projj.*q_proj") as caught:
        failed.result(60)
    assert caught.value.code == "invalid_request"
    assert trainer.info().state == "failed"
    trainer.close()


@pytest.mark.parametrize("name", ["tiny-lama", "no/such-model", "../tiny-llama"])
def test_an_unknown_model_is_said_at_once_with_those_that_exist(
    service: ts.ServiceClient, tmp_path: Path, name: str
) -> None:
    before = len(service.list_sessions())
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    calls: list[Callable[[], Any]] = [
        lambda: service.create_lora_training_client(name),
        lambda: service.create_sampling_client(name),
        lambda: service.get_tokenizer(name),
        lambda: service.import_adapter(tmp_path, base_model=name, name="x"),
    ]
    for call in calls:
        with pytest.raises(ts.UnknownModel) as caught:
            call()
        assert caught.value.code == "unknown_model"
        assert_says(caught.value, (name, MODEL))
    assert len(service.list_sessions()) == before


def test_unknown_sessions_and_checkpoints_are_not_found(
    service: ts.ServiceClient, two_steps: list[dict[str, float]]
) -> None:
    with pytest.raises(ts.NotFound, match="s_nobody") as caught:
        service.attach("s_nobody")
    assert (caught.value.code, caught.value.status) == ("not_found", 404)
    for wrong in ("", "a/b", None):
        with pytest.raises(ts.InvalidRequest, match="session_id"):
            service.attach(wrong)  # type: ignore[arg-type]
    path = "ts://s_nobody/state/x"
    calls: list[Callable[[], Any]] = [
        lambda: service.create_training_client_from_state(path),
        lambda: service.create_training_client_from_state_with_optimizer(path),
        lambda: service.create_sampling_client(path="ts://s_nobody/weights/x"),
        lambda: service.create_sampling_client(path="ts://s_nobody/live"),
        lambda: service.download_checkpoint(path, "never-made"),
        lambda: service.delete_checkpoint(path),
    ]
    for call in calls:
        with pytest.raises(ts.NotFound, match="s_nobody"):
            call()
    assert not Path("never-made").exists()
    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        with pytest.raises(ts.NotFound, match="s_nobody/state/x"):
            trainer.load_state(path).result(60)
        with pytest.raises(ts.NotFound, match="weights/x"):
            trainer.create_sampling_client("ts://s_nobody/weights/x").sample(PROMPT).result(60)
        assert step(trainer) == two_steps[1]


def test_a_closed_session_takes_nothing_from_any_client(service: ts.ServiceClient) -> None:
    closed = new_trainer(service)
    state = closed.save_state("s").result(60)
    closed.close()
    calls: list[Callable[[], Any]] = [
        lambda: closed.forward(batch()),
        lambda: closed.forward_backward(batch()),
        lambda: closed.optim_step(),
        lambda: closed.save_state("t"),
        lambda: closed.save_weights_and_get_sampling_client(),
    ]
    for call in calls:
        with pytest.raises(ts.SessionClosed, match=closed.session_id) as caught:
            call()
        assert (caught.value.code, caught.value.status) == ("session_closed", 409)
    with pytest.raises(ts.SessionClosed, match=closed.session_id):
        service.attach(closed.session_id)
    closed.close()  # twice is not an error
    # Another client of the session hears of it from the service.
    one = new_trainer(service)
    service._connection.call("POST", f"/v1/sessions/{one.session_id}/close")
    with pytest.raises(ts.SessionClosed, match=one.session_id):
        one.forward_backward(batch()).result(60)
    # The checkpoint outlives its session.
    with service.create_training_client_from_state(state.path) as resumed:
        assert step(resumed)["step"] == 1


def test_a_checkpoint_of_another_base_model_is_refused(
    service: ts.ServiceClient, two_steps: list[dict[str, float]], tmp_path: Path
) -> None:
    with new_trainer(service, "tiny-qwen3") as other:
        step(other)
        state = other.save_state("s").result(60).path
        weights = other.save_weights_for_sampler("w").result(60).path
    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        for failed in (
            trainer.load_state(state),
            trainer.load_state_with_optimizer(state),
            trainer.load_state(weights),
        ):
            with pytest.raises(ts.CheckpointMismatch, match=r"tiny-qwen3.*tiny-llama") as caught:
                failed.result(60)
            assert (caught.value.code, caught.value.status) == ("checkpoint_mismatch", 422)
        assert step(trainer) == two_steps[1]
        mine = trainer.save_state("mine").result(60).path
        with pytest.raises(ts.CheckpointMismatch, match="no optimizer"):
            trainer.load_state_with_optimizer(trainer.save_weights_for_sampler("w").result(60).path).result(60)
        trainer.load_state_with_optimizer(mine).result(60)
    with new_trainer(service, rank=8) as wider, pytest.raises(ts.CheckpointMismatch, match=r"rank"):
        wider.load_state(mine).result(60)
    # A PEFT adapter names no weights, only shapes: the first use says what does not fit.
    service.download_checkpoint(weights, tmp_path / "adapter")
    arrays = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wide = {key: np.tile(value, (1, 2)) if "lora_A" in key else value for key, value in arrays.items()}
    save_file(wide, tmp_path / "adapter" / "adapter_model.safetensors")
    imported = service.import_adapter(tmp_path / "adapter", base_model=MODEL, name="foreign")
    with pytest.raises(ts.CheckpointMismatch, match="lora_A"):
        service.create_sampling_client(path=imported.path).sample(PROMPT).result(60)


# --- disks -------------------------------------------------------------------------------------
def test_a_batch_that_a_full_disk_refused_is_no_part_of_a_step(
    service: ts.ServiceClient, two_steps: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        trainer.forward_backward(batch()[:1]).result(60)
        large = [datum(CONTEXT, seed, weights=np.ones(CONTEXT)) for seed in range(60)]

        def full(_descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            failed = trainer.forward_backward(large)
            with pytest.raises(ts.StorageError, match="free some space") as caught:
                failed.result(60)
            assert (caught.value.code, caught.value.status) == ("storage_error", 507)
            with pytest.raises(ts.StorageError, match="free some space"):
                trainer.save_state("full").result(60)
        with pytest.raises(ts.IncompleteGradients):
            trainer.optim_step(ADAM).result(60)
        trainer.zero_grad()
        assert step(trainer) == two_steps[1]
        assert trainer.save_state("full").result(60).path.endswith("/full")


def test_a_batch_beyond_the_body_limit_is_no_part_of_a_step(
    service: ts.ServiceClient, two_steps: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainsession.transport.http import Transport

    request = Transport.request

    async def too_large(self: Transport, method: str, path: str, *, body: Any = None, **options: Any) -> Any:
        if isinstance(body, dict) and body.get("kind") == "forward_backward":
            raise ts.PayloadTooLarge("the body has 300000000 bytes, above the limit max_body_bytes = 268435456")
        return await request(self, method, path, body=body, **options)

    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        trainer.forward_backward(batch()[:1]).result(60)
        with monkeypatch.context() as patch:
            patch.setattr(Transport, "request", too_large)
            with pytest.raises(ts.PayloadTooLarge, match="max_body_bytes"):
                trainer.forward_backward(batch()[1:]).result(60)
        with pytest.raises(ts.IncompleteGradients):
            trainer.optim_step(ADAM).result(60)
        trainer.zero_grad()
        assert step(trainer) == two_steps[1]


def test_an_unwritable_home_is_the_error_of_the_first_call(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    for home in (tmp_path / "file" / "home", Path("/proc/no-such-home")):
        monkeypatch.setenv("TRAINSESSION_HOME", str(home))
        monkeypatch.delenv("TRAINSESSION_BASE_URL", raising=False)
        with ts.ServiceClient() as client, pytest.raises(ts.StorageError) as caught:
            client.list_base_models()
        assert caught.value.code == "storage_error"
        assert_says(caught.value, (str(home), "TRAINSESSION_HOME"))
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path / "good"))
    with ts.ServiceClient() as client:
        assert client.list_sessions() == []


_ON_A_SMALL_DISK = """
import json
import sys
from pathlib import Path
import trainsession as ts
from tests.semantics.loop import batch, datum, new_trainer, step
from trainsession.runtime.host import LocalHost
from trainsession.transport.embedded import open_embedded

home, expected = Path(sys.argv[1]), json.loads(sys.argv[2])
embedded = open_embedded(home / "data", open_host=lambda: LocalHost(device="cpu", dtype="float32"))
with ts.ServiceClient() as service, new_trainer(service) as trainer:
    assert step(trainer) == expected[0]
    trainer.forward_backward(batch()[:1]).result(60)
    with open(home / "ballast", "wb", buffering=0) as ballast:
        try:
            while ballast.write(bytes(4096)):
                pass
        except OSError:
            print("the disk is full")
    failed = trainer.forward_backward([datum(500, seed) for seed in range(60)])
    try:
        failed.result(60)
    except ts.StorageError as error:
        print(error.message)
    (home / "ballast").unlink()
    try:
        trainer.optim_step().result(60)
    except ts.IncompleteGradients:
        print("no step on part of a batch")
    trainer.zero_grad()
    assert step(trainer) == expected[1]
    print("as if nothing had happened")
embedded.close()
"""


@pytest.mark.slow
def test_on_a_disk_that_is_really_full(models: Path, two_steps: list[dict[str, float]], tmp_path: Path) -> None:
    """A home on a file system of 16 MB in a mount namespace of its own, filled to the last block."""
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount += ['mount -t tmpfs -o size=16m none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system (unshare --mount)")
    environment = {
        **os.environ,
        "TRAINSESSION_HOME": str(tmp_path / "data"),
        "TRAINSESSION_MODEL_CACHE": str(models),
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[2] / sub) for sub in ("src", "")),
    }
    ended = subprocess.run(
        [*mount, sys.executable, "-c", _ON_A_SMALL_DISK, str(tmp_path), json.dumps(two_steps)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "the disk is full"
    assert "free some space" in lines[1]
    assert lines[2:] == ["no step on part of a batch", "as if nothing had happened"]
