"""Reinforcement learning that shows within minutes: adding two numbers (`make quickstart`).

The model sees one solved example and a sum, `25 + 38 = 63\\n17 + 46 =`, and is rewarded with 1
where its answer is exactly the sum. A group of samples answers each prompt; a sample's advantage
is its reward less its group's mean (GRPO without the division by the standard deviation), and one
importance-sampling step follows. Accuracy is measured on sums that training never sees in either
order. `--random-rewards` is the control: with rewards that mean nothing, nothing may be learned.

    python -m cookbook.arithmetic_rl --seed 1
    python -m cookbook.arithmetic_rl --data answers.jsonl   # rows {"prompt": ..., "answer": ...}
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations_with_replacement

import trainsession as ts

from .lib.config import BaseConfig, UsageError, command_line, option
from .lib.data import Problem
from .lib.estimates import paired
from .lib.evaluate import Accuracy, accuracy
from .lib.formats import answered
from .lib.plot import save_curve
from .lib.rl.advantages import dr_grpo
from .lib.rl.datums import policy_datums
from .lib.rows import read_rows
from .lib.run import Run
from .lib.schedule import cosine

EXAMPLE = (25, 38)


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    data: str | None = option(None, 'JSON Lines of {"prompt", "answer"} in place of sums')
    prompts: int = option(8, "prompts in a step")
    group_size: int = option(8, "samples of a prompt")
    max_tokens: int = option(5, "tokens of an answer")
    learning_rate: float = option(2e-4, "of Adam at the first step; half a cosine takes it to zero")
    rank: int = option(16, "of the LoRA adapter")
    held_out: int = option(200, "problems kept for evaluation")
    random_rewards: bool = option(False, "control: reward each sample by a coin flip")


def sums(limit: int, held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems `a + b` with a, b in 0..limit, split by unordered pair.

    So neither `a + b` nor `b + a` of a held-out problem is ever trained on, nor shown as the example.
    """
    rng = random.Random(f"sums {seed}")
    pairs = [pair for pair in combinations_with_replacement(range(limit + 1), 2) if pair != EXAMPLE]
    rng.shuffle(pairs)
    test = [problem(*rng.choice([(a, b), (b, a)])) for a, b in pairs[:held_out]]
    train = [problem(*order) for a, b in pairs[held_out:] for order in sorted({(a, b), (b, a)})]
    return train, test


def problem(a: int, b: int) -> Problem:
    left, right = EXAMPLE
    return Problem(f"{left} + {right} = {left + right}\n{a} + {b} =", str(a + b))


def problems_of_file(path: str, held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """The same split of a file's rows; of several rows with one prompt the first is taken."""
    rows = {problem.prompt: problem for problem in map(answered, reversed(read_rows(path)))}
    problems = sorted(rows.values(), key=lambda item: item.prompt)
    random.Random(f"rows {seed}").shuffle(problems)
    if len(problems) <= held_out:
        raise UsageError(f"{path}: {len(problems)} different prompts, none left beside {held_out} held-out ones")
    return problems[held_out:], problems[:held_out]


def reward(text: str, answer: str) -> float:
    """1 where the answer, without the space around it, is exact; else 0."""
    return float(text.strip() == answer)


def main(config: Config) -> tuple[Accuracy, Accuracy]:
    """Train, and return the held-out accuracy before and after."""
    run = Run("arithmetic_rl", config)
    train, test = (
        problems_of_file(config.data, config.held_out, config.seed)
        if config.data
        else sums(50, config.held_out, config.seed)
    )
    rng = random.Random(config.seed)
    with (
        ts.ServiceClient(config.base_url) as service,
        service.create_lora_training_client(config.model, rank=config.rank, alpha=32, seed=config.seed) as trainer,
    ):
        tokenizer = trainer.get_tokenizer()

        def evaluate(step: int) -> Accuracy:
            sampler = trainer.save_weights_and_get_sampling_client()
            found = accuracy(sampler, test, reward, max_tokens=config.max_tokens, stop=["\n"], seed=config.seed)
            run.log("held-out", step, {"greedy": found.greedy.value, "sampled": found.sampled.value})
            return found

        before = evaluate(0)
        curve: list[float] = []
        for step in range(1, config.steps + 1):
            # Answer: a group of samples for each prompt, from the weights as they are now.
            batch = rng.sample(train, config.prompts)
            prompts = [tokenizer.encode(item.prompt) for item in batch]
            params = ts.SamplingParams(max_tokens=config.max_tokens, stop=["\n"], seed=rng.randrange(2**32))
            sampler = trainer.save_weights_and_get_sampling_client()
            responses = sampler.sample(prompts, num_samples=config.group_size, sampling_params=params).result()

            # Reward, and compare within the group.
            rewards = [
                [reward(sample.text, item.answer) for sample in response.sequences]
                for item, response in zip(batch, responses, strict=True)
            ]
            if config.random_rewards:
                rewards = [[float(rng.random() < 0.5) for _ in group] for group in rewards]
            datums: list[ts.Datum] = []
            for prompt, response, advantages in zip(prompts, responses, dr_grpo(rewards), strict=True):
                datums += policy_datums(prompt, response.sequences, advantages)

            # Learn. Groups of equal rewards gave no datum; a batch of none has nothing to teach.
            metrics: dict[str, float] = {}
            if datums:
                backward = trainer.forward_backward(datums, "importance_sampling")
                rate = config.learning_rate * cosine(step - 1, config.steps)
                update = trainer.optim_step(ts.AdamParams(learning_rate=rate))
                metrics = {**backward.result().metrics, **update.result().metrics}
            curve.append(sum(map(sum, rewards)) / (config.prompts * config.group_size))
            run.log("train", step, {"reward": curve[-1], "datums": len(datums)}, metrics)

        after = evaluate(config.steps)
        saved = trainer.save_weights_for_sampler("final").result()
        save_curve(
            run.directory / "curve.png",
            title=f"{config.model.split('/')[-1]}, seed {config.seed}",
            ylabel="exact answers",
            name="training reward",
            values=curve,
            held_out={
                "held-out, greedy": [(0, before.greedy), (config.steps, after.greedy)],
                "held-out, sampled": [(0, before.sampled), (config.steps, after.sampled)],
            },
        )
        run.finish(
            {
                "model": trainer.base_model,
                "data": config.data or f"sums of 0..50, {len(test)} held out, neither order trained on",
                "rewards": "random (control)" if config.random_rewards else "exact answer",
                "greedy": f"{before.greedy} -> {after.greedy}",
                "greedy, change": paired(before.greedy_right, after.greedy_right),
                "sampled": f"{before.sampled} -> {after.sampled}",
                "weights": saved.path,
            },
            trainer.usage(),
        )
    return before, after


if __name__ == "__main__":
    command_line(main, Config, "arithmetic_rl", __doc__)
