"""The mask, drawn."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import trainsession as ts
from cookbook.lib.rendering import Rendered, Renderer, save_mask
from cookbook.lib.rendering.drawing import _FILLS

CHAT = [{"role": "user", "content": "2 < $3$? 👋🏽"}, {"role": "assistant", "content": "\nyes 👋🏽"}]


@pytest.fixture
def rendered(family: Callable[[str], ts.Tokenizer]) -> Rendered:
    return Renderer(family("smollm2")).render(CHAT)


def test_marks_what_is_learned_and_what_straddles(rendered: Rendered) -> None:
    assert str(rendered).endswith(
        "<|im_start|>user\n2 < $3$? 👋🏽<|im_end|>\n<|im_start|>assistant⟪\n\n⟫⟦yes 👋🏽<|im_end|>⟧\n"
    )
    assert re.sub("[⟦⟧⟪⟫]", "", str(rendered)) == rendered.text


def test_colours_end_with_each_line(rendered: Rendered, capsys: pytest.CaptureFixture[str]) -> None:
    rendered.show()
    shown = capsys.readouterr().out
    assert "\x1b[30;42myes 👋🏽<|im_end|>\x1b[0m" in shown
    assert re.sub("\x1b\\[[0-9;]*m|↵", "", shown) == rendered.text + "\n"
    assert all(line.endswith("\x1b[0m") for line in shown.rstrip("\n").split("\n"))


def test_html_escapes_and_names_each_token(rendered: Rendered) -> None:
    html = rendered._repr_html_()
    titles = re.findall(r'title="(\d+): (\d+) \((given|learned|straddling)\)"', html)
    assert [int(index) for index, _, _ in titles] == list(range(len(rendered)))
    assert [int(token) for _, token, _ in titles] == rendered.tokens
    assert [kind == "learned" for _, _, kind in titles] == [weight == 1 for weight in rendered.weights]
    assert "2 &lt; $3$" in re.sub("<[^>]*>", "", html)
    assert "<|im" not in html


def test_png(rendered: Rendered, tmp_path: Path) -> None:
    """Boxes of the three colours, where matplotlib's own reader finds them; no warning for a missing emoji."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: cookbook)")
    from matplotlib.image import imread

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_mask(rendered, tmp_path / "mask.png", columns=40)
    pixels = (imread(tmp_path / "mask.png")[..., :3] * 255).round().astype(int)
    shown = {
        kind: (pixels == [int(fill[at : at + 2], 16) for at in (1, 3, 5)]).all(-1).sum()
        for kind, fill in _FILLS.items()
    }
    assert shown["given"] > shown["learned"] > shown["straddling"] > 50
