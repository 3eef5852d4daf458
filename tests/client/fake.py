"""The native wire in memory, for what only goes wrong between a client and its service.

It runs operations strictly in the order of their numbers, as the service does, and does to requests
what a test asks for: refuse them, lose their answers, hold them back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainsession.client.connection import Connection
from trainsession.client.training import TrainingClient
from trainsession.errors import InvalidDatum, SequenceConflict, TrainSessionError
from trainsession.types import SessionInfo
from trainsession.wire import pack, unpack

CONSUMING = (InvalidDatum,)


def f32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def i32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def i64(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


class FakeService:
    """Acts as a `Transport`; all of it runs on the client's I/O loop but the fields a test reads.

    Attributes:
        refuse: Errors for the submits of a number, one each until they are used up.
        lose_answer: Numbers whose submit is taken, while its answer is lost as this error.
        fail: Errors that operations of a kind end with.
        hold: Kinds that don't run before `release`.
        submits: Bodies in the order of their arrival, refused ones included.
        ran: ``(seq, kind)`` in the order in which they ran.
    """

    def __init__(self) -> None:
        self.refuse: dict[int, list[TrainSessionError]] = defaultdict(list)
        self.lose_answer: dict[int, TrainSessionError] = {}
        self.fail: dict[str, TrainSessionError] = {}
        self.hold: set[str] = set()
        self.submits: list[dict[str, Any]] = []
        self.ran: list[tuple[int, str]] = []
        self.acknowledged: list[str] = []
        self.polls: list[list[str]] = []
        self.polls_now = self.most_polls = 0
        self.submits_now = self.most_submits = 0
        self.submit_seconds = 0.0
        self.break_poll: TrainSessionError | None = None
        self.cancelled: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.sample_keys: list[str] = []
        self.limited: list[TrainSessionError] = []
        """What the next submits of samples are refused with."""
        self.frames: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str]] = []
        self.is_closed = False
        self._operations: dict[int, dict[str, Any]] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._next = 1
        self._changed: asyncio.Event | None = None
        self.has_run = threading.Event()

    # --- what a test does ---------------------------------------------------------------------

    def client(self) -> TrainingClient:
        session = SessionInfo("ses_1", "trainer", "tiny", "running", time.time(), 1)
        return TrainingClient(self.connection(), session, epoch=1, next_seq=1)

    def connection(self) -> Connection:
        return Connection(lambda: self, lambda: None)  # type: ignore[arg-type, return-value]

    def release(self, client: TrainingClient, kind: str) -> None:
        def let_go() -> None:
            self.hold.discard(kind)
            self._run()

        client._connection.io.call_soon(let_go)

    # --- the transport ------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        body: Any = None,
        params: Any = None,
        timeout: Any = None,
        repeat_limited: bool = True,
        held: bool = False,
    ) -> Any:
        sent = json if body is None else unpack(pack(body))
        self.calls.append((method, path))
        await asyncio.sleep(0)
        if path == "/v1/results":
            return await self._poll(sent)
        if path == "/v1/samples":
            return self._sample(sent)
        if path.endswith("/operations"):
            return await self._submit(sent)
        if path.endswith("/cancel"):
            return {"cancelled": self._cancel(path.split("/")[-2])}
        return {}

    async def stream(self, path: str) -> AsyncIterator[dict[str, Any]]:
        for frame in self.frames:
            await asyncio.sleep(0.001)
            yield frame
            if path.split("/")[-2] in self.cancelled:
                break

    async def close(self) -> None:
        self.is_closed = True

    # --- the service --------------------------------------------------------------------------

    async def _submit(self, body: dict[str, Any]) -> dict[str, Any]:
        seq = body["seq"]
        self.submits.append(body)
        self.submits_now += 1
        self.most_submits = max(self.most_submits, self.submits_now)
        await asyncio.sleep(self.submit_seconds)
        self.submits_now -= 1
        if self.refuse[seq]:
            error = self.refuse[seq].pop(0)
            if isinstance(error, CONSUMING):
                self._operations[seq] = {**body, "kind": "refused"}
                self._run()
            raise error
        if seq in self._operations:
            raise SequenceConflict(f"sequence number {seq} was used")
        self._operations[seq] = body
        self._run()
        if seq in self.lose_answer:
            raise self.lose_answer.pop(seq)
        return {"operation_id": f"op_{seq}", "seq": seq}

    def _run(self) -> None:
        while (body := self._operations.get(self._next)) and body["kind"] not in self.hold:
            seq, kind = self._next, body["kind"]
            self._next += 1
            if f"op_{seq}" in self.cancelled:
                self._end(f"op_{seq}", {"state": "cancelled"})
                continue
            self.ran.append((seq, kind))
            if kind in self.fail:
                self._end(f"op_{seq}", {"state": "failed", "error": self.fail[kind].to_wire()})
            else:
                self._end(f"op_{seq}", {"state": "done", "value": _value(body)})
        self.has_run.set()

    def _end(self, operation_id: str, result: dict[str, Any]) -> None:
        self._results[operation_id] = {"operation_id": operation_id, **result}
        if self._changed is not None:
            self._changed.set()

    async def _poll(self, body: dict[str, Any]) -> dict[str, Any]:
        self.polls.append(body["wait"])
        self.acknowledged += body["ack"]
        self.polls_now += 1
        self.most_polls = max(self.most_polls, self.polls_now)
        self._changed = self._changed or asyncio.Event()
        try:
            if self.break_poll is not None:
                error, self.break_poll = self.break_poll, None
                raise error
            deadline = time.monotonic() + body["timeout"]
            while not (ready := [self._results[i] for i in body["wait"] if i in self._results]):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    break
            waiting = [i for i in body["wait"] if i not in self._results]
            positions = {i: int(i[3:]) - self._next if i.startswith("op_") else 0 for i in waiting}
            return unpack(pack({"results": ready, "positions": positions}))
        finally:
            self.polls_now -= 1

    def _cancel(self, operation_id: str) -> bool:
        if operation_id in self._results:
            return False
        self.cancelled.append(operation_id)
        if operation_id.startswith("smp_"):
            self._end(operation_id, {"state": "done", "value": _samples(1, "cancelled")})
        else:
            self._run()
        return True

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sample_keys.append(body["idempotency_key"])
        if self.limited:
            raise self.limited.pop(0)
        ids = []
        for request in body["requests"]:
            operation_id = f"smp_{len(self.samples)}"
            self.samples.append({**request, "weights": body["weights"]})
            if "sample" not in self.hold:
                self._end(operation_id, {"state": "done", "value": _samples(request["num_samples"], "length")})
            ids.append(operation_id)
        return {"operation_ids": ids}


def _samples(count: int, reason: str) -> dict[str, Any]:
    one = {"tokens": i32([5, 6]), "logprobs": f32([-1, -2]), "stop_reason": reason, "text": "ab"}
    return {
        "sequences": [{**one, "topk": None} for _ in range(count)],
        "prompt_logprobs": f32([np.nan, -0.5]) if not count else None,
        "topk_prompt": None,
        "usage": {"prefill": 2, "sample": 2 * count},
    }


def _value(body: dict[str, Any]) -> Any:
    if body["kind"] in ("forward", "forward_backward", "forward_keep"):
        logprobs = [np.full(datum["inputs"]["target_tokens"].shape, -1.5, np.float32) for datum in body["data"]]
        tokens = sum(len(datum["tokens"]) for datum in body["data"])
        return {
            "outputs": [{"logprobs": values} for values in logprobs],
            "metrics": {"loss:sum": float(sum(datum["tokens"].sum() for datum in body["data"]))},
            "usage": {"train" if body["kind"] == "forward_backward" else "prefill": tokens},
        }
    if body["kind"] == "optim_step":
        return {"metrics": {"grad_norm": 1.0, "step": 1.0}}
    if body["kind"] in ("save_state", "save_weights"):
        return {"path": f"ts://ses_1/state/{body['params'].get('name', 'made')}", "size_bytes": 3}
    if body["kind"] == "load_state":
        return {"path": body["params"]["path"]}
    if body["kind"] == "backward":
        tokens = sum(gradient.size for gradient in body["gradients"])
        return {"usage": {"train": tokens, "prefill": -tokens}}
    return {}
