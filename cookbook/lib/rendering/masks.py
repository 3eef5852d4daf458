"""Tokens and the weight of each in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import trainsession as ts

from ..data import sequence_datum
from .drawing import as_html, as_text


@dataclass(frozen=True, slots=True)
class Rendered:
    """N tokens with a loss mask.

    Attributes:
        tokens: N token ids.
        weights: N: 1 for a token that is learned (by predicting it from those before it), else 0.
        straddling: Indices of tokens across the edge of what is learned (a template's newline and a
            reply that begins with one are one token): no sampler would produce them, their weight is 0.
    """

    tokenizer: ts.Tokenizer
    tokens: Sequence[int]
    weights: Sequence[float]
    straddling: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.tokens)

    @property
    def learned(self) -> list[str]:
        """The texts of the runs of learned tokens."""
        runs: list[list[int]] = []
        before = 0.0
        for token, weight in zip(self.tokens, self.weights, strict=True):
            if weight and not before:
                runs.append([])
            if weight:
                runs[-1].append(token)
            before = weight
        return [self.tokenizer.decode(run) for run in runs]

    def datum(self) -> ts.Datum:
        """For ``cross_entropy``: N - 1 positions, where position ``i`` predicts token ``i + 1``."""
        return sequence_datum(self.tokens, self.weights)

    def continues(self, other: Rendered) -> bool:
        """Whether the tokens begin with all of the other's."""
        return self.tokens[: len(other)] == other.tokens

    def also_learning(self, other: Rendered) -> Rendered:
        """The same tokens, with what the other learns of them, too."""
        both = [max(pair) for pair in zip(self.weights, other.weights, strict=False)]
        return replace(self, weights=[*both, *self.weights[len(both) :]])

    def __str__(self) -> str:
        return as_text(self, colour=False)

    def show(self) -> None:
        """Print it in colour: learned tokens on green, straddling ones on red, the rest dim."""
        print(as_text(self, colour=True))

    def _repr_html_(self) -> str:
        return as_html(self)
