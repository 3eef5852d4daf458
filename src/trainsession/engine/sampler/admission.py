"""What a sampling request must satisfy before it is queued."""

from __future__ import annotations

from ...errors import InvalidRequest, LimitExceeded, PromptTooLong
from ...limits import LIMITS
from ..api import SampleItem
from ..model import LoadedModel


def checked_max_tokens(item: SampleItem, model: LoadedModel, cache_tokens: int) -> int:
    """Tokens that each sample may have at most: ``params.max_tokens``, or what the context leaves.

    Args:
        item: The request.
        model: Whose vocabulary and context bound it.
        cache_tokens: Positions of the whole KV cache, which one sample must fit.

    Raises:
        InvalidRequest: an empty prompt, a token outside the vocabulary, nothing to compute, or a
            seed that is missing.
        PromptTooLong: the prompt and the tokens asked for do not fit the context.
        LimitExceeded: a limit of the service, or the KV cache's size.
    """
    params = item.params
    length = len(item.prompt)
    if length == 0:
        raise InvalidRequest(
            "prompt: it is empty; give at least one token (a begin token, for text from nothing)",
            details={"key": "prompt"},
        )
    _check_tokens("prompt", item.prompt.tolist(), model.vocab_size)
    _check_tokens("stop", params.stop_token_ids, model.vocab_size)
    _check_tokens("logit_bias", tuple(params.logit_bias or ()), model.vocab_size)
    if item.num_samples < 0:
        raise InvalidRequest(f"num_samples must be >= 0, got {item.num_samples}", details={"key": "num_samples"})
    LIMITS.check("max_num_samples", item.num_samples, "num_samples")
    LIMITS.check("max_topk_logprobs", item.topk_logprobs, "topk_logprobs")
    LIMITS.check("max_topk_logprobs", item.topk_prompt_logprobs, "topk_prompt_logprobs")
    if length > model.context_length:
        raise PromptTooLong(
            f"prompt: {length} tokens do not fit the model's context of {model.context_length}",
            details={"key": "prompt", "tokens": length, "context_length": model.context_length},
        )
    if item.num_samples == 0:
        if not (item.prompt_logprobs or item.topk_prompt_logprobs):
            raise InvalidRequest(
                "num_samples=0 computes prompt logprobs only: ask for them, or for samples",
                details={"key": "num_samples"},
            )
        _check_cache(length, cache_tokens)
        return 0
    if params.seed is None:
        raise InvalidRequest("SamplingParams.seed is not set: the service draws one", details={"key": "seed"})
    room = min(model.context_length, cache_tokens + 1) - length
    max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
    if length + max_tokens > model.context_length:
        raise PromptTooLong(
            f"prompt: {length} tokens and max_tokens={max_tokens} do not fit the model's context of "
            f"{model.context_length}",
            details={"key": "max_tokens", "tokens": length, "context_length": model.context_length},
        )
    LIMITS.check("max_sampled_tokens", item.num_samples * max_tokens, "num_samples * max_tokens")
    _check_cache(length + max_tokens - 1, cache_tokens)  # the last token is never fed back
    return max_tokens


def _check_tokens(key: str, tokens: list[int] | tuple[int, ...], vocab_size: int) -> None:
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{key}[{place}]: token {token} is outside the vocabulary of {vocab_size}",
                details={"key": key, "position": place, "token": token, "vocab_size": vocab_size},
            )


def _check_cache(positions: int, cache_tokens: int) -> None:
    if positions > cache_tokens:
        raise LimitExceeded(
            f"prompt and sample take {positions} positions, above the KV cache's {cache_tokens}",
            details={"limit": "kv_cache_tokens", "bound": cache_tokens, "value": positions},
        )
