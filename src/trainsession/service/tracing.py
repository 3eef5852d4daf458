"""Traces for OpenTelemetry: a span for each request, each operation, and within it each time that an engine ran it.

Off unless the extra ``[telemetry]`` is installed and an OTLP endpoint is configured. Spans are made when what they
tell of has ended, from what the log may say, too: routes and ids, never paths, bodies, prompts, tokens or keys. An
operation's trace id is derived from its id, so that no context has to travel through log and engine with it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import SpanContext, Tracer

logger = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_tracer: Tracer | None = None
_provider: TracerProvider | None = None


def start(processor: SpanProcessor | None = None) -> None:
    """Begin, if the environment asks for it (``OTEL_...``, as OpenTelemetry defines them).

    Args:
        processor: Takes the spans instead of an exporter to the configured endpoint.
    """
    if processor is None and not any(map(os.environ.get, ENDPOINTS)):
        return
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if processor is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor = BatchSpanProcessor(OTLPSpanExporter())
    except ModuleNotFoundError as error:
        logger.warning(
            "no traces: OTEL_... is set, but %s is missing: pip install 'trainsession[telemetry]'", error.name
        )
        return
    global _tracer, _provider
    _provider = TracerProvider(id_generator=_ids())
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("trainsession")


def stop() -> None:
    """Send what is left, and end."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


def is_on() -> bool:
    return _tracer is not None


def request(fields: Mapping[str, Any], seconds: float, traceparent: str | None) -> None:
    """A request has been answered.

    Args:
        fields: Those of its line in the log.
        traceparent: The caller's, which makes the span a child of the caller's span.
    """
    if _tracer is None:
        return
    from opentelemetry.trace import Link, SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent or ""})
    end = time.time_ns()
    attributes = {
        "http.request.method": fields["method"],
        "http.route": fields["route"] or "",
        "http.response.status_code": fields["status"],
        "trainsession.request_id": fields["request_id"] or "",
        "trainsession.operation_ids": list(fields["operations"]),
    }
    span = _tracer.start_span(
        f"{fields['method']} {fields['route'] or '(no route)'}",
        parent,
        SpanKind.SERVER,
        attributes,
        [Link(_root(operation_id)) for operation_id in fields["operations"]],
        end - int(seconds * 1e9),
    )
    if fields["status"] >= 500:
        span.set_status(StatusCode.ERROR)
    span.end(end)


def operation(operation_id: str, kind: str, state: str, seconds: float) -> None:
    """An operation has ended, durably, so long after it was accepted."""
    if _tracer is None:
        return
    end = time.time_ns()
    attributes = {"trainsession.operation_id": operation_id, "trainsession.kind": kind, "trainsession.state": state}
    _ids_of.append(_root(operation_id))
    try:
        span = _tracer.start_span(kind, _empty(), attributes=attributes, start_time=end - int(seconds * 1e9))
    finally:
        _ids_of.clear()
    span.end(end)


def engine(operation_ids: Sequence[str], model: str, seconds: float) -> None:
    """An engine has run these operations together, just now."""
    if _tracer is None:
        return
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    end = time.time_ns()
    for operation_id in operation_ids:
        attributes = {"trainsession.operation_id": operation_id, "trainsession.model": model}
        parent = set_span_in_context(NonRecordingSpan(_root(operation_id)), _empty())
        _tracer.start_span("engine", parent, attributes=attributes, start_time=end - int(seconds * 1e9)).end(end)


def _root(operation_id: str) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    digest = hashlib.sha256(operation_id.encode()).digest()
    trace, span = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


_ids_of: list[SpanContext] = []
"""The ids that the span which is just begun must have."""


def _ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return _ids_of[0].trace_id if _ids_of else super().generate_trace_id()

        def generate_span_id(self) -> int:
            return _ids_of[0].span_id if _ids_of else super().generate_span_id()

    return Ids()


def _empty() -> Context:
    from opentelemetry.context.context import Context

    return Context()
