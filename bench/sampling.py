"""Sampling against transformers' `generate`: tokens a second, pairs in one run, same weights and dtype.

    python bench/sampling.py MODEL_DIRECTORY [--dtype float32] [--pairs 3] [--threads 2]

Two workloads, with the logprob of every sampled token on both sides:
- shared: 4 prompts x 8 samples, 128 prompt tokens, 64 new tokens each;
- distinct: 32 prompts, 64 + 64.
First the greedy tokens of both sides are compared, and the sampled logprobs with transformers'
own forward; the benchmark fails if they disagree.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainsession.engine.api import SampleItem
from trainsession.engine.model import LoadedModel, load_model
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import BUNDLE_FILES, Tokenizer
from trainsession.types import SamplingParams

WORKLOADS = {"shared": (4, 8, 128, 64), "distinct": (32, 1, 64, 64)}
"""Prompts, samples of each, prompt tokens, new tokens."""
TEXT = (
    "The history of the steam engine begins long before the railway. In the first century a small "
    "sphere that turned by steam was described, and nobody knew what to do with it. "
)


def prompts(tokenizer: Tokenizer, count: int, length: int) -> list[np.ndarray]:
    tokens = np.array(tokenizer.encode(TEXT * 40), dtype=np.int32)
    return [tokens[7 * i : 7 * i + length].copy() for i in range(count)]


def ours(sampler: Sampler, workload: str, temperature: float) -> dict[str, list[tuple[list[int], list[float]]]]:
    count, samples, length, new = WORKLOADS[workload]
    params = SamplingParams(max_tokens=new, temperature=temperature, seed=1, stop=[])
    out: dict[str, list[tuple[list[int], list[float]]]] = {}
    for i, prompt in enumerate(prompts(sampler.tokenizer, count, length)):
        # A salt of its own per run: the prefix cache of an earlier run must not help.
        item = SampleItem(
            request_id=str(i), prompt=prompt, num_samples=samples, params=params, cache_salt=str(time.perf_counter())
        )
        out[str(i)] = [([], []) for _ in range(samples)]
        sampler.submit(item, None)
    while sampler.has_work():
        for event in sampler.step():
            if event.error is not None:
                raise event.error
            if not event.done:
                tokens, logprobs = out[event.request_id][event.index]
                tokens += event.tokens
                logprobs += event.logprobs
    return out


@torch.inference_mode()
def theirs(model: PreTrainedModel, tokenizer: Tokenizer, workload: str, temperature: float) -> torch.Tensor:
    """New tokens (count * samples, new); the logprobs are computed and dropped."""
    count, samples, length, new = WORKLOADS[workload]
    inputs = torch.from_numpy(np.stack(prompts(tokenizer, count, length))).long()
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        num_return_sequences=samples if temperature else 1,
        max_new_tokens=new,
        min_new_tokens=new,
        output_logits=True,
        return_dict_in_generate=True,
        **sampling,
    )
    tokens = output.sequences[:, length:]
    for position, logits in enumerate(output.logits):
        torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1).gather(1, tokens[:, position : position + 1])
    return tokens


@torch.inference_mode()
def check(sampler: Sampler, model: PreTrainedModel, tokenizer: Tokenizer, dtype: str) -> dict[str, float]:
    """Greedy tokens equal transformers' (in float32); greedy and drawn logprobs agree with its forward."""
    differences: list[float] = []
    agree: list[bool] = []
    for workload, (count, _, length, _) in WORKLOADS.items():
        reference = theirs(model, tokenizer, workload, 0.0)
        for temperature in (0.0, 1.0):
            samples = ours(sampler, workload, temperature)
            for i, prompt in enumerate(prompts(tokenizer, count, length)):
                tokens, logprobs = samples[str(i)][0]
                if temperature == 0.0:
                    agree.append(tokens == reference[i].tolist())
                if i % 8 == 0:
                    row = torch.tensor([[*prompt.tolist(), *tokens]])
                    logits = model(row).logits[0, length - 1 : -1].float()
                    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
                    differences += (expected - torch.tensor(logprobs)).abs().tolist()
    share, worst = sum(agree) / len(agree), float(np.max(differences))
    bounds = (1.0, 5e-5) if dtype == "float32" else (0.5, 0.3)
    if not (share >= bounds[0] and worst <= bounds[1]):  # a NaN fails too
        raise SystemExit(f"disagreement: {share:.3f} of the greedy samples are equal, logprobs differ by {worst:.2g}")
    return {"greedy_equal": share, "max_logprob_difference": worst}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    files = {n: (arguments.model / n).read_bytes() for n in BUNDLE_FILES if (arguments.model / n).exists()}
    tokenizer = Tokenizer(files)
    model: LoadedModel = load_model(arguments.model, name="bench", device="cpu", dtype=arguments.dtype)
    peer = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=model.dtype).eval()
    sampler = Sampler(model, tokenizer)
    checks = {} if arguments.skip_check else check(sampler, peer, tokenizer, arguments.dtype)
    for workload in arguments.workload or WORKLOADS:
        count, samples, _, new = WORKLOADS[workload]
        tokens = count * samples * new
        # Both sides once unmeasured: the first use of memory is paid there.
        ours(sampler, workload, 1.0)
        theirs(peer, tokenizer, workload, 1.0)
        pairs: list[tuple[float, float]] = []
        for number in range(arguments.pairs):
            fast = seconds(lambda w=workload: ours(sampler, w, 1.0))
            slow = seconds(lambda w=workload: theirs(peer, tokenizer, w, 1.0))
            pairs.append((fast, slow))
            print(f"{workload}, pair {number + 1}: {fast:.1f} s, generate {slow:.1f} s", file=sys.stderr, flush=True)
        ratios = sorted(slow / fast for fast, slow in pairs)
        print(
            json.dumps(
                {
                    "workload": workload,
                    "dtype": arguments.dtype,
                    "exact": model.exact,
                    "trainsession_tokens_per_s": round(max(tokens / fast for fast, _ in pairs), 1),
                    "generate_tokens_per_s": round(max(tokens / slow for _, slow in pairs), 1),
                    "ratio_median": round(ratios[len(ratios) // 2], 2),
                    "ratio_min": round(ratios[0], 2),
                    "pairs": arguments.pairs,
                    "threads": arguments.threads,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "cpu": platform.processor() or platform.machine(),
                    **checks,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
