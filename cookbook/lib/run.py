"""A run's files and its summary.

runs/arithmetic_rl-20250101-120000/
    config.json      every setting
    session.txt      which session trains, for `--resume`
    metrics.jsonl    a row per step, then one per evaluation
    curve.png        written by the recipe
    summary.txt      what `finish` printed
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

import trainsession as ts

from .config import BaseConfig, ResumableConfig, UsageError

R = TypeVar("R", bound=ResumableConfig)


class Run:
    """One execution of a recipe.

    Args:
        recipe: Its name, for the default directory.
        config: Written to ``config.json``.
        resumed: Go on with the run that is in ``config.out``.

    Raises:
        UsageError: ``config.out`` already holds a run; nothing is overwritten.
    """

    def __init__(self, recipe: str, config: BaseConfig, *, resumed: bool = False) -> None:
        self.recipe = recipe
        self.config = config
        self.resumed = resumed
        self.directory = Path(config.out or f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
        self.started = time.monotonic()
        self._metrics = self.directory / "metrics.jsonl"
        self._session = self.directory / "session.txt"
        if resumed:
            return
        if self._metrics.exists():
            raise UsageError(f"{self.directory} already holds a run; pass another --out")
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")

    @classmethod
    def open(cls, recipe: str, config: R, smoke_sized: Callable[[R], R]) -> tuple[Self, R]:
        """A new run, or the one that ``config.resume`` names; and its settings.

        Raises:
            UsageError: there is no unfinished run in that directory.
        """
        if config.resume is None:
            config = smoke_sized(config) if config.smoke else config
            return cls(recipe, config), config
        directory = Path(config.resume)
        if not (directory / "session.txt").is_file():
            raise UsageError(f"{directory} holds no run that has begun")
        if (directory / "summary.txt").exists():
            raise UsageError(f"the run in {directory} is finished")
        settings = json.loads((directory / "config.json").read_text())
        config = type(config)(**{**settings, "out": str(directory)})
        return cls(recipe, config, resumed=True), config

    def trainer(self, service: ts.ServiceClient, rank: int) -> ts.TrainingClient:
        """A new session, or that of the resumed run as its last finished step left it.

        What the service had accepted runs to its end first, so a step is neither taken twice nor forgotten; gradients
        that no step took are dropped: the recipe computes them again.
        """
        if self.resumed:
            trainer = service.attach(self._session.read_text())
            trainer.zero_grad().result()  # behind all that was accepted
            trainer.progress = trainer.info().progress  # of `attach`: as it was before them
            return trainer
        config = self.config
        trainer = service.create_lora_training_client(config.model, rank=rank, alpha=32, seed=config.seed)
        self._session.write_text(trainer.session_id)
        return trainer

    def logged(self, phase: str) -> list[dict[str, Any]]:
        """The rows of a phase so far."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        return [row for row in map(json.loads, lines) if row["phase"] == phase]

    def log(self, phase: str, step: int, metrics: Mapping[str, float], more: Mapping[str, float] | None = None) -> None:
        """Append a row to ``metrics.jsonl``, and print it without ``more`` on one line."""
        seconds = round(time.monotonic() - self.started, 3)
        row = {**(more or {}), **metrics, "phase": phase, "step": step, "seconds": seconds}
        with self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"{seconds:7.1f} s  {phase} {step}  {shown}", flush=True)

    def finish(self, facts: Mapping[str, object], usage: ts.UsageReport) -> None:
        """Print the summary and write it to ``summary.txt``.

        Args:
            facts: Lines of the summary: model, data, accuracies, ...
            usage: Of this run's sessions.
        """
        facts = {
            **facts,
            "seed": self.config.seed,
            "time": f"{time.monotonic() - self.started:.0f} s in all; session: {time_line(usage)}",
            "files": self.directory,
        }
        width = max(len(name) for name in facts)
        lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
        text = "\n".join(["", self.recipe, *lines, "", *usage_table(usage), ""])
        (self.directory / "summary.txt").write_text(text)
        print(text, flush=True)


def time_line(usage: ts.UsageReport) -> str:
    return (
        f"{usage.wall_seconds:.0f} s wall = {usage.busy_seconds:.0f} s engine "
        f"+ {usage.idle_seconds:.0f} s idle (your code; costs nothing)"
    )


def usage_table(usage: ts.UsageReport) -> list[str]:
    """Tokens by kind, the price of a million, and the cost."""
    prices = _prices(usage)
    lines = [f"{'tokens':<16}{'count':>12}{'per million':>16}{'cost':>16}"]
    for kind, count in usage.total.tokens.items():
        price = prices.get(kind)
        known = price is not None
        lines.append(
            f"{kind:<16}{count:>12,}"
            + (f"{price:>12.4f} {usage.currency}" if known else f"{'':>16}")
            + (f"{count * price / 1e6:>12.6f} {usage.currency}" if known else "")
        )
    lines.append(
        f"{'total':<16}{sum(usage.total.tokens.values()):>12,}{'':>16}{usage.total.cost:>12.6f} {usage.currency}"
    )
    return lines


def _prices(usage: ts.UsageReport) -> Mapping[str, Any]:
    """The one price table in use; none where sessions of several models are summed."""
    return next(iter(usage.prices.values())) if len(usage.prices) == 1 else {}
