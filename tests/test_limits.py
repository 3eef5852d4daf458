"""Limits: one place, and a refusal that names the limit."""

from __future__ import annotations

import dataclasses

import pytest

from trainsession import LIMITS, LimitExceeded, Limits


@pytest.mark.parametrize("field", dataclasses.fields(Limits), ids=lambda field: field.name)
def test_the_bound_itself_is_allowed_and_one_more_is_not(field: dataclasses.Field[float]) -> None:
    bound = getattr(LIMITS, field.name)
    LIMITS.check(field.name, bound)
    with pytest.raises(LimitExceeded, match=field.name) as caught:
        LIMITS.check(field.name, bound + 1, "what was given")
    assert str(caught.value).startswith("what was given")
    assert caught.value.details == {"limit": field.name, "bound": bound, "value": bound + 1}


def test_limits_are_those_of_the_design() -> None:
    assert (
        LIMITS.to_wire()
        | {
            "max_num_samples": 1_024,
            "max_sampled_tokens": 4_000_000,
            "max_body_bytes": 256 * 2**20,
            "max_rank": 256,
            "max_live_sessions": 64,
            "max_queued_operations": 4_096,
            "max_topk_logprobs": 128,
        }
        == LIMITS.to_wire()
    )


def test_limits_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LIMITS.max_rank = 3  # type: ignore[misc]
