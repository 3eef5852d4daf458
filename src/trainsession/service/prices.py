"""The price table: what a million tokens of a kind cost on a base model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from ..errors import InvalidRequest
from ..types import Usage

KINDS = ("prefill", "prefill_cached", "sample", "train")
_PICO = 12
"""Digits behind the point of tokens times price: prices are millionths per million tokens."""
MICRO = 1_000_000
"""Prices are stored as whole millionths of a currency unit per million tokens."""
EXAMPLE_PRICES = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Tokens of one kind and their price."""

    kind: str
    tokens: int
    price: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What an operation costs, settled when it is accepted and logged with it: a price table that changes
    while it waits, or a crash, does not change its bill.

    Attributes:
        prices: By kind, as in the `PriceTable`.
        most: The greatest cost that it can have, as whole ``tokens * price``: what a budget reserves.
        cached: Tokens of a sample's prompt that were known (`trainsession.service.prefixes`).
        max_tokens: What ``most`` holds for a sample that names no ``max_tokens``.
    """

    currency: str
    prices: Mapping[str, int]
    most: int = 0
    cached: int = 0
    max_tokens: int | None = None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        return cls(**row)

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    def charges(self, tokens: Mapping[str, int]) -> list[Charge]:
        """Ledger rows."""
        return [Charge(kind=kind, tokens=count, price=self.prices[kind]) for kind, count in tokens.items() if count > 0]

    def usage(self, tokens: Mapping[str, int]) -> Usage:
        """Tokens by kind, with their cost."""
        return Usage(**tokens, cost=cost_of(sum(count * self.prices[kind] for kind, count in tokens.items())))


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices by base model and kind, as whole millionths per million tokens."""

    currency: str
    default: dict[str, int]
    models: dict[str, dict[str, int]]

    @classmethod
    def load(cls, path: Path = EXAMPLE_PRICES) -> PriceTable:
        """Read a TOML table: ``currency``, ``[default]``, ``[models."<name>"]``.

        Raises:
            InvalidRequest: a key that is not a kind, a price that is not a number >= 0, or a known prefix
                that costs more than a new one.
        """
        with path.open("rb") as file:
            table = tomllib.load(file, parse_float=Decimal)
        default = _row(path, "default", table.get("default", {}), dict.fromkeys(KINDS, 0))
        models = {
            name: _row(path, f'models."{name}"', row, default) for name, row in dict(table.get("models", {})).items()
        }
        return cls(str(table.get("currency", "USD")), default, models)

    @classmethod
    def of_home(cls, home: Path) -> PriceTable:
        """``prices.toml`` of a home, or the packaged example prices. Raises as `load` does."""
        own = home / "prices.toml"
        return cls.load(own if own.exists() else EXAMPLE_PRICES)

    def price(self, base_model: str, kind: str) -> int:
        return self.models.get(base_model, self.default)[kind]

    def quote(
        self, base_model: str, at_most: Mapping[str, int], *, cached: int = 0, max_tokens: int | None = None
    ) -> Quote:
        """Today's prices for an operation.

        Args:
            at_most: The most tokens of each kind that it can have.
            cached, max_tokens: See `Quote`.
        """
        prices = self.models.get(base_model, self.default)
        most = sum(count * prices[kind] for kind, count in at_most.items())
        return Quote(currency=self.currency, prices=prices, most=most, cached=cached, max_tokens=max_tokens)

    def shown(self, base_models: set[str]) -> dict[str, dict[str, float]]:
        """Per million tokens in the currency, of these models."""
        return {model: {kind: self.price(model, kind) / MICRO for kind in KINDS} for model in sorted(base_models)}


def cost_of(tokens_times_price: int) -> float:
    """Currency units of a sum of ``tokens * price``: exact until this one division."""
    return tokens_times_price / (MICRO * MICRO)


def exact(tokens_times_price: int) -> Decimal:
    """Currency units of a sum of ``tokens * price``, without a rounding."""
    return Decimal((int(tokens_times_price < 0), tuple(map(int, str(abs(tokens_times_price)))), -_PICO))


def whole(amount: Decimal) -> int:
    """The sum of ``tokens * price`` that an amount >= 0 of currency units is; what is smaller is cut off."""
    _, digits, exponent = amount.as_tuple()
    assert isinstance(exponent, int)
    number = int("".join(map(str, digits)))
    return number * 10 ** (_PICO + exponent) if _PICO + exponent >= 0 else number // 10 ** -(_PICO + exponent)


def _row(path: Path, name: str, row: Mapping[str, Any], default: Mapping[str, int]) -> dict[str, int]:
    """Where a row has a price for ``prefill`` only, ``prefill_cached`` costs the same."""
    prices = dict(default)
    for kind, value in row.items():
        if kind not in KINDS:
            raise InvalidRequest(f"{path.name} [{name}]: unknown kind {kind!r}; known are {', '.join(KINDS)}")
        if isinstance(value, bool) or not isinstance(value, int | Decimal) or not 0 <= value < 10**9:
            raise InvalidRequest(f"{path.name} [{name}] {kind}: expected a price >= 0, got {value!r}")
        prices[kind] = int((Decimal(value) * MICRO).to_integral_value())
    if "prefill" in row and "prefill_cached" not in row:
        prices["prefill_cached"] = prices["prefill"]
    if prices["prefill_cached"] > prices["prefill"]:
        raise InvalidRequest(f"{path.name} [{name}]: prefill_cached costs more than prefill")
    return prices
