"""What a service must say of a session, worked out from the calls alone. Pure Python: no engine, no database.

A `Plan` is a list of calls that a seed draws, good and bad ones. An `Oracle` goes through it and says how each call
ends, which operations the log holds, what is billed, which checkpoints exist and how many steps were taken.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

CONTEXT, VOCABULARY = 512, 320
Loss = Literal["cross_entropy", "importance_sampling", "ppo"]
LOSSES: tuple[Loss, ...] = ("cross_entropy", "importance_sampling", "ppo")
WEIGHTS = {
    "pass": 6,
    "custom": 2,
    "forward": 1,
    "bad_pass": 1,
    "step": 5,
    "zero": 1,
    "freeze": 2,
    "sample": 4,
    "stream": 1,
    "save_state": 1,
    "save_weights": 1,
    "load": 1,
}


@dataclass(frozen=True)
class Call:
    """``kind`` is a key of `WEIGHTS`; ``seed`` draws its data; ``target`` is a sampler or a checkpoint, by number."""

    kind: str
    seed: int
    target: int = 0
    name: str = ""
    optimizer: bool = False
    count: int = 1
    length: int = 8


@dataclass(frozen=True)
class Plan:
    name: str
    seed: int
    calls: tuple[Call, ...]


def plan_of(name: str, seed: int) -> Plan:
    draw = random.Random(f"{name} {seed}")
    calls: list[Call] = []
    samplers = 0
    states: list[str] = []
    for index in range(draw.randint(6, 16)):
        kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if (kind in ("sample", "stream") and not samplers) or (kind == "load" and not states):
            kind = "pass"
        target = draw.randrange(samplers) if kind in ("sample", "stream") else draw.randrange(len(states) or 1)
        # A name that is used twice: the second save fails.
        label = (
            states[target] if kind == "load" else f"n{draw.randint(0, 2)}" if kind == "save_weights" else f"s{index}"
        )
        samplers += kind == "freeze"
        states += [label] * (kind == "save_state")
        count = draw.randint(1, 3) if kind != "stream" else 1
        calls.append(
            Call(kind, draw.randrange(1 << 30), target, label, draw.random() < 0.5, count, draw.randint(1, 12))
        )
    return Plan(name, seed, tuple(calls))


def rows_of(call: Call) -> list[list[int]]:
    """The sequences of a pass; one token of a bad one is not in the vocabulary."""
    draw = random.Random(call.seed)
    rows = [[draw.randrange(3, 300) for _ in range(draw.randint(4, 40))] for _ in range(call.count)]
    if call.kind == "bad_pass":
        rows[-1][1] = VOCABULARY + 7
    return rows


def prompt_of(call: Call) -> list[int]:
    return rows_of(call)[0]


def loss_of(call: Call) -> Loss:
    return LOSSES[call.seed % len(LOSSES)]


@dataclass
class Oracle:
    """Where a session stands after the calls that it was told of.

    Attributes:
        outcomes: "done", or the class of the error, of each call.
        operations: (seq or None, kind, state) of the log's rows.
        bill: (kind, tokens) of the ledger's rows; a kept forward is charged, and taken back by its backward.
        checkpoints: (kind, name).
        steps: Taken since the session, or the checkpoint that was loaded with its optimizer, began.
    """

    outcomes: list[str] = field(default_factory=list)
    operations: Counter[tuple[int | None, str, str]] = field(default_factory=Counter)
    bill: Counter[tuple[str, int]] = field(default_factory=Counter)
    checkpoints: set[tuple[str, str]] = field(default_factory=set)
    steps: int = 0
    _seq: int = 0
    _pending: bool = False
    _incomplete: bool = False
    _saved: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan) -> Oracle:
        oracle = cls()
        for call in plan.calls:
            oracle.tell(call)
        return oracle

    def tell(self, call: Call) -> None:
        getattr(self, f"_{call.kind}")(call)

    def _operation(self, kind: str, outcome: str = "done") -> None:
        """One numbered operation; it is the call's end unless another one follows."""
        self._seq += 1
        self.operations[self._seq, kind, "done" if outcome == "done" else "failed"] += 1

    def _ends(self, outcome: str = "done") -> None:
        self.outcomes.append(outcome)

    def _charge(self, kind: str, tokens: int) -> None:
        self.bill[kind, tokens] += 1

    def _pass(self, call: Call) -> None:
        self._operation("forward_backward")
        self._charge("train", sum(len(row) - 1 for row in rows_of(call)))
        self._pending = True
        self._ends()

    def _bad_pass(self, call: Call) -> None:
        self._operation("forward_backward", "InvalidDatum")
        self._incomplete = True
        self._ends("InvalidDatum")

    def _forward(self, call: Call) -> None:
        self._operation("forward")
        self._charge("prefill", sum(len(row) - 1 for row in rows_of(call)))
        self._ends()

    def _custom(self, call: Call) -> None:
        tokens = sum(len(row) - 1 for row in rows_of(call))
        self._operation("forward_keep")
        self._operation("backward")
        for kind, count in (("prefill", tokens), ("train", tokens), ("prefill", -tokens)):
            self._charge(kind, count)
        self._pending = True
        self._ends()

    def _step(self, call: Call) -> None:
        outcome = "IncompleteGradients" if self._incomplete else "done" if self._pending else "NoGradients"
        self._operation("optim_step", outcome)
        if outcome == "done":
            self.steps += 1
            self._pending = False
        self._ends(outcome)

    def _zero(self, call: Call) -> None:
        self._operation("zero_grad")
        self._pending = self._incomplete = False
        self._ends()

    def _freeze(self, call: Call) -> None:
        self._operation("snapshot")
        self._ends()

    def _sample(self, call: Call) -> None:
        self.operations[None, "sample", "done"] += 1
        self._charge("prefill", len(prompt_of(call)))
        self._charge("sample", call.count * call.length)
        self._ends()

    _stream = _sample

    def _save_state(self, call: Call) -> None:
        self._operation("save_state")
        self.checkpoints.add(("state", call.name))
        self._saved.append(self.steps)
        self._ends()

    def _save_weights(self, call: Call) -> None:
        new = ("weights", call.name) not in self.checkpoints
        self._operation("save_weights", "done" if new else "CheckpointExists")
        self.checkpoints.add(("weights", call.name))
        self._ends("done" if new else "CheckpointExists")

    def _load(self, call: Call) -> None:
        self._operation("load_state")
        self.steps = self._saved[call.target] if call.optimizer else 0
        self._pending = self._incomplete = False
        self._ends()
