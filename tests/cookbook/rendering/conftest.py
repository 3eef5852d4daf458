"""The chat templates of SmolLM2, Qwen3 and Llama 3, each with a small tokenizer that has its special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import trainsession as ts
from tests.tokenization.conftest import npm_tokenizer, smollm2_dir  # noqa: F401 (fixtures)

TEMPLATES = Path(__file__).parent / "templates"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = [
    "user\nassistant\n\nsystem\n\n\n",
    "the think tool call\n",
    "2 + 2 = 4\n\n",
    '{"name": "f", "arguments": {}}',
] * 3
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen's, without contractions."""
FAMILIES = ("smollm2", "qwen3", "llama3")


def save_family(directory: Path, family: str) -> Path:
    """Byte-level BPE that merges newlines, as the real ones do; Llama 3's puts a begin token before a text."""
    special = LLAMA if family == "llama3" else CHATML
    backend = Tokenizer(models.BPE())
    if family == "qwen3":
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if family == "qwen3":
        tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
        backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    if family == "llama3":
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", backend.token_to_id(LLAMA[0]))]
        )
    names = {"bos_token": LLAMA[0], "eos_token": LLAMA[1]} if family == "llama3" else {"eos_token": "<|im_end|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "pad_token": special[0]}
    directory.mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text())
    return directory


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = save_family(tmp_path_factory.mktemp("families") / family, family)
        return made[family]

    return directory


@pytest.fixture(scope="session")
def family(family_dir: Callable[[str], Path]) -> Callable[[str], ts.Tokenizer]:
    made: dict[str, ts.Tokenizer] = {}

    def tokenizer(name: str) -> ts.Tokenizer:
        if name not in made:
            made[name] = ts.Tokenizer.from_directory(family_dir(name))
        return made[name]

    return tokenizer
