"""Text completions: one answer, or chunks of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ....errors import InvalidRequest
from ....limits import LIMITS
from ....service.requests import SampleRequest
from ....tokenization import Tokenizer
from ....types import SampledSequence, SampleResponse
from ....types.data import as_tokens
from .answers import Completion, FinishReason, TextChoice, TextLogprobs, Usage
from .drawing import Frame, usage_of
from .logprobs import TextLogprobsBuilder, TopK
from .requests import COMPLETION_TOKENS, CompletionRequest

MAX_SEED = 2**62


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """``text`` as given; of a prompt in tokens their text, where it is needed."""

    tokens: list[int]
    text: str


def prompts_of(tokenizer: Tokenizer, request: CompletionRequest) -> list[TextPrompt]:
    """The prompts as tokens; a text is encoded as it stands, special tokens included.

    Raises:
        InvalidRequest, LimitExceeded: none, an empty one, or too many.
    """
    given: list[Any] = [request.prompt] if _is_one(request.prompt) else list(request.prompt)
    LIMITS.check("max_prompts", len(given), "prompt")
    prompts: list[TextPrompt] = []
    for prompt in given:
        if not prompt:
            raise InvalidRequest("prompt: it is empty; give at least one token", details={"key": "prompt"})
        if isinstance(prompt, str):
            prompts.append(TextPrompt(tokenizer.encode(prompt), prompt))
        else:
            tokens = _token_ids(prompt)
            prompts.append(TextPrompt(tokens, tokenizer.decode(tokens) if request.echo else ""))
    return prompts


def _token_ids(prompt: list[int]) -> list[int]:
    try:
        return as_tokens(prompt, "prompt").tolist()
    except InvalidRequest as error:
        raise InvalidRequest(error.message, details={"key": "prompt"}) from None


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)


def samples_of(request: CompletionRequest, prompts: list[TextPrompt], payer: str | None) -> list[SampleRequest]:
    """What the service draws. Prompt ``i`` begins at ``seed + i * n``: no two samples share draws."""
    only_echo = request.max_tokens == 0
    params = request.params(1 if only_echo else request.max_tokens or COMPLETION_TOKENS)
    logprobs = request.logprobs
    scores_prompt = bool(request.echo) and logprobs is not None
    requests: list[SampleRequest] = []
    for index, prompt in enumerate(prompts):
        seed = None if params.seed is None else (params.seed + index * request.samples) % MAX_SEED
        requests.append(
            SampleRequest(
                prompt=np.asarray(prompt.tokens, np.int32),
                num_samples=0 if only_echo else request.samples,
                params=replace(params, seed=seed),
                prompt_logprobs=scores_prompt or only_echo,
                topk_prompt_logprobs=(logprobs or 0) if scores_prompt else 0,
                topk_logprobs=logprobs or 0,
                session_id=payer,
            )
        )
    return requests


class TextAnswer:
    """Writes the answer to one request.

    Args:
        answer_id: The same in all chunks.
    """

    def __init__(self, answer_id: str, tokenizer: Tokenizer, request: CompletionRequest, prompts: list[TextPrompt]):
        self._id = f"cmpl-{answer_id}"
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._request = request
        self._prompts = prompts

    def whole(self, responses: list[SampleResponse]) -> Completion:
        """Of all prompts; choice ``i * n + j`` is sample ``j`` of prompt ``i``."""
        choices: list[TextChoice] = []
        for prompt, response in zip(self._prompts, responses, strict=True):
            # With max_tokens = 0 nothing was drawn: the prompt itself is what was asked for.
            for sequence in response.sequences or [SampledSequence([], [], "length", "", [])] * self._request.samples:
                choices.append(self._choice(len(choices), prompt, response, sequence))
        usage = usage_of(asdict(response.usage) for response in responses)
        return self._completion(choices, usage)

    def _choice(
        self, index: int, prompt: TextPrompt, response: SampleResponse, sequence: SampledSequence
    ) -> TextChoice:
        echoed = prompt.text if self._request.echo else ""
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._builder(len(echoed)).add(
                sequence.tokens, sequence.logprobs, self._topk(sequence.topk_logprobs)
            )
            if self._request.echo:
                logprobs = _joined(self._prompt_logprobs(prompt, response), logprobs)
        reason = finish_reason(sequence.stop_reason)
        return TextChoice(index=index, text=echoed + sequence.text, logprobs=logprobs, finish_reason=reason)

    def _prompt_logprobs(self, prompt: TextPrompt, response: SampleResponse) -> TextLogprobs:
        # Tokens that the tokenizer put before the text (a begin token) stand at its beginning.
        added = len(self._tokenizer.decode(prompt.tokens)) - len(prompt.text)
        builder = self._builder(-added, skip_special_tokens=False)
        return builder.add(prompt.tokens, response.prompt_logprobs or [], self._topk(response.topk_prompt_logprobs))

    def _builder(self, offset: int, skip_special_tokens: bool = True) -> TextLogprobsBuilder:
        return TextLogprobsBuilder(self._tokenizer, offset, skip_special_tokens=skip_special_tokens)

    def _topk(self, rows: TopK | None) -> TopK | None:
        return rows if self._request.logprobs else None

    async def chunks(self, frames: AsyncIterator[Frame]) -> AsyncIterator[str]:
        """Each as JSON."""
        usages: list[dict[str, Any]] = []
        builders: dict[int, TextLogprobsBuilder] = {}
        async for frame in frames:
            event = frame.event
            if event.get("done"):
                usages.append(event["usage"])
                continue
            index = frame.prompt * self._request.samples + event["index"]
            text = event["text_delta"]
            echoed = self._prompts[frame.prompt].text if self._request.echo and index not in builders else ""
            builder = builders.setdefault(index, self._builder(len(echoed)))
            logprobs = None
            if self._request.logprobs is not None:
                logprobs = builder.add(event["tokens"], event["logprobs"], self._topk(event.get("topk")))
            reason = event["stop_reason"]
            if echoed or text or logprobs is not None or reason is not None:
                choice = TextChoice(
                    index=index,
                    text=echoed + text,
                    logprobs=logprobs,
                    finish_reason=None if reason is None else finish_reason(reason),
                )
                yield self._completion([choice], None).to_json()
        if self._request.wants_usage:
            yield self._completion([], usage_of(usages)).to_json()

    def _completion(self, choices: list[TextChoice], usage: Usage | None) -> Completion:
        completion = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._request.model, choices=choices
        )
        if usage is not None or self._request.wants_usage:
            completion.usage = usage
        return completion


def finish_reason(reason: str) -> FinishReason:
    """A sample that somebody cancelled is cut short, like one that reached its length."""
    return "stop" if reason == "stop" else "length"


def _joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    tops = None if first.top_logprobs is None else [*first.top_logprobs, *(second.top_logprobs or [])]
    return TextLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )
