"""A loss mask to look at: marked text, a terminal's colours, a notebook's HTML, a PNG."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .masks import Rendered

Kind = Literal["given", "learned", "straddling"]

_COLOURS: dict[Kind, str] = {"given": "\x1b[2m", "learned": "\x1b[30;42m", "straddling": "\x1b[30;41m"}
_MARKS: dict[Kind, tuple[str, str]] = {"given": ("", ""), "learned": ("⟦", "⟧"), "straddling": ("⟪", "⟫")}
_FILLS: dict[Kind, str] = {"given": "#eeeeee", "learned": "#a6e3a1", "straddling": "#f38ba8"}


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
    from matplotlib.figure import Figure

    placed: list[tuple[int, int, Kind, str]] = []
    row = column = 0
    for kind, texts in runs(rendered):
        for text in texts:
            shown = text.replace("\n", "↵")
            if column and column + len(shown) > columns:
                row, column = row + 1, 0
            placed.append((row, column, kind, shown))
            column += len(shown)
            if text.endswith("\n"):
                row, column = row + 1, 0
    figure = Figure(figsize=(columns * 0.085 + 0.2, (row + 1) * 0.2 + 0.2))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-1, columns + 1), ylim=(row + 1.5, -0.5))
    axes.set_axis_off()
    for at, left, kind, shown in placed:
        axes.barh(at + 0.5, len(shown), left=left, height=0.9, color=_FILLS[kind], edgecolor="white", linewidth=0.8)
        # A dollar would begin a formula.
        axes.text(left, at + 0.5, shown.replace("$", r"\$"), family="monospace", fontsize=9.5, va="center_baseline")
    FigureCanvasAgg(figure).print_png(Path(path))
