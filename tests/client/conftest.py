from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.client.fake import FakeService
from trainsession import Datum, ServiceClient
from trainsession.client.training import TrainingClient
from trainsession.engine.api import EngineHost
from trainsession.server.running import Server, bind_tcp
from trainsession.transport.embedded import open_embedded
from trainsession.transport.home import prepare
from trainsession.transport.serving import serve_home


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
def trainer(fake: FakeService) -> Iterator[TrainingClient]:
    client = fake.client()
    yield client
    fake.hold.clear()
    for kind in ("forward_backward", "optim_step", "sample"):
        fake.release(client, kind)
    client._connection.close()


@pytest.fixture
def batch() -> list[Datum]:
    return [Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 0.5]})]


@contextmanager
def serving(home: Path, open_host: Callable[[], EngineHost], port: int = 0) -> Iterator[str]:
    """A home served on a real loopback port: its URL."""
    servers: list[tuple[asyncio.AbstractEventLoop, Server]] = []
    ready = threading.Event()
    listener = bind_tcp("127.0.0.1", port)

    def on_ready(_socket: str, server: Server) -> None:
        servers.append((asyncio.get_running_loop(), server))
        ready.set()

    def main() -> None:
        asyncio.run(serve_home(home, prepare(home), open_host, on_ready, [listener]))

    thread = threading.Thread(target=main, name="test-server")
    thread.start()
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop, server = servers[0]
        loop.call_soon_threadsafe(server.stop)
        thread.join(60)


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of this module's services; ``tiny-llama`` is the one model in it."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").mkdir()
    (home / "models" / "tiny-llama").symlink_to(tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSESSION_HOME", str(home / "data"))
        patch.setenv("TRAINSESSION_MODEL_CACHE", str(home / "models"))
        patch.delenv("TRAINSESSION_BASE_URL", raising=False)
        yield home


@pytest.fixture(scope="module", params=["embedded", "http"])
def service(request: pytest.FixtureRequest, models: Path) -> Iterator[ServiceClient]:
    """The real service with the real engine, inside this process and on a socket."""
    from trainsession.runtime.host import LocalHost

    if request.param == "embedded":
        embedded = open_embedded(models / "data", open_host=LocalHost)
        with ServiceClient() as client:
            yield client
        embedded.close()
    else:
        with serving(models / "served", LocalHost) as url, ServiceClient(url) as client:
            yield client
