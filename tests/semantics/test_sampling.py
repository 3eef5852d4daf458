"""The sampling half of the numerical contract, against transformers' own forward and `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainsession.engine.api import SampleItem
from trainsession.engine.lora import Adapter, new_adapter
from trainsession.engine.model import LoadedModel
from trainsession.engine.sampler.sampler import Sampler
from trainsession.tokenization import Tokenizer
from trainsession.types import LoraConfig, SampleResponse, SamplingParams

TOLERANCE = 2e-5
PROMPT = (3 + np.arange(21) * 7 % 290).astype(np.int32)
EOS = 2


class Policy:
    """A sampler of one tiny model, and transformers' module with the same weights."""

    def __init__(
        self, model: LoadedModel, reference: PreTrainedModel, tokenizer: Tokenizer, finish: Callable[..., Any]
    ) -> None:
        self.model = model
        self.reference = reference
        self.tokenizer = tokenizer
        self.sampler = Sampler(model, tokenizer, num_blocks=64, block_size=8)
        self.finish = finish

    def sample(
        self, prompt: npt.NDArray[np.int32] = PROMPT, n: int = 1, adapter: Adapter | None = None, **fields: Any
    ) -> SampleResponse:
        """One request on the shared sampler; unknown fields are `SamplingParams`."""
        of_item = {
            k: fields.pop(k) for k in ("prompt_logprobs", "topk_prompt_logprobs", "topk_logprobs") if k in fields
        }
        params = SamplingParams(**{"max_tokens": 8, "seed": 11, **fields})
        weights = None if adapter is None else str(id(adapter))
        self.sampler.submit(
            SampleItem(request_id="a", prompt=prompt, num_samples=n, params=params, weights=weights, **of_item), adapter
        )
        return self.finish(self.sampler)["a"]

    @torch.inference_mode()
    def logits(self, tokens: npt.ArrayLike) -> torch.Tensor:
        """transformers' logits (T, V) in float64."""
        return self.reference(torch.tensor(np.asarray(tokens)[None], dtype=torch.int64)).logits[0].double()

    def logprobs_of(self, prompt: npt.NDArray[np.int32], tokens: Sequence[int], temperature: float) -> Any:
        logits = self.logits(np.concatenate([prompt, tokens]))[len(prompt) - 1 : -1]
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens).long()[:, None])[:, 0].numpy()


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def policy(
    request: pytest.FixtureRequest,
    loaded: Callable[[str], LoadedModel],
    tiny_path: Callable[[str], Path],
    tiny_tokenizer: Tokenizer,
    finish: Callable[..., Any],
) -> Policy:
    reference = AutoModelForCausalLM.from_pretrained(tiny_path(request.param), dtype=torch.float32).eval()
    return Policy(loaded(request.param), reference, tiny_tokenizer, finish)


# --- logprobs ---------------------------------------------------------------------------------
def test_greedy_equals_transformers_generate(policy: Policy) -> None:
    response = policy.sample(temperature=0, max_tokens=40, stop=[])
    expected = policy.reference.generate(  # type: ignore[operator]
        torch.tensor(PROMPT[None]).long(), max_new_tokens=40, min_new_tokens=40, do_sample=False
    )
    tokens = response.sequences[0].tokens
    assert tokens == expected[0, len(PROMPT) :].tolist()
    np.testing.assert_allclose(response.sequences[0].logprobs, policy.logprobs_of(PROMPT, tokens, 1.0), atol=TOLERANCE)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 4}, {"top_p": 0.7, "min_p": 0.01}]
)
def test_logprobs_are_of_the_tempered_softmax_before_truncation(policy: Policy, params: dict[str, Any]) -> None:
    response = policy.sample(n=3, max_tokens=20, **params)
    for sequence in response.sequences:
        expected = policy.logprobs_of(PROMPT, sequence.tokens, params.get("temperature", 1.0))
        np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE)


