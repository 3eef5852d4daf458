"""What callers send: OpenAI's fields, of which those that this service cannot honour are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ....errors import InvalidRequest
from ....limits import LIMITS
from ....types import SamplingParams
from ...schemas import JsonRequest, Request

COMPLETION_TOKENS = 16
"""``max_tokens`` of a text completion that gives none, as OpenAI has it."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "parallel_tool_calls": (True,),
    "suffix": ("",),
}
"""Values of unsupported fields that ask for nothing."""
_INSTEAD = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "best_of": "; use n",
}

Stop = Annotated[str | list[str] | None, Field(description="At most 16 strings; beside the model's end tokens.")]


class StreamOptions(Request):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; chunks carry none."""


class SampleFields(JsonRequest):
    """What chat and text completions have in common."""

    model: str
    n: int | None = Field(default=None, ge=1, le=LIMITS.max_num_samples)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop = None
    user: str | None = Field(default=None, description="Accepted, and not used.")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream = true")
        return self

    @property
    def samples(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, max_tokens: int | None) -> SamplingParams:
        """The same in the service's terms.

        Raises:
            InvalidRequest: a value out of range; names the field.
        """
        given: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            # An empty list stops at the end token all the same here; for us it would mean at nothing.
            "stop": None if self.stop == [] else self.stop,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _refuse(value: Any, info: ValidationInfo) -> Any:
    name = str(info.field_name)
    if value is None or value in _NEUTRAL.get(name, ()):
        return None
    raise PydanticCustomError(
        "unsupported", "not supported by this service{instead}", {"instead": _INSTEAD.get(name, "")}
    )


class ToolFunction(Request):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Accepted; nothing holds the model to the schema.")


class Tool(Request):
    type: Literal["function"]
    function: ToolFunction


class CalledFunction(Request):
    name: str
    arguments: str


class CalledTool(Request):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Request):
    """One message; `trainsession.server.doors.openai.chat` says how it is rendered."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None

    @field_validator("annotations", mode="before")
    @classmethod
    def _nothing_annotated(cls, value: Any) -> None:
        """Of an answer that is handed back as it came; it is not part of the text."""

    _refused = field_validator("refusal", "audio", "function_call", mode="before")(_refuse)


class ChatRequest(SampleFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=LIMITS.max_topk_logprobs)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    metadata: dict[str, str] | None = Field(default=None, description="Accepted, and not used.")
    safety_identifier: str | None = Field(default=None, description="Accepted, and not used.")
    prompt_cache_key: str | None = Field(default=None, description="Accepted, and not used.")
    service_tier: str | None = Field(default=None, description="Accepted, and not used.")
    response_format: Any = None
    modalities: Any = None
    store: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    _refused = field_validator(
        "response_format",
        "modalities",
        "store",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "audio",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        mode="before",
    )(_refuse)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError("both", "give max_completion_tokens or max_tokens, not both")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs = true")
        return self

    @property
    def offered_tools(self) -> list[Tool] | None:
        """Those that the model is told of; none with ``tool_choice = "none"``, so that it calls none."""
        return None if self.tool_choice == "none" else self.tools or None


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(SampleFields):
    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=LIMITS.max_topk_logprobs)
    echo: bool | None = None
    best_of: Any = None
    suffix: Any = None

    _refused = field_validator("suffix", mode="before")(_refuse)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != self.samples:
            raise PydanticCustomError("best_of", "best_of other than n is not supported by this service")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise PydanticCustomError("max_tokens", "max_tokens = 0 needs echo = true and no stream")
        if self.echo and self.stream and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs is not supported by this service in a stream")
        return self


T = TypeVar("T", bound=SampleFields)


def parse(kind: type[T], body: bytes) -> T:
    """The request in a JSON body.

    Raises:
        InvalidRequest: names the field as its writer would, ``messages[1].content``.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        param = _path(problem["loc"])
        message = "unrecognized request argument" if problem["type"] == "extra_forbidden" else problem["msg"]
        raise InvalidRequest(f"{param}: {message}" if param else message, details={"key": param or None}) from None


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content", "str")`` as ``messages[0].content``: without the branches of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "int") and "[" not in part:
            path += f".{part}" if path else part
    return path
