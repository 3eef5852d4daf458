"""The sampling half of the contract through the SDK, held against the training half: another code path.

`forward` with soft targets gives the log-probability of every token of the vocabulary, so each
sampling parameter's effect can be computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

import trainsession as ts

from .loop import MODEL, PROMPT, VOCABULARY, logprobs_of, new_trainer, step

TOLERANCE = 5e-5
EOS = 2


@pytest.fixture(scope="module")
def trainer(service: ts.ServiceClient) -> Iterator[ts.TrainingClient]:
    with new_trainer(service) as client:
        step(client)
        yield client


@pytest.fixture(scope="module")
def sampler(trainer: ts.TrainingClient) -> ts.SamplingClient:
    return trainer.save_weights_and_get_sampling_client()


def draw(sampler: ts.SamplingClient, prompt: Any = PROMPT, n: int = 1, **params: Any) -> list[ts.SampledSequence]:
    return sampler.sample(prompt, n, ts.SamplingParams(**{"max_tokens": 8, "seed": 7, **params})).result(60).sequences


def distribution(trainer: ts.TrainingClient, ids: list[int]) -> npt.NDArray[np.float64]:
    """Logprobs at T=1 of every token after each position of ``ids``: (N, V), from training's forward."""
    parts = np.array_split(np.arange(VOCABULARY), 3)
    data = [ts.Datum(ids, {"target_tokens": np.tile(part, (len(ids), 1))}) for part in parts]
    outputs = trainer.forward(data).result(60).logprobs
    return np.concatenate([values.to_numpy() for values in outputs], axis=1).astype(np.float64)


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_sampled_logprobs_are_those_of_forward(
    trainer: ts.TrainingClient, sampler: ts.SamplingClient, params: dict[str, Any]
) -> None:
    """I-18, I-19, I-20, I-25, I-26, I-49: of softmax(logits / T) before truncation, finite, one per token."""
    heat = params.get("temperature", 1.0) or 1.0
    for sequence in draw(sampler, n=4, max_tokens=24, **params):
        assert len(sequence.tokens) == len(sequence.logprobs) > 0
        assert np.isfinite(sequence.logprobs).all()
        whole = [*PROMPT, *sequence.tokens]
        data = [ts.Datum(whole[:-1], {"target_tokens": whole[1:], "temperature": heat})]
        np.testing.assert_allclose(sequence.logprobs, logprobs_of(trainer, data)[len(PROMPT) - 1 :], atol=TOLERANCE)
        computed: Any = sampler.compute_logprobs(whole).result(60)
        assert computed[0] is None
        if heat == 1.0:
            np.testing.assert_allclose(sequence.logprobs, computed[len(PROMPT) :], atol=TOLERANCE)


def test_topk_logprobs_are_the_most_likely_of_each_position(
    trainer: ts.TrainingClient, sampler: ts.SamplingClient
) -> None:
    """I-53, for the prompt at T=1 and for sampled tokens at their temperature."""
    params = ts.SamplingParams(max_tokens=6, seed=1, temperature=0.8, stop=[])
    response = sampler.sample(PROMPT, 2, params, True, topk_prompt_logprobs=4, topk_logprobs=3).result(60)
    assert response.prompt_logprobs is not None
    assert response.topk_prompt_logprobs is not None
    assert response.prompt_logprobs[0] is response.topk_prompt_logprobs[0] is None
    for sequence in response.sequences:
        every = distribution(trainer, [*PROMPT, *sequence.tokens])
        sampled = log_softmax(every[len(PROMPT) - 1 : -1] / 0.8)
        tops: list[tuple[Any, npt.NDArray[np.float64], int]] = [
            *((top, every[at], 4) for at, top in enumerate(response.topk_prompt_logprobs[1:])),
            *((top, row, 3) for top, row in zip(sequence.topk_logprobs or [], sampled, strict=True)),
        ]
        assert len(tops) == len(PROMPT) - 1 + 6
        for top, row, k in tops:
            likely = np.argsort(-row)[:k]
            assert [token for token, _ in top] == likely.tolist()
            np.testing.assert_allclose([value for _, value in top], row[likely], atol=TOLERANCE)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {5: 2.0, 40: -3.0}},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.5},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {9: 1.0}},
    ],
    ids=str,
)
def test_penalties_and_bias_arrive_and_come_before_the_logprobs(
    service: ts.ServiceClient, tiny_model: Path, params: dict[str, Any]
) -> None:
    """I-52, against transformers' logits of the base model."""
    with service.create_sampling_client(MODEL) as base:
        (sequence,) = draw(base, max_tokens=10, stop=[], **params)
    ids = sequence.tokens
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[0].double().numpy()[len(PROMPT) - 1 : -1]
    for at, token in enumerate(ids):
        row = logits[at].copy()
        for seen in {*PROMPT, *ids[:at]}:
            penalty = params.get("repetition_penalty", 1.0)
            row[seen] = row[seen] / penalty if row[seen] > 0 else row[seen] * penalty
        for seen in set(ids[:at]):
            row[seen] -= params.get("presence_penalty", 0.0)
            row[seen] -= params.get("frequency_penalty", 0.0) * ids[:at].count(seen)
        for biased, amount in params.get("logit_bias", {}).items():
            row[biased] += amount
        expected = log_softmax(row / params.get("temperature", 1.0))[token]
        assert sequence.logprobs[at] == pytest.approx(expected, abs=TOLERANCE)
    plain = draw(service.create_sampling_client(MODEL), max_tokens=10, stop=[])[0]
    assert plain.logprobs != sequence.logprobs