def test_compute_logprobs_agrees_with_what_was_sampled(policy: Policy) -> None:
    sequence = policy.sample(max_tokens=30, stop=[]).sequences[0]
    whole = np.concatenate([PROMPT, np.array(sequence.tokens, np.int32)])
    computed = policy.sample(whole, n=0, prompt_logprobs=True, max_tokens=None).prompt_logprobs
    assert computed is not None
    np.testing.assert_allclose(np.array(computed[len(PROMPT) :], dtype=np.float32), sequence.logprobs, atol=TOLERANCE)


def test_prompt_logprobs_are_at_temperature_one_with_none_first(policy: Policy) -> None:
    response = policy.sample(temperature=0.3, prompt_logprobs=True, topk_prompt_logprobs=3, topk_logprobs=2)
    assert response.prompt_logprobs is not None
    assert response.topk_prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert response.topk_prompt_logprobs[0] is None
    logprobs = torch.log_softmax(policy.logits(PROMPT), -1)
    expected = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:]).long()[:, None])[:, 0]
    np.testing.assert_allclose(
        np.array(response.prompt_logprobs[1:], dtype=np.float64), expected.numpy(), atol=TOLERANCE
    )
    for position, top in enumerate(response.topk_prompt_logprobs[1:]):
        values, tokens = logprobs[position].topk(3)
        assert top is not None
        assert [token for token, _ in top] == tokens.tolist()
        np.testing.assert_allclose([value for _, value in top], values.numpy(), atol=TOLERANCE)
    sampled = response.sequences[0]
    assert sampled.topk_logprobs is not None
    assert [len(top) for top in sampled.topk_logprobs] == [2] * len(sampled.tokens)


def test_a_single_token_prompt_has_one_none(policy: Policy) -> None:
    response = policy.sample(PROMPT[:1], prompt_logprobs=True)
    assert response.prompt_logprobs == [None]
    np.testing.assert_allclose(
        response.sequences[0].logprobs,
        policy.logprobs_of(PROMPT[:1], response.sequences[0].tokens, 1.0),
        atol=TOLERANCE,
    )


def test_penalties_and_bias_come_before_the_logprobs(policy: Policy) -> None:
    bias = {int(PROMPT[0]): 3.0, 7: -2.0}
    response = policy.sample(
        max_tokens=15,
        stop=[],
        temperature=0.8,
        logit_bias=bias,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
    )
    tokens = response.sequences[0].tokens
    logits = policy.logits(np.concatenate([PROMPT, tokens]))[len(PROMPT) - 1 : -1].numpy()
    for step, token in enumerate(tokens):
        row = logits[step].copy()
        for seen in {*PROMPT.tolist(), *tokens[:step]}:
            row[seen] = row[seen] / 1.2 if row[seen] > 0 else row[seen] * 1.2
        for seen in set(tokens[:step]):
            row[seen] -= 0.6 + 0.3 * tokens[:step].count(seen)
        for biased, amount in bias.items():
            row[biased] += amount
        row = row / 0.8
        expected = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert response.sequences[0].logprobs[step] == pytest.approx(expected, abs=TOLERANCE)


def test_an_adapter_samples_from_the_merged_weights(policy: Policy, tiny_path: Callable[[str], Path]) -> None:
    adapter = new_adapter(
        LoraConfig(rank=4, alpha=8, seed=1, train_unembed=True), policy.model.lora_modules, policy.model.device
    )
    for pair in adapter.weights.values():
        torch.nn.init.normal_(pair.B, std=0.2, generator=torch.Generator().manual_seed(3))
    frozen = adapter.frozen_copy()
    merged = AutoModelForCausalLM.from_pretrained(policy.model.path, dtype=torch.float32).eval()
    merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())  # untie
    with torch.no_grad():
        for name, pair in frozen.weights.items():
            merged.get_parameter(f"{name}.weight").add_(2.0 * pair.B @ pair.A)
    with_adapter = policy.sample(adapter=frozen, max_tokens=20, stop=[]).sequences[0]
    expected = Policy(policy.model, merged, policy.tokenizer, policy.finish).logprobs_of(
        PROMPT, with_adapter.tokens, 1.0
    )
    np.testing.assert_allclose(with_adapter.logprobs, expected, atol=5 * TOLERANCE)
    base = policy.logprobs_of(PROMPT, with_adapter.tokens, 1.0)
    assert np.abs(base - expected).max() > 0.1
    # Frozen means frozen: training the original afterwards changes nothing.
    for pair in adapter.weights.values():
        pair.B.data.add_(1.0)
    assert policy.sample(adapter=frozen, max_tokens=20, stop=[]).sequences[0].logprobs == with_adapter.logprobs


