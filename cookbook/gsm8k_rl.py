"""Grade-school mathematics: supervised warm start, then GRPO on whether the final answer is right.

A small base model solves almost none of GSM8K, so rewards would be too sparse to learn from. It
first learns the form of the training rationales (`Question: ...\\nAnswer:`, the steps without their
<<>> calculator marks, `#### N`); then groups of samples are rewarded where math-verify finds the
number behind `####` equal to the reference. The sizes suit one GPU; on a CPU make them small.

    python -m cookbook.gsm8k_rl --data gsm8k/          # a directory with train.jsonl and test.jsonl
    python -m cookbook.gsm8k_rl                        # openai/gsm8k from the Hugging Face hub
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import trainsession as ts

from .lib.config import BaseConfig, command_line, one_of, option
from .lib.conversations import text_sequence
from .lib.data import scaled, weight_sum
from .lib.estimates import paired
from .lib.evaluate import Accuracy, accuracy
from .lib.gsm8k import Question, load, reward
from .lib.plot import save_curve
from .lib.rl.advantages import ADVANTAGES
from .lib.rl.datums import policy_datums
from .lib.run import Run
from .lib.schedule import cosine


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    data: str | None = option(None, "directory with train.jsonl and test.jsonl; default: openai/gsm8k from the hub")
    steps: int = option(20, "GRPO steps")
    prompts: int = option(96, "questions in a GRPO step")
    group_size: int = option(16, "samples of a question")
    max_tokens: int = option(200, "tokens of an answer")
    learning_rate: float = option(2e-4, "of GRPO")
    advantages: str = option("dr_grpo", f"how rewards are compared: {', '.join(ADVANTAGES)}")
    sft_steps: int = option(350, "steps of the warm start; 350 of 64 are three epochs")
    sft_batch: int = option(64, "examples in a step of the warm start")
    sft_learning_rate: float = option(1e-3, "peak, of a linear warm-up of 20 steps and half a cosine")
    rank: int = option(64, "of the LoRA adapter (alpha is twice the rank)")
    held_out: int | None = option(None, "test questions to evaluate on; default: all 1,319")


def warm_start(
    config: Config, run: Run, trainer: ts.TrainingClient, tokenizer: ts.Tokenizer, questions: list[Question]
) -> None:
    """Cross-entropy on the training rationales, mean over each batch's answer tokens."""
    rng = random.Random(f"sft {config.seed}")
    queue: list[Question] = []
    for step in range(config.sft_steps):
        while len(queue) < config.sft_batch:
            queue += rng.sample(questions, len(questions))
        batch, queue = queue[: config.sft_batch], queue[config.sft_batch :]
        datums = [text_sequence(tokenizer, q.prompt, q.rationale).datum() for q in batch]
        loss = trainer.forward_backward(scaled(datums, "weights", 1 / weight_sum(datums)), "cross_entropy")
        rate = config.sft_learning_rate * cosine(step, config.sft_steps, warmup=min(20, config.sft_steps // 5))
        update = trainer.optim_step(ts.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
        nll, norm = loss.result().metrics["loss:sum"], update.result().metrics["grad_norm"]
        run.log("sft", step + 1, {"nll": nll, "learning_rate": rate, "grad_norm": norm})


def main(config: Config) -> tuple[Accuracy, Accuracy, Accuracy]:
    """Train, and return the test accuracy of the base model, after the warm start, and after GRPO."""
    run = Run("gsm8k_rl", config)
    train, test = load(config.data)
    test = random.Random(f"test {config.seed}").sample(test, min(len(test), config.held_out or len(test)))
    rng = random.Random(config.seed)
    compare, rank = one_of("advantages", config.advantages, ADVANTAGES), config.rank
    with (
        ts.ServiceClient(config.base_url) as service,
        service.create_lora_training_client(config.model, rank=rank, alpha=2 * rank, seed=config.seed) as trainer,
    ):
        tokenizer = trainer.get_tokenizer()

        def evaluate(phase: str) -> Accuracy:
            sampler = trainer.save_weights_and_get_sampling_client()
            found = accuracy(sampler, [q.problem for q in test], reward, max_tokens=config.max_tokens, seed=config.seed)
            run.log(phase, 0, {"greedy": found.greedy.value, "sampled": found.sampled.value})
            return found

        base = evaluate("test, base")
        warm_start(config, run, trainer, tokenizer, train)
        warm = evaluate("test, after SFT")

        curve: list[float] = []
        for step in range(1, config.steps + 1):
            # Answer: a group of samples for each question, from the weights as they are now.
            batch = rng.sample(train, config.prompts)
            prompts = [tokenizer.encode(q.prompt) for q in batch]
            params = ts.SamplingParams(max_tokens=config.max_tokens, seed=rng.randrange(2**32))
            sampler = trainer.save_weights_and_get_sampling_client()
            responses = sampler.sample(prompts, num_samples=config.group_size, sampling_params=params).result()

            # Reward, and compare within the group.
            rewards = [
                [reward(sample.text, question.answer) for sample in response.sequences]
                for question, response in zip(batch, responses, strict=True)
            ]
            datums: list[ts.Datum] = []
            for prompt, response, advantages in zip(prompts, responses, compare(rewards), strict=True):
                datums += policy_datums(prompt, response.sequences, advantages)
            mixed = sum(len(set(group)) > 1 for group in rewards)

            # Learn: the mean over the tokens of the groups that differ, so a clip at norm 1 is the same at any size.
            metrics: dict[str, float] = {}
            if datums:
                mean = scaled(datums, "advantages", 1 / weight_sum(datums))
                backward = trainer.forward_backward(mean, "importance_sampling")
                update = trainer.optim_step(ts.AdamParams(learning_rate=config.learning_rate, grad_clip_norm=1.0))
                metrics = {**backward.result().metrics, **update.result().metrics}
            curve.append(sum(map(sum, rewards)) / (config.prompts * config.group_size))
            run.log("grpo", step, {"reward": curve[-1], "mixed_groups": mixed / len(batch)}, metrics)

        after = evaluate("test, after GRPO")
        saved = trainer.save_weights_for_sampler("final").result()
        save_curve(
            run.directory / "curve.png",
            title=f"GSM8K, {config.model.split('/')[-1]}, seed {config.seed}",
            ylabel="right answers",
            name="training reward",
            values=curve,
            held_out={
                "test, greedy": [(0, warm.greedy), (config.steps, after.greedy)],
                "test, sampled": [(0, warm.sampled), (config.steps, after.sampled)],
            },
        )
        run.finish(
            {
                "model": trainer.base_model,
                "data": f"{config.data or 'openai/gsm8k'}: {len(train)} training, {len(test)} test questions",
                "greedy": f"base {base.greedy} -> SFT {warm.greedy} -> GRPO {after.greedy}",
                "greedy, change by GRPO": paired(warm.greedy_right, after.greedy_right),
                "sampled": f"base {base.sampled} -> SFT {warm.sampled} -> GRPO {after.sampled}",
                "weights": saved.path,
            },
            trainer.usage(),
        )
    return base, warm, after


if __name__ == "__main__":
    command_line(main, Config, "gsm8k_rl", __doc__)
