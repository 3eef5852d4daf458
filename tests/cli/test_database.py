"""`trainsession serve`, `keys`, `projects` and `db` on a PostgreSQL database, as an operator types them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import trainsession as ts
from tests.cli.test_objects import run
from tests.cli.test_tenancy import served
from tests.postgres import PostgresServer
from trainsession.store.backend import backend_of, parse_address
from trainsession.store.schema import SCHEMA_VERSION
from trainsession.store.upgrade import migrate, schema_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path / "home"))
    for name in ("TRAINSESSION_BASE_URL", "TRAINSESSION_API_KEY", "TRAINSESSION_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def test_a_service_and_its_commands_share_a_database(
    postgres_server: PostgresServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.create(empty=True)
    run("projects", "create", "a", "--database", url)
    monkeypatch.setenv("TRAINSESSION_DATABASE_URL", url)
    key = run("keys", "create", "--project", "a")[0].strip()
    with served() as (port, _), ts.ServiceClient(f"http://127.0.0.1:{port}", key) as client:
        assert isinstance(client.list_base_models(), list)
        run("keys", "revoke", key.rpartition("-")[0])
        with pytest.raises(ts.AuthenticationFailed, match="revoked"):
            client.list_base_models()
    assert "a" in run("projects", "list")[0]
    assert not (home / "service.db").exists()


def test_an_older_schema_is_upgraded_only_when_asked_for(postgres_server: PostgresServer, home: Path) -> None:
    url = postgres_server.create(empty=True)
    backend = backend_of(parse_address(home, url))
    migrate(backend, "0001")
    for command in (("serve", "--port", "0"), ("keys", "list")):
        said = run(*command, "--database", url, code=1)[1]
        assert "trainsession db upgrade" in said
        assert postgres_server.password not in said
    assert schema_of(backend) == "0001"
    assert f"0001 -> {SCHEMA_VERSION}" in run("db", "upgrade", "--database", url)[1]
    assert f"at {SCHEMA_VERSION} already" in run("db", "upgrade", "--database", url)[1]
    run("keys", "list", "--database", url)


def test_a_file_is_upgraded_too(home: Path) -> None:
    assert f"service.db: empty -> {SCHEMA_VERSION}" in run("db", "upgrade")[1]
    assert os.path.exists(home / "service.db")


@pytest.mark.parametrize("wrong", ["mysql://u:hidden@h/x", "hidden", "postgresql://u:hidden@127.0.0.1:1/x"])
def test_a_database_that_is_none_is_named_without_its_password(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSESSION_DATABASE_URL", wrong)
    for command in (("serve", "--port", "0"), ("projects", "list"), ("db", "upgrade")):
        out, said = run(*command, code=1)
        assert "database" in said
        assert "hidden" not in out + said
    assert "hidden" not in "".join(run("serve", "--help"))


def test_servers_that_share_a_database_say_where_they_are(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = run("serve", "--dev", "--advertise", "http://127.0.0.1:1", code=2)
    assert "PostgreSQL" in said
    monkeypatch.setenv("TRAINSESSION_DATABASE_URL", postgres_server.create())
    _, said = run("serve", "--dev", "--port", "0", "--advertise", "127.0.0.1:1", code=1)
    assert "expected http://host[:port]" in said
    run("keys", "create")
    with served():
        second = ("serve", "--dev", "--port", "0", "--home", str(tmp_path / "second"))
        (tmp_path / "second").mkdir()
        (tmp_path / "second" / "blobs").symlink_to(tmp_path / "home" / "blobs")
        _, said = run(*second, "--advertise", "http://127.0.0.1:1", code=1)
        assert "that one does not say where it can be reached" in said
        assert "--advertise" in said
