"""The curve of a run, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .estimates import Proportion

Point = tuple[int, float | Proportion]
"""A step, and a value; a proportion is drawn with its 95% interval."""


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of up to ``window - 1`` before it."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def save_curve(
    path: Path,
    *,
    title: str,
    ylabel: str,
    name: str,
    values: Sequence[float],
    held_out: Mapping[str, Sequence[Point]],
    window: int = 5,
) -> None:
    """One value per training step, its running mean, and held-out evaluations as points.

    Args:
        path: Of the PNG.
        name: What ``values`` are, for the legend.
        values: After step 1, 2, ...
        held_out: Evaluations by name; step 0 is before training.
        window: Of the running mean, in steps.
    """
    # A Figure of its own, not pyplot: no display, no global state, safe in a notebook and in a thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, ".", color="0.75", label=name)
    axes.plot(steps, running_mean(values, window), color="0.4", label=f"mean of {window} steps")
    for index, (label, points) in enumerate(held_out.items()):
        numbers = [value.value if isinstance(value, Proportion) else value for _, value in points]
        bounds = [value.interval if isinstance(value, Proportion) else (value, value) for _, value in points]
        errors = [
            [number - low for number, (low, _) in zip(numbers, bounds, strict=True)],
            [high - number for number, (_, high) in zip(numbers, bounds, strict=True)],
        ]
        axes.errorbar(
            [step for step, _ in points], numbers, yerr=errors, fmt="o--", capsize=3, color=f"C{index}", label=label
        )
    axes.set(title=title, xlabel="optimizer step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)
