"""The price table: what a million tokens of a kind cost on a base model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..types import Usage

KINDS = ("prefill", "prefill_cached", "sample", "train")
MICRO = 1_000_000
"""Prices are stored as whole millionths of a currency unit per million tokens."""
EXAMPLE_PRICES = Path(__file__).with_name("prices.toml")


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
            InvalidRequest: a key that is not a kind, or a price that is not a number >= 0.
        """
        with path.open("rb") as file:
            table = tomllib.load(file, parse_float=Decimal)
        default = dict.fromkeys(KINDS, 0) | _row(path, "default", table.get("default", {}))
        models = {
            name: default | _row(path, f'models."{name}"', row) for name, row in dict(table.get("models", {})).items()
        }
        return cls(str(table.get("currency", "USD")), default, models)

    def price(self, base_model: str, kind: str) -> int:
        return self.models.get(base_model, self.default)[kind]

    def shown(self, base_models: set[str]) -> dict[str, dict[str, float]]:
        """Per million tokens in the currency, of these models."""
        return {model: {kind: self.price(model, kind) / MICRO for kind in KINDS} for model in sorted(base_models)}

    def priced(self, base_model: str, tokens: Mapping[str, int]) -> Usage:
        """Tokens by kind, with their cost."""
        micro = sum(count * self.price(base_model, kind) for kind, count in tokens.items())
        return Usage(**tokens, cost=cost_of(micro))


def cost_of(tokens_times_price: int) -> float:
    """Currency units of a sum of ``tokens * price``: exact until this one division."""
    return tokens_times_price / (MICRO * MICRO)


def _row(path: Path, name: str, row: Mapping[str, Any]) -> dict[str, int]:
    prices: dict[str, int] = {}
    for kind, value in row.items():
        if kind not in KINDS:
            raise InvalidRequest(f"{path.name} [{name}]: unknown kind {kind!r}; known are {', '.join(KINDS)}")
        if isinstance(value, bool) or not isinstance(value, int | Decimal) or not 0 <= value < 10**9:
            raise InvalidRequest(f"{path.name} [{name}] {kind}: expected a price >= 0, got {value!r}")
        prices[kind] = int((Decimal(value) * MICRO).to_integral_value())
    return prices