# --- seeds ------------------------------------------------------------------------------------
def test_sample_j_is_the_single_sample_of_seed_plus_j(policy: Policy) -> None:
    together = policy.sample(n=4, seed=40).sequences
    for j in range(4):
        single = policy.sample(n=1, seed=40 + j).sequences[0]
        assert single.tokens == together[j].tokens
        assert single.logprobs == together[j].logprobs
    assert len({tuple(sequence.tokens) for sequence in together}) == 4


def test_sampling_touches_no_global_generator(policy: Policy) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index,union-attr]

    before = states()
    policy.sample(n=2)
    assert states() == before


def test_temperature_one_with_one_sample_is_not_greedy(policy: Policy) -> None:
    logits = policy.logits(PROMPT)[-1]
    tokens = [int(sequence.tokens[0]) for sequence in policy.sample(seed=1_000, n=400, max_tokens=1).sequences]
    probs = torch.softmax(logits, -1).numpy()
    likely = np.argsort(-probs)[:10]
    for token in likely:
        share = tokens.count(int(token)) / len(tokens)
        assert abs(share - probs[token]) < 4.5 * np.sqrt(probs[token] * (1 - probs[token]) / len(tokens))


def test_truncation_to_one_token_is_greedy(policy: Policy) -> None:
    greedy = policy.sample(temperature=0, stop=[]).sequences[0].tokens
    cuts: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    for params in cuts:
        assert policy.sample(stop=[], **params).sequences[0].tokens == greedy


# --- ends -------------------------------------------------------------------------------------
FORCED_EOS = {EOS: 1_000.0}


@pytest.mark.parametrize(
    ("params", "length", "reason"),
    [
        ({}, 1, "stop"),
        ({"stop": []}, 6, "length"),
        ({"ignore_eos": True}, 6, "length"),
        ({"ignore_eos": True, "stop": [EOS]}, 1, "stop"),
        ({"stop": ["zzz"]}, 1, "stop"),
        ({"min_tokens": 4}, 4, "stop"),
        ({"min_tokens": 6}, 6, "stop"),
    ],
)
def test_end_tokens_end_a_sample_and_are_returned(
    policy: Policy, params: dict[str, Any], length: int, reason: str
) -> None:
    for temperature in (0.0, 1.0):
        sequence = policy.sample(max_tokens=6, logit_bias=FORCED_EOS, temperature=temperature, **params).sequences[0]
        assert (len(sequence.tokens), sequence.stop_reason) == (length, reason)
        assert sequence.tokens[-1] == EOS
        assert np.isfinite(sequence.logprobs).all()


def test_stop_strings_and_token_ids_mix(policy: Policy) -> None:
    word = policy.tokenizer.encode("Paris")
    by_id = policy.sample(logit_bias={word[0]: 1_000.0}, stop=["never", word[0]]).sequences[0]
    assert (by_id.tokens, by_id.text, by_id.stop_reason) == ([word[0]], "", "stop")
    text = policy.tokenizer.decode(word[:1])
    by_text = policy.sample(logit_bias={word[0]: 1_000.0}, stop=[text[-1:], 5]).sequences[0]
    assert by_text.tokens == [word[0]]  # the whole last token
    assert by_text.text == text[:-1]


def test_text_is_the_decoded_sample_without_special_tokens(policy: Policy) -> None:
    for sequence in policy.sample(n=4, max_tokens=30, stop=[]).sequences:
        assert sequence.text == policy.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
