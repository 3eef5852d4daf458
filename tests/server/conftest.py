from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.client.conftest import serving as serving_home
from tests.server.scripted import ScriptedService, serving
from trainsession import ServiceClient, Usage

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, ScriptedService]]:
    service = ScriptedService()
    with serving(service) as (url, _):
        yield url, service


@pytest.fixture
def service(running: tuple[str, ScriptedService]) -> ScriptedService:
    """The service behind `url` and `http`, as new."""
    running[1].reset()
    return running[1]


@pytest.fixture
def url(running: tuple[str, ScriptedService], service: ScriptedService) -> str:
    return running[0]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False) as client:
        yield client


@dataclass(frozen=True)
class Door:
    """A real service with the real engine on a loopback socket, and the clients of its users."""

    url: str
    sdk: ServiceClient
    openai: OpenAI

    def metered(self) -> Usage:
        """The project's ledger."""
        return self.sdk.usage().total


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Say <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def door(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Serves ``tiny-llama``, and as ``tiny-tools`` the same weights with a template that knows tools."""
    from openai import OpenAI

    from trainsession.runtime.host import LocalHost

    home = tmp_path_factory.mktemp("door")
    models = home / "models"
    models.mkdir()
    (models / "tiny-llama").symlink_to(tiny_model)
    shutil.copytree(tiny_model, models / "tiny-tools")
    (models / "tiny-tools" / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSESSION_MODEL_CACHE", str(models))
        with (
            serving_home(home / "data", LocalHost) as url,
            ServiceClient(url) as sdk,
            OpenAI(base_url=f"{url}/openai/v1", api_key="none", max_retries=0) as client,
        ):
            yield Door(url, sdk, client)
