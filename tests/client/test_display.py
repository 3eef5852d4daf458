"""What a session, usage and samples look like, and when a progress bar is shown."""

from __future__ import annotations

import concurrent.futures
import io
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.client.fake import FakeService
from trainsession import (
    Datum,
    SampledSequence,
    SampleResponse,
    ServiceClient,
    SessionInfo,
    StorageError,
    Usage,
    UsageReport,
)
from trainsession.client import progress
from trainsession.client.checkpoint_files import download
from trainsession.client.io_loop import io_loop
from trainsession.client.progress import Progress, Waiting
from trainsession.client.training import TrainingClient


def _sample(text: str) -> SampledSequence:
    return SampledSequence([1, 2], [-1.0, -2.0], "stop", text)


def test_reprs_are_one_short_line(trainer: TrainingClient, batch: list[Datum]) -> None:
    response = SampleResponse([_sample("x" * 1000) for _ in range(100)])
    usage = UsageReport(Usage(train=1_000_000, cost=0.25), {"ses_1": Usage(train=1_000_000, cost=0.25)}, {})
    future = trainer.forward_backward(batch)
    future.result(10)
    for thing in (trainer, trainer.base_sampling_client(), response, usage, future, batch[0]):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 400
    assert "100 in all" in repr(response)
    assert "1,000,000 train; 0.250000 USD" in repr(usage)
    assert repr(future) == "<OperationFuture forward_backward, done>"


def test_a_service_client_shows_its_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before its first call too, when it is still open which process serves the home."""
    monkeypatch.delenv("TRAINSESSION_BASE_URL", raising=False)
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path))
    with ServiceClient() as embedded, ServiceClient("http://gpu-box:8000") as remote:
        assert repr(embedded) == f"ServiceClient(embedded, home {tmp_path})"
        assert repr(remote) == "ServiceClient(http://gpu-box:8000)"


def test_html_escapes_what_a_model_wrote() -> None:
    shown = SampleResponse([_sample("<script>alert(1)</script>"), _sample("b" * 5000)])._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert len(shown) < 2000
    many = SampleResponse([_sample("a")] * 50)._repr_html_()
    assert many.count("<tr>") == 21
    assert "30 more" in many


def test_html_of_sessions_and_usage() -> None:
    session = SessionInfo("ses_<1>", "trainer", "tiny", "running", 0.0, 1, name="mine", waiting_for="number 7")
    html = session._repr_html_()
    assert "ses_&lt;1&gt;" in html
    assert "running, waits for number 7" in html
    assert "1970-01-01 00:00:00 UTC" in html
    by_session = {"a": Usage(train=1500, cost=0.5), "b": Usage(sample=2, cost=0.25)}
    report = UsageReport(by_session["a"] + by_session["b"], by_session, {}, "EUR", 10.0, 4.0)
    html = report._repr_html_()
    assert "<td" in html
    assert "1,500" in html
    assert "0.750000 EUR" in html
    assert "idle 6.0 s" in html


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def watch(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by the test itself: pytest sets stderr anew after the fixtures."""
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.delenv("TRAINSESSION_PROGRESS", raising=False)


def test_a_bar_is_shown_to_a_terminal_only(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(terminal, monkeypatch)
    with Progress("downloading", 10, "B") as bar:
        bar.add(4)
    assert "downloading:  40%" in terminal.getvalue()
    monkeypatch.setenv("TRAINSESSION_PROGRESS", "0")
    quiet = Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    with Progress("downloading", 10) as bar:
        bar.add(4)
    monkeypatch.delenv("TRAINSESSION_PROGRESS")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("downloading", 10) as bar:
        bar.add(4)
    assert quiet.getvalue() == ""


def test_what_is_quick_shows_no_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(terminal, monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 5.0)
    with Progress("downloading", 10) as bar:
        bar.add(10)
    assert terminal.getvalue() == ""


def test_waiting_counts_samples_and_says_that_a_model_loads(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(terminal, monkeypatch)
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    waiting = Waiting("sample")
    waiting.total = 4

    def work() -> None:
        for _ in range(4):
            time.sleep(0.15)
            waiting.count += 1
        outcome.set_result(1)

    threading.Thread(target=work).start()
    waiting.until_done(outcome, None)
    assert "4/4" in terminal.getvalue()
    loading: concurrent.futures.Future[int] = concurrent.futures.Future()
    one = Waiting("forward")
    one.is_loading = lambda: True
    one.until_done(loading, 0.7)
    assert not loading.done()
    assert "waiting for the model" in terminal.getvalue()
    before = terminal.getvalue()
    Waiting("forward").until_done(loading, 0.05)
    assert terminal.getvalue() == before, "a loop of single steps must not flicker"


class _Files(FakeService):
    """A checkpoint's files as a service could give them."""

    def __init__(self, name: str, content: bytes, sha256: str) -> None:
        super().__init__()
        self.name, self.content, self.sha256 = name, content, sha256

    async def request(self, method: str, path: str, **options: object) -> object:
        return {"files": [{"name": self.name, "size": len(self.content), "sha256": self.sha256}]}

    async def download(self, path: str, params: object, destination: Path, on_bytes: object) -> str:
        import hashlib

        destination.write_bytes(self.content)
        return hashlib.sha256(self.content).hexdigest()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "", "a\\b"])
def test_a_service_cannot_write_outside_the_directory(tmp_path: Path, name: str) -> None:
    files = _Files(name, b"x", "")
    with pytest.raises(StorageError, match="no plain file name"):
        io_loop().run(download(files, "ts://s/weights/w", tmp_path / "in"))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.rglob("*")] == ["in"]


def test_a_damaged_download_is_refused_and_removed(tmp_path: Path) -> None:
    files = _Files("adapter_config.json", b"x", "0" * 64)
    with pytest.raises(StorageError, match="sha256"):
        io_loop().run(download(files, "ts://s/weights/w", tmp_path))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        io_loop().run(download(_Files("a", b"x", ""), "ts://s/weights/w", tmp_path / "file" / "in"))  # type: ignore[arg-type]
