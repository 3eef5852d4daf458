"""One accepted sample request: what is logged of it, what the engine gets, what it has drawn so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import wire
from ..engine.api import EngineHandle, EngineInfo, SampleEvent, SampleItem
from ..errors import EngineLost, PermissionDenied, PromptTooLong
from ..types import SampledSequence, SampleResponse, Usage
from .bodies import check_ids
from .ids import new_seed
from .lane import Lane
from .prices import Quote
from .requests import SampleRequest


@dataclass(slots=True)
class SampleRun:
    """One accepted request: its events so far, and those who watch."""

    id: str
    project: str
    payer: str
    request: SampleRequest
    lane: Lane
    quote: Quote
    new_blocks: list[bytes] = field(default_factory=list)
    """Of its prompt; see `Prefixes.take`."""
    frames: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    handle: EngineHandle | None = None
    """Set while the engine draws."""
    cancelled: bool = False
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    topk: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    reasons: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    watched: bool = False
    """Somebody reads it as a stream: what was drawn once must not change."""
    diverged: bool = False
    """Drawn again for a stream, it came out otherwise."""
    losses: int = 0
    """Times that the engine's process ended while it drew this."""
    _known: list[int] = field(default_factory=list)
    """By sample, tokens of an earlier engine that this one has not drawn again yet."""

    def __post_init__(self) -> None:
        n = self.request.num_samples
        self.tokens, self.logprobs, self.topk = ([[] for _ in range(n)] for _ in range(3))
        self.reasons, self.texts = [None] * n, [""] * n
        self._known = [0] * n

    def draw_again(self) -> None:
        """Another engine starts from the prompt. What a stream has shown stays, and is compared."""
        self.losses += 1
        if self.watched:
            self._known = [len(tokens) for tokens in self.tokens]
        else:
            self.frames.clear()
            self.__post_init__()

    def redraws_otherwise(self, event: SampleEvent) -> bool:
        """Whether these tokens are to continue a stream that showed others in their place."""
        known = self._known[event.index]
        if not known:
            return False
        at = len(self.tokens[event.index]) - known
        return self.tokens[event.index][at : at + len(event.tokens)] != event.tokens

    def draw(self, event: SampleEvent) -> None:
        """Add what the engine drew, unless it drew it before."""
        index = event.index
        if self._known[index]:
            self._known[index] -= len(event.tokens)
            return
        self.tokens[index].extend(event.tokens)
        self.logprobs[index].extend(event.logprobs)
        self.topk[index].extend(event.topk)
        if event.stop_reason is not None:
            self.reasons[index] = event.stop_reason
            self.texts[index] = event.text
        frame: dict[str, Any] = {
            "index": index,
            "tokens": event.tokens,
            "logprobs": event.logprobs,
            "text_delta": event.text_delta,
            "stop_reason": event.stop_reason,
        }
        if self.request.topk_logprobs:
            frame["topk"] = event.topk
        self.frame(frame)

    def frame(self, frame: dict[str, Any]) -> None:
        self.frames.append(frame)
        self.changed.set()

    def response(self, end: SampleEvent, usage: Usage) -> SampleResponse:
        with_topk = self.request.topk_logprobs > 0
        return SampleResponse(
            sequences=[
                SampledSequence(
                    list(self.tokens[index]),
                    list(self.logprobs[index]),
                    self.reasons[index] or "cancelled",
                    self.texts[index],
                    self.topk[index] if with_topk else None,
                )
                for index in range(self.request.num_samples)
            ],
            prompt_logprobs=end.prompt_logprobs,
            topk_prompt_logprobs=end.topk_prompt_logprobs,
            usage=usage,
        )


def diverged(run: SampleRun) -> EngineLost:
    """The end of a stream whose sample came out otherwise when it was drawn again."""
    return EngineLost(
        "the engine's process ended while this sample was streamed, and drew other tokens when it was run again "
        "(outside exact mode it may): the stream cannot be continued. Nothing is charged; ask again",
        details={"operation_id": run.id},
    )


def fit(info: EngineInfo, request: SampleRequest, at_most: int | None = None) -> SampleRequest:
    """The request with ``max_tokens`` filled in: what the context has room for, but not above ``at_most``.

    Raises:
        InvalidDatum: a token outside the vocabulary. PromptTooLong: it does not fit the context.
    """
    check_ids(info, request.prompt, "prompt", {"key": "prompt"})
    room = info.context_length - int(request.prompt.size)
    wanted = request.params.max_tokens
    needed = 0 if request.num_samples == 0 else (wanted or 1)
    if room < needed:
        asked = f" and max_tokens={wanted}" if wanted and request.num_samples else ""
        raise PromptTooLong(
            f"prompt: {request.prompt.size} tokens{asked} do not fit the context of {info.context_length} "
            f"({info.base_model})",
            details={"key": "prompt", "bound": info.context_length, "value": int(request.prompt.size) + needed},
        )
    if wanted is None:
        room = max(room, 1) if at_most is None else min(max(room, 1), at_most)
        filled = replace(request, params=replace(request.params, max_tokens=room))
        filled.check()
        return filled
    return request


def item_of(run: SampleRun, request: SampleRequest, weights: str | None) -> SampleItem:
    return SampleItem(
        request_id=run.id,
        prompt=request.prompt,
        num_samples=request.num_samples,
        params=request.params,
        weights=weights,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_logprobs=request.topk_logprobs,
        cache_salt=run.project,
    )


def paid_by(requests: Sequence[SampleRequest], session_id: str) -> list[SampleRequest]:
    """The requests of a caller that is bound to a session, which pays.

    Raises:
        PermissionDenied: one names another session.
    """
    if any(request.session_id not in (None, session_id) for request in requests):
        raise PermissionDenied(f"this key can only sample session {session_id}", details={"session_id": session_id})
    return [replace(request, session_id=session_id) for request in requests]


def with_seed(request: SampleRequest, seed: int | None = None) -> SampleRequest:
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=new_seed() if seed is None else seed))


def pack_sample(request: SampleRequest, weights: Mapping[str, Any]) -> bytes:
    fields = {name: getattr(request, name) for name in SampleRequest.__dataclass_fields__}
    return wire.pack({**fields, "params": request.params.to_wire(), "weights": dict(weights)})


def unpack_sample(data: bytes) -> SampleRequest:
    body = wire.unpack(data)
    del body["weights"]
    return SampleRequest.from_wire(body)


def position_of(run: SampleRun) -> Callable[[], int]:
    return lambda: 0 if run.handle is not None else 1
