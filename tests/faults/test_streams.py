"""Streams over HTTP whose server, with its engine, is killed while they are read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainsession as ts
from tests.faults.served import Server, engines_of, served

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds engines through /proc")
PROMPT = [5, 6, 7]
SAMPLES = 24
PARAMS = ts.SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
CROWD, CROWD_PARAMS = 240, ts.SamplingParams(max_tokens=4, seed=4, ignore_eos=True)
"""Samples before those of the stream. While they run some of its own wait (256 decode at once), and after a kill they
do not: its frames come in another order then."""


def kill_engine(server: Server) -> None:
    os.kill(engines_of(server.pid)[0], signal.SIGKILL)


def read(stream: Iterator[Any], on_count: dict[int, Callable[[], None]]) -> list[Any]:
    """(tokens, logprobs, text, stop reason) of each sample; calls a function once so many tokens are there."""
    found = [([], [], "", None) for _ in range(SAMPLES)]  # type: list[Any]
    count, left = 0, sorted(on_count)
    for delta in stream:
        tokens, logprobs, text, reason = found[delta.index]
        assert reason is None, "a delta behind the sample's last one"
        found[delta.index] = (
            tokens + delta.tokens,
            logprobs + delta.logprobs,
            text + delta.text,
            delta.stop_reason,
        )
        count += len(delta.tokens)
        while left and count >= left[0]:
            on_count[left.pop(0)]()
    assert not left
    return found


def test_a_stream_through_kills_is_the_whole_one_with_no_token_doubled_or_lost(
    tmp_path: Path, tiny_model: Path
) -> None:
    with served(tmp_path / "home") as server, ts.ServiceClient(server.url) as service:
        sampler = service.create_sampling_client(base_model=str(tiny_model))
        whole = sampler.sample(PROMPT, SAMPLES, PARAMS).result(120)
        expected = [(s.tokens, s.logprobs, s.text, s.stop_reason) for s in whole.sequences]
        total = sum(len(s.tokens) for s in whole.sequences)
        crowd = sampler.sample([9, 8], CROWD, CROWD_PARAMS)
        while crowd.operation_id is None:
            time.sleep(0.001)
        stream = sampler.stream(PROMPT, SAMPLES, PARAMS)
        kills = {total // 3: lambda: kill_engine(server), total // 2: lambda: server.kill(engine_too=True)}
        assert read(stream, kills) == expected
        assert stream.usage is not None
        assert stream.usage.sample == total
        assert len(crowd.result(120).sequences) == CROWD
        assert service.usage().total.sample == 2 * total + CROWD * 4
