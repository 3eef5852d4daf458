"""`GET /v1/usage` over a real socket: grouping, export, other projects, prices that change."""

from __future__ import annotations

import csv
import io
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import httpx
import pytest

import trainsession as ts
from bench.null_engine import MODEL
from tests.server.keyed import client, keyed, make_key

PRICES = 'currency = "EUR"\n[default]\ntrain = {train}\n'


def train(service: ts.ServiceClient, tokens: list[int]) -> str:
    trainer = service.create_lora_training_client(MODEL, rank=1)
    trainer.forward_backward([ts.Datum(tokens, {"target_tokens": tokens})], "cross_entropy").result()
    return trainer.session_id


def test_a_price_change_never_rewrites_the_past(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    key = make_key(home)
    seen: list[ts.UsageReport] = []
    for price, currency in ((0.3, "EUR"), (7, "EUR"), (1, "USD")):
        (home / "prices.toml").write_text(PRICES.format(train=price).replace("EUR", currency))
        with keyed(home) as url, ts.ServiceClient(url, key) as service:
            before = service.usage(by="session") if seen else None
            if before is not None:
                was, now = seen[-1], before
                assert [(row.group, row.cost, row.currency) for row in now.rows] == [
                    (row.group, row.cost, row.currency) for row in was.rows
                ]
                assert now.costs == was.costs
            train(service, [1, 2, 3])
            seen.append(service.usage(by="session"))
    assert [report.costs for report in seen] == [
        {"EUR": Decimal("0.0000009")},
        {"EUR": Decimal("0.0000219")},
        {"EUR": Decimal("0.0000219"), "USD": Decimal("0.000003")},
    ]
    assert sorted(row.cost_per_million or 0 for row in seen[-1].rows) == [0.3, 1.0, 7.0]
    # One number cannot add two currencies: it is of today's.
    assert (seen[-1].currency, seen[-1].total.cost, seen[-1].total.train) == ("USD", 0.000003, 9)
    assert seen[-1].prices == {MODEL: {"prefill": 0.0, "prefill_cached": 0.0, "sample": 0.0, "train": 1.0}}


def test_a_wrong_price_table_keeps_the_service_from_starting(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("[default]\ntrian = 1\n")
    from tests.service.driver import run, serving

    async def open_it() -> None:
        async with serving(tmp_path):
            pass

    with pytest.raises(ts.InvalidRequest, match="trian"):
        run(open_it())


def test_grouping_windows_and_exports(tmp_path: Path) -> None:
    with keyed(tmp_path) as url:
        key, other = make_key(tmp_path, "a"), make_key(tmp_path, "b")
        started = time.time()
        with ts.ServiceClient(url, key) as service, ts.ServiceClient(url, other) as theirs:
            sessions = sorted([train(service, [1, 2, 3]), train(service, [1])])
            train(theirs, [1] * 50)
            today = datetime.now(UTC).date().isoformat()
            report = service.usage(by=["day", "kind"], since=started)
            assert [(dict(row.group), row.tokens) for row in report.rows] == [({"day": today, "kind": "train"}, 4)]
            assert report.by == ("day", "kind")
            assert service.usage(by="project").rows[0].group == {"project": "a"}
            assert sum(row.tokens for row in service.usage(by="session", until=started).rows) == 0
            assert service.usage(since=datetime.now(UTC) + timedelta(days=1)).total.train == 0
            assert service.usage(since=today, by="model").rows[0].engine_seconds
            assert [row.group["session"] for row in service.usage(by="session").rows] == sessions
            with pytest.raises(ts.InvalidRequest, match="by: expected some of project, session"):
                service.usage(by="hour")
            with pytest.raises(ts.InvalidRequest, match="since: expected a date"):
                service.usage(since="yesterday")
        with client(url, key) as http:
            answer = http.get("/v1/usage", params={"by": "session,kind", "format": "csv"})
            assert answer.headers["content-type"].startswith("text/csv")
            rows = list(csv.DictReader(io.StringIO(answer.text)))
            assert [row["session"] for row in rows] == sessions
            assert set(rows[0]) == {
                *("session", "kind", "tokens", "cost", "currency", "cost_per_million", "engine_seconds")
            }
            whole = http.get("/v1/usage").json()
            assert sum(Decimal(row["cost"]) for row in rows) == Decimal(whole["costs"]["USD"]) == Decimal("0.0000016")
            assert http.get("/v1/usage", params={"by": "hour"}).json()["code"] == "invalid_request"
            assert http.get("/v1/usage", params={"since": "nan"}).status_code == 422
            assert http.get("/v1/usage", params={"format": "xml"}).status_code == 422


def test_only_an_operator_sees_other_projects(tmp_path: Path) -> None:
    with keyed(tmp_path) as url:
        keys = {scope: make_key(tmp_path, "a", scope=scope) for scope in ("full", "read", "operator")}
        for project in ("a", "b"):
            with ts.ServiceClient(url, make_key(tmp_path, project)) as service:
                train(service, [1, 2])
        for scope in ("full", "read"):
            with ts.ServiceClient(url, keys[scope]) as service:
                with pytest.raises(ts.PermissionDenied, match="only an operator"):
                    service.usage(all_projects=True)
                assert service.usage().total.train == 2
        with ts.ServiceClient(url, keys["operator"]) as service:
            report = service.usage(by="project", all_projects=True)
            assert {row.group["project"]: row.tokens for row in report.rows} == {"a": 2, "b": 2}
            with pytest.raises(ts.PermissionDenied):
                service.list_sessions()
            with pytest.raises(ts.PermissionDenied):
                service.create_lora_training_client(MODEL)
        transport = httpx.HTTPTransport(uds=str(tmp_path / "run" / "service.sock"))
        with httpx.Client(transport=transport, base_url="http://home") as http:
            assert http.get("/v1/usage", params={"all_projects": "true"}).json()["total"]["train"] == 4
            assert http.get("/v1/usage").json()["total"]["train"] == 0  # that of `default`
