"""One home, many processes: joining, taking over, forking, ending."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.null_engine import MODEL, NullHost
from tests.transport.peer import ask, in_fork, new_session, session_names
from trainsession.errors import ConnectionFailed, StorageError
from trainsession.transport import embedded
from trainsession.transport.embedded import EmbeddedService, open_embedded
from trainsession.transport.home import HomeLock, published

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def service(home: Path) -> Iterator[EmbeddedService]:
    service = open_embedded(home, open_host=NullHost)
    yield service
    service.close()


class Peer:
    """Another process of the same home."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.peer", str(home)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, command: str) -> Any:
        self.send(command)
        return self.answer()

    def send(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def leave(self) -> int:
        self.send("exit")
        return self.process.wait(30)


@pytest.fixture
def peers(home: Path) -> Iterator[Any]:
    started: list[Peer] = []

    def start() -> Peer:
        started.append(Peer(home))
        return started[-1]

    yield start
    for peer in started:
        peer.process.kill()
        peer.process.communicate()


def test_nothing_is_written_before_the_first_request(home: Path, service: EmbeddedService) -> None:
    assert not home.exists()
    assert ask(service, "GET", "/v1/health")["status"] == "ok"
    assert service.serves


def test_the_home_and_its_socket_are_private(home: Path, service: EmbeddedService) -> None:
    ask(service, "GET", "/v1/health")
    location = published(home / "run")
    assert location is not None
    assert location.pid == os.getpid()
    for path, kind in ((home, stat.S_ISDIR), (home / "run", stat.S_ISDIR)):
        mode = path.stat().st_mode
        assert kind(mode)
        assert stat.S_IMODE(mode) == 0o700
    assert stat.S_ISSOCK(os.stat(location.socket).st_mode)


def test_a_home_with_a_very_long_path(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 20) / ("path" * 20)
    service = open_embedded(home, open_host=NullHost)
    try:
        assert ask(service, "GET", "/v1/health")["status"] == "ok"
        location = published(home / "run")
        assert location is not None
        directory = Path(location.socket).parent
        assert not directory.is_relative_to(tmp_path)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        service.close()
    assert not directory.exists()


def test_an_unwritable_home_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    service = open_embedded(tmp_path / "file" / "home", open_host=NullHost)
    with pytest.raises(StorageError, match="TRAINSESSION_HOME"):
        ask(service, "GET", "/v1/health")
    service.close()


def test_missing_packages_are_named_with_the_line_to_type(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "SERVER_MODULES", ("fastapi", "a_missing_package"))
    service = open_embedded(home, open_host=NullHost)
    with pytest.raises(ConnectionFailed, match=r"a_missing_package: pip install 'trainsession\[local\]'"):
        ask(service, "GET", "/v1/health")
    assert HomeLock(home / "run").acquire(), "the lock was kept"
    service.close()


def test_an_error_while_opening_arrives_and_lets_go_of_the_home(home: Path) -> None:
    def broken() -> NullHost:
        raise StorageError("no space left")

    service = open_embedded(home, open_host=broken)
    with pytest.raises(StorageError, match="no space left"):
        ask(service, "GET", "/v1/health")
    service.close()
    again = open_embedded(home, open_host=NullHost)
    # The first object of a home lives on, with its host.
    again._open_host = NullHost
    assert ask(again, "GET", "/v1/health")["status"] == "ok"
    again.close()


def test_closing_leaves_no_thread_no_socket_and_no_lock(home: Path) -> None:
    before = set(threading.enumerate())
    service = open_embedded(home, open_host=NullHost)
    new_session(service, "kept")
    service.close()
    left = {thread for thread in threading.enumerate() if thread not in before and thread.is_alive()}
    assert left == set()
    assert sorted(path.name for path in (home / "run").iterdir()) == ["lock"]
    with pytest.raises(ConnectionFailed, match="closed"):
        ask(service, "GET", "/v1/health")
    again = open_embedded(home, open_host=NullHost)
    assert session_names(again) == ["kept"]
    again.close()


def test_the_last_user_closes(home: Path) -> None:
    first, second = open_embedded(home, open_host=NullHost), open_embedded(home, open_host=NullHost)
    assert first is second
    ask(first, "GET", "/v1/health")
    first.close()
    assert ask(second, "GET", "/v1/health")["status"] == "ok"
    second.close()
    assert not second.serves


def test_many_threads_start_one_service(home: Path) -> None:
    hosts: list[NullHost] = []

    def open_host() -> NullHost:
        hosts.append(NullHost())
        return hosts[-1]

    service = open_embedded(home, open_host=open_host)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(service, "GET", "/v1/health")["status"])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.close()
    assert answers == ["ok"] * 8
    assert len(hosts) == 1


