"""LoRA training against transformers + PEFT: tokens a second and peak memory, pairs in one run.

    python bench/training.py MODEL_DIRECTORY [--dtype float32] [--pairs 3] [--threads 2] [--json FILE]

One step is forward, backward and AdamW over 8 sequences of 256 tokens with cross-entropy; LoRA r=16
on all linear layers, same weights, data, dtype and threads on both sides. Each side runs in a
process of its own, because peak memory is a process's; sides take turns. First both sides'
gradients of a small batch are compared with PEFT's in float32; the benchmark fails if ours are off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch.nn import functional

from trainsession.engine.api import TrainItem, TrainOutput
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.optim import AdamState, optim_step
from trainsession.engine.trainer import Trainer
from trainsession.types import AdamParams, Datum, LoraConfig

RANK, ALPHA = 16, 32
TOLERANCE = 1e-3
"""Of a gradient's norm, or the loss. Reduced precision strays further, PEFT's as far as ours."""


@dataclass(frozen=True)
class Options:
    model: str
    dtype: str
    threads: int
    batch: int
    length: int
    steps: int
    exact: bool | None


def tokens(options: Options, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, (options.batch, options.length + 1))


def our_side(options: Options) -> tuple[LoadedModel, Adapter]:
    model = load_model(options.model, name="bench", device="cpu", dtype=options.dtype, exact=options.exact)
    config = LoraConfig(rank=RANK, alpha=ALPHA, seed=0)
    return model, new_adapter(config, model.lora_modules, model.device)


def our_step(options: Options) -> Callable[[], None]:
    model, adapter = our_side(options)
    trainer, state = Trainer(model), AdamState.fresh(adapter)
    data = [Datum(row[:-1], {"target_tokens": row[1:]}) for row in tokens(options, model.vocab_size)]

    def step() -> None:
        forward_backward(trainer, adapter, data)
        optim_step(adapter, state, AdamParams())

    return step


def forward_backward(trainer: Trainer, adapter: Adapter, data: list[Datum]) -> TrainOutput:
    (output,) = trainer.train([TrainItem(adapter_id="a", data=data, loss_fn="cross_entropy")], {"a": adapter})
    if not isinstance(output, TrainOutput):
        raise output
    return output


def their_side(options: Options) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(base, config)


def their_loss(model: Any, rows: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(rows)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def their_step(options: Options) -> Callable[[], None]:
    model = their_side(options)
    params = AdamParams()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=0.0,
    )
    rows = tokens(options, model.config.vocab_size)

    def step() -> None:
        their_loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(side: str, options: Options) -> dict[str, float]:
    """One process: a warm-up step, then timed ones."""
    step = our_step(options) if side == "ours" else their_step(options)
    step()
    times: list[float] = []
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "tokens_per_second": options.batch * options.length / statistics.median(times),
        "peak_gib": peak / 2**30,
    }


def check(options: Options) -> dict[str, float]:
    """How far both sides' gradients are from PEFT's in float32; raises if ours are too far."""
    small = Options(**{**asdict(options), "batch": 2, "length": 48})
    model, adapter = our_side(small)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for pair in adapter.weights.values():
            pair.B.copy_(torch.randn(pair.B.shape, generator=generator) * 0.01)
    rows = tokens(small, model.vocab_size)
    data = [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows]
    loss = forward_backward(Trainer(model), adapter, data).metrics["loss:sum"]
    ours = [parameter.grad for parameter in adapter.parameters() if parameter.grad is not None]
    their_value, theirs = their_gradients(small, adapter, rows)
    value, exact = their_gradients(Options(**{**asdict(small), "dtype": "float32"}), adapter, rows)
    our_error, their_error = distance(ours, exact), distance(theirs, exact)
    loss_error = abs(loss - value) / value
    loss_bound = max(TOLERANCE, 2 * abs(their_value - value) / value)
    if not (our_error <= max(TOLERANCE, 1.5 * their_error) and loss_error <= loss_bound):  # a NaN fails too
        raise SystemExit(
            f"gradients are {our_error:.1e} from PEFT's in float32, PEFT's own {their_error:.1e}; "
            f"the loss is {loss_error:.1e} off, allowed {loss_bound:.1e}"
        )
    return {"gradient_error": our_error, "their_gradient_error": their_error, "loss_error": loss_error}


def their_gradients(options: Options, adapter: Adapter, rows: np.ndarray) -> tuple[float, list[torch.Tensor]]:
    """PEFT's loss, and its gradients in the order of ``adapter``'s parameters."""
    theirs = their_side(options)
    modules: dict[str, Any] = dict(theirs.base_model.model.named_modules())
    with torch.no_grad():
        for name, pair in adapter.weights.items():
            modules[name].lora_A["default"].weight.copy_(pair.A)
            modules[name].lora_B["default"].weight.copy_(pair.B)
    loss = their_loss(theirs, rows)
    loss.backward()
    layers = [layer for name in adapter.weights for layer in (modules[name].lora_A, modules[name].lora_B)]
    return loss.item(), [layer["default"].weight.grad for layer in layers]


def distance(gradients: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest relative distance of a factor's gradient."""
    pairs = zip(gradients, reference, strict=True)
    return float(np.max([float((mine.float() - exact).norm() / exact.norm()) for mine, exact in pairs]))


