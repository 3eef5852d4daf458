"""The price table, and that a change of it never rewrites the past."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.null_engine import NullHost
from tests.service.driver import PROJECT, Trainer, run, value
from trainsession.errors import InvalidRequest, NotFound
from trainsession.service.prices import EXAMPLE_PRICES, Charge, PriceTable, Quote, cost_of, exact, whole
from trainsession.service.service import Service

TABLE = """
currency = "EUR"
[default]
train = 2.0
[models.null]
train = 1000
prefill = 0.000001
"""


def test_a_models_row_stands_on_the_default_row(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(TABLE)
    table = PriceTable.load(path)
    assert table.currency == "EUR"
    assert table.shown({"null", "x"}) == {
        "null": {"prefill": 1e-6, "prefill_cached": 1e-6, "sample": 0.0, "train": 1000.0},
        "x": {"prefill": 0.0, "prefill_cached": 0.0, "sample": 0.0, "train": 2.0},
    }
    quote = table.quote("null", {"train": 5, "prefill": 2})
    assert quote.usage({"train": 3}).cost == 0.003
    assert exact(quote.most) == Decimal("0.005000000002")
    assert quote.charges({"train": 3, "prefill": 0, "sample": -1}) == [Charge(kind="train", tokens=3, price=10**9)]
    assert Quote.of_row(json.loads(json.dumps(quote.to_row()))) == quote


@given(st.integers(0, 10**40))
def test_money_is_exact_both_ways(pico: int) -> None:
    assert whole(exact(pico)) == pico
    assert Fraction(exact(pico)) == Fraction(pico, 10**12)


def test_a_known_prefix_costs_what_a_new_one_does_where_nothing_is_said_and_never_more(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[default]\nprefill = 4\nprefill_cached = 1\n[models.a]\nprefill = 3\n[models.b]\ntrain = 5\n")
    shown = PriceTable.load(path).shown({"a", "b"})
    assert [shown[model]["prefill_cached"] for model in "ab"] == [3.0, 1.0]
    path.write_text("[default]\nprefill = 4\nprefill_cached = 5\n")
    with pytest.raises(InvalidRequest, match=r"\[default\]: prefill_cached costs more"):
        PriceTable.load(path)


@pytest.mark.parametrize("row", ["trian = 1", "train = -1", 'train = "1"', "train = true", "train = inf"])
def test_a_wrong_price_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(f"[default]\n{row}\n")
    with pytest.raises(InvalidRequest, match="tr"):
        PriceTable.load(path)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=30))
def test_the_sum_of_the_parts_is_the_total_for_any_grouping(parts: list[tuple[int, int]]) -> None:
    products = [tokens * price for tokens, price in parts]
    assert cost_of(sum(products[::2]) + sum(products[1::2])) == cost_of(sum(products))
    assert PriceTable.load(EXAMPLE_PRICES).currency == "USD"


def test_a_new_price_applies_from_then_on(tmp_path: Path) -> None:
    async def test() -> None:
        prices = tmp_path / "prices.toml"
        prices.write_text(TABLE)
        service = await Service.open(tmp_path / "home", NullHost(), prices=prices)
        trainer = await Trainer.create(service)
        assert (await value(service, await trainer.train([1, 2])))["usage"]["cost"] == 0.002
        await service.close()
        prices.write_text(TABLE.replace("1000", "5000"))
        service = await Service.open(tmp_path / "home", NullHost(), prices=prices)
        again = await Trainer.attach(service, trainer.id)
        await value(service, await again.train([1]))
        report = await service.usage(PROJECT)
        assert (report.total.train, report.total.cost) == (3, 0.007)
        assert report.by_session == {trainer.id: report.total}
        assert report.wall_seconds > report.busy_seconds >= 0
        assert report.idle_seconds == report.wall_seconds - report.busy_seconds
        with pytest.raises(NotFound):
            await service.usage("other", trainer.id)
        await service.close()

    run(test())
