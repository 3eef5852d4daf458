"""The tree of errors: stable codes, and the same class on both sides of the wire."""

from __future__ import annotations

import json
import pickle
import re

import pytest

import trainsession as ts
from trainsession import errors


def tree(root: type[ts.TrainSessionError] = ts.TrainSessionError) -> list[type[ts.TrainSessionError]]:
    below = [leaf for sub in root.__subclasses__() for leaf in tree(sub) if leaf.__module__ == errors.__name__]
    return list(dict.fromkeys([root, *below]))  # one class has two parents


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_wire_as_itself(cls: type[ts.TrainSessionError]) -> None:
    error = cls("what was wrong", details={"datum": 3, "key": "weights"}, request_id="req_1")
    back = errors.from_wire(json.loads(json.dumps(error.to_wire())), error.status)
    assert type(back) is cls
    assert (back.message, back.details, back.request_id) == ("what was wrong", error.details, "req_1")
    assert str(back) == "what was wrong"


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling(cls: type[ts.TrainSessionError]) -> None:
    """As `multiprocessing` and `concurrent.futures` send it."""
    back = pickle.loads(pickle.dumps(cls("x", details={"key": "k"}, request_id="r")))  # noqa: S301
    assert type(back) is cls
    assert (back.message, back.details, back.request_id) == ("x", {"key": "k"}, "r")


def test_codes_are_unique_and_statuses_are_errors() -> None:
    codes = [cls.code for cls in tree()]
    assert len(set(codes)) == len(codes)
    assert all(400 <= cls.status < 600 for cls in tree())
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


def test_codes_do_not_change() -> None:
    """A released code is a promise to every client."""
    assert {(cls.__name__, cls.status, cls.code) for cls in tree()} == {
        ("TrainSessionError", 500, "error"),
        ("InvalidRequest", 422, "invalid_request"),
        ("InvalidDatum", 422, "invalid_datum"),
        ("PromptTooLong", 422, "prompt_too_long"),
        ("UnknownModel", 422, "unknown_model"),
        ("LimitExceeded", 422, "limit_exceeded"),
        ("CheckpointMismatch", 422, "checkpoint_mismatch"),
        ("AuthenticationFailed", 401, "authentication_failed"),
        ("BudgetExceeded", 402, "budget_exceeded"),
        ("PermissionDenied", 403, "permission_denied"),
        ("NotFound", 404, "not_found"),
        ("Conflict", 409, "conflict"),
        ("SequenceConflict", 409, "sequence_conflict"),
        ("SessionClosed", 409, "session_closed"),
        ("SessionFenced", 409, "session_fenced"),
        ("CheckpointExists", 409, "checkpoint_exists"),
        ("IncompleteGradients", 409, "incomplete_gradients"),
        ("NoGradients", 409, "no_gradients"),
        ("Cancelled", 499, "cancelled"),
        ("SnapshotLost", 410, "snapshot_lost"),
        ("OperationSkipped", 424, "operation_skipped"),
        ("NonFinite", 422, "non_finite"),
        ("PayloadTooLarge", 413, "payload_too_large"),
        ("UnsupportedMediaType", 415, "unsupported_media_type"),
        ("RateLimited", 429, "rate_limited"),
        ("RequestTimeout", 408, "request_timeout"),
        ("EngineError", 500, "engine_error"),
        ("EngineLost", 500, "engine_lost"),
        ("StorageError", 507, "storage_error"),
        ("ServiceUnavailable", 503, "unavailable"),
        ("ConnectionFailed", 503, "connection_failed"),
        ("StorageUnavailable", 503, "storage_unavailable"),
        ("DatabaseUnavailable", 503, "database_unavailable"),
        ("BlobsUnavailable", 503, "blobs_unavailable"),
        ("IncompatibleVersion", 426, "incompatible_version"),
        ("ResultTimeout", 408, "result_timeout"),
    }


def test_the_tree_is_in_the_docstring_and_in_the_docs() -> None:
    from pathlib import Path

    page = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()
    for cls in tree():
        assert re.search(rf"\b{cls.__name__}\b", errors.__doc__ or "")
        assert cls is ts.TrainSessionError or f"| `{cls.code}` |" in page
        assert cls is ts.TrainSessionError or re.search(rf"`{cls.__name__}`.*\| {cls.status} \|", page)


@pytest.mark.parametrize(
    ("status", "cls"),
    [(404, ts.NotFound), (409, ts.Conflict), (422, ts.InvalidRequest), (503, ts.ServiceUnavailable), (418, None)],
)
def test_an_unknown_code_keeps_the_class_of_its_status(status: int, cls: type[ts.TrainSessionError] | None) -> None:
    error = errors.from_wire({"code": "made_up_later", "message": "m"}, status)
    assert type(error) is (cls or ts.TrainSessionError)


@pytest.mark.parametrize("details", [None, [1], "x", 3])
def test_details_are_always_a_map(details: object) -> None:
    assert errors.from_wire({"code": "not_found", "message": "m", "details": details}).details == {}


def test_errors_are_also_the_built_in_ones() -> None:
    assert issubclass(ts.InvalidDatum, ValueError)
    assert issubclass(ts.NotFound, LookupError)
    assert issubclass(ts.ResultTimeout, TimeoutError)


def test_a_message_left_out_is_the_docstring() -> None:
    assert str(ts.SessionClosed()) == "The session is closed."


def test_retryable_is_what_may_succeed_later() -> None:
    retryable = {cls.__name__ for cls in tree() if cls("x").is_retryable()}
    assert retryable == {
        "RateLimited",
        "RequestTimeout",
        "ServiceUnavailable",
        "ConnectionFailed",
        "StorageUnavailable",
        "DatabaseUnavailable",
        "BlobsUnavailable",
        "ResultTimeout",
    }
