"""A tokenizer from its files alone, equal to transformers' ``AutoTokenizer`` token for token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, overload

import tokenizers

from ..errors import InvalidRequest, NotFound
from ..types.data import TokensLike, as_tokens
from .bundle import BUNDLE_FILES, TokenizerBundle
from .chat import Messages, render_chat
from .marking import UserText
from .rendered import RenderedChat


class Tokenizer:
    """Text to token ids and back, with the model's chat template. Safe to use from several threads.

    Args:
        files: The bundle: file name to content; names outside `BUNDLE_FILES` are ignored.

    Raises:
        InvalidRequest: a file is missing or not valid.

    Attributes:
        files: The bundle as given.
        hash: SHA-256 of the bundle: equal hashes mean equal behaviour.
        special_tokens_map: ``{"eos_token": "<|im_end|>", ...}``, as chat templates see it.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._bundle = TokenizerBundle(files)
        self.files = self._bundle.files
        self.hash = self._bundle.hash
        self.special_tokens_map = self._bundle.special_tokens
        self._backend = self._bundle.load_backend()
        self._added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in self._added.items() if token.special)

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens in its input."""
        backend = self._bundle.load_backend()
        backend.encode_special_tokens = True
        return backend

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """From a bundle in memory: file name to content."""
        return cls(files)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        """From the tokenizer files of a Hugging Face model directory."""
        root = Path(directory)
        files = {name: (root / name).read_bytes() for name in BUNDLE_FILES if (root / name).is_file()}
        if "tokenizer.json" not in files:
            raise NotFound(f"there is no tokenizer.json in {root}")
        return cls(files)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the bundle's files into a directory, which is made where it is missing."""
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (root / name).write_bytes(content)

    # --- text to tokens -------------------------------------------------------------------
    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special_tokens: Add what the tokenizer puts around a text (often a begin token).
            parse_special: A special token spelled in the text (``"<|im_end|>"``) becomes that token,
                as transformers does it. Pass False for text that somebody else wrote: it is then
                encoded as ordinary characters. Added tokens that are not special (``<think>``) are
                parsed either way.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"encode: expected a text, got {type(text).__name__}", details={"key": "text"})
        try:
            if parse_special:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            ids = self._plain_backend.encode(text, add_special_tokens=False).ids
            forged = self._special_ids.intersection(ids) - {self._id_of("unk_token")}
            if forged:
                raise InvalidRequest(
                    f"encode: this tokenizer has no other spelling for {self._added[min(forged)].content!r}",
                    details={"key": "text"},
                )
            return self._plain_backend.encode(text).ids if add_special_tokens else ids
        except (UnicodeEncodeError, TypeError):  # what tokenizers makes of a str that is not Unicode text
            raise InvalidRequest(
                "encode: the text holds lone surrogates, which no encoding has; decode its bytes with errors='replace'",
                details={"key": "text"},
            ) from None

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text, add_special_tokens, parse_special=parse_special) for text in texts]

    # --- tokens to text -------------------------------------------------------------------
    def decode(self, token_ids: TokensLike | int, skip_special_tokens: bool = False) -> str:
        """Text of token ids: a list, array, tensor, `ModelInput` or one id.

        Ids that the tokenizer does not know (a model's embedding may have more rows) decode to
        nothing; bytes that are not UTF-8 decode to U+FFFD.
        """
        ids = [token_ids] if isinstance(token_ids, int) else as_tokens(token_ids, "decode").tolist()
        text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return _clean_up(text) if self.cleans_up_spaces else text

    def decode_batch(self, sequences: Iterable[TokensLike], skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each sequence."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    batch_decode = decode_batch

    @cached_property
    def cleans_up_spaces(self) -> bool:
        """Whether `decode` removes spaces before punctuation, as a few old configurations ask for."""
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        asked = bool(self._bundle.config.get("clean_up_tokenization_spaces"))
        return asked and (self._bundle.model_type != "BPE" or bool(self._bundle.config.get(forced)))

    # --- chat -----------------------------------------------------------------------------
    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = ...,
        tokenize: Literal[True] = True,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        continue_final_message: bool = ...,
        parse_special: bool = ...,
        **variables: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = ...,
        tokenize: Literal[False],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        continue_final_message: bool = ...,
        parse_special: bool = ...,
        **variables: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        parse_special: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """A chat as the model was trained on it.

        Args:
            messages: ``[{"role": "user", "content": "Hi"}, ...]``.
            add_generation_prompt: End with the header of an assistant message.
            tokenize: Token ids, else the text.
            tools: JSON schemas of functions, where the template knows tools.
            documents: ``{"title", "text"}`` maps, where the template knows documents.
            continue_final_message: Leave the last message open, so that the model continues it.
            parse_special: False encodes special tokens that are spelled inside messages as ordinary
                characters, so that only the template itself begins and ends a turn.
            **variables: What else this template reads (``enable_thinking=False``).

        Raises:
            InvalidRequest: no template, a variable that it does not read, messages that it refuses,
                or a template that runs away.
        """
        chat = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            parse_special=parse_special,
            **variables,
        )
        return chat.tokens if tokenize else chat.text

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        parse_special: bool = True,
        **variables: Any,
    ) -> RenderedChat:
        """`apply_chat_template`, with text, tokens and where each message stands in them."""
        user_text = None if parse_special else UserText(self)
        guard = user_text.mark if user_text else _unchanged
        text, spans = render_chat(
            self.chat_template(with_tools=bool(tools)),
            guard(messages),
            tools=guard(tools),
            documents=guard(documents),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.special_tokens_map,
            variables=guard(variables),
        )
        encode = user_text.encode if user_text else self._encode_rendered
        return RenderedChat(text, spans, encode, marked=user_text is not None)

    def _encode_rendered(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def chat_template(self, *, with_tools: bool = False) -> str:
        """The Jinja text of the chat template; ``with_tools``: the one for chats with tools, where there are two.

        Raises:
            InvalidRequest: there is none.
        """
        templates = self._bundle.chat_templates
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name not in templates:
            raise InvalidRequest(
                "this model's tokenizer has no chat template: it is a base model; give it text or tokens",
                details={"key": "chat_template"},
            )
        return templates[name]

    # --- vocabulary -----------------------------------------------------------------------
    @property
    def vocab_size(self) -> int:
        """Size of the base vocabulary, without the added tokens (as transformers has it)."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        """Size of the whole vocabulary, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary; None for an id that the tokenizer does not know."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def convert_ids_to_tokens(self, token_ids: TokensLike) -> list[str | None]:
        return [self.id_to_token(index) for index in as_tokens(token_ids).tolist()]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """Ids of tokens; an unknown one becomes the unknown token's id, or None without one."""
        unknown = self._id_of("unk_token")
        return [unknown if (index := self.token_to_id(token)) is None else index for token in tokens]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of("pad_token")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample: the tokenizer's end token, and those of generation_config.json."""
        first = [] if self.eos_token_id is None else [self.eos_token_id]
        return tuple(dict.fromkeys([*first, *self._bundle.generation_eos_ids]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids that ``skip_special_tokens`` leaves out, in ascending order."""
        return sorted(self._special_ids)

    @property
    def decoder_type(self) -> str:
        """The decoder's type in tokenizer.json (``"ByteLevel"``, ``"Sequence"``); empty without one."""
        return self._bundle.decoder_type

    @property
    def added_tokens(self) -> Mapping[int, tokenizers.AddedToken]:
        return self._added

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, {self.hash[:12]})"

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.token_to_id(token)


def _clean_up(text: str) -> str:
    for spaced in (" .", " ?", " !", " ,"):
        text = text.replace(spaced, spaced[1])
    text = text.replace(" ' ", "'")
    for spaced in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text


def _unchanged(value: Any) -> Any:
    return value
