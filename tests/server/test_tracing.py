"""Traces, read with OpenTelemetry's own exporter in memory, of a real service over a socket."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainsession as ts
from bench.null_engine import MODEL
from tests.server.keyed import client, keyed, make_key
from trainsession.service import tracing

pytest.importorskip("opentelemetry.sdk", reason="pip install 'trainsession[telemetry]'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

PROMPT = [41_301, 41_302, 41_303]
"""Token ids that stand nowhere by chance."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.start(SimpleSpanProcessor(exporter))
    yield exporter
    tracing.stop()


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def test_requests_and_operations_have_spans_that_find_each_other(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    with keyed(tmp_path) as url:
        key = make_key(tmp_path)
        with ts.ServiceClient(url, key) as service:
            trainer = service.create_lora_training_client(MODEL, rank=1)
            datum = ts.Datum(ts.ModelInput.from_ints(PROMPT), {"target_tokens": PROMPT})
            trainer.forward_backward([datum], "cross_entropy").result()
            sampler = service.create_sampling_client(MODEL)
            sampler.sample(ts.ModelInput.from_ints(PROMPT), sampling_params=ts.SamplingParams(max_tokens=4)).result()
        with client(url, key) as http:
            http.get(f"/v1/sessions/s_none?secret={key}", headers={"traceparent": PARENT})
            http.get(f"/{key}")
    found = spans.get_finished_spans()

    def named(name: str) -> ReadableSpan:
        return next(span for span in found if span.name == name)

    operation = named("forward_backward")
    own = context(operation)
    operation_id = (operation.attributes or {})["trainsession.operation_id"]
    submit = next(s for s in found if s.links and s.links[0].context.trace_id == own.trace_id)
    assert submit.name.startswith("POST /v1/")
    assert (submit.attributes or {})["trainsession.operation_ids"] == (operation_id,)
    assert str((submit.attributes or {})["trainsession.request_id"]).startswith("req_")
    engine = named("engine")
    assert engine.parent is not None
    assert (context(engine).trace_id, engine.parent.span_id) == (own.trace_id, own.span_id)
    assert (operation.start_time or 0) - 10_000_000 < (engine.start_time or 0)  # it has no clock of its own
    assert (engine.start_time or 0) < (engine.end_time or 0) <= (operation.end_time or 0)
    assert (named("sample").attributes or {})["trainsession.state"] == "done"
    child = named("GET /v1/sessions/{session_id}")
    assert context(child).trace_id == int(PARENT.split("-")[1], 16)
    everything = " ".join(span.to_json() for span in found)
    assert key not in everything
    assert key.split("-")[2] not in everything
    assert not any(str(token) in json.dumps([dict(s.attributes or {}) for s in found]) for token in PROMPT)


def test_without_an_endpoint_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracing.start()
    assert not tracing.is_on()


def test_without_the_extra_the_log_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tracing.ENDPOINTS[1], "http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        tracing.start()
    assert not tracing.is_on()
    assert "trainsession[telemetry]" in caplog.text
