"""Puts a sampler's events together, and checks what holds of all events on the way."""

from __future__ import annotations

import math
from collections import defaultdict

from trainsession.engine.api import SampleEvent
from trainsession.engine.sampler.sampler import Sampler
from trainsession.types import SampledSequence, SampleResponse


def finish_all(sampler: Sampler, *, max_steps: int = 10_000) -> dict[str, SampleResponse]:
    """Step until nothing is left; raises the error of the first request that failed."""
    events: dict[str, list[SampleEvent]] = defaultdict(list)
    for _ in range(max_steps):
        if not sampler.has_work():
            return {request_id: assemble(of_request) for request_id, of_request in events.items()}
        for event in sampler.step():
            if event.error is not None:
                raise event.error
            events[event.request_id].append(event)
    raise AssertionError("the sampler does not come to an end")


def assemble(events: list[SampleEvent]) -> SampleResponse:
    """The response that a request's events add up to."""
    *of_samples, last = events
    assert last.done
    by_sample: dict[int, list[SampleEvent]] = defaultdict(list)
    for event in of_samples:
        assert not event.done
        assert len(event.tokens) == len(event.logprobs)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in event.logprobs)
        by_sample[event.index].append(event)
    sequences = []
    for index in sorted(by_sample):
        parts = by_sample[index]
        reason = parts[-1].stop_reason
        assert reason is not None
        assert all(part.stop_reason is None for part in parts[:-1])
        assert "".join(part.text_delta for part in parts) == parts[-1].text
        sequences.append(
            SampledSequence(
                tokens=[token for part in parts for token in part.tokens],
                logprobs=[logprob for part in parts for logprob in part.logprobs],
                stop_reason=reason,
                text=parts[-1].text,
                topk_logprobs=[top for part in parts for top in part.topk] or None,
            )
        )
    return SampleResponse(sequences, last.prompt_logprobs, last.topk_prompt_logprobs)
