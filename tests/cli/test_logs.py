"""The log of `trainsession serve`: a line for each request, and nothing of what was in it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.null_engine import MODEL
from tests.cli.test_tenancy import COMMAND
from tests.server.keyed import client, keyed, make_key
from tests.server.test_tenancy import Owner, sample
from trainsession.transport.logs import JsonFormatter, TextFormatter


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """Records of trainsession's loggers, as the handler of `serve` gets them."""
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept(logging.INFO)
    logger = logging.getLogger("trainsession")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


def written(records: list[logging.LogRecord]) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(record)) for record in records if record.name == "trainsession.access"]


def test_each_request_has_one_line_without_its_content(tmp_path: Path, lines: list[logging.LogRecord]) -> None:
    with keyed(tmp_path) as url:
        owner = Owner(url, tmp_path, "alice")
        http = owner.http
        answers = [
            sample(http, {"base_model": MODEL}, count=20),
            http.get("/v1/samples/secret%0Aid/stream"),
            http.get(f"/v1/nowhere/{owner.key}", params={"api_key": owner.key}),
            http.post("/v1/sessions", json={"base_model": "a-secret-model", "name": "a-secret-name"}),
        ]
        http.close()
        with client(url, owner.key[:-1] + "x") as stranger:
            answers += [stranger.get("/v1/sessions"), stranger.get("/healthz")]
    by_id = {line["request_id"]: line for line in written(lines)}
    found = [by_id[answer.headers["x-request-id"]] for answer in answers]
    ids = answers[0].json()["operation_ids"]
    assert [(line.get("route"), line["status"]) for line in found] == [
        ("/v1/samples", 200),
        ("/v1/samples/{operation_id}/stream", 404),
        (None, 404),
        ("/v1/sessions", 422),
        ("/v1/sessions", 401),
        (None, 200),
    ]
    assert len(by_id) == len(written(lines))
    assert (found[0]["operations"], found[0]["more_operations"]) == (ids[:16], 4)
    assert [line.get("project") for line in found] == ["alice", "alice", None, "alice", None, None]
    assert all(line["ms"] > 0 and line["method"] in ("GET", "POST") for line in found)
    texts = [formatter.format(record) for record in lines for formatter in (JsonFormatter(), TextFormatter())]
    for secret in (owner.key[16:40], "secret", "nowhere", "api_key"):
        assert not [text for text in texts if secret in text]
    assert not [text for text in texts if "\n" in text]


def test_formats_of_a_fault() -> None:
    try:
        raise ValueError("on purpose")
    except ValueError as error:
        record = logging.LogRecord(
            "trainsession.x", logging.ERROR, "", 0, "it %s", ("failed",), (ValueError, error, error.__traceback__)
        )
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("error", "trainsession.x", "it failed")
    assert line["exception"].endswith("ValueError: on purpose")
    assert line["time"].endswith("+00:00")
    text = TextFormatter().format(record)
    assert "ERROR it failed\nTraceback" in text


@pytest.mark.parametrize("arguments", [[], ["--log-format", "text"]])
def test_serve_logs_as_it_was_asked(tmp_path: Path, arguments: list[str]) -> None:
    home = tmp_path / "home"
    key = make_key(home)
    command = [*COMMAND, "serve", "--port", "0", "--home", str(home), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        first = server.stderr.readline()
        shown = first if arguments else json.loads(first)["message"]
        with client(shown.split()[2], key) as http:
            assert http.get("/v1/sessions").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        said = server.stderr.read().splitlines()
    assert key[20:40] not in "".join(said)
    if arguments:
        (line,) = [line for line in said if "GET /v1/sessions 200" in line]
        assert " project=default" in line
    else:
        records = [json.loads(line) for line in said]
        (request,) = [record for record in records if record["logger"] == "trainsession.access"]
        assert (request["route"], request["status"], request["project"]) == ("/v1/sessions", 200, "default")
        assert records[-1]["message"] == "stopped; sessions are kept"
