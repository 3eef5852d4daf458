"""Results: sums, shortcuts, and reprs that stay short."""

from __future__ import annotations

import numpy as np

from trainsession import ForwardBackwardOutput, SampledSequence, SampleResponse, TensorData, Usage, UsageReport


def test_usage_adds_up() -> None:
    total = sum([Usage(prefill=1, cost=0.5), Usage(train=2, cost=0.25), Usage(sample=3, prefill_cached=4)], Usage())
    assert total == Usage(prefill=1, prefill_cached=4, sample=3, train=2, cost=0.75)
    assert total.tokens == {"prefill": 1, "prefill_cached": 4, "sample": 3, "train": 2}


def test_idle_time_is_what_is_left() -> None:
    report = UsageReport(Usage(), {}, {}, wall_seconds=10.0, busy_seconds=4.0)
    assert report.idle_seconds == 6.0
    assert UsageReport(Usage(), {}, {}, wall_seconds=1.0, busy_seconds=4.0).idle_seconds == 0.0


def test_shortcuts() -> None:
    output = ForwardBackwardOutput([{"logprobs": TensorData([-1.0])}], {"loss:sum": 1.0})
    assert output.logprobs == [TensorData([-1.0])]
    sequence = SampledSequence([0] * 3, [0.0] * 3, "stop", "hello")
    assert SampleResponse([sequence]).text == "hello"


def test_reprs_are_compact() -> None:
    output = ForwardBackwardOutput([{"logprobs": TensorData(np.zeros(10_000))}] * 50, {"loss:sum": 1.23456789})
    assert repr(output) == "ForwardBackwardOutput(50 datums, loss:sum=1.23457)"
    sequence = SampledSequence([0] * 9, [0.0] * 9, "length", "word " * 100)
    assert len(repr(sequence)) < 120
    assert "9 tokens, length" in repr(sequence)
    assert len(repr(TensorData(np.zeros((100, 100))))) < 80
