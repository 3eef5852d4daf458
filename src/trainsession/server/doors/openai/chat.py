"""From OpenAI's messages to the tokens that the model's own chat template makes of them."""

from __future__ import annotations

import json
from typing import Any

from ....errors import InvalidRequest
from ....tokenization import Tokenizer
from ....tokenization.chat import template_variables
from .requests import CalledTool, ChatMessage, ChatRequest
from .tools import OPENING

_UNRENDERED = {"function": {"strict"}}


def prompt_of(tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
    """Token ids of the chat, up to the header of the answer.

    Special tokens that are spelled inside a message are ordinary characters: only the template
    begins and ends a turn.

    Raises:
        InvalidRequest: a content part that is no text, or messages or tools that the template does not take.
    """
    tools = request.offered_tools
    if tools and "tools" not in template_variables(tokenizer.chat_template(with_tools=True)):
        raise InvalidRequest("tools: this model's chat template knows no tools", details={"key": "tools"})
    return tokenizer.apply_chat_template(
        [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)],
        add_generation_prompt=True,
        tools=[tool.model_dump(exclude_unset=True, exclude=_UNRENDERED) for tool in tools] if tools else None,
        parse_special=False,
    )


def calls_tools(tokenizer: Tokenizer, request: ChatRequest) -> bool:
    """Whether tool calls may stand in the answer, in the convention that `ToolCallReader` reads."""
    return bool(request.offered_tools) and OPENING in tokenizer.chat_template(with_tools=True)


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as chat templates know it."""
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{where}.content: missing", details={"key": f"{where}.content"})
    plain: dict[str, Any] = {
        # OpenAI's newer name of the same thing, which few templates know.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, f"{where}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [_called(call) for call in message.tool_calls]
    return plain


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """The parts of a content, one a line."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.get("type") != "text":
            key = f"{where}[{index}].type"
            raise InvalidRequest(
                f"{key}: this service takes parts of type 'text', got {part.get('type')!r:.40}", details={"key": key}
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            key = f"{where}[{index}]"
            raise InvalidRequest(f"{key}: expected {{type, text}} with a string", details={"key": key})
        texts.append(part["text"])
    return "\n".join(texts)


def _called(call: CalledTool) -> dict[str, Any]:
    """An earlier call; templates take the arguments as a map, where OpenAI has JSON text."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = call.function.arguments  # what a model wrote that was no JSON
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}
