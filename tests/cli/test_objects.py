"""The command line, as a user types it, against a served home."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainsession as ts
from bench.null_engine import MODEL, NullHost
from trainsession.cli import app
from trainsession.transport.embedded import open_embedded

COST = "0.000000800000"
SERVE = "import sys\nfrom trainsession.cli import app\napp(sys.argv[1:])"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with one session and two checkpoints, served by this process."""
    monkeypatch.delenv("TRAINSESSION_BASE_URL", raising=False)
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path))
    service = open_embedded(tmp_path, open_host=NullHost)
    with ts.ServiceClient() as client:
        trainer = client.create_lora_training_client(MODEL, rank=2, seed=0, name="mine")
        trainer.forward_backward([ts.Datum([1, 2], {"target_tokens": [2, 3]})], "cross_entropy")
        trainer.optim_step(ts.AdamParams())
        trainer.save_state("first").result()
        trainer.save_weights_for_sampler("first").result()
    yield tmp_path
    service.close()


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def paths() -> list[str]:
    return [row["path"] for row in json.loads(run("checkpoints", "--json")[0])]


def test_lists_as_tables_and_as_json(home: Path) -> None:
    assert MODEL in run("models")[0]
    (session,) = json.loads(run("sessions", "--json")[0])
    assert (session["name"], session["step"]) == ("mine", 1)
    table, _ = run("sessions")
    assert session["session_id"] in table
    assert len(paths()) == 2
    assert paths()[0] in run("checkpoints")[0]


def test_usage_shows_sessions_and_total(home: Path) -> None:
    out, err = run("usage")
    assert re.search(r"total +0 +0 +0 +2 ", out)
    assert "engine busy" in err
    assert json.loads(run("usage", "--json")[0])["total"]["train"] == 2


def test_usage_is_grouped_and_exported(home: Path) -> None:
    today = datetime.now(UTC).date().isoformat()
    out, _ = run("usage", "--by", "day,kind", "--csv", "--since", today)
    assert out == f"day,kind,tokens,cost,currency,cost_per_million,engine_seconds\n{today},train,2,{COST},USD,0.4,\n"
    assert json.loads(run("usage", "--by", "kind", "--json")[0])["rows"][0]["group"] == {"kind": "train"}
    assert re.search(rf"{today} +0 +0 +0 +2 +2 +0.000001 +USD +0.4000 +0\.\d", run("usage", "--by", "day")[0])
    assert json.loads(run("usage", "--all-projects", "--by", "project", "--json")[0])["rows"]
    assert "expected some of" in run("usage", "--by", "hour", code=1)[1]
    run("usage", "--csv", "--json", code=2)


def test_download_and_delete(home: Path, tmp_path: Path) -> None:
    (weights,) = [path for path in paths() if "/weights/" in path]
    out, _ = run("download", weights, str(tmp_path / "adapter"))
    assert out.strip() == str(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    out, err = run("delete", weights)
    assert (out, err.strip()) == ("", f"deleted {weights}")
    assert weights not in paths()


def test_errors_are_one_line_on_stderr_and_status_1(home: Path) -> None:
    out, err = run("delete", "ts://s_none/state/nothing", code=1)
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_a_service_that_is_not_there(home: Path) -> None:
    _, err = run("models", "--base-url", "http://127.0.0.1:9", code=1)
    assert "no service answers at http://127.0.0.1:9" in err.replace("\n", " ")


def test_version() -> None:
    assert run("version")[0].strip() == ts.__version__


def test_serve_without_keys_refuses_addresses_that_others_reach() -> None:
    _, err = run("serve", "--dev", "--host", "0.0.0.0", code=2)
    assert "0.0.0.0 can be reached from other machines" in err.replace("\n", " ")


def test_help_has_examples_for_every_command() -> None:
    for command in ("serve", "models", "sessions", "checkpoints", "usage", "download", "delete"):
        out, _ = run(command, "--help")
        assert f"trainsession {command}" in out


def test_serve_prints_its_address_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, "serve", "--dev", "--port", "0", "--home", str(tmp_path / "home")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert server.stdout is not None
        first = server.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert found, first + server.stderr.read()
        with ts.ServiceClient(found[0]) as client:
            assert isinstance(client.list_base_models(), list)
        # A second server of the same home is told who serves it.
        again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 1
        assert f"process {server.pid} serves" in again.stderr.replace("\n", " ")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert "sessions are kept" in server.stderr.read()
        assert server.stdout.read() == ""
