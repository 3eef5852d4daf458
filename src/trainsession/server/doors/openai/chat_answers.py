"""Chat completions: one answer, or chunks of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from ....service.requests import SampleRequest
from ....tokenization import Tokenizer
from ....types import SampledSequence, SampleResponse
from .answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    DeltaChoice,
    FinishReason,
    IndexedToolCall,
    ToolCall,
    Usage,
)
from .completions import finish_reason
from .drawing import Frame, usage_of
from .logprobs import TopK, chat_logprobs
from .requests import ChatRequest
from .tools import Call, ToolCallReader


def sample_of(request: ChatRequest, prompt: list[int], payer: str | None) -> SampleRequest:
    """What the service draws; without a bound, as many tokens as the model's context leaves."""
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    return SampleRequest(
        prompt=np.asarray(prompt, np.int32),
        num_samples=request.samples,
        params=request.params(max_tokens),
        topk_logprobs=request.top_logprobs or 0,
        session_id=payer,
    )


class ChatAnswer:
    """Writes the answer to one request.

    Args:
        answer_id: The same in all chunks; part of the ids of tool calls.
        reads_tools: Tool calls are taken from the text.
    """

    def __init__(self, answer_id: str, tokenizer: Tokenizer, request: ChatRequest, *, reads_tools: bool) -> None:
        self._answer_id = answer_id
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._request = request
        self._reads_tools = reads_tools

    def whole(self, response: SampleResponse) -> ChatCompletion:
        """Of all ``n`` samples."""
        return ChatCompletion(
            id=f"chatcmpl-{self._answer_id}",
            object="chat.completion",
            created=self._created,
            model=self._request.model,
            choices=[self._choice(index, sequence) for index, sequence in enumerate(response.sequences)],
            usage=usage_of([asdict(response.usage)]),
        )

    def _choice(self, index: int, sequence: SampledSequence) -> ChatChoice:
        text, calls = sequence.text, list[Call]()
        if self._reads_tools:
            reader = ToolCallReader()
            shown = reader.add(text)
            rest, calls = reader.end()
            text = shown + rest
        message = AssistantMessage(role="assistant", content=text or (None if calls else ""), refusal=None)
        if calls:
            message.tool_calls = [self._tool_call(index, number, call) for number, call in enumerate(calls)]
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs),
            finish_reason=_finish_reason(sequence.stop_reason, calls),
        )

    async def chunks(self, frames: AsyncIterator[Frame]) -> AsyncIterator[str]:
        """Each as JSON."""
        usage: dict[str, Any] | None = None
        readers: dict[int, ToolCallReader | None] = {}
        async for frame in frames:
            event = frame.event
            if event.get("done"):
                usage = event["usage"]
                continue
            index = event["index"]
            if index not in readers:
                readers[index] = ToolCallReader() if self._reads_tools else None
                yield self._chunk(index, Delta(role="assistant", content=""))
            for chunk in self._step(index, event, readers[index]):
                yield chunk
        if self._request.wants_usage and usage is not None:
            yield self._framed([], usage_of([usage]))

    def _step(self, index: int, event: dict[str, Any], reader: ToolCallReader | None) -> Iterator[str]:
        text = event["text_delta"]
        if reader is not None:
            text = reader.add(text)
        logprobs = self._logprobs(event["tokens"], event["logprobs"], event.get("topk"))
        reason, calls = event["stop_reason"], list[Call]()
        if reason is not None and reader is not None:
            rest, calls = reader.end()
            text += rest
        if text or (logprobs is not None and logprobs.content):
            yield self._chunk(index, Delta(content=text), logprobs)
        if calls:
            indexed = [
                IndexedToolCall(index=number, **self._tool_call(index, number, call).model_dump())
                for number, call in enumerate(calls)
            ]
            yield self._chunk(index, Delta(tool_calls=indexed))
        if reason is not None:
            yield self._chunk(index, Delta(), None, _finish_reason(reason, calls))

    def _logprobs(self, tokens: list[int], logprobs: list[float], topk: TopK | None) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._tokenizer, tokens, logprobs, topk if self._request.top_logprobs else None)

    def _tool_call(self, index: int, number: int, call: Call) -> ToolCall:
        return ToolCall(
            id=f"call_{self._answer_id}_{index}_{number}",
            type="function",
            function=CalledFunction(name=call.name, arguments=call.arguments),
        )

    def _chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None, reason: FinishReason | None = None
    ) -> str:
        return self._framed([DeltaChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)], None)

    def _framed(self, choices: list[DeltaChoice], usage: Usage | None) -> str:
        chunk = ChatChunk(
            id=f"chatcmpl-{self._answer_id}",
            object="chat.completion.chunk",
            created=self._created,
            model=self._request.model,
            choices=choices,
        )
        if self._request.wants_usage:
            chunk.usage = usage
        return chunk.to_json()


def _finish_reason(reason: str, calls: list[Call]) -> FinishReason:
    return "tool_calls" if calls and reason == "stop" else finish_reason(reason)
