"""Projects, keys and `trainsession serve` with keys, as an operator types them."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import openai
import pytest

import trainsession as ts
from bench.null_engine import MODEL
from tests.cli.test_objects import run
from tests.server.keyed import keyed
from tests.server.owner import SpokenHost

COMMAND = [sys.executable, "-m", "trainsession.cli"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path / "home"))
    for name in ("TRAINSESSION_BASE_URL", "TRAINSESSION_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def make_key(*arguments: str) -> str:
    return run("keys", "create", *arguments)[0].strip()


def test_projects_are_made_listed_and_limited() -> None:
    out, err = run("projects", "create", "a")
    assert (out, "keys create --project a" in err) == ("", True)
    assert json.loads(run("projects", "create", "b", "--json")[0])["project"] == "b"
    assert "project a exists" in run("projects", "create", "a", code=1)[1]
    table, _ = run("projects", "set-limit", "a", "max_live_sessions=3", "max_body_bytes=1000000")
    assert re.search(r"a +3 +4096 +16384 +1000000000 +1000000 ", table)
    listed = {row["project"]: row for row in json.loads(run("projects", "list", "--json")[0])}
    assert listed.keys() == {"a", "b", "default"}
    assert listed["a"]["own_limits"] == {"max_live_sessions": 3, "max_body_bytes": 1_000_000}
    assert listed["b"]["limits"]["max_live_sessions"] == 64
    assert "max_live_sessions" in run("projects", "list")[0]
    changed = json.loads(run("projects", "set-limit", "a", "max_live_sessions=default", "--json")[0])
    assert changed["own_limits"] == {"max_body_bytes": 1_000_000}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("max_live_sessions", "expected LIMIT=NUMBER or LIMIT=default"),
        ("max_live_sessions=-1", "expected LIMIT=NUMBER"),
        ("max_live_sessions=0", "expected at least 1"),
        ("max_rank=8", "no limit 'max_rank' can be set for a project"),
        ("max_body_bytes=999999999999", "can only be lower"),
        ("max_tokens_per_minute=99999999999999999999", "at most"),
        pytest.param("max_tokens_per_minute=1" + "0" * 5000, "expected LIMIT=NUMBER", id="huge"),
    ],
)
def test_limits_that_cannot_be_set(setting: str, said: str) -> None:
    out, err = run("projects", "set-limit", "default", setting, code=1)
    assert out == ""
    assert err.startswith("error: ")
    assert said in err


def test_a_key_is_printed_once_and_never_listed() -> None:
    out, err = run("keys", "create", "--name", "laptop", "--days", "2")
    assert re.fullmatch(r"ts-[0-9a-f]{12}-[0-9a-f]{64}\n", out)
    secret = out.strip().rpartition("-")[2]
    assert "cannot be shown again" in err
    assert secret not in err
    table, _ = run("keys", "list")
    (row,) = json.loads(run("keys", "list", "--json")[0])
    assert row["prefix"] == out.rpartition("-")[0]
    assert row["expires_at"] - row["created_at"] == pytest.approx(2 * 86_400)
    assert (row["project"], row["scope"], row["name"], row["revoked_at"]) == ("default", "full", "laptop", None)
    assert "laptop" in table
    assert secret not in table + json.dumps(row)
    made = json.loads(run("keys", "create", "--scope", "read", "--json")[0])
    assert made["key"].startswith(made["prefix"])
    assert made["scope"] == "read"


def test_names_are_shown_as_they_are() -> None:
    run("keys", "create", "--name", "[red]x[/green]")
    assert "[red]x[/green]" in run("keys", "list")[0]


def test_a_key_is_revoked_by_its_prefix() -> None:
    prefix = make_key().rpartition("-")[0]
    out, err = run("keys", "revoke", prefix)
    assert (out, err.strip()) == ("", f"revoked {prefix} of project default")
    assert json.loads(run("keys", "revoke", prefix, "--json")[0])["revoked_at"]
    assert "keys list" in run("keys", "revoke", "ts-000000000000", code=1)[1]


def test_keys_of_what_is_not_there() -> None:
    assert "projects create nobody" in run("keys", "create", "--project", "nobody", code=1)[1].replace("\n", " ")
    assert "no session s_none" in run("keys", "create", "--session", "s_none", code=1)[1]
    run("keys", "create", "--scope", "admin", code=2)
    for days in ("0", "inf", "nan", "3000000"):
        assert "expiry" in run("keys", "create", "--days", days, code=1)[1]


def test_keys_that_an_older_version_made_without_a_bound_can_be_listed(home: Path) -> None:
    prefix = make_key().rpartition("-")[0]
    with closing(sqlite3.connect(home / "service.db")) as connection, connection:
        connection.execute("UPDATE api_keys SET expires_at = 9e999, revoked_at = 1e15")
    assert prefix in run("keys", "list")[0]


@pytest.mark.parametrize(
    "command", [("keys", "list"), ("projects", "list", "--json"), ("keys", "revoke", "ts-000000000000")]
)
def test_commands_that_look_make_no_home(home: Path, command: tuple[str, ...]) -> None:
    assert "no trainsession home is at" in run(*command, code=1)[1]
    assert not home.exists()


def test_help_has_examples() -> None:
    for group, command in (
        *(("projects", command) for command in ("create", "list", "set-limit")),
        *(("keys", command) for command in ("create", "list", "revoke")),
    ):
        assert f"trainsession {group} {command}" in run(group, command, "--help")[0]


def test_commands_work_beside_a_running_service_and_hold_at_once(home: Path) -> None:
    with keyed(home) as url:
        run("projects", "create", "a")
        key = make_key("--project", "a")
        with ts.ServiceClient(url, key) as client:
            trainer = client.create_lora_training_client(MODEL, rank=1)
            run("projects", "set-limit", "a", "max_live_sessions=1")
            with pytest.raises(ts.LimitExceeded):
                client.create_lora_training_client(MODEL, rank=1)
            bound = make_key("--project", "a", "--session", trainer.session_id)
            rows = json.loads(run("keys", "list", "--project", "a", "--json")[0])
            assert [row["scope"] for row in rows] == ["full", "sample"]
            assert rows[1]["session_id"] == trainer.session_id
            assert json.loads(run("sessions", "--base-url", url, "--api-key", key, "--json")[0])
            assert "scope sample" in run("sessions", "--base-url", url, "--api-key", bound, code=1)[1]
            run("keys", "revoke", key.rpartition("-")[0])
            assert "was revoked" in run("sessions", "--base-url", url, "--api-key", key, code=1)[1]


def test_the_page_of_the_openai_door_makes_a_key_of_one_session(home: Path, tmp_path: Path) -> None:
    """The command as it stands in docs/openai.md, and the address and model that stand below it."""
    page = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    (command,) = re.findall(r"^trainsession (keys create .*?--session s_\.\.\..*?) *#", page, re.MULTILINE)
    (address,) = re.findall(r"^export OPENAI_BASE_URL=http://gpu-host:8765(/\S+)$", page, re.MULTILINE)
    (model,) = re.findall(r"^# model: (\S+)$", page, re.MULTILINE)
    with keyed(home, SpokenHost.opener(tmp_path / "tokenizer")) as url, ts.ServiceClient(url, make_key()) as service:
        trainer = service.create_lora_training_client(MODEL, rank=1)
        assert trainer.save_weights_and_get_sampling_client().openai_model.startswith("ts://")
        key = run(*command.replace("s_...", trainer.session_id).split())[0].strip()
        with openai.OpenAI(base_url=url + address, api_key=key) as client:
            model = model.replace("s_...", trainer.session_id)
            assert client.completions.create(model=model, prompt="a", max_tokens=2).usage is not None
            assert [known.id for known in client.models.list()] == [model]
            with pytest.raises(openai.PermissionDeniedError):
                client.completions.create(model=MODEL, prompt="a", max_tokens=2)
        (row,) = [row for row in json.loads(run("keys", "list", "--json")[0]) if row["name"] == "agent"]
        assert (row["scope"], row["session_id"]) == ("sample", trainer.session_id)
        assert row["expires_at"] - row["created_at"] == pytest.approx(7 * 86_400)


# --- serve -----------------------------------------------------------------------------------


def test_serve_refuses_to_start_without_a_key_that_works(home: Path) -> None:
    said = f"trainsession keys create --home {home}"
    assert said in run("serve", "--port", "0", code=1)[1].replace("\n", " ")
    run("keys", "revoke", make_key().rpartition("-")[0])
    assert said in run("serve", "--port", "0", "--host", "0.0.0.0", code=1)[1].replace("\n", " ")


@contextmanager
def served(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server process: its port."""
    command = [*COMMAND, "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        first = server.stderr.readline()
        found = re.search(r"trainsession at http://\S+:(\d+) \(with API keys\)", first)
        assert found, first + server.stderr.read()
        try:
            yield int(found[1]), server
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
            said = server.stderr.read()
            assert "sessions are kept" in said
            assert server.stdout is not None
            assert server.stdout.read() == ""


def test_serve_with_keys_on_every_address_and_the_command_line_beside_it(home: Path) -> None:
    key = make_key()
    with served("--host", "0.0.0.0") as (port, _):
        url = f"http://127.0.0.1:{port}"
        with ts.ServiceClient(url) as client, pytest.raises(ts.AuthenticationFailed):
            client.list_base_models()
        with ts.ServiceClient(url, key) as client:
            assert isinstance(client.list_base_models(), list)
        assert json.loads(run("models", "--base-url", url, "--api-key", key, "--json")[0]) is not None
        # The home's own socket needs no key: who reaches it could read the home.
        assert run("sessions", "--json")[0].strip() == "[]"
        run("keys", "revoke", key.rpartition("-")[0])
        assert "was revoked" in run("models", "--base-url", url, "--api-key", key, code=1)[1]


def test_a_key_in_the_environment_is_used_and_not_shown() -> None:
    key = make_key()
    with served() as (port, _):
        environment = os.environ | {
            "TRAINSESSION_BASE_URL": f"http://127.0.0.1:{port}",
            "TRAINSESSION_API_KEY": key[:-1] + ("0" if key[-1] != "0" else "1"),
        }
        failed = subprocess.run(
            [*COMMAND, "models"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert failed.returncode == 1
        assert "not known here" in failed.stderr
        assert "(request req_" in failed.stderr
        assert key[20:-1] not in failed.stderr + failed.stdout
