"""Submits, retries, reorders, cancels and restarts against a dictionary model (hypothesis)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bench.null_engine import MODEL, NullHost
from tests.service.driver import LORA, PROJECT, database_of, datum
from trainsession.errors import SequenceConflict
from trainsession.service.requests import CreateSession, OperationRequest
from trainsession.service.service import Service
from trainsession.service.settings import Settings


class LogMachine(RuleBasedStateMachine):
    """One session; the model knows each number's token and what the whole must add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.sent: dict[int, tuple[OperationRequest, str]] = {}
        self.tokens: dict[int, int] = {}

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    @initialize()
    def begin(self) -> None:
        self.open()
        request = CreateSession(base_model=MODEL, lora=LORA)
        info, self.epoch = self.wait(self.service.create_session(PROJECT, request))
        self.session = info.session_id

    def open(self) -> None:
        quick = Settings(snapshot_every_operations=3)
        home = Path(self.directory.name)
        self.service = self.wait(Service.open(home, NullHost(), database=database_of(home), settings=quick))

    def request(self, seq: int, token: int, key: bool) -> OperationRequest:
        return OperationRequest(
            kind="forward_backward",
            seq=seq,
            epoch=self.epoch,
            idempotency_key=f"k{seq}" if key else "",
            params={"loss_fn": "cross_entropy"},
            data=[datum([token])],
        )

    @rule(ahead=st.integers(0, 4), token=st.integers(1, 1000), key=st.booleans())
    def submit(self, ahead: int, token: int, key: bool) -> None:
        free = [seq for seq in range(1, len(self.sent) + 6) if seq not in self.sent]
        seq = free[min(ahead, len(free) - 1)]
        request = self.request(seq, token, key)
        operation_id, numbered = self.wait(self.service.submit(PROJECT, self.session, request))
        assert numbered == seq
        self.sent[seq], self.tokens[seq] = (request, operation_id), token

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), times=st.integers(1, 3))
    def retry(self, data: st.DataObject, times: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.sent)))
        request, operation_id = self.sent[seq]

        async def at_once() -> list[Any]:
            submits = (self.service.submit(PROJECT, self.session, request) for _ in range(times))
            return await asyncio.gather(*submits)

        assert self.wait(at_once()) == [(operation_id, seq)] * times

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def conflict(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.sent)))
        other = self.request(seq, self.tokens[seq] + 1, key=False)
        try:
            self.wait(self.service.submit(PROJECT, self.session, other))
        except SequenceConflict:
            return
        raise AssertionError("another operation took a number that was in use")

    @rule()
    def restart(self) -> None:
        self.wait(self.service.close())
        self.open()

    def contiguous(self) -> int:
        seq = 1
        while seq in self.sent:
            seq += 1
        return seq

    @invariant()
    def next_number_is_the_first_gap(self) -> None:
        if hasattr(self, "session"):
            info = self.wait(self.service.get_session(PROJECT, self.session))
            assert info.next_seq == self.contiguous()

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.check_sum()
            self.wait(self.service.close())
        self.loop.close()
        self.directory.cleanup()

    def check_sum(self) -> None:
        """Fill the gaps, step, and compare weight, ledger and results with the model."""
        for seq in range(1, max(self.sent, default=0)):
            if seq not in self.sent:
                request = self.request(seq, 1, key=False)
                self.sent[seq] = (request, self.wait(self.service.submit(PROJECT, self.session, request))[0])
                self.tokens[seq] = 1
        for seq, (_, operation_id) in self.sent.items():
            answer = self.wait(self.service.results(PROJECT, [operation_id], timeout=20))
            assert answer.results[0].value["metrics"]["loss:sum"] == self.tokens[seq]
        assert self.wait(self.service.usage(PROJECT)).total.train == len(self.sent)
        if self.sent:
            step = OperationRequest(kind="optim_step", params={"learning_rate": 1.0})
            operation_id, _ = self.wait(self.service.submit(PROJECT, self.session, step))
            answer = self.wait(self.service.results(PROJECT, [operation_id], timeout=20))
            assert answer.results[0].value["metrics"]["grad_norm"] == sum(self.tokens.values())


@pytest.mark.usefixtures("each_database")
def test_the_log_agrees_with_the_model() -> None:
    run_state_machine_as_test(LogMachine, settings=settings(max_examples=12, stateful_step_count=12, deadline=None))
