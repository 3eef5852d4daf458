"""A number that a client loses on the way: what it sees of the wait, and what it is told when it is late."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import trainsession as ts
from bench.null_engine import MODEL
from tests.server.keyed import client, keyed, make_key
from trainsession.wire import MEDIA_TYPE, pack


def test_a_lost_number_is_seen_waited_for_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINSESSION_API_KEY", raising=False)
    key = make_key(tmp_path)
    with keyed(tmp_path) as url, ts.ServiceClient(url, key) as service, client(url, key) as raw:
        trainer = service.create_lora_training_client(MODEL, rank=1, gap_timeout=1.0)
        body = {"kind": "zero_grad", "seq": 2, "epoch": 1, "idempotency_key": "k", "params": {}}
        sent = raw.post(
            f"/v1/sessions/{trainer.session_id}/operations", content=pack(body), headers={"Content-Type": MEDIA_TYPE}
        )
        assert sent.status_code == 200, sent.text
        (session,) = service.list_sessions()
        assert session.waiting_for == "sequence number 1"
        assert session.waiting_since is not None
        assert session.waiting_until == pytest.approx(max(session.waiting_since, session.created_at) + 1.0, abs=0.1)
        assert "waits for sequence number 1 until 20" in session._repr_html_()
        while service.list_sessions()[0].waiting_for:
            time.sleep(0.05)
        with pytest.raises(ts.SequenceConflict, match=r"came too late: it was given up \(gap_timeout"):
            trainer.zero_grad().result()


def test_it_waits_ten_minutes_where_nothing_is_said_and_for_ever_where_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINSESSION_API_KEY", raising=False)
    key = make_key(tmp_path)
    with keyed(tmp_path) as url, ts.ServiceClient(url, key) as service, client(url, key) as raw:
        expected: list[tuple[dict[str, Any], int | None]] = [({}, 600), ({"gap_timeout": None}, None)]
        for options, seconds in [*expected, ({"gap_timeout": 5}, 5)]:
            trainer = service.create_lora_training_client(MODEL, rank=1, **options)
            body = {"kind": "zero_grad", "seq": 2, "epoch": 1, "params": {}}
            headers = {"Content-Type": MEDIA_TYPE}
            raw.post(f"/v1/sessions/{trainer.session_id}/operations", content=pack(body), headers=headers)
            session = service.list_sessions()[0]
            assert session.session_id == trainer.session_id
            assert session.waiting_since is not None
            until = None if seconds is None else session.waiting_since + seconds
            assert session.waiting_until == pytest.approx(until, abs=1.0)
