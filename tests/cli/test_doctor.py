"""`trainsession doctor` on homes that are well and homes that are not."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from tests.cli.test_objects import run
from tests.postgres import PostgresServer
from tests.s3 import BUCKET, BlobStores, S3Server, settings
from tests.server.keyed import keyed, make_key
from trainsession.cli import doctor as module
from trainsession.store.backend import backend_of, parse_address
from trainsession.store.schema import SCHEMA_VERSION
from trainsession.store.upgrade import migrate


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a model in the cache: a directory with the files that one has."""
    home, cache = tmp_path / "home", tmp_path / "models"
    home.mkdir(mode=0o700)
    model = cache / "org" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("TRAINSESSION_HOME", str(home))
    monkeypatch.setenv("TRAINSESSION_MODEL_CACHE", str(cache))
    return home


def findings(*arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    out, _ = run("doctor", "--json", *arguments, code=code)
    return {finding["check"]: finding for finding in json.loads(out)}


def failed(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert all(finding["do"] for finding in found.values() if not finding["ok"])
    return {name: finding for name, finding in found.items() if not finding["ok"]}


def test_a_healthy_home_new_and_in_use(home: Path) -> None:
    found = findings()
    assert failed(found) == {}
    assert list(found) == [
        *("home", "disk", "database", "blobs", "service", "prices", "model cache", "engine", "clock")
    ]
    assert "org/model" in found["model cache"]["found"]
    assert found["database"]["found"].startswith("none yet")
    assert list(home.iterdir()) == []  # it changes nothing
    make_key(home)
    with keyed(home):
        found = findings()
        assert failed(found) == {}
        assert found["database"]["found"] == f"schema {SCHEMA_VERSION}"
        assert "serves this home" in found["service"]["found"]
    table, _ = run("doctor")
    assert "FAILED" not in table
    assert "float32" in table or "bfloat16" in table


def test_a_service_that_is_not_ready(home: Path) -> None:
    make_key(home)
    with keyed(home):
        shutil.rmtree(home / "blobs")
        found = failed(findings(code=1))
    assert list(found) == ["service"]
    assert found["service"]["found"].endswith("serves this home, and is not ready: blobs")


def test_a_home_that_is_no_directory_or_open_to_others(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert {"home", "blobs"} <= failed(findings("--home", str(tmp_path / "file" / "home"), code=1)).keys()
    home.chmod(0o755)
    assert failed(findings(code=1))["home"]["do"] == f"chmod 700 {home}"


def test_a_full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home)._replace(free=2**29)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    found = failed(findings(code=1))
    assert found["disk"]["found"] == "0.5 GiB free"
    assert "FAILED" in run("doctor", code=1)[0]


def test_databases_that_are_damaged_newer_older_or_held(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / "service.db"
    path.write_bytes(b"no database" * 1000)
    assert "not a database" in failed(findings(code=1))["database"]["found"]
    path.unlink()
    path.touch()
    migrate(backend_of(path), "0001")
    assert f"upgraded to {SCHEMA_VERSION}" in findings()["database"]["found"]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert "newer trainsession" in failed(findings(code=1))["database"]["do"]
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert failed(findings(code=1))["database"]["do"] == "end the process that holds it"


def test_prices_models_and_engine(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "prices.toml").write_text("[default]\ntrian = 1\n")
    assert "trian" in failed(findings(code=1))["prices"]["found"]
    (home / "prices.toml").write_text("currency = [")
    assert "prices.toml" in failed(findings(code=1))["prices"]["do"]
    (home / "prices.toml").write_text('currency = "EUR"\n')
    assert "in EUR" in findings()["prices"]["found"]
    monkeypatch.setenv("TRAINSESSION_MODEL_CACHE", str(home / "prices.toml"))
    assert "TRAINSESSION_MODEL_CACHE" in failed(findings(code=1))["model cache"]["do"]


def test_a_clock_that_was_never_set_or_went_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    assert "NTP" in failed(findings(code=1))["clock"]["do"]
    monkeypatch.setattr(module.time, "time", lambda: now)
    path = home / "service.db"
    path.touch()
    migrate(backend_of(path))
    with closing(sqlite3.connect(path)) as connection, connection:
        session = {"id": "s1", "project": "a", "kind": "trainer", "base_model": "m", "state": "closed"}
        session |= {"on_failure": "skip", "name": "", "tags": "[]", "metadata": "{}", "request_hash": "", "epoch": 1}
        session |= {"with_optimizer": 0, "next_seq": 1, "step": 0, "created_at": now, "used_at": now + 3600.0}
        session |= {"busy_seconds": 0.0}
        values = ", ".join(map(repr, session.values()))
        connection.execute(f"INSERT INTO sessions ({', '.join(session)}) VALUES ({values})")
    assert "3600 s behind" in failed(findings(code=1))["clock"]["found"]


def test_a_database_and_a_bucket_elsewhere(
    home: Path, postgres_server: PostgresServer, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings(s3_server.url).items():
        monkeypatch.setenv(name, value)
    url, bucket = postgres_server.create(), f"s3://{BUCKET}/{home.parent.name}"
    before = postgres_server.execute("SELECT count(*) FROM meta", url_name(url))
    found = findings("--database", url, "--blobs", bucket)
    assert failed(found) == {}
    assert found["database"]["found"].endswith("written and read")
    assert found["blobs"]["found"] == f"{bucket}: written, read and deleted"
    assert postgres_server.execute("SELECT count(*) FROM meta", url_name(url)) == before
    assert BlobStores(s3_server).directory(home).exists() is False
    assert "empty" in findings("--database", postgres_server.create(empty=True))["database"]["found"]

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-hidden")
    wrong = url.replace(postgres_server.password, "wrong-and-hidden")
    bad = failed(findings("--database", wrong, "--blobs", bucket, code=1))
    assert "password authentication failed" in bad["database"]["found"]
    assert "PGPASSWORD" in bad["database"]["do"]
    assert "SignatureDoesNotMatch" in bad["blobs"]["found"]
    assert "hidden" not in str(bad)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert "AWS_ENDPOINT_URL_S3" in failed(findings("--blobs", bucket, code=1))["blobs"]["do"]
    old = postgres_server.create(empty=True)
    migrate(backend_of(parse_address(home, old)), "0001")
    assert failed(findings("--database", old, code=1))["database"]["do"] == "trainsession db upgrade"


def url_name(url: str) -> str:
    return str(make_url(url).database)


def test_a_check_that_breaks_is_a_finding(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_something(home: Path) -> module.Finding:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(module, "CHECKS", (check_something,))
    assert failed(findings(code=1))["something"]["found"] == "RuntimeError: on purpose"
