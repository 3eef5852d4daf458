"""A client of the random walk: plays plans through the SDK over a network that repeats, delays and drops."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import trainsession as ts
from tests.faults.oracle import Call, Plan, loss_of, prompt_of, rows_of
from trainsession.wire import MEDIA_TYPE, PROTOCOL_VERSION, VERSION_HEADER, pack

WAIT = 180.0


class Hostile:
    """A transport whose submits are delayed (so reordered), sent several times, and cut off by a vanishing client."""

    def __init__(self, transport: Any, key: str, draw: random.Random) -> None:
        self._transport, self._key, self._draw = transport, key, draw
        self.repeated = self.vanished = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def request(self, method: str, path: str, **options: Any) -> Any:
        body = options.get("body")
        if method != "POST" or body is None:
            return await self._transport.request(method, path, **options)
        await asyncio.sleep(self._draw.uniform(0, 0.03))
        if self._draw.random() < 0.1:
            self.vanished += 1
            await self._vanish(path, pack(body))
        if self._draw.random() >= 0.2:
            return await self._transport.request(method, path, **options)
        self.repeated += 1
        twins = [self._transport.request(method, path, **options) for _ in range(self._draw.randint(2, 4))]
        answers = await asyncio.gather(*twins, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        if refused:
            # The service may have gone down between two of them. What it refuses it logs as failed, and names it too.
            taken = {answer["operation_id"] for answer in answers if not isinstance(answer, BaseException)}
            named = {error.details.get("operation_id") for error in refused if isinstance(error, ts.InvalidRequest)}
            assert len(taken | named) <= 1, f"one submit was several operations: {answers}"
            raise refused[0]
        assert all(answer == answers[0] for answer in answers), f"one submit had several answers: {answers}"
        return answers[0]

    async def _vanish(self, path: str, body: bytes) -> None:
        """The same request, up to some byte of it, or whole but for its answer; then a reset."""
        url = self._transport.base_url.removeprefix("http://")
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {url}\r\nAuthorization: Bearer {self._key}\r\n"
            f"{VERSION_HEADER}: {PROTOCOL_VERSION}\r\nContent-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        whole = head.encode() + body
        try:
            host, port = url.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.write(whole[: self._draw.choice([len(whole), self._draw.randrange(len(whole))])])
            await asyncio.sleep(self._draw.uniform(0, 0.02))
            writer.transport.abort()
        except OSError:  # the service is away: it has vanished from there
            pass


def hostile_client(url: str, key: str, draw: random.Random) -> tuple[ts.ServiceClient, list[Hostile]]:
    service, transports = ts.ServiceClient(url, key), []
    opening = service._connection._open_transport

    def open_transport() -> Any:
        transports.append(Hostile(opening(), key, draw))
        return transports[-1]

    service._connection._open_transport = open_transport
    return service, transports


def play(service: ts.ServiceClient, model: str, plan: Plan) -> dict[str, Any]:
    """All calls at once, as a client that pipelines does; what each came to, and the state it left."""
    lora: dict[str, Any] = {"rank": 2, "seed": plan.seed % 1000, "target_modules": ["q_proj", "v_proj"]}
    trainer = service.create_lora_training_client(model, **lora, name=f"{plan.name}-{plan.seed}")
    samplers: list[ts.SamplingClient] = []
    futures: list[Any] = []
    for call in plan.calls:
        futures.append(_start(trainer, samplers, call))
    results = [_came_to(service, future) for future in futures]
    # What is pending goes into the state that is compared.
    last = [trainer.zero_grad(), trainer.forward_backward(_data(LAST[1]), loss_of(LAST[1]))]
    last += [trainer.optim_step(ts.AdamParams(learning_rate=1e-3)), trainer.save_state("end")]
    results += [_came_to(service, future) for future in last]
    usage = trainer.usage().total
    trainer.close()  # a project has 64 live sessions at most
    bill = (usage.prefill, usage.sample, usage.train, usage.cost)
    return {"session": trainer.session_id, "results": results, "bill": bill}


LAST = (Call("zero", 0), Call("pass", 3), Call("step", 0), Call("save_state", 0, name="end"))
"""What `play` does after the calls of a plan."""


def _start(trainer: ts.TrainingClient, samplers: list[ts.SamplingClient], call: Call) -> Any:
    adam = ts.AdamParams(learning_rate=1e-2)
    match call.kind:
        case "pass" | "bad_pass":
            return trainer.forward_backward(_data(call), loss_of(call))
        case "forward":
            return trainer.forward(_data(call), loss_of(call))
        case "custom":
            return trainer.forward_backward_custom(_data(call), _custom)
        case "step":
            return trainer.optim_step(adam)
        case "zero":
            return trainer.zero_grad()
        case "freeze":
            samplers.append(trainer.save_weights_and_get_sampling_client())
            return None
        case "sample":
            params = ts.SamplingParams(max_tokens=call.length, seed=call.seed, ignore_eos=True)
            return samplers[call.target].sample(prompt_of(call), call.count, params)
        case "stream":
            params = ts.SamplingParams(max_tokens=call.length, seed=call.seed, ignore_eos=True)
            return [
                piece
                for delta in samplers[call.target].stream(prompt_of(call), call.count, params)
                for piece in zip(delta.tokens, delta.logprobs, strict=True)
            ]
        case "save_state":
            return trainer.save_state(call.name)
        case "save_weights":
            return trainer.save_weights_for_sampler(call.name)
        case "load":
            path = f"ts://{trainer.session_id}/state/{call.name}"
            return trainer.load_state_with_optimizer(path) if call.optimizer else trainer.load_state(path)
        case _:
            raise AssertionError(call.kind)


def _came_to(service: ts.ServiceClient, future: Any) -> Any:
    """A plain value, the same for the same numbers; the class of an error."""
    if future is None or isinstance(future, list):
        return future
    try:
        value = future.result(WAIT)
    except ts.TrainSessionError as error:
        return type(error).__name__
    if isinstance(value, ts.SampleResponse):
        return [(part.tokens, part.logprobs) for part in value.sequences]
    if isinstance(value, ts.SaveWeightsResponse):
        with tempfile.TemporaryDirectory() as directory:
            files = sorted(Path(service.download_checkpoint(value.path, directory)).rglob("*.safetensors"))
            return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    outputs = getattr(value, "loss_fn_outputs", [])
    metrics = getattr(value, "metrics", {})
    return [dict(metrics), [output["logprobs"].data.tobytes() for output in outputs]] if metrics else None


def _data(call: Call) -> list[ts.Datum]:
    draw = np.random.default_rng(call.seed)
    data = []
    for row in rows_of(call):
        inputs: dict[str, Any] = {"target_tokens": row[1:]}
        if call.kind in ("pass", "bad_pass", "forward") and loss_of(call) != "cross_entropy":
            inputs["logprobs"] = (-5.0 + draw.random(len(row) - 1)).astype(np.float32)
            inputs["advantages"] = draw.normal(size=len(row) - 1).astype(np.float32)
        data.append(ts.Datum(ts.ModelInput.from_ints(row[:-1]), inputs))
    return data


def _custom(_data: Any, logprobs: Any) -> tuple[Any, Mapping[str, float]]:
    loss: Any = sum((values.exp() ** 2).sum() for values in logprobs)
    return loss, {"loss:sum": float(loss.detach())}
