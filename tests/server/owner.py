"""A project that has one of everything, and samples drawn over plain HTTP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.null_engine import MODEL, NullHost
from tests.conftest import save_tiny_tokenizer
from tests.server.keyed import client, make_key
from trainsession.tokenization import BUNDLE_FILES
from trainsession.wire import MEDIA_TYPE, pack, unpack

MSGPACK = {"Content-Type": MEDIA_TYPE}


class SpokenHost(NullHost):
    """Its models have a tokenizer and a chat template, for doors where requests are text."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__()
        self._files = {name: (tokenizer / name).read_bytes() for name in BUNDLE_FILES if (tokenizer / name).exists()}

    @classmethod
    def opener(cls, directory: Path) -> partial[SpokenHost]:
        """What opens one, with its files in this directory."""
        save_tiny_tokenizer(directory)
        return partial(cls, directory)

    async def tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        return self._files


class Owner:
    """A project with a session in it and one of everything that has an id."""

    def __init__(self, url: str, home: Path, project: str) -> None:
        self.key = make_key(home, project)
        self.http = client(url, self.key)
        answer = self.http.post("/v1/sessions", json={"base_model": MODEL, "lora": {"rank": 1}, "name": project})
        self.session_id = answer.json()["session"]["session_id"]
        self.seq = 0
        self.training_id = self.operation("zero_grad")
        self.snapshot_id = self.operation("snapshot")
        for kind in ("save_state", "save_weights"):
            self.result(self.operation(kind, name="kept"))
        self.state = f"ts://{self.session_id}/state/kept"
        self.weights = f"ts://{self.session_id}/weights/kept"
        (self.sample_id,) = self.sample({"operation_id": self.snapshot_id}).json()["operation_ids"]
        self.result(self.sample_id)
        self.http.post(f"/v1/sessions/{self.session_id}/log", json={"metrics": {"loss": 1.0}})

    def operation(self, kind: str, **params: Any) -> str:
        self.seq += 1
        body = {"kind": kind, "seq": self.seq, "params": params}
        answer = self.http.post(f"/v1/sessions/{self.session_id}/operations", content=pack(body), headers=MSGPACK)
        return answer.json()["operation_id"]

    def result(self, operation_id: str) -> dict[str, Any]:
        answer = self.http.post("/v1/results", json={"wait": [operation_id], "timeout": 20})
        (result,) = unpack(answer.content)["results"]
        assert result["state"] == "done", result
        return result

    def sample(self, weights: dict[str, str], http: httpx.Client | None = None, **fields: Any) -> httpx.Response:
        return sample(http or self.http, weights, **fields)


def sample(http: httpx.Client, weights: dict[str, str], count: int = 1, **fields: Any) -> httpx.Response:
    request = {"prompt": np.array([1, 2], np.int32), "params": {"max_tokens": 3}, **fields}
    body = pack({"weights": weights, "requests": [request] * count})
    return http.post("/v1/samples", content=body, headers=MSGPACK)
