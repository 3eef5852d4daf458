"""Probes and metrics over real sockets, with faults of the disk behind them."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

import trainsession as ts
from bench.null_engine import MODEL, NullHandle, NullHost
from tests.server.keyed import client, keyed, make_key
from tests.server.test_usage import train
from tests.service.driver import PROJECT, Trainer, prompt, run, sample, serving, value
from trainsession.errors import StorageError
from trainsession.service import readiness, telemetry
from trainsession.store.blobs import OWNER
from trainsession.store.blobs_local import LocalBlobs
from trainsession.store.schema import ledger

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str | bytes) -> Values:
    text = text if isinstance(text, str) else text.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


def named(values: Values, name: str, **labels: str) -> float:
    return values[f"trainsession_{name}", tuple(sorted(labels.items()))]


def test_metrics_are_for_an_operator_and_name_no_project(tmp_path: Path) -> None:
    with keyed(tmp_path) as url:
        key, operator = make_key(tmp_path, "secret-project"), make_key(tmp_path, scope="operator")
        with ts.ServiceClient(url, key) as service:
            session_id = train(service, [1, 2, 3])
            sampler = service.create_sampling_client(MODEL)
            sampler.sample(ts.ModelInput.from_ints([1, 2]), sampling_params=ts.SamplingParams(max_tokens=4)).result()
        with client(url, key) as http:
            answer = http.get("/metrics")
            assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")
        with client(url, operator) as http:
            answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        values = parsed(answer.text)
        assert named(values, "ledger_tokens_total", model=MODEL, kind="train") == 3
        assert named(values, "ledger_tokens_total", model=MODEL, kind="sample") == 4
        assert named(values, "ledger_cost", model=MODEL, kind="train", currency="USD") == pytest.approx(3 * 0.4e-6)
        assert named(values, "submit_seconds_count", kind="forward_backward") == 1
        assert named(values, "operation_seconds_count", kind="sample", state="done") == 1
        assert 0 < named(values, "operation_seconds_sum", kind="forward_backward", state="done") < 10
        assert named(values, "engine_answers", model=MODEL) == 1
        assert named(values, "engine_samples_running", model=MODEL) == 0
        assert named(values, "engine_busy_seconds_total", model=MODEL) > 0
        assert named(values, "database_commits_total") > 3
        assert ("process_resident_memory_bytes", ()) in values
        for secret in ("secret-project", session_id, operator[3:15], str(tmp_path)):
            assert secret not in answer.text
        transport = httpx.HTTPTransport(uds=str(tmp_path / "run" / "service.sock"))
        with httpx.Client(transport=transport, base_url="http://home") as http:
            assert parsed(http.get("/metrics").text).keys() == values.keys()


def test_two_services_of_one_process_count_for_themselves(tmp_path: Path) -> None:
    async def test() -> None:
        before = {family.name for family in REGISTRY.collect()}
        async with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
            trainer = await Trainer.create(one)
            await value(one, await trainer.train([1, 2]))
            one.telemetry.engine_restarted(MODEL)
            values, others = parsed(await one.metrics()), parsed(await other.metrics())
            assert named(values, "engine_restarts_total", model=MODEL) == 1
            assert not [name for name, _ in others if "restarts" in name or "ledger" in name]
        assert {family.name for family in REGISTRY.collect()} == before

    run(test())


def test_queues_and_engines_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "STATS_SECONDS", 0.05)
    let_go = asyncio.Event()
    call = NullHandle.call

    async def held(handle: NullHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in ("train", "stats"):
            await let_go.wait()
        return await call(handle, method, *args, **kwargs)

    async def test() -> None:
        monkeypatch.setattr(NullHandle, "call", held)
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            ids = [await trainer.train([1, 2]), await trainer.train([1, 2]), await trainer.step()]
            started = time.monotonic()
            values = parsed(await service.metrics())
            assert time.monotonic() - started < 2
            assert named(values, "operations_unfinished", model=MODEL, kind="forward_backward") == 2
            assert named(values, "operations_unfinished", model=MODEL, kind="optim_step") == 1
            assert named(values, "engine_answers", model=MODEL) == 0
            let_go.set()
            for operation_id in ids:
                await value(service, operation_id)
            values = parsed(await service.metrics())
            assert named(values, "engine_answers", model=MODEL) == 1
            assert not [name for name, _ in values if "unfinished" in name]

    run(test())


def test_ledger_totals_are_those_of_usage_however_the_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "RECENT_ROWS", 3)

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            for n in range(1, 6):
                await value(service, await trainer.train([1] * n))
                await sample(service, {"base_model": MODEL}, prompt([1], session_id=trainer.id, max_tokens=n))
                texts = await asyncio.gather(service.metrics(), service.metrics(), service.metrics())
                report = await service.usage(PROJECT)
                for values in map(parsed, texts):
                    for kind in ("train", "sample", "prefill"):
                        tokens = named(values, "ledger_tokens_total", model=MODEL, kind=kind)
                        assert tokens == report.total.tokens[kind]
            count = await service.store.read(lambda c: c.execute(sa.select(sa.func.count(ledger.c.id))).scalar())
            assert count == 15

    run(test())


# --- probes ----------------------------------------------------------------------------------


def test_probes_need_no_key_and_say_little(tmp_path: Path) -> None:
    with keyed(tmp_path) as url, client(url, None) as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            200,
            {
                "ready": True,
                "checks": {"database": True, "blobs": True, "lease": True, "serving": True},
                "engines_loaded": 0,
            },
        )


@pytest.mark.parametrize("part", ["database", "blobs"])
def test_not_ready_while_a_store_refuses_writes_and_ready_again_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    with keyed(tmp_path, NullHost) as url, client(url, None) as http:
        assert http.get("/readyz").status_code == 200
        with monkeypatch.context() as broken:
            if part == "blobs":

                def full(blobs: LocalBlobs, prefix: str, data: bytes) -> None:
                    raise StorageError("no space in /secret/path")

                broken.setattr(LocalBlobs, "put", full)
            else:
                locked = sa.create_engine(f"sqlite:///{tmp_path / 'service.db'}")
                broken.setattr(readiness, "CHECK_SECONDS", 0.2)
                with locked.connect() as connection:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                    check_not_ready(http, part)
                locked.dispose()
            if part == "blobs":
                check_not_ready(http, part)
        assert http.get("/readyz").status_code == 200
        assert re.search(f"not ready: {part} cannot be written", caplog.text)


def check_not_ready(http: httpx.Client, part: str) -> None:
    answer = http.get("/readyz")
    expected = {"database": True, "blobs": True, "lease": True, "serving": True, part: False}
    assert (answer.status_code, answer.json()["ready"], answer.json()["checks"]) == (503, False, expected)
    assert "secret" not in answer.text
    assert http.get("/healthz").status_code == 200


def test_probing_again_and_again_writes_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            before = service.store.fsyncs
            found = await asyncio.gather(*(service.check_ready() for _ in range(50)))
            assert all(all(parts.values()) for parts in found)
            assert service.store.fsyncs - before <= 4
            assert [path.name for path in (tmp_path / "blobs").iterdir()] == [OWNER]

    run(test())
