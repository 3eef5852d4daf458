"""From what a model wrote to a message: thinking, text, tool calls, and what is none of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import trainsession as ts


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A part of a reply that is not what the template's form asks for."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed reply.

    Attributes:
        message: ``role`` and ``content``; ``reasoning_content`` where the model thought, and
            ``tool_calls`` (``[{"type": "function", "function": {"name", "arguments"}}]``) where it called.
        stopped: Whether it ended with a stop token; otherwise it was cut.
        unparsed: Thinking that never ends, malformed tool calls, text behind tool calls.
    """

    message: dict[str, Any]
    stopped: bool
    unparsed: tuple[Unparsed, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a template writes thinking and tool calls; empty tags where it writes none.

    Attributes:
        think: The tags around thinking.
        call: The tags around a tool call, which is a JSON object between them.
        arguments: The key of a call's arguments.
        thinking_begun: The prompt ends with the opening tag, so that a reply begins behind it.
        prints_thinking: Whether the template prints thinking at all, in whatever form.
        prints_calls: The same of tool calls.
    """

    think: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    arguments: str = "arguments"
    thinking_begun: bool = False
    prints_thinking: bool = False
    prints_calls: bool = False

    @classmethod
    def of(cls, header: str, *, thinking: str, calling: str, plain: str) -> Self:
        """From the template's own bodies of replies: content ``C0NTENT``, and ``REAS0NING`` or a call of ``NAME``."""
        think, call, arguments, begun = ("", ""), ("", ""), "arguments", False
        if "REAS0NING" in thinking and "C0NTENT" in thinking:
            opening, rest = thinking.split("REAS0NING")
            closing = rest.split("C0NTENT")[0].strip()
            begun = not opening.strip()
            think = (header.split()[-1] if begun and header.split() else opening.strip(), closing)
        written = calling.split("C0NTENT", 1)[-1] if calling != plain else ""
        if '"NAME"' in written and "{" in written:
            at = written.index("{")
            try:
                body, length = json.JSONDecoder().raw_decode(written[at:])
            except ValueError:
                body, length = {}, 0
            keys = [key for key in ("arguments", "parameters") if key in body]
            tags = written[:at].strip(), written[at + length :].strip()
            if keys and all(tags) and body.get("name") == "NAME":
                call, arguments = tags, keys[0]
        return cls(
            think=think if think[1] else ("", ""),
            call=call,
            arguments=arguments,
            thinking_begun=begun,
            prints_thinking="REAS0NING" in thinking,
            prints_calls=calling != plain,
        )


def parse(tokenizer: ts.Tokenizer, reply: Sequence[int], stop_tokens: Sequence[int], form: ReplyFormat) -> Reply:
    """See `Renderer.parse`."""
    tokens = list(reply)
    end = next((index for index, token in enumerate(tokens) if token in stop_tokens), None)
    text, unparsed = tokenizer.decode(tokens[:end]), []
    if end is not None and tokens[end + 1 :]:
        unparsed.append(Unparsed(tokenizer.decode(tokens[end + 1 :]), "behind the stop token"))
    message: dict[str, Any] = {"role": "assistant", "content": ""}

    thinking, text, problem = _split_thinking(text, form)
    if thinking:
        message["reasoning_content"] = thinking
    content, calls, problems = _split_calls(text, form)
    message["content"] = content
    if calls:
        message["tool_calls"] = calls
    return Reply(message, end is not None, (*problem, *problems, *unparsed))


def _split_thinking(text: str, form: ReplyFormat) -> tuple[str, str, list[Unparsed]]:
    opening, closing = form.think
    if not closing:
        return "", text, []
    begins = text.lstrip().startswith(opening)
    if not begins and not form.thinking_begun:
        return "", text, []
    inner = text.lstrip()[len(opening) :] if begins else text
    if closing not in inner:
        return "", "", [Unparsed(text, f"the thinking has no {closing}")]
    thinking, rest = inner.split(closing, 1)
    return thinking.strip("\n"), rest.lstrip("\n"), []


def _split_calls(text: str, form: ReplyFormat) -> tuple[str, list[dict[str, Any]], list[Unparsed]]:
    opening, closing = form.call
    if not opening or opening not in text:
        return text, [], []
    content, rest = text.split(opening, 1)
    calls: list[dict[str, Any]] = []
    unparsed: list[Unparsed] = []
    rest = opening + rest
    while rest.strip():
        if not rest.lstrip().startswith(opening):
            behind, found, more = rest.partition(opening)
            unparsed.append(Unparsed(behind.strip(), "behind a tool call"))
            rest = found + more
            continue
        rest = rest.lstrip()
        body = rest[len(opening) :]
        call, length, reason = _read_call(body, form)
        if call is not None:
            calls.append(call)
        else:
            at = body.find(closing)
            length = len(body) if at < 0 else at + len(closing)
            unparsed.append(Unparsed(rest[: len(opening) + length], reason))
        rest = body[length:]
    return content.removesuffix("\n"), calls, unparsed


def _read_call(body: str, form: ReplyFormat) -> tuple[dict[str, Any] | None, int, str]:
    """A call at the beginning of a text, the length of it with its closing tag; or what is wrong."""
    at = len(body) - len(body.lstrip())
    try:
        # Not up to the closing tag: an argument's text may contain it.
        value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(body, at)
    except (ValueError, RecursionError) as error:
        return None, 0, f"not valid JSON: {error}"
    behind = body[end:].lstrip()
    if not behind.startswith(form.call[1]):
        return None, 0, f"no {form.call[1]} behind the JSON"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, 0, "not an object with a 'name'"
    arguments = value.get(form.arguments, {})
    if not isinstance(arguments, dict):
        return None, 0, f"{form.arguments!r} is not an object"
    length = len(body) - len(behind) + len(form.call[1])
    return {"type": "function", "function": {"name": value["name"], "arguments": arguments}}, length, ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
