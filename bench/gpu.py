"""The engine on one CUDA GPU: sampling speed beside its physical limit, and what the sampled logprobs are worth.

    python -m bench.gpu TOKENIZER_DIRECTORY [--size 0.6B] [--row NAME ...] [--json FILE] [--profile]

Models have Qwen3's shapes and random weights. A row's floor is the time in which the weights and the keys
and values of each step can be read from memory once. Each line is one JSON object, printed as it comes.
The peers' figures were measured on the same kind of card (DESIGN section 7).
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config

from trainsession.engine.api import SampleItem, TrainItem, TrainOutput
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.sampler.sampler import Sampler
from trainsession.engine.trainer import Trainer
from trainsession.tokenization import BUNDLE_FILES, Tokenizer
from trainsession.types import Datum, LoraConfig, SamplingParams

BYTES_PER_SECOND = 4.3e12
"""What an H200 was seen to read (DESIGN section 7)."""
VOCABULARY = 151_936
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
Samples = dict[str, tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Row:
    """A workload: prompts, samples of each, prompt and new tokens, adapters in turn over the prompts."""

    prompts: int
    samples: int
    length: int
    new: int
    adapters: int = 0
    peer: dict[str, float] | None = None
    must: dict[str, float] | None = None


ROWS = {
    "256 prompts, 128 + 256": Row(
        256, 1, 128, 256, peer={"0.6B": 25_500, "4B": 22_800}, must={"0.6B": 40_000, "4B": 27_000}
    ),
    "32 prompts x 8, 128 + 256": Row(32, 8, 128, 256, peer={"0.6B": 19_700, "4B": 22_000}, must={"0.6B": 40_000}),
    "256 prompts, one adapter": Row(256, 1, 128, 256, adapters=1),
    "256 prompts, 8 adapters": Row(256, 1, 128, 256, adapters=8),
    "one sample, 128 + 256": Row(1, 1, 128, 256, must={"0.6B": 400, "4B": 200}),
}


def make_model(size: str, directory: Path) -> LoadedModel:
    config = Qwen3Config(
        **SHAPES[size],  # pyright: ignore[reportArgumentType]
        vocab_size=VOCABULARY,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(directory)
    del module
    torch.cuda.empty_cache()
    return load_model(directory, name=size, device="cuda", dtype="bfloat16")


def make_adapters(model: LoadedModel, count: int) -> list[Adapter]:
    adapters = [new_adapter(LoraConfig(rank=32, seed=seed), model.lora_modules, model.device) for seed in range(count)]
    for adapter in adapters:
        for pair in adapter.weights.values():
            torch.nn.init.normal_(pair.B.data, std=0.01)
    return adapters


def prompt_of(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).integers(3, VOCABULARY, length).astype(np.int32)


def run(sampler: Sampler, row: Row, adapters: list[Adapter], turn: int) -> Samples:
    for number in range(row.prompts):
        adapter = adapters[number % len(adapters)] if adapters else None
        item = SampleItem(
            request_id=f"{turn}/{number}",
            prompt=prompt_of(1000 * turn + number, row.length),
            num_samples=row.samples,
            params=SamplingParams(max_tokens=row.new, min_tokens=row.new, seed=number, stop=[]),
            weights=None if adapter is None else f"adapter {number % len(adapters)}",
        )
        sampler.submit(item, adapter)
    out: Samples = {}
    while sampler.has_work():
        for event in sampler.step():
            if event.error is not None:
                raise event.error
            if not event.done:
                tokens, logprobs = out.setdefault(f"{event.request_id}/{event.index}", ([], []))
                tokens += event.tokens
                logprobs += event.logprobs
    return out


def floor_seconds(model: LoadedModel, row: Row) -> float:
    """Each step reads the weights and all running keys and values once."""
    weights = sum(parameter.numel() for parameter in model.causal.parameters()) * 2
    position = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    running = row.prompts * row.samples
    return sum(weights + running * (row.length + step) * position for step in range(row.new)) / BYTES_PER_SECOND


def fidelity(model: LoadedModel, row: Row, adapters: list[Adapter], samples: Samples, turn: int) -> dict[str, float]:
    """Sampled logprobs against the trainer's own forward over the same tokens."""
    trainer = Trainer(model)
    differences: list[np.ndarray] = []
    for number in range(0, row.prompts, max(1, row.prompts // 16)):
        tokens, logprobs = samples[f"{turn}/{number}/0"]
        whole = np.concatenate([prompt_of(1000 * turn + number, row.length), tokens]).astype(np.int64)
        adapter = (
            adapters[number % len(adapters)]
            if adapters
            else new_adapter(LoraConfig(rank=1, seed=0), model.lora_modules, model.device)
        )
        item = TrainItem(
            adapter_id="a", data=[Datum(whole[:-1], {"target_tokens": whole[1:]})], loss_fn=None, backward=False
        )
        (output,) = trainer.train([item], {"a": adapter})
        if not isinstance(output, TrainOutput):
            raise output
        differences.append(output.logprobs[0][row.length - 1 :] - np.array(logprobs))
    difference = np.concatenate(differences)
    if not (np.abs(difference).mean() < 0.05 and np.abs(difference).max() < 1):  # NaN fails, too
        raise SystemExit(f"sampled logprobs are {np.abs(difference).mean()} from the trainer's")
    # The tokens are the sampler's, so the mean difference estimates KL(sampler, trainer).
    return {
        "logprob_mean_abs": float(np.abs(difference).mean()),
        "logprob_max_abs": float(np.abs(difference).max()),
        "kl": float(-difference.mean()),
    }


def measure(model: LoadedModel, tokenizer: Tokenizer, size: str, name: str, *, static: bool, profile: bool) -> dict:
    row = ROWS[name]
    adapters = make_adapters(model, row.adapters)
    sampler = Sampler(model, tokenizer, static=static, num_blocks=256 * 16)
    for turn in (1, 2):  # every size of step once without a graph, once captured
        run(sampler, Row(row.prompts, row.samples, row.length, 8), adapters, turn)
    torch.cuda.synchronize()
    start = time.perf_counter()
    samples = profiled(lambda: run(sampler, row, adapters, 3)) if profile else run(sampler, row, adapters, 3)
    seconds = time.perf_counter() - start
    count = sum(len(tokens) for tokens, _ in samples.values())
    assert count == row.prompts * row.samples * row.new
    floor = count / floor_seconds(model, row)
    return {
        "name": f"{size}, {name}" + ("" if static else ", packed steps"),
        "value": round(count / seconds),
        "unit": "tokens/s",
        "floor": round(floor),
        "of_floor": round(count / seconds / floor, 3),
        "peer": (row.peer or {}).get(size),
        "must": (row.must or {}).get(size),
        **fidelity(model, row, adapters, samples, 3),
    }


def profiled(call: Callable[[], Samples]) -> Samples:
    profile = cProfile.Profile()
    samples = profile.runcall(call)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="directory with a tokenizer.json")
    parser.add_argument("--size", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--row", choices=list(ROWS), action="append")
    parser.add_argument("--packed", action="store_true", help="without static steps")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    files = {n: (options.tokenizer / n).read_bytes() for n in BUNDLE_FILES if (options.tokenizer / n).exists()}
    tokenizer = Tokenizer(files)
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["python -m bench.gpu", *sys.argv[2:]]),
    }
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(options.size, Path(directory))
        for name in options.row or ROWS:
            row = measure(model, tokenizer, options.size, name, static=not options.packed, profile=options.profile)
            line = json.dumps({**row, **about})
            print(line, flush=True)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
