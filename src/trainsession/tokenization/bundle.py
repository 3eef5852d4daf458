"""The files that make a tokenizer, and what they say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

from ..errors import InvalidRequest

BUNDLE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files of a bundle. The first is required."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerBundle:
    """Tokenizer, configuration and chat template: one unit, identified by its content.

    Args:
        files: File name to content; names outside `BUNDLE_FILES` are ignored.

    Raises:
        InvalidRequest: a file is missing or not valid.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = {name: bytes(files[name]) for name in BUNDLE_FILES if name in files}
        if "tokenizer.json" not in self.files:
            raise InvalidRequest("a tokenizer bundle needs tokenizer.json (a fast tokenizer)", details={"key": "files"})
        self.hash = _hash(self.files)
        tokenizer = self._read_json("tokenizer.json")
        self.model_type = str((tokenizer.get("model") or {}).get("type", ""))
        self.decoder_type = str((tokenizer.get("decoder") or {}).get("type", ""))
        self.config = {**self._read_json("special_tokens_map.json"), **self._read_json("tokenizer_config.json")}
        self.special_tokens: dict[str, str] = {
            name: _token_text(self.config[name]) for name in _NAMED if self.config.get(name) is not None
        }

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The bundle's templates by name; most have one, ``default``."""
        if "chat_template.jinja" in self.files:
            return {"default": self.files["chat_template.jinja"].decode()}
        template = self._read_json("chat_template.json").get("chat_template") or self.config.get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        return {entry["name"]: entry["template"] for entry in template or ()}

    @cached_property
    def generation_eos_ids(self) -> list[int]:
        """The end tokens that generation_config.json lists."""
        listed = self._read_json("generation_config.json").get("eos_token_id")
        return listed if isinstance(listed, list) else [] if listed is None else [listed]

    def load_backend(self) -> tokenizers.Tokenizer:
        """A new `tokenizers.Tokenizer`, set up as transformers would.

        tokenizer.json alone says what is put around a text: like transformers, this ignores the
        configuration's ``add_bos_token`` and ``add_eos_token``.
        """
        try:
            backend = tokenizers.Tokenizer.from_buffer(self.files["tokenizer.json"])
        except Exception as error:  # tokenizers raises bare Exception for everything
            raise InvalidRequest(f"tokenizer.json is not valid: {error}", details={"key": "tokenizer.json"}) from None
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens(self._missing_special_tokens(backend))
        return backend

    def _missing_special_tokens(self, backend: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
        """Special tokens that the configuration names and tokenizer.json does not add, or not as special."""
        present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        listed: dict[int, Any] = {int(k): v for k, v in (self.config.get("added_tokens_decoder") or {}).items()}
        extra = self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens") or ()
        named = [self.config[name] for name in _NAMED if self.config.get(name) is not None]
        named += extra.values() if isinstance(extra, dict) else extra
        special = {_token_text(value) for value in named}
        wanted = [*(listed[index] for index in sorted(listed)), *named]
        missing: dict[str, tokenizers.AddedToken] = {}
        for value in wanted:
            text = _token_text(value)
            if text in special and not (text in present and present[text].special):
                missing[text] = _added_token(value)
        return list(missing.values())

    def _read_json(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            return {}
        try:
            value = json.loads(self.files[name])
        except (ValueError, RecursionError):
            raise InvalidRequest(f"tokenizer bundle: {name} is not valid JSON", details={"key": name}) from None
        if not isinstance(value, dict):
            raise InvalidRequest(f"tokenizer bundle: {name} is not a JSON map", details={"key": name})
        return value


def _hash(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, Mapping) else str(value)


def _added_token(value: Any) -> tokenizers.AddedToken:
    if not isinstance(value, Mapping):
        return tokenizers.AddedToken(str(value), special=True, normalized=False)
    flags = {key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in value}
    return tokenizers.AddedToken(value["content"], special=True, **flags)
