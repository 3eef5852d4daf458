"""The usage report: every grouping is exact, the past stays as it was, engine seconds count once."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from bench.null_engine import MODEL, NullEngine, NullHandle
from tests.service.driver import PROJECT, Trainer, prompt, run, sample, serving, value
from trainsession.errors import InvalidRequest, LimitExceeded, NotFound
from trainsession.service import usage as module
from trainsession.service.engine_time import HOUR, EngineTime
from trainsession.service.prices import EXAMPLE_PRICES, KINDS, PriceTable
from trainsession.service.usage import DAY, UsageQuery, read_report
from trainsession.store.backend import backend_of
from trainsession.store.schema import engine_time, ledger
from trainsession.store.upgrade import migrate, prepare
from trainsession.types import USAGE_GROUPS, UsageReport

PRICES = PriceTable.load(EXAMPLE_PRICES)
GROUPINGS = [by for size in range(1, 6) for by in itertools.combinations(USAGE_GROUPS, size)]


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Connection]:
    path = tmp_path_factory.mktemp("usage") / "service.db"
    prepare(backend_of(path))
    engine = backend_of(path).engine("read")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def charge(operation: int, **fields: Any) -> dict[str, Any]:
    row = {"project": "a", "session_id": "s1", "base_model": "m", "kind": "train", "tokens": 1, "price": 1}
    return row | {"operation_id": f"op{operation}", "currency": "USD", "created_at": 0.0} | fields


charges = st.lists(
    st.fixed_dictionaries(
        {
            "project": st.sampled_from("ab"),
            "session_id": st.sampled_from(["s1", "s2", ""]),
            "base_model": st.sampled_from(["m", "n"]),
            "kind": st.sampled_from(KINDS),
            "tokens": st.integers(-(10**12), 10**15),
            "price": st.sampled_from([0, 1, 999_999_999_999_999, 70_001]),
            "currency": st.sampled_from(["USD", "EUR"]),
            "created_at": st.floats(0, 3 * DAY),
        }
    ),
    max_size=12,
)


@given(rows=charges, project=st.sampled_from(["a", None]), cuts=st.tuples(st.floats(0, 3 * DAY), st.floats(0, 3 * DAY)))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_rows_of_every_grouping_are_exactly_the_total(
    connection: sa.Connection, rows: list[dict[str, Any]], project: str | None, cuts: tuple[float, float]
) -> None:
    with connection.begin() as transaction:
        if rows:
            connection.execute(sa.insert(ledger), [charge(n, **row) for n, row in enumerate(rows)])
            hours = {(r["project"], r["session_id"], r["base_model"], int(r["created_at"] // HOUR)) for r in rows}
            columns = ("project", "session_id", "base_model", "hour")
            connection.execute(
                sa.insert(engine_time), [dict(zip(columns, hour, strict=True)) | {"seconds": 0.5} for hour in hours]
            )
        mine = [row for row in rows if project in (None, row["project"])]
        whole = read_report(connection, UsageQuery(project=project), PRICES)
        for currency in {row["currency"] for row in mine}:
            pico = sum(row["tokens"] * row["price"] for row in mine if row["currency"] == currency)
            assert Fraction(whole.costs[currency]) == Fraction(pico, 10**12)
        for by in GROUPINGS:
            report = read_report(connection, UsageQuery(project=project, by=by), PRICES)
            assert report.total == whole.total
            assert exact_costs(report) == {name: Fraction(cost) for name, cost in whole.costs.items()}
            for kind in KINDS:
                assert sum(row.usage.tokens[kind] for row in report.rows) == whole.total.tokens[kind]
            if "kind" not in by:
                assert sum(row.engine_seconds or 0 for row in report.rows) == report.busy_seconds == whole.busy_seconds
            groups = [(tuple(row.group.values()), row.currency) for row in report.rows]
            assert len(set(groups)) == len(groups)
            assert groups == sorted(groups)
        # Windows that follow each other hold each row once.
        early, late = sorted(cuts)
        windows = [(None, early), (early, late), (late, None)]
        parts = [
            read_report(connection, UsageQuery(project=project, since=since, until=until), PRICES)
            for since, until in windows
        ]
        assert sum(part.total.train for part in parts) == whole.total.train
        assert sum(part.busy_seconds for part in parts) == whole.busy_seconds
        transaction.rollback()


def exact_costs(report: UsageReport) -> dict[str, Fraction]:
    """As fractions: a sum of decimals rounds at 28 digits."""
    return {
        name: sum((Fraction(row.cost) for row in report.rows if row.currency == name), Fraction(0))
        for name in report.costs
    }


def test_days_are_of_utc_and_half_open(connection: sa.Connection) -> None:
    with connection.begin() as transaction:
        times = (DAY - 0.001, DAY, 2 * DAY - 0.001, 2 * DAY)
        connection.execute(sa.insert(ledger), [charge(n, created_at=at) for n, at in enumerate(times)])
        report = read_report(connection, UsageQuery(project="a", by=["day"], since=DAY, until=2 * DAY), PRICES)
        assert [(row.group["day"], row.tokens) for row in report.rows] == [("1970-01-02", 2)]
        report = read_report(connection, UsageQuery(project="a", by=["day"]), PRICES)
        assert [row.group["day"] for row in report.rows] == ["1970-01-01", "1970-01-02", "1970-01-03"]
        transaction.rollback()


def test_a_report_of_too_many_sums_is_refused(connection: sa.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GROUPS", 3)
    with connection.begin() as transaction:
        connection.execute(sa.insert(ledger), [charge(n, created_at=n * DAY) for n in range(4)])
        with pytest.raises(LimitExceeded, match="shorter time"):
            read_report(connection, UsageQuery(project="a", by=["day"]), PRICES)
        assert read_report(connection, UsageQuery(project="a", by=["day"], since=DAY), PRICES).total.train == 3
        transaction.rollback()


@pytest.mark.parametrize(
    "fields",
    [{"by": ["hour"]}, {"by": ["day", "day"]}, {"since": float("nan")}, {"until": -1.0}, {"since": 2.0, "until": 1.0}],
)
def test_a_query_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        UsageQuery(project="a", **fields)


# --- the ledger is append-only ---------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE ledger SET tokens = 0",
        "UPDATE OR REPLACE ledger SET price = 0",
        "DELETE FROM ledger",
        "INSERT OR REPLACE INTO ledger SELECT id, project, session_id, operation_id, base_model, kind, 0, 0, currency, "
        "created_at FROM ledger",
        "INSERT OR REPLACE INTO ledger SELECT id + 1000, project, session_id, operation_id, base_model, kind, 0, 0, "
        "currency, created_at FROM ledger",
        "INSERT INTO ledger SELECT * FROM ledger WHERE true ON CONFLICT (id) DO UPDATE SET tokens = 0",
    ],
)
def test_the_database_itself_refuses_to_change_the_ledger(tmp_path: Path, change: str) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1, 2, 3]))
            before = await service.usage(PROJECT)

            with closing(sqlite3.connect(tmp_path / "service.db")) as other:
                with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                    other.execute(change)
                other.rollback()
            with pytest.raises(IntegrityError):
                await service.store.write(lambda connection: connection.execute(sa.text(change)))
            after = await service.usage(PROJECT)
            assert (after.total, after.total.train) == (before.total, 3)
            assert await trainer.do("zero_grad") is not None  # the writer goes on

    run(test())


def test_an_older_ledger_is_protected_when_it_is_upgraded_and_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    path.touch()
    migrate(backend_of(path), "0002")
    with closing(sqlite3.connect(path)) as old, old:
        session = {"id": "s1", "project": "a", "kind": "trainer", "base_model": "m", "state": "closed"}
        session |= {"on_failure": "skip", "name": "", "tags": "[]", "metadata": "{}", "request_hash": "", "epoch": 1}
        session |= {"with_optimizer": 0, "next_seq": 1, "step": 0, "created_at": 2.0 * DAY, "used_at": 0}
        session |= {"closed_at": 3.0 * DAY, "busy_seconds": 12.5}
        old.execute(f"INSERT INTO sessions ({', '.join(session)}) VALUES ({', '.join(map(repr, session.values()))})")
        row = charge(1)
        old.execute(f"INSERT INTO ledger ({', '.join(row)}) VALUES ({', '.join(map(repr, row.values()))})")
    prepare(backend_of(path))
    with closing(sqlite3.connect(path)) as upgraded, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        upgraded.execute("DELETE FROM ledger")
    engine = backend_of(path).engine("read")
    with engine.connect() as connection:
        report = read_report(connection, UsageQuery(project="a", by=["day"]), PRICES)
    engine.dispose()
    assert (report.busy_seconds, report.wall_seconds, report.total.train) == (12.5, DAY, 1)
    assert [row.engine_seconds for row in report.rows] == [0.0, 12.5]


# --- engine time -----------------------------------------------------------------------------


def test_engine_seconds_are_shared_and_count_once() -> None:
    handle, times = NullHandle(NullEngine()), EngineTime()
    one, two = ("a", "s1", MODEL), ("b", "s2", MODEL)
    times.enter(handle, one)
    handle.busy_seconds = 4.0
    times.enter(handle, two)
    times.enter(handle, two)  # a second call of the same session takes no second share
    handle.busy_seconds = 10.0
    assert written(times) == {one: 7.0, two: 3.0}
    times.leave(handle, two)
    handle.busy_seconds = 12.0
    times.leave(handle, one)
    handle.busy_seconds = 15.0
    times.leave(handle, two)
    handle.busy_seconds = 100.0  # nobody's: loading, replays
    times.enter(handle, one)
    handle.busy_seconds = 101.0
    times.leave(handle, one)
    assert written(times) == {one: 2.0, two: 4.0}
    assert times.take() is None


def written(times: EngineTime) -> dict[Any, Any]:
    engine = sa.create_engine("sqlite://")
    engine_time.create(engine)
    write = times.take()
    assert write is not None
    with engine.connect() as connection:
        write(connection)
        rows = connection.execute(sa.select(engine_time)).all()
    return {(row.project, row.session_id, row.base_model): pytest.approx(row.seconds) for row in rows}


def test_the_report_of_a_service_by_session_kind_and_model(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            first, second = await Trainer.create(service), await Trainer.create(service)
            await value(service, await first.train([1, 2, 3]))
            await value(service, await second.train([1, 2]))
            await sample(service, {"base_model": MODEL}, prompt([5, 6], session_id=first.id))
            report = await service.usage(PROJECT, by=["session", "kind"])
            counted = {tuple(row.group.values()): row.tokens for row in report.rows}
            expected = {(first.id, "train"): 3, (first.id, "prefill"): 2, (first.id, "sample"): 3}
            assert counted == expected | {(second.id, "train"): 2}
            assert {row.engine_seconds for row in report.rows} == {None}
            report = await service.usage(PROJECT, by=["session"])
            assert all(row.engine_seconds for row in report.rows)
            assert sum(row.engine_seconds or 0 for row in report.rows) == pytest.approx(report.busy_seconds)
            (row,) = (await service.usage(PROJECT, first.id, by=["model", "project"])).rows
            assert (dict(row.group), row.tokens) == ({"model": MODEL, "project": PROJECT}, 8)
            assert (await service.usage(PROJECT)).rows == []
            assert (await service.usage("other", by=["project"])).rows == []
            with pytest.raises(NotFound):
                await service.usage("other", first.id, by=["day"])

    run(test())


def test_engine_time_survives_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1, 2, 3]))
            before = (await service.usage(PROJECT)).busy_seconds
        async with serving(tmp_path) as service:
            assert (await service.usage(PROJECT)).busy_seconds >= before > 0

    run(test())
