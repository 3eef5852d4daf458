"""What callers get: OpenAI's objects. A field that was never set is not sent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# --- chat -----------------------------------------------------------------------------------


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class SampledLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[SampledLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class IndexedToolCall(ToolCall):
    index: int


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[IndexedToolCall] = []


class DeltaChoice(Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | None = None


# --- text completions -----------------------------------------------------------------------


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class Completion(Answer):
    """Also each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Answer):
    error: ErrorDetail
