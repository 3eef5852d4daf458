"""What counts as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest
from ..limits import LIMITS
from ..types import ModelInput
from ..types.data import as_tokens

if TYPE_CHECKING:
    import torch

    from ..tokenization import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""``{"role": ..., "content": ...}``"""
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[Any] | torch.Tensor"
Prompt: TypeAlias = "ModelInput | TokenIds | str | Sequence[Message]"
"""Token ids; a text, encoded as it stands; or chat messages, through the model's chat template."""
Prompts: TypeAlias = "list[str] | Sequence[ModelInput | TokenIds | Sequence[Message]]"
"""Several of them."""


def is_many(prompt: Any) -> bool:
    """Whether this is a list of prompts. An empty list is one (empty) prompt."""
    if isinstance(prompt, (str, ModelInput)) or not isinstance(prompt, (list, tuple)) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, (str, ModelInput, list, tuple)) or getattr(first, "ndim", 0) > 0


def prompt_tokens(prompt: Any, tokenizer: Callable[[], Tokenizer], what: str = "prompt") -> npt.NDArray[np.int32]:
    """Token ids (N,) of one prompt, as an array of its own.

    Args:
        tokenizer: Gives the tokenizer, called for text and chat messages only.
        what: Names the prompt in errors.

    Raises:
        InvalidRequest: an empty prompt, or something that is none.
    """
    if isinstance(prompt, Mapping):
        raise InvalidRequest(f"{what}: chat messages are a list of them, got one mapping", details={"key": "prompt"})
    if isinstance(prompt, str):
        tokens = as_tokens(tokenizer().encode(prompt), what)
    elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
        tokens = as_tokens(tokenizer().apply_chat_template(prompt, add_generation_prompt=True), what)
    else:
        try:
            tokens = as_tokens(prompt, what).copy()
        except ValueError as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"{what}: expected token ids, a string or chat messages: {error}") from None
    if tokens.size == 0:
        raise InvalidRequest(f"{what}: it is empty; give at least one token", details={"key": "prompt"})
    return tokens


def all_prompt_tokens(prompts: Sequence[Any], tokenizer: Callable[[], Tokenizer]) -> list[npt.NDArray[np.int32]]:
    LIMITS.check("max_prompts", len(prompts), "prompts")
    return [prompt_tokens(prompt, tokenizer, f"prompt {index}") for index, prompt in enumerate(prompts)]
