"""Losses of preference pairs, over the logprobs of both replies, in torch; and how well a policy prefers.

Each takes P pairs and gives P losses and P margins. A margin is the difference of the two replies'
rewards as the method defines them: above zero, the policy prefers the chosen one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

import trainsession as ts

from .rendering import Rendered

if TYPE_CHECKING:
    from torch import Tensor


class Scores(NamedTuple):
    """Of P replies, shape (P,).

    ``gain``: by how many nats a reply is more likely than in the base model. ``mean``: the mean
    logprob of its tokens.
    """

    gain: Tensor
    mean: Tensor


class Outcome(NamedTuple):
    losses: Tensor
    margins: Tensor


def dpo(chosen: Scores, rejected: Scores, beta: float) -> Outcome:
    """Rafailov et al. 2023 (arXiv:2305.18290), eq. 7: ``-log sigmoid(beta * (gain of chosen - gain of rejected))``."""
    from torch.nn.functional import logsigmoid

    margins = beta * (chosen.gain - rejected.gain)
    return Outcome(-logsigmoid(margins), margins)


def ipo(chosen: Scores, rejected: Scores, beta: float) -> Outcome:
    """Azar et al. 2023 (arXiv:2310.12036), eq. 17, with ``beta`` for tau: ``(h - 1 / (2 beta))^2``."""
    difference = chosen.gain - rejected.gain
    return Outcome((difference - 1 / (2 * beta)) ** 2, beta * difference)


def simpo(chosen: Scores, rejected: Scores, beta: float) -> Outcome:
    """Meng et al. 2024 (arXiv:2405.14734), eq. 6: means over tokens, no reference, target margin gamma = beta / 2."""
    from torch.nn.functional import logsigmoid

    margins = beta * (chosen.mean - rejected.mean)
    return Outcome(-logsigmoid(margins - beta / 2), margins)


def orpo(chosen: Scores, rejected: Scores, beta: float) -> Outcome:
    """Hong et al. 2024 (arXiv:2403.07691), eq. 6: NLL of the chosen one and ``beta`` (lambda) times the odds' loss."""
    import torch
    from torch.nn.functional import logsigmoid

    def odds(mean: Tensor) -> Tensor:
        """log p / (1 - p), where a reply that is certain has no finite one: p is kept from 1."""
        mean = mean.clamp(max=-1e-6)
        return mean - torch.log(-torch.expm1(mean))

    margins = odds(chosen.mean) - odds(rejected.mean)
    return Outcome(-chosen.mean - beta * logsigmoid(margins), margins)


@dataclass(frozen=True, slots=True)
class Method:
    """A loss, its usual ``beta``, and whether it compares with the base model."""

    loss: Callable[[Scores, Scores, float], Outcome]
    beta: float
    reference: bool


METHODS = {
    "dpo": Method(dpo, 0.1, True),
    "ipo": Method(ipo, 0.1, True),
    "simpo": Method(simpo, 2.0, False),
    "orpo": Method(orpo, 0.1, False),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replies to one prompt, of N and M tokens; ``reference``: the base model's N - 1 and M - 1 logprobs."""

    chosen: Rendered
    rejected: Rendered
    reference: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None

    def datums(self) -> list[ts.Datum]:
        """Chosen, then rejected; each with what the loss needs to know."""
        both: list[ts.Datum] = []
        for side, reply in enumerate((self.chosen, self.rejected)):
            datum = reply.datum()
            reference = self.reference[side] if self.reference else np.zeros(len(reply) - 1, np.float32)
            both.append(ts.Datum(datum.model_input, {**datum.loss_fn_inputs, "reference": reference}))
        return both


def with_reference(trainer: ts.TrainingClient, pairs: Sequence[Pair], file: Path) -> list[Pair]:
    """The pairs with what the policy makes of them before its first step, when it is the base model.

    From the very computation that trains, so that the first margins are exactly zero; kept in
    ``file`` (npy), because a resumed run cannot compute it again.
    """
    datums = [plain for pair in pairs for plain in map(_targets_alone, pair.datums())]
    if not file.exists():
        rows = [row.to_numpy() for row in _logprobs(trainer, datums)]
        aside = file.with_suffix(".new.npy")
        np.save(aside, np.concatenate(rows), allow_pickle=False)
        aside.rename(file)
    ends = np.cumsum([len(datum.model_input.to_ints()) for datum in datums])
    known = np.split(np.load(file, allow_pickle=False), ends[:-1])
    return [
        replace(pair, reference=(chosen, rejected))
        for pair, chosen, rejected in zip(pairs, known[::2], known[1::2], strict=True)
    ]


PART_DATUMS, PART_TOKENS = 16_384, 1 << 22
"""Of one request: a quarter of the datums that the service takes, and a body well below its 256 MiB."""


def _logprobs(trainer: ts.TrainingClient, datums: Sequence[ts.Datum]) -> list[ts.TensorData]:
    """Of as many datums as there are, a part at a time."""
    parts: list[list[ts.Datum]] = [[]]
    tokens = 0
    for datum in datums:
        tokens += len(datum.model_input.to_ints())
        if parts[-1] and (len(parts[-1]) == PART_DATUMS or tokens > PART_TOKENS):
            parts.append([])
            tokens = len(datum.model_input.to_ints())
        parts[-1].append(datum)
    return [row for part in parts for row in trainer.forward(part, "cross_entropy").result().logprobs]


def _targets_alone(datum: ts.Datum) -> ts.Datum:
    return ts.Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]})


def outcome(method: Method, beta: float, data: Sequence[ts.Datum], logprobs: Sequence[Tensor]) -> Outcome:
    """Losses and margins of the pairs whose datums (`Pair.datums`) these are, in a row."""
    import torch

    gains, means = [], []
    for datum, row in zip(data, logprobs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        # Token by token: equal policies have exactly no gain, however long the reply is.
        gains.append(((row - datum.loss_fn_inputs["reference"].to_torch()) * weights).sum())
        means.append((row * weights).sum() / weights.sum())
    gain, mean = torch.stack(gains), torch.stack(means)
    return method.loss(Scores(gain[::2], mean[::2]), Scores(gain[1::2], mean[1::2]), beta)


PairLoss = Callable[[Sequence[ts.Datum], Sequence["Tensor"]], "tuple[Tensor, dict[str, float]]"]


def pair_loss(method: Method, beta: float) -> PairLoss:
    """For `forward_backward_custom`: the mean over the pairs."""

    def loss(data: Sequence[ts.Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        losses, margins = outcome(method, beta, data, logprobs)
        return losses.mean(), {"margin:mean": margins.mean().item(), "accuracy:mean": share_preferred(margins)}

    return loss


def share_preferred(margins: Tensor) -> float:
    """How many chosen replies are preferred; no preference counts as half."""
    return ((margins > 0).float() + 0.5 * (margins == 0).float()).mean().item()


@dataclass(frozen=True, slots=True)
class Preferred:
    """Held-out pairs: the mean loss and margin, and the share in which the chosen reply is preferred."""

    loss: float
    margin: float
    accuracy: float


def evaluate(trainer: ts.TrainingClient, method: Method, beta: float, pairs: Sequence[Pair]) -> Preferred:
    """Of the policy as it is now."""
    data = [datum for pair in pairs for datum in pair.datums()]
    logprobs = [row.to_torch() for row in _logprobs(trainer, [_targets_alone(datum) for datum in data])]
    losses, margins = outcome(method, beta, data, logprobs)
    return Preferred(losses.mean().item(), margins.mean().item(), share_preferred(margins))
