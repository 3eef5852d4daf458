"""A loss mask to look at: marked text, a terminal's colours, a notebook's HTML, a PNG."""

from __future__ import annotations

import html
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .masks import Rendered

Kind = Literal["given", "learned", "straddling"]

_COLOURS: dict[Kind, str] = {"given": "\x1b[2m", "learned": "\x1b[30;42m", "straddling": "\x1b[30;41m"}
_MARKS: dict[Kind, tuple[str, str]] = {"given": ("", ""), "learned": ("⟦", "⟧"), "straddling": ("⟪", "⟫")}
_FILLS: dict[Kind, str] = {"given": "#eeeeee", "learned": "#a6e3a1", "straddling": "#f38ba8"}

_FONT_SIZE = 9.5
_CHARACTER_WIDTH = 1233 / 2048
"""Of DejaVu Sans Mono, which matplotlib brings, in font sizes."""


def runs(rendered: Rendered) -> list[tuple[Kind, list[str]]]:
    """Runs of tokens of one kind, each token as text.

    A character may be spread over several tokens: its text stands at the last of them.
    """
    pieces: list[tuple[Kind, list[str]]] = []
    straddling = set(rendered.straddling)
    held: list[int] = []
    for index, (token, weight) in enumerate(zip(rendered.tokens, rendered.weights, strict=True)):
        kind: Kind = "straddling" if index in straddling else "learned" if weight else "given"
        held.append(token)
        text = rendered.tokenizer.decode(held)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(held) < 4:
            text = ""  # UTF-8 has at most four bytes
        else:
            held.clear()
        if not pieces or pieces[-1][0] != kind:
            pieces.append((kind, []))
        pieces[-1][1].append(text)
    return pieces


def as_text(rendered: Rendered, *, colour: bool) -> str:
    """What is learned between ⟦ and ⟧, or in a terminal's colours; tokens across an edge between ⟪ and ⟫."""
    if not colour:
        return "".join(_MARKS[kind][0] + "".join(texts) + _MARKS[kind][1] for kind, texts in runs(rendered))
    lines: list[str] = []
    for kind, texts in runs(rendered):
        # The newline is shown, and colour ends before it: a terminal would fill the line.
        shown = "".join(texts).replace("\n", f"↵\x1b[0m\n{_COLOURS[kind]}")
        lines.append(f"{_COLOURS[kind]}{shown}\x1b[0m")
    return "".join(lines)


def as_html(rendered: Rendered) -> str:
    """One ``<span>`` a token, with its id and index as the tooltip."""
    index = 0
    spans: list[str] = []
    for kind, texts in runs(rendered):
        for text in texts:
            shown = html.escape(text).replace("\n", "↵\n")
            title = f"{index}: {rendered.tokens[index]} ({kind})"
            spans.append(f'<span title="{title}" style="background:{_FILLS[kind]};color:#111">{shown}</span>')
            index += 1
    return f'<pre style="white-space:pre-wrap;line-height:1.6">{"".join(spans)}</pre>'


def save_mask(rendered: Rendered, path: str | Path, *, columns: int = 88) -> None:
    """Draw the tokens as boxes, in lines of about ``columns`` characters, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    lines = [""]
    boxes: list[list[tuple[float, float]]] = []
    fills: list[str] = []
    for kind, texts in runs(rendered):
        for text in texts:
            shown = text.replace("\n", "↵").replace("\t", "→")
            if lines[-1] and len(lines[-1]) + len(shown) > columns:
                lines.append("")
            left, right, top = len(lines[-1]), len(lines[-1]) + len(shown), len(lines) - 0.95
            boxes.append([(left, top), (right, top), (right, top + 0.9), (left, top + 0.9)])
            fills.append(_FILLS[kind])
            lines[-1] += shown
            if text.endswith("\n"):
                lines.append("")
    width = max(columns, *map(len, lines)) + 2
    # A column is as wide as a character, so a line is one text; a text for each token takes seconds.
    figure = Figure(figsize=(width * _CHARACTER_WIDTH * _FONT_SIZE / 72, (len(lines) + 1) * 0.2))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-1, width - 1), ylim=(len(lines) + 0.5, -0.5))
    axes.set_axis_off()
    axes.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors="white", linewidths=0.8))
    for row, line in enumerate(lines):
        # A dollar would begin a formula.
        shown, font = line.replace("$", r"\$"), {"family": "DejaVu Sans Mono", "fontsize": _FONT_SIZE}
        axes.text(0, row + 0.5, shown, va="center_baseline", **font)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box
        FigureCanvasAgg(figure).print_png(Path(path))