def test_a_second_process_joins(service: EmbeddedService, peers: Any) -> None:
    new_session(service, "mine")
    peer = peers()
    peer("session theirs")
    assert peer("serves") is False
    assert peer("sessions") == ["mine", "theirs"]
    assert session_names(service) == ["mine", "theirs"]
    assert peer.leave() == 0
    assert session_names(service) == ["mine", "theirs"]


def test_processes_that_start_together_agree_on_one(peers: Any) -> None:
    together = [peers() for _ in range(3)]
    for index, peer in enumerate(together):
        peer.send(f"session s{index}")
    for peer in together:
        peer.answer()
    assert [peer("sessions") for peer in together] == [["s0", "s1", "s2"]] * 3
    assert sorted(peer("serves") for peer in together) == [False, False, True]


@pytest.mark.parametrize("ending", ["exit", "close", "kill"])
def test_another_process_takes_over_when_the_owner_ends(service: EmbeddedService, peers: Any, ending: str) -> None:
    owner = peers()
    owner("session before")
    assert owner("serves") is True
    assert session_names(service) == ["before"]
    assert not service.serves
    if ending == "kill":
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait(10)
    elif ending == "close":
        owner("close")
    else:
        assert owner.leave() == 0
    started = time.monotonic()
    assert session_names(service) == ["before"]
    assert service.serves
    assert time.monotonic() - started < 10
    new_session(service, "after")
    assert session_names(service) == ["after", "before"]


def test_one_transport_survives_the_end_of_its_server(service: EmbeddedService, peers: Any) -> None:
    """A long poll is on its way when the owner is killed; the same transport goes on."""
    owner = peers()
    owner("session before")

    async def main() -> Any:
        transport = service.transport()
        assert len((await transport.request("GET", "/v1/sessions"))["sessions"]) == 1
        waiting = asyncio.create_task(transport.request("GET", "/v1/sessions"))
        owner.process.kill()
        owner.process.wait()
        await waiting
        answer = await transport.request("GET", "/v1/sessions")
        await transport.close()
        return answer

    assert [session["name"] for session in asyncio.run(main())["sessions"]] == ["before"]
    assert service.serves


def test_a_forked_child_joins_its_parent(service: EmbeddedService) -> None:
    new_session(service, "parent")
    names, serves = in_fork(service, "child")
    assert names == ["child", "parent"]
    assert serves is False
    assert service.serves
    assert session_names(service) == ["child", "parent"]


def test_a_forked_child_does_not_keep_the_home_when_its_parent_dies(service: EmbeddedService, peers: Any) -> None:
    """Inherited lock and sockets would block the takeover for as long as the child lives."""
    owner = peers()
    owner("session before")
    owner.send("orphan")
    child = owner.answer()
    try:
        owner.process.kill()
        owner.process.wait()
        started = time.monotonic()
        assert session_names(service) == ["before"]
        assert service.serves
        assert time.monotonic() - started < 10
    finally:
        os.kill(child, signal.SIGKILL)


def test_leaving_without_a_goodbye_closes_the_service(peers: Any, home: Path) -> None:
    """The interpreter's end is a clean stop: the socket is gone, and the service was closed."""
    peer = peers()
    peer("session kept")
    assert peer.leave() == 0
    assert sorted(path.name for path in (home / "run").iterdir()) == ["lock"]


def test_tokens_arrive_one_by_one(service: EmbeddedService) -> None:
    async def main() -> list[Any]:
        transport = service.transport()
        request = {"prompt": np.array([1, 2, 3], np.int32), "num_samples": 1, "params": {"max_tokens": 5}}
        body = {"weights": {"base_model": MODEL}, "requests": [request]}
        (operation,) = (await transport.request("POST", "/v1/samples", body=body))["operation_ids"]
        frames = [frame async for frame in transport.stream(f"/v1/samples/{operation}/stream")]
        await transport.close()
        return frames

    *tokens, last = asyncio.run(main())
    assert [frame["tokens"] for frame in tokens] == [[4], [5], [6], [7], [8]]
    assert last["done"] is True
    assert last["usage"]["sample"] == 5