def child(task: str, options: Options) -> dict[str, float]:
    command = [sys.executable, __file__, options.model, "--task", task, "--options", json.dumps(asdict(options))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each process")
    parser.add_argument("--free", action="store_true", help="outside exact mode")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", choices=["ours", "theirs", "check"], help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        options = Options(**json.loads(args.options))
        torch.set_num_threads(options.threads)
        print(json.dumps(check(options) if args.task == "check" else measure(args.task, options)))
        return

    options = Options(
        args.model, args.dtype, args.threads, args.batch, args.length, args.steps, False if args.free else None
    )
    errors = child("check", options)
    print(
        f"gradients: {errors['gradient_error']:.1e} from PEFT's in float32 (PEFT's own: "
        f"{errors['their_gradient_error']:.1e}), loss within {errors['loss_error']:.1e}"
    )
    pairs: list[dict[str, dict[str, float]]] = []
    for number in range(args.pairs):
        sides = ("theirs", "ours") if number % 2 else ("ours", "theirs")
        pairs.append({side: child(side, options) for side in sides})
        speeds = {side: round(result["tokens_per_second"], 1) for side, result in pairs[-1].items()}
        print(f"pair {number + 1} of {args.pairs}: tokens/s {speeds}", file=sys.stderr, flush=True)
    report(options, pairs, errors, args.json)


def report(
    options: Options, pairs: list[dict[str, dict[str, float]]], errors: dict[str, float], file: Path | None
) -> None:
    def median(side: str, key: str) -> float:
        return statistics.median(pair[side][key] for pair in pairs)

    speedups = sorted(pair["ours"]["tokens_per_second"] / pair["theirs"]["tokens_per_second"] for pair in pairs)
    memory = median("ours", "peak_gib") / median("theirs", "peak_gib")
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    print(
        f"\nLoRA r={RANK} on all linears, {options.batch} x {options.length} tokens, "
        f"{options.dtype}, {machine}, {versions}\n"
    )
    print("| | tokens/s | peak GiB |\n|---|---|---|")
    for side, name in (("theirs", "transformers + PEFT"), ("ours", "trainsession")):
        print(f"| {name} | {median(side, 'tokens_per_second'):.0f} | {median(side, 'peak_gib'):.2f} |")
    print(
        f"| ratio | {statistics.median(speedups):.2f} (pairs {', '.join(f'{ratio:.2f}' for ratio in speedups)}) "
        f"| {memory:.2f} |"
    )
    if file is not None:
        rows = {"options": asdict(options), "machine": machine, "versions": versions, "errors": errors, "pairs": pairs}
        file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
