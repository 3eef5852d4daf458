"""Supervised fine-tuning on a JSON Lines file: loss on the completions, NLL on held-out rows.

Rows of any of these shapes (one shape in a file):

    {"prompt": "...", "completion": "..."}      as they are, then the end token
    {"messages": [{"role", "content"}, ...]}    the model's chat template; the last message is learned
    {"instruction", "instances": [{"input", "output"}, ...]}     Self-Instruct; as a chat
    {"question", "answer"}                      GSM8K; as a chat

    python -m cookbook.sft --data seed_tasks.jsonl --steps 30
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import trainsession as ts

from .lib.config import BaseConfig, UsageError, command_line, option
from .lib.conversations import examples_of_row, tokens_of_example
from .lib.data import completion_datum, read_jsonl, scaled, weight_sum
from .lib.evaluate import mean_nll
from .lib.plot import save_curve
from .lib.run import Run
from .lib.schedule import cosine


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    data: str | None = option(None, "JSON Lines file (required)")
    batch_size: int = option(16, "examples in a step")
    learning_rate: float = option(3e-4, "peak, of a linear warm-up and half a cosine")
    warmup: int = option(5, "steps of the warm-up")
    rank: int = option(16, "of the LoRA adapter")
    max_length: int = option(1024, "tokens; longer examples are left out")
    held_out: float = option(0.1, "fraction of the examples kept for evaluation")


def split(datums: Sequence[ts.Datum], fraction: float, seed: int) -> tuple[list[ts.Datum], list[ts.Datum]]:
    """Training and held-out datums: a shuffle by ``seed``, at least one datum on each side."""
    order = list(datums)
    random.Random(f"split {seed}").shuffle(order)
    count = min(max(1, round(fraction * len(order))), len(order) - 1)
    if count < 1:
        raise UsageError(f"{len(order)} usable examples: at least 2 are needed, one of them held out")
    return order[count:], order[:count]


def main(config: Config) -> tuple[float, float]:
    """Train, and return the held-out NLL per completion token, in nats, before and after."""
    if config.data is None:
        raise UsageError("sft needs --data, a JSON Lines file; see --help for its rows")
    run = Run("sft", config)
    rng = random.Random(config.seed)
    with (
        ts.ServiceClient(config.base_url) as service,
        service.create_lora_training_client(config.model, rank=config.rank, alpha=32, seed=config.seed) as trainer,
    ):
        tokenizer = trainer.get_tokenizer()
        examples = [example for row in read_jsonl(config.data) for example in examples_of_row(row)]
        pairs = [tokens_of_example(tokenizer, example) for example in examples]
        fitting = [(p, c) for p, c in pairs if len(p) + len(c) <= config.max_length]
        train, test = split([completion_datum(p, c) for p, c in fitting], config.held_out, config.seed)

        def evaluate(step: int) -> float:
            nll = mean_nll(trainer, test)
            run.log("held-out", step, {"nll": nll})
            return nll

        before = evaluate(0)
        curve: list[float] = []
        queue: list[ts.Datum] = []
        for step in range(config.steps):
            while len(queue) < config.batch_size:  # the next epoch, in a new order
                queue += rng.sample(train, len(train))
            batch, queue = queue[: config.batch_size], queue[config.batch_size :]

            # Losses are sums: weights of 1 / tokens make this one the mean over the batch's tokens.
            loss = trainer.forward_backward(scaled(batch, "weights", 1 / weight_sum(batch)), "cross_entropy")
            rate = config.learning_rate * cosine(step, config.steps, warmup=config.warmup)
            update = trainer.optim_step(ts.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
            metrics = {**loss.result().metrics, **update.result().metrics}
            curve.append(metrics["loss:sum"])
            run.log("train", step + 1, {"nll": curve[-1], "learning_rate": rate, "grad_norm": metrics["grad_norm"]})

        after = evaluate(config.steps)
        saved = trainer.save_weights_for_sampler("final").result()
        save_curve(
            run.directory / "curve.png",
            title=f"{config.model.split('/')[-1]}, seed {config.seed}",
            ylabel="NLL per completion token (nats)",
            name="training batch",
            values=curve,
            held_out={"held-out": [(0, before), (config.steps, after)]},
        )
        left_out = f", {len(pairs) - len(fitting)} longer than {config.max_length} tokens left out"
        run.finish(
            {
                "model": trainer.base_model,
                "data": f"{config.data}: {len(train)} examples, {len(test)} held out" + left_out,
                "NLL": f"{before:.4f} -> {after:.4f} nats per completion token, held out",
                "weights": saved.path,
            },
            trainer.usage(),
        )
    return before, after


if __name__ == "__main__":
    command_line(main, Config, "sft", __doc__)
