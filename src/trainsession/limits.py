"""The service's limits, in one place: served at ``/v1/limits`` and named in every refusal."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .errors import LimitExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds; a request beyond one is refused with `LimitExceeded`."""

    max_num_samples: int = 1_024
    """Samples of one prompt (``n``)."""
    max_sampled_tokens: int = 4_000_000
    """``num_samples * max_tokens`` of one request."""
    max_body_bytes: int = 256 * 2**20
    """A request body after decompression."""
    max_json_bytes: int = 2**20
    """A JSON request body; everything large is msgpack."""
    max_prompts: int = 4_096
    """Prompts in one sampling request."""
    max_datums: int = 65_536
    """Datums in one training request."""
    max_rank: int = 256
    max_topk_logprobs: int = 128
    max_stop_sequences: int = 16
    max_stop_length: int = 256
    """Characters of one stop string."""
    max_logit_bias: int = 1_024
    max_live_sessions: int = 64
    """Sessions of one project that are not closed."""
    max_queued_operations: int = 4_096
    """Training operations of one project that wait or run."""
    max_concurrent_samples: int = 16_384
    """Sample requests (prompts) of one project that wait or run."""
    max_tokens_per_minute: int = 1_000_000_000
    """Prompt, sampled and trained tokens of one project; as it stands, more than one service can do."""
    max_name_length: int = 128
    max_tags: int = 32
    max_metadata_bytes: int = 16_384
    max_poll_ids: int = 4_096
    max_poll_seconds: float = 30.0

    def check(self, limit: str, value: float, what: str = "") -> None:
        """Raise `LimitExceeded` when ``value`` is above the limit of that name."""
        bound = getattr(self, limit)
        if value > bound:
            raise LimitExceeded(
                f"{what or limit}: {value} is above the limit {limit} = {bound}",
                details={"limit": limit, "bound": bound, "value": value},
            )

    def to_wire(self) -> dict[str, float]:
        return asdict(self)


LIMITS = Limits()

PROJECT_LIMITS = (
    "max_live_sessions",
    "max_queued_operations",
    "max_concurrent_samples",
    "max_tokens_per_minute",
    "max_body_bytes",
)
"""Those that an operator can set for each project."""

MIN_BODY_BYTES = 1_000
"""No project's ``max_body_bytes`` is lower: a body of that size fits, whoever sent it."""
