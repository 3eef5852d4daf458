"""`trainsession config`, and that `serve` and the operator's commands run on what it prints."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cli.test_objects import run
from tests.postgres import PostgresServer
from trainsession.cli.configuration import VARIABLES, table

SECRET = "hidden-password"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*VARIABLES.values(), "TRAINSESSION_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def shown(*arguments: str) -> dict[str, str]:
    """Key to line."""
    return {line.split(" =")[0].removeprefix("# "): line for line in run("config", *arguments)[0].splitlines()}


def test_file_variables_and_options_in_that_order(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config.toml").write_text(
        'port = 1\nhost = "::1"\nblobs = "s3://a-file/x"\nlog_format = "json"\n[service]\nidle_seconds = 5\n'
    )
    monkeypatch.setenv("TRAINSESSION_BLOBS", "s3://a-variable/x")
    monkeypatch.setenv("TRAINSESSION_LOG_FORMAT", "text")
    lines = shown("--log-format", "json")
    file = str(home / "config.toml")
    for key, value, source in (
        ("port", "1", file),
        ("host", '"::1"', file),
        ("blobs", '"s3://a-variable/x"', "TRAINSESSION_BLOBS"),
        ("log_format", '"json"', "--log-format"),
        ("home", f'"{home}"', "TRAINSESSION_HOME"),
        ("dev", "false", "default"),
        ("idle_seconds", "5.0", file),
        ("janitor_seconds", "60.0", "default"),
    ):
        assert lines[key].startswith(f"{key} = {value} "), lines[key]
        assert lines[key].endswith(f"# {source}")
    assert lines["database"].startswith("# database =")


def test_what_is_printed_is_a_file_that_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINSESSION_HOME")  # a variable goes before a file
    out, _ = run("config", "--port", "7", "--blobs", "s3://bucket/a", "--dev", "--home", str(tmp_path / 'a "b" \\ c'))
    parsed = tomllib.loads(out)
    assert (parsed["port"], parsed["dev"], parsed["blobs"]) == (7, True, "s3://bucket/a")
    (tmp_path / "copy.toml").write_text(out)
    again, _ = run("config", "--config", str(tmp_path / "copy.toml"))
    assert tomllib.loads(again) == parsed


def test_no_password_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (f"postgresql://u:{SECRET}@h/x", f"postgresql://u@h/x?password={SECRET}", f"x{SECRET}"):
        monkeypatch.setenv("TRAINSESSION_DATABASE_URL", url)
        assert SECRET not in "".join(run("config"))
        assert "database = " in run("config")[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "unknown key prot; did you mean port?"),
        ("[service]\nidle_second = 1", "unknown key service.idle_second; did you mean service.idle_seconds?"),
        ("xyzzy = 1", "unknown key xyzzy; known are dev, host"),
        ('port = "many"', "config.toml: port: "),
        ("port = 70000", "config.toml: port: "),
        ('log_format = "xml"', "log_format: Input should be 'json' or 'text'"),
        ("[service]\nidle_seconds = -1", "service.idle_seconds: expected a number above 0"),
        ('[service]\nidle_seconds = "long"', "service.idle_seconds: "),
        ("service = 1", "expected a table"),
        ("port = ", "no TOML"),
        ('home = "/elsewhere"', "this file is in the home"),
        (f"database = ['{SECRET}']", "database: "),
    ],
)
def test_a_file_that_is_wrong_says_where_and_what_would_be_right(home: Path, text: str, said: str) -> None:
    (home / "config.toml").write_text(text)
    for command in (("config",), ("serve",), ("keys", "list"), ("doctor",)):
        out, err = run(*command, code=1)
        assert said in err.replace("\n", " ")
        assert "config.toml" in err
        assert SECRET not in out + err


def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSESSION_LOG_FORMAT", "xml")
    assert "TRAINSESSION_LOG_FORMAT: log_format" in run("config", code=1)[1]
    assert "cannot be read" in run("config", "--config", "/none/such.toml", code=1)[1]


def test_serve_and_keys_work_on_what_the_file_says(home: Path, postgres_server: PostgresServer) -> None:
    url = postgres_server.create()
    (home / "config.toml").write_text(f'database = "{url}"\nhost = "0.0.0.0"\ndev = true\n')
    assert "--dev asks for no key" in run("serve", code=2)[1]
    run("projects", "create", "of-the-file")
    assert "of-the-file" in run("projects", "list", "--database", url)[0]
    assert not (home / "service.db").exists()


def test_the_documentation_has_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    for row in table():
        assert row in page
