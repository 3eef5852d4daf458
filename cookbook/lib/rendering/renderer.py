"""From messages to tokens by the model's own chat template, with the mask that training needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import trainsession as ts

from ..config import UsageError
from .masks import Rendered
from .parsing import Reply, ReplyFormat, parse

Message = Mapping[str, Any]
Learn = Literal["all", "last"] | Collection[int]
"""Which messages are learned: all of the assistant's, the assistant's last one, or those at these indices."""

_PROBES = ("A", "B")
"""Contents that share no character, so that what two renderings have in common is the template's own."""
_THINKING = ("reasoning_content", "thinking", "reasoning")
_USER: Message = {"role": "user", "content": "A"}


@dataclass(frozen=True, slots=True)
class _Edges:
    """What a template puts around the content of a message, whatever that is."""

    before: str
    behind: str


class Renderer:
    """Chats of one tokenizer.

    What a turn consists of is found by comparing what the template itself prints, never by looking
    for a text that a message could contain: the template's loop says where message ``i`` stands
    (`Tokenizer.render_chat`), its generation prompt says where the model's own words begin, and two
    renderings with other contents there say what it puts behind them.

    Args:
        tokenizer: With a chat template.
        tools: JSON schemas of functions, where the template knows tools.
        parse_special: Whether ``<|im_end|>`` in a message becomes that token, as
            `apply_chat_template` of transformers has it. By default it stays ordinary text: no
            message ends its own turn.
        **variables: What else the template reads (``enable_thinking=False``).
    """

    def __init__(
        self,
        tokenizer: ts.Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_special: bool = False,
        **variables: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self._options: dict[str, Any] = {"tools": tools, "parse_special": parse_special, **variables}

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """The same renderer for chats with these tools.

        Raises:
            UsageError: the template does not print tools.
        """
        other = Renderer(self.tokenizer, **{**self._options, "tools": tools})
        if other._chat([_USER]).text == self._chat([_USER]).text:
            raise UsageError("this chat template does not print tools: its model was not made to call any")
        return other

    # --- to tokens ------------------------------------------------------------------------
    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The chat with the header of the reply that is asked for: what a sampler is given."""
        return self._chat(messages, add_generation_prompt=True).tokens

    def render(self, messages: Sequence[Message], learn: Learn = "all") -> Rendered:
        """The whole chat, token for token as `apply_chat_template` has it.

        A reply is learned from behind its header to its stop token; the newline that many templates
        put there is not, since a sampler never gets to it. A template may print earlier replies in
        another form than it asks for (Qwen3 leaves out their thinking): `examples` is for training.

        Raises:
            UsageError: there is no such message, or the template does not show where it stands.
        """
        learned = _learned(messages, learn)
        chat = self._chat(messages)
        weights = [0.0] * len(chat.tokens)
        straddling: set[int] = set()
        for index, edges in zip(learned, self._edges(messages, learned), strict=True):
            start, end = self._span(chat, messages, index, edges)
            (first_mixed, first), (last, last_mixed) = chat.split_tokens(start), chat.split_tokens(end)
            weights[first:last] = [1.0] * (last - first)
            straddling.update(range(first_mixed, first), range(last, last_mixed))
        for index in straddling:
            weights[index] = 0.0
        return Rendered(self.tokenizer, chat.tokens, weights, sorted(straddling))

    def examples(self, messages: Sequence[Message], learn: Learn = "all") -> list[Rendered]:
        """What to train on: each reply behind exactly the tokens that a sampler would be given for it.

        One sequence for the whole chat where the template prints a longer chat as the continuation
        of a shorter one. Where it does not, replies stand in sequences of their own. Nothing follows
        the last reply.

        Raises:
            UsageError: as of `render`; or a message that is learned is not the assistant's; or the
                template prints no thinking, or no tool calls, of which there are some: they would be
                lost without a word.
        """
        self._check_all_is_printed(messages)
        found: list[Rendered] = []
        for index in _learned(messages, learn):
            if messages[index]["role"] != "assistant":
                raise UsageError(f"messages[{index}] is the {messages[index]['role']}'s: no sampler writes it")
            if index == 0:
                raise UsageError("messages[0] is the assistant's: there is no prompt before it")
            upto = messages[: index + 1]
            chat = self._chat(upto)
            (edges,) = self._edges(upto, [index])
            prompt, reply = self.prompt(upto[:-1]), chat.encode(*self._span(chat, upto, index, edges))
            new = Rendered(self.tokenizer, [*prompt, *reply], [0.0] * len(prompt) + [1.0] * len(reply))
            if found and new.continues(found[-1]):
                found[-1] = new.also_learning(found[-1])
            else:
                found.append(new)
        return found

    # --- stop tokens and replies ----------------------------------------------------------
    @cached_property
    def stop_tokens(self) -> list[int]:
        """Tokens that end a reply: the one with which the template ends it, and the tokenizer's own.

        They differ for Llama 3, whose tokenizer names ``<|end_of_text|>`` while turns end with
        ``<|eot_id|>``: pass them as ``SamplingParams(stop=renderer.stop_tokens)``.
        """
        (edges,) = self._edges([_USER, {"role": "assistant", "content": "A"}], [1])
        token = self.tokenizer.token_to_id(self._stop(edges, 1)[1])
        return list(dict.fromkeys([*([] if token is None else [token]), *self.tokenizer.eos_token_ids]))

    def parse(self, reply: Sequence[int]) -> Reply:
        """What a model sampled after `prompt`, stop token included, as a message.

        Never raises on what a model wrote: see `Reply.unparsed`.
        """
        return parse(self.tokenizer, reply, self.stop_tokens, self._reply_format)

    def _check_all_is_printed(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            thinking = next((key for key in _THINKING if message.get(key)), None)
            if thinking is not None and not self._reply_format.prints_thinking:
                raise UsageError(f"messages[{index}] has {thinking!r}, which this chat template does not print")
            if message.get("tool_calls") and not self._reply_format.prints_calls:
                raise UsageError(f"messages[{index}] has 'tool_calls', which this chat template does not print")

    @cached_property
    def _reply_format(self) -> ReplyFormat:
        def body(**message: Any) -> str:
            messages = [_USER, {"role": "assistant", "content": "C0NTENT", **message}]
            chat = self._chat(messages)
            (edges,) = self._edges(messages, [1])
            start, end = self._span(chat, messages, 1, edges)
            return chat.text[start : end - len(self._stop(edges, 1)[1])]

        call = {"type": "function", "function": {"name": "NAME", "arguments": {"key": "value"}}}
        header = self._header([_USER]) or ""
        return ReplyFormat.of(
            header, thinking=body(reasoning_content="REAS0NING"), calling=body(tool_calls=[call]), plain=body()
        )

    # --- where a message stands -----------------------------------------------------------
    def _chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> ts.RenderedChat:
        return self.tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, **self._options)

    def _edges(self, messages: Sequence[Message], learned: Sequence[int]) -> list[_Edges]:
        """Of each learned message: what two renderings with other contents have in common."""
        if not learned:
            return []
        one, two = (self._chat(_with_contents(messages, learned, probe)) for probe in _PROBES)
        edges: list[_Edges] = []
        for index in learned:
            blocks = [chat.text[slice(*_block_span(chat, index))] for chat in (one, two)]
            if blocks[0] == blocks[1]:
                raise UsageError(f"this chat template does not print the content of messages[{index}]")
            before = _common_beginning(*blocks)
            behind = _common_beginning(*(block[::-1] for block in blocks))[::-1]
            edges.append(_Edges(before, behind))
        return edges

    def _span(self, chat: ts.RenderedChat, messages: Sequence[Message], index: int, edges: _Edges) -> tuple[int, int]:
        """Where what is learned of a message stands in the text: from behind its header to its stop token."""
        start, end = _block_span(chat, index)
        block = chat.text[start:end]
        headers = [edges.before]
        if messages[index]["role"] == "assistant":
            # What the prompt gives is given, the rest is the model's: an empty thinking block, say.
            asked = self._header(messages[:index] or [_USER])
            headers = [edges.before] if asked is None else [asked, edges.before]
        header = next((header for header in headers if block.startswith(header)), None)
        if header is None or not block.endswith(edges.behind):
            raise UsageError(
                f"this chat template prints messages[{index}] in a form of its own, {block!r:.200}: expected "
                f"{' or '.join(map(repr, headers))}, the message, and {edges.behind!r}"
            )
        if messages[index]["role"] != "assistant":
            return start + len(header), end - len(edges.behind)
        at, stop = self._stop(edges, index)
        return start + len(header), end - len(edges.behind) + at + len(stop)

    def _header(self, messages: Sequence[Message]) -> str | None:
        """What the template prints behind these messages to ask for a reply; None where it refuses them."""
        try:
            chat = self._chat(messages, add_generation_prompt=True)
        except ts.InvalidRequest:
            return None  # roles that must alternate, say: such a reply cannot be asked for
        last = chat.spans[-1]
        return None if last is None else chat.text[last[1] :]

    def _stop(self, edges: _Edges, index: int) -> tuple[int, str]:
        """The first special token that the template prints behind a reply, and where."""
        special = [token.content for token in self.tokenizer.added_tokens.values() if token.special]
        found = [(edges.behind.find(token), -len(token), token) for token in special if token in edges.behind]
        if not found:
            raise UsageError(
                f"this chat template ends messages[{index}] with {edges.behind!r}, which has no special token: "
                "a model that learns such replies does not learn to stop"
            )
        at, _, stop = min(found)
        return at, stop


def _block_span(chat: ts.RenderedChat, index: int) -> tuple[int, int]:
    span = chat.spans[index]
    if span is None:
        raise UsageError(f"this chat template prints messages[{index}] outside its loop over messages; learn others")
    return span


def _common_beginning(left: str, right: str) -> str:
    differing = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return left[: next(differing, min(len(left), len(right)))]


def _learned(messages: Sequence[Message], learn: Learn) -> list[int]:
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if isinstance(learn, str):
        if learn not in ("all", "last"):
            raise UsageError(f"learn={learn!r}: expected 'all', 'last' or the indices of messages")
        if not replies:
            raise UsageError("there is no message of the role 'assistant' to learn")
        return replies if learn == "all" else replies[-1:]
    wrong = [index for index in learn if not 0 <= index < len(messages)]
    if wrong:
        raise UsageError(f"learn: there is no messages[{wrong[0]}] among {len(messages)}")
    return sorted(set(learn))


def _with_contents(messages: Sequence[Message], learned: Collection[int], content: str) -> list[Message]:
    """The messages, with this content in the learned ones and without thinking or tool calls in them."""
    kept = ("role", "name", "tool_call_id")
    return [
        {
            **{key: message[key] for key in kept if key in message},
            "content": [{"type": "text", "text": content}] if isinstance(message.get("content"), list) else content,
        }
        if index in learned
        else message
        for index, message in enumerate(messages)
    ]
