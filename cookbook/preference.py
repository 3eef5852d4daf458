"""Learning from preferences: DPO, IPO, SimPO or ORPO on pairs of a chosen and a rejected reply.

The loss is a Python function over the logprobs of both replies (`cookbook/lib/preferences.py`), which
`forward_backward_custom` runs here while the model runs in the service. DPO and IPO compare with
the base model, whose logprobs are taken once. Rows (docs/recipes.md):

    {"prompt": text or messages, "chosen": ..., "rejected": ...}    replies as texts or messages
    {"conversations": [...], "chosen": {...}, "rejected": {...}}
    {"chosen": [messages], "rejected": [messages]}                  that differ in the last message

    python -m cookbook.preference --data pairs.jsonl --loss dpo
    python -m cookbook.preference --resume runs/preference-20250101-120000
    python -m cookbook.preference --smoke
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import trainsession as ts

from .lib.config import ResumableConfig, UsageError, command_line, one_of, option
from .lib.formats import preference
from .lib.order import Shuffled, split
from .lib.plot import save_curve
from .lib.preferences import METHODS, Pair, Preferred, evaluate, pair_loss, with_reference
from .lib.rendering import Renderer, save_mask
from .lib.rows import Row, rows_for
from .lib.run import Run
from .lib.schedule import cosine


@dataclass(frozen=True, kw_only=True)
class Config(ResumableConfig):
    data: str | None = option(None, "file of pairs (*.jsonl, *.json, *.parquet), or a hub name")
    loss: str = option("dpo", f"one of {', '.join(METHODS)}")
    beta: float | None = option(None, "of the loss; default: .1, and 2 for simpo")
    pairs: int = option(8, "pairs in a step")
    learning_rate: float = option(5e-5, "peak, of a linear warm-up and half a cosine")
    warmup: int = option(5, "steps of the warm-up")
    rank: int = option(16, "of the LoRA adapter")
    max_length: int = option(1024, "tokens; pairs with a longer side are left out")
    held_out: float = option(0.1, "fraction of the pairs kept for evaluation")


def smoke_sized(config: Config) -> Config:
    return replace(config, steps=min(config.steps, 4), pairs=4, warmup=1, rank=4, max_length=512)


def pairs_of(renderer: Renderer, rows: Sequence[Row], max_length: int) -> list[Pair]:
    pairs: list[Pair] = []
    for row in rows:
        found = preference(row)
        try:
            chosen, rejected = (
                renderer.examples([*found.prompt, reply], "last")[0] for reply in (found.chosen, found.rejected)
            )
        except (UsageError, ts.InvalidRequest) as error:
            raise row.error(str(error)) from None
        if max(len(chosen), len(rejected)) <= max_length:
            pairs.append(Pair(chosen, rejected))
    if len(pairs) < 2:
        few = f"{len(pairs)} of {len(rows)} pairs have at most {max_length} tokens on both sides"
        raise UsageError(f"{few} (--max-length): at least 2 are needed, one of them held out")
    return pairs


def main(config: Config) -> tuple[Preferred, Preferred]:
    """Train, and return what is preferred of the held-out pairs, before and after."""
    one_of("loss", config.loss, METHODS)  # before there is a run
    run, config = Run.open("preference", config, smoke_sized)
    rows = rows_for(
        config, ({"prompt": f"{n}+{n}?", "chosen": str(2 * n), "rejected": str(2 * n + 1)} for n in range(20))
    )
    method = METHODS[config.loss]
    beta = method.beta if config.beta is None else config.beta
    with (
        ts.ServiceClient(config.base_url) as service,
        run.trainer(service, config.rank) as trainer,
    ):
        pairs = pairs_of(Renderer(trainer.get_tokenizer()), rows, config.max_length)
        save_mask(pairs[0].chosen, run.directory / "mask.png")
        known = with_reference(trainer, pairs, run.directory / "reference.npy") if method.reference else pairs
        train, test = split(known, config.held_out, config.seed)

        def measure(step: int) -> Preferred:
            found = evaluate(trainer, method, beta, test)
            run.log("held-out", step, {"loss": found.loss, "margin": found.margin, "accuracy": found.accuracy})
            return found

        done, *position = trainer.progress or (0, 0, 0)
        order = Shuffled(train, config.seed, (position[0], position[1]))
        logged = run.logged("held-out")
        before = Preferred(*(logged[0][name] for name in ("loss", "margin", "accuracy"))) if logged else measure(0)
        for step in range(done, config.steps):
            batch = [datum for pair in order.take(config.pairs) for datum in pair.datums()]
            backward = trainer.forward_backward_custom(batch, pair_loss(method, beta))
            rate = config.learning_rate * cosine(step, config.steps, warmup=config.warmup)
            adam = ts.AdamParams(learning_rate=rate, grad_clip_norm=1.0)
            update = trainer.optim_step(adam, progress=[step + 1, *order.position])
            metrics = {**backward.result().metrics, **update.result().metrics}
            shown = {"loss": "loss:sum", "margin": "margin:mean", "accuracy": "accuracy:mean", "grad_norm": "grad_norm"}
            run.log("train", step + 1, {name: metrics[key] for name, key in shown.items()})

        after = measure(config.steps)
        saved = trainer.save_weights_for_sampler("final", overwrite=True).result()
        save_curve(
            run.directory / "curve.png",
            title=f"{config.model.split('/')[-1]}, {config.loss}, seed {config.seed}",
            ylabel="margin",
            name="training batch",
            values=[row["margin"] for row in run.logged("train")],
            held_out={"held-out": [(0, before.margin), (config.steps, after.margin)]},
        )
        run.finish(
            {
                "model": trainer.base_model,
                "data": f"{config.data or 'sums'}: {len(train)} pairs, {len(test)} held out, "
                f"{len(rows) - len(pairs)} longer than {config.max_length} tokens left out",
                "loss": f"{config.loss}, beta {beta:g}",
                "margin": f"{before.margin:.4f} -> {after.margin:.4f}, held out",
                "accuracy": f"{before.accuracy:.1%} -> {after.accuracy:.1%}, held out",
                "weights": saved.path,
            },
            trainer.usage(),
        )
    return before, after


if __name__ == "__main__":
    command_line(main, Config, "preference", __doc__)
