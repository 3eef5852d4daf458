"""Supervised fine-tuning on conversations: loss on the replies, negative log-likelihood on held-out rows.

Each reply is learned behind exactly the tokens that a sampler would be given for it, from the first
token behind the header to the stop token (`mask.png` in the run's directory shows it). A batch is a
number of tokens, since the service packs sequences without padding. Rows (docs/recipes.md):

    {"messages": [{"role", "content"}, ...]}     or {"conversations": [{"from", "value"}, ...]}
    {"prompt": "...", "completion": "..."}       as they are, then the end token
    {"instruction", "instances": [{"input", "output"}, ...]}, {"instruction", "input", "output"},
    {"question", "answer"}                       as a chat

    python -m cookbook.chat_sl --data rows.jsonl --steps 30
    python -m cookbook.chat_sl --resume runs/chat_sl-20250101-120000     # goes on where that run stopped
    python -m cookbook.chat_sl --smoke                                   # seconds: does all of it work here?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import trainsession as ts

from .lib.config import ResumableConfig, UsageError, command_line, option
from .lib.conversations import sequences_of_row
from .lib.data import scaled, weight_sum
from .lib.evaluate import mean_nll
from .lib.order import Shuffled, split
from .lib.plot import save_curve
from .lib.rendering import Learn, Rendered, Renderer, save_mask
from .lib.rows import rows_for
from .lib.run import Run
from .lib.schedule import cosine


@dataclass(frozen=True, kw_only=True)
class Config(ResumableConfig):
    data: str | None = option(None, "file of rows (*.jsonl, *.json, *.parquet), or a hub name")
    learn: str = option("all", "which replies of a chat: all, or the last")
    batch_tokens: int = option(4096, "tokens of a batch: rows are added until it has that many")
    learning_rate: float = option(3e-4, "peak, of a linear warm-up and half a cosine")
    warmup: int = option(5, "steps of the warm-up")
    rank: int = option(16, "of the LoRA adapter")
    max_length: int = option(1024, "tokens; longer sequences are left out")
    held_out: float = option(0.1, "fraction of the rows kept for evaluation")


def smoke_sized(config: Config) -> Config:
    return replace(config, steps=min(config.steps, 4), batch_tokens=256, warmup=1, rank=4, max_length=512)


def next_batch(order: Shuffled[list[Rendered]], tokens: int) -> list[ts.Datum]:
    """Rows until the batch has that many tokens."""
    batch: list[Rendered] = []
    while sum(map(len, batch)) < tokens:
        (row,) = order.take(1)
        batch += row
    return [sequence.datum() for sequence in batch]


def datums_of(rows: Sequence[Sequence[Rendered]]) -> list[ts.Datum]:
    return [sequence.datum() for row in rows for sequence in row]


def main(config: Config) -> tuple[float, float]:
    """Train, and return the held-out NLL per learned token, in nats, before and after."""
    run, config = Run.open("chat_sl", config, smoke_sized)
    rows = rows_for(config, ({"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(20)))
    with (
        ts.ServiceClient(config.base_url) as service,
        run.trainer(service, config.rank) as trainer,
    ):
        renderer = Renderer(trainer.get_tokenizer())
        sequences = [sequences_of_row(renderer, row, cast(Learn, config.learn)) for row in rows]
        fitting = [kept for row in sequences if (kept := [s for s in row if len(s) <= config.max_length])]
        if len(fitting) < 2:
            few = f"{len(fitting)} of {len(rows)} rows have a sequence of at most {config.max_length} tokens"
            raise UsageError(f"{few} (--max-length): at least 2 are needed, one of them held out")
        train, test = split(fitting, config.held_out, config.seed)
        save_mask(train[0][0], run.directory / "mask.png")

        def evaluate(step: int) -> float:
            nll = mean_nll(trainer, datums_of(test))
            run.log("held-out", step, {"nll": nll})
            return nll

        # What a step left behind is stored with the step: how many there were, and where the data stood.
        done, *position = trainer.progress or (0, 0, 0)
        order = Shuffled(train, config.seed, (position[0], position[1]))
        logged = run.logged("held-out")
        before = logged[0]["nll"] if logged else evaluate(0)
        for step in range(done, config.steps):
            batch = next_batch(order, config.batch_tokens)
            # Losses are sums: weights of 1 / tokens make this one the mean over the batch's tokens.
            loss = trainer.forward_backward(scaled(batch, "weights", 1 / weight_sum(batch)), "cross_entropy")
            rate = config.learning_rate * cosine(step, config.steps, warmup=config.warmup)
            adam = ts.AdamParams(learning_rate=rate, grad_clip_norm=1.0)
            update = trainer.optim_step(adam, progress=[step + 1, *order.position])
            nll, norm = loss.result().metrics["loss:sum"], update.result().metrics["grad_norm"]
            run.log("train", step + 1, {"nll": nll, "learning_rate": rate, "grad_norm": norm})

        after = evaluate(config.steps)
        saved = trainer.save_weights_for_sampler("final", overwrite=True).result()
        save_curve(
            run.directory / "curve.png",
            title=f"{config.model.split('/')[-1]}, seed {config.seed}",
            ylabel="NLL per learned token (nats)",
            name="training batch",
            values=[row["nll"] for row in run.logged("train")],
            held_out={"held-out": [(0, before), (config.steps, after)]},
        )
        left_out = sum(map(len, sequences)) - sum(map(len, fitting))
        run.finish(
            {
                "model": trainer.base_model,
                "data": f"{config.data or 'sums'}: {len(train)} rows, {len(test)} held out, "
                f"{left_out} sequences longer than {config.max_length} tokens left out",
                "NLL": f"{before:.4f} -> {after:.4f} nats per learned token, held out",
                "weights": saved.path,
            },
            trainer.usage(),
        )
    return before, after


if __name__ == "__main__":
    command_line(main, Config, "chat_sl", __doc__)