def test_greedy_takes_the_most_likely_token(trainer: ts.TrainingClient, sampler: ts.SamplingClient) -> None:
    """T-26: temperature 0 is allowed, needs no seed, and is what it says."""
    params = ts.SamplingParams(max_tokens=12, temperature=0, stop=[])
    (sequence,) = sampler.sample(PROMPT, 1, params).result(60).sequences
    every = distribution(trainer, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 : -1]
    assert sequence.tokens == every.argmax(-1).tolist()
    again = sampler.sample(PROMPT, 1, params).result(60).sequences[0]
    assert again.logprobs == sequence.logprobs
    one = sampler.sample(PROMPT, 1, ts.SamplingParams(max_tokens=12, stop=[], seed=1)).result(60).sequences[0]
    assert one.tokens != sequence.tokens, "T-19: temperature 1 is not greedy"


def test_sample_j_of_n_has_seed_plus_j(sampler: ts.SamplingClient) -> None:
    """I-21: different within a call, the same again, alone or together."""
    together = draw(sampler, n=4, seed=50, max_tokens=16, stop=[])
    assert len({tuple(sequence.tokens) for sequence in together}) == 4
    for j, sequence in enumerate(together):
        (alone,) = draw(sampler, n=1, seed=50 + j, max_tokens=16, stop=[])
        assert alone.logprobs == sequence.logprobs
        assert alone.tokens == sequence.tokens


def test_stops_of_every_kind_arrive(sampler: ts.SamplingClient) -> None:
    """I-23, I-24, T-19: strings, ids, both, one alone, none; the last token is whole and the end token stays."""
    tokenizer = sampler.get_tokenizer()
    token = tokenizer.encode("quick")[-1]
    text = tokenizer.decode([token])
    forced: dict[str, Any] = {"logit_bias": {token: 1_000.0}, "max_tokens": 3}
    stops: list[Any] = [token, [token], ["no such text", token], text, [text], [text[-1], VOCABULARY - 1]]
    for stop in stops:
        (sequence,) = draw(sampler, stop=stop, **forced)
        assert (sequence.tokens, sequence.stop_reason) == ([token], "stop")
        assert len(sequence.logprobs) == 1
    assert draw(sampler, stop=[text[-1]], **forced)[0].text == text[:-1]
    end: dict[str, Any] = {"logit_bias": {EOS: 1_000.0}, "max_tokens": 3}
    for options, length in (({}, 1), ({"stop": ["x"]}, 1), ({"stop": []}, 3), ({"ignore_eos": True}, 3)):
        (sequence,) = draw(sampler, **options, **end)
        assert sequence.tokens == [EOS] * length
        assert sequence.stop_reason == ("stop" if length == 1 else "length")
    (sequence,) = draw(sampler, min_tokens=2, **end)
    assert (len(sequence.tokens), sequence.tokens[1]) == (2, EOS)
    assert sequence.tokens[0] != EOS
