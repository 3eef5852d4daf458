"""Bad input through the SDK: a clear typed error at once, nothing lost, the session usable afterwards.

"Usable" is a number: the step after a bad call has the bits of a session that never saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trainsession as ts

from .loop import (
    ADAM,
    CONTEXT,
    MODEL,
    PROMPT,
    VOCABULARY,
    assert_says,
    batch,
    datum,
    new_trainer,
    rl_datum,
    step,
    tokens,
)

NAN, INF = float("nan"), float("inf")
Call = Callable[[ts.TrainingClient], Any]
Error = type[ts.TrainSessionError]


def train(datums: list[ts.Datum], loss_fn: Any = "cross_entropy", config: Any = None) -> Call:
    return lambda trainer: trainer.forward_backward(datums, loss_fn, config)


def build(make: Callable[[], Any]) -> Call:
    return lambda trainer: make()


def sample(prompt: Any, n: Any = 1, **params: Any) -> Call:
    return lambda trainer: trainer.base_sampling_client().sample(prompt, n, ts.SamplingParams(**params))


def custom(data: list[ts.Datum]) -> Call:
    return lambda trainer: trainer.forward_backward_custom(data, lambda _, logprobs: (logprobs[0].sum(), {}))


# --- what the client can know: an exception of the call itself, and no number is taken --------------
_BAD, _REQUEST, _LIMIT = ts.InvalidDatum, ts.InvalidRequest, ts.LimitExceeded
_GOOD = datum()
# What, whose error, and words of its message: what is wrong, where, what would be right.
KNOWN_TO_THE_CLIENT: dict[str, tuple[Call, Error, tuple[str, ...]]] = {
    # wrong lengths
    "short-weights": (train([_GOOD, datum(weights=np.ones(6))]), _BAD, ("datum 1", "'weights'", "(6,)", "(7,)")),
    "long-targets": (train([datum(target_tokens=tokens(8))]), _BAD, ("datum 0", "target_tokens", "(8,)", "(7,)")),
    "short-logprobs": (train([rl_datum(logprobs=np.ones(5))], "ppo"), _BAD, ("datum 0", "'logprobs'", "(5,)", "(7,)")),
    "scalar-advantage": (train([rl_datum(advantages=1.0)], "cispo"), _BAD, ("datum 0", "'advantages'", "()", "(7,)")),
    "flat-weights-of-soft-targets": (
        train([datum(target_tokens=np.ones((7, 3), int), weights=np.ones(7))]),
        _BAD,
        ("datum 0", "'weights'", "(7,)", "(7, 3)"),
    ),
    "ragged": (build(lambda: datum(weights=[[1.0], [1.0, 2.0]])), _BAD, ("'weights'", "rectangular")),
    # missing or unknown loss inputs
    "no-targets": (train([datum(target_tokens=None)]), _BAD, ("datum 0", "'target_tokens'", "missing")),
    "no-advantages": (
        train([rl_datum(), rl_datum(advantages=None)], "importance_sampling"),
        _BAD,
        ("datum 1", "'advantages'", "missing", "importance_sampling needs target_tokens, logprobs, advantages"),
    ),
    "no-logprobs": (train([rl_datum(logprobs=None)], "dro", {"beta": 0.1}), _BAD, ("datum 0", "'logprobs'", "dro")),
    "unknown-input": (
        train([datum(rewards=np.ones(7))]),
        _BAD,
        ("datum 0", "'rewards'", "cross_entropy", "target_tokens, weights, temperature"),
    ),
    "no-targets-for-a-custom-loss": (custom([datum(target_tokens=None)]), _BAD, ("datum 0", "'target_tokens'")),
    # missing or unknown configuration keys
    "unknown-config": (
        train([rl_datum()], "ppo", {"clip_range": 0.2}),
        _REQUEST,
        ("loss_fn_config of ppo", "'clip_range'", "clip_low_threshold, clip_high_threshold"),
    ),
    "config-of-a-loss-without": (train([_GOOD], "cross_entropy", {"beta": 1.0}), _REQUEST, ("'beta'", "none")),
    "missing-config": (train([rl_datum()], "dro"), _REQUEST, ("loss_fn_config of dro", "'beta'", "required")),
    "nan-config": (train([rl_datum()], "dro", {"beta": NAN}), _REQUEST, ("'beta'", "finite", "nan")),
    "unknown-loss": (train([_GOOD], "cross_entorpy"), _REQUEST, ("cross_entorpy", "cross_entropy", "gspo")),
    # token ids that no vocabulary has
    "ignore-label": (
        train([datum(target_tokens=[5, 6, 7, -100, 8, 9, 10])]),
        _BAD,
        ("datum 0", "target_tokens", "-100", ">= 0", "weight 0"),
    ),
    "negative-input": (build(lambda: ts.ModelInput.from_ints([5, -1])), _REQUEST, ("-1",)),
    "fractional-target": (build(lambda: datum(target_tokens=[1.5] * 7)), _BAD, ("target_tokens", "1.5")),
    # empty batch or prompt
    "empty-batch": (train([]), _REQUEST, ("data", "empty", "at least one datum")),
    "empty-custom-batch": (custom([]), _REQUEST, ("data", "empty", "at least one datum")),
    "empty-datum": (train([_GOOD, ts.Datum([], {"target_tokens": []})]), _BAD, ("datum 1", "model_input", "empty")),
    "empty-prompt": (sample([]), _REQUEST, ("prompt", "empty", "at least one token")),
    "empty-prompt-of-a-list": (sample([PROMPT, []]), _REQUEST, ("prompt 1", "empty")),
    "empty-text": (sample(""), _REQUEST, ("prompt", "empty", "at least one token")),
    "empty-logprobs-prompt": (
        lambda trainer: trainer.base_sampling_client().compute_logprobs([]),
        _REQUEST,
        ("prompt", "empty"),
    ),
    # NaN and infinity
    "nan-weight": (
        train([_GOOD, datum(weights=[1, 1, NAN, 1, 1, 1, 1])]),
        _BAD,
        ("datum 1", "'weights'", "position 2"),
    ),
    "inf-advantage": (
        train([rl_datum(advantages=[1, 1, 1, 1, INF, 1, 1])], "ppo"),
        _BAD,
        ("datum 0", "'advantages'", "position 4"),
    ),
    "minus-inf-logprob": (
        train([rl_datum(logprobs=[-INF, -1, -1, -1, -1, -1, -1])], "gspo"),
        _BAD,
        ("datum 0", "'logprobs'", "position 0"),
    ),
    "nan-temperature": (train([datum(temperature=NAN)]), _BAD, ("datum 0", "'temperature'", "above 0")),
    "zero-temperature": (train([datum(temperature=0.0)]), _BAD, ("datum 0", "'temperature'", "above 0")),
    "nan-prompt": (sample([1.0, NAN]), _REQUEST, ("prompt", "integers", "float64")),
    "nan-learning-rate": (build(lambda: ts.AdamParams(learning_rate=NAN)), _REQUEST, ("learning_rate", "finite")),
    "infinite-clip": (build(lambda: ts.AdamParams(grad_clip_norm=INF)), _REQUEST, ("grad_clip_norm", "finite")),
    "beta-of-one": (build(lambda: ts.AdamParams(beta1=1.0)), _REQUEST, ("beta1", "[0, 1)", "1.0")),
    "nan-sampling-temperature": (sample(PROMPT, temperature=NAN), _REQUEST, ("temperature", "finite")),
    "infinite-bias": (sample(PROMPT, logit_bias={5: INF}), _REQUEST, ("logit_bias[5]", "finite")),
    "nan-progress": (lambda trainer: trainer.optim_step(progress=NAN), _REQUEST, ("progress", "JSON")),
    # sampling parameters
    "no-tokens": (sample(PROMPT, max_tokens=0), _REQUEST, ("max_tokens", ">= 1", "got 0")),
    "negative-tokens": (sample(PROMPT, max_tokens=-5), _REQUEST, ("max_tokens", ">= 1", "got -5")),
    "absurd-tokens": (sample(PROMPT, 1_000, max_tokens=10**6), _LIMIT, ("max_tokens", "max_sampled_tokens = 4000000")),
    "no-samples": (sample(PROMPT, 0), _REQUEST, ("num_samples", ">= 1", "got 0")),
    "absurd-samples": (sample(PROMPT, 1_025), _LIMIT, ("num_samples", "1025", "max_num_samples = 1024")),
    "zero-top-p": (sample(PROMPT, top_p=0.0), _REQUEST, ("top_p", "(0, 1]", "0.0")),
    "zero-top-k": (sample(PROMPT, top_k=0), _REQUEST, ("top_k", "-1 (all) or >= 1")),
    "empty-stop": (sample(PROMPT, stop=["\n", ""]), _REQUEST, ("stop", "empty string")),
    # not what was asked for
    "datum-not-in-a-list": (lambda trainer: trainer.forward(_GOOD), _REQUEST, ("data", "list of Datum", "Datum")),  # type: ignore[arg-type]
    "not-a-datum": (train([_GOOD, {"tokens": [1]}]), _BAD, ("datum 1", "expected a Datum", "dict")),  # type: ignore[list-item]
    "adam-as-a-dict": (lambda trainer: trainer.optim_step({"lr": 1}), _REQUEST, ("adam_params", "AdamParams", "dict")),  # type: ignore[arg-type]
    "bad-name": (lambda trainer: trainer.save_state("../x"), _REQUEST, ("name", "'../x'", "letters, digits")),
    "local-path": (lambda trainer: trainer.load_state("/a/b"), _REQUEST, ("path", "'/a/b'", "ts://")),
}


@pytest.fixture(scope="module")
def busy(service: ts.ServiceClient) -> Iterator[ts.TrainingClient]:
    with new_trainer(service) as trainer:
        step(trainer)
        yield trainer


@pytest.mark.parametrize("case", KNOWN_TO_THE_CLIENT)
def test_what_the_client_can_know_is_raised_by_the_call(busy: ts.TrainingClient, case: str) -> None:
    call, error, words = KNOWN_TO_THE_CLIENT[case]
    number = busy.next_seq
    with pytest.raises(ts.TrainSessionError) as caught:
        call(busy)
    assert type(caught.value) is error
    assert caught.value.code == error.code
    assert_says(caught.value, words)
    if words[0].startswith("datum "):
        assert caught.value.details["datum"] == int(words[0].removeprefix("datum "))
    assert busy.next_seq == number


def test_none_of_it_leaves_a_trace(service: ts.ServiceClient, two_steps: list[dict[str, float]]) -> None:
    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        whole = trainer.forward_backward(batch())
        for call, error, _ in KNOWN_TO_THE_CLIENT.values():
            with pytest.raises(error):
                call(trainer)
        stepped = trainer.optim_step(ADAM).result(60)
        assert whole.result(60).metrics | stepped.metrics == two_steps[1]


# --- what only the service knows: the error of the future, and no step on part of a batch -------------
KNOWN_TO_THE_SERVICE: dict[str, tuple[Call, Error, tuple[str, ...]]] = {
    "input-outside-the-vocabulary": (
        train([_GOOD, ts.Datum([5, VOCABULARY], {"target_tokens": [5, 6]})]),
        ts.InvalidDatum,
        ("datum 1", "model_input", str(VOCABULARY), f"vocabulary of {VOCABULARY}"),
    ),
    "target-outside-the-vocabulary": (
        train([ts.Datum([5, 6], {"target_tokens": [5, 2**31 - 1 - 1]})]),
        ts.InvalidDatum,
        ("datum 0", "target_tokens", f"vocabulary of {VOCABULARY}"),
    ),
    "longer-than-the-context": (
        train([datum(CONTEXT + 1)]),
        ts.InvalidDatum,
        ("datum 0", "model_input", str(CONTEXT + 1), f"context of {CONTEXT}"),
    ),
    "custom-loss-outside-the-vocabulary": (
        custom([ts.Datum([5, VOCABULARY], {"target_tokens": [5, 6]})]),
        ts.InvalidDatum,
        ("datum 0", "model_input", f"vocabulary of {VOCABULARY}"),
    ),
    "overflowing-loss": (
        train([rl_datum(), rl_datum(logprobs=np.full(7, -1e30))], "importance_sampling"),
        ts.NonFinite,
        ("datum 1",),
    ),
    "nan-custom-loss": (
        lambda trainer: trainer.forward_backward_custom([_GOOD], lambda _, lp: (lp[0].sum() * NAN, {})),
        ts.NonFinite,
        ("custom loss", "nan"),
    ),
    "infinite-custom-gradient": (
        lambda trainer: trainer.forward_backward_custom(
            [_GOOD, datum(3)], lambda _, lp: (lp[0].sum() + torch.sqrt((lp[1] - lp[1].detach()).sum()), {})
        ),
        ts.NonFinite,
        ("datum 1", "gradient"),
    ),
}


@pytest.mark.parametrize("case", KNOWN_TO_THE_SERVICE)
def test_what_the_service_refuses_leaves_no_part_of_a_batch(
    service: ts.ServiceClient, two_steps: list[dict[str, float]], case: str
) -> None:
    call, error, words = KNOWN_TO_THE_SERVICE[case]
    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        trainer.forward_backward(batch()[:1])
        failed = call(trainer)
        stepped = trainer.optim_step(ADAM)
        with pytest.raises(ts.TrainSessionError) as caught:
            failed.result(60)
        assert type(caught.value) is error
        assert caught.value.code == error.code
        assert_says(caught.value, words)
        with pytest.raises(ts.IncompleteGradients, match=r"zero_grad\(\)"):
            stepped.result(60)
        trainer.zero_grad()
        assert step(trainer) == two_steps[1]


def test_the_first_operation_hears_of_bad_input_too(
    service: ts.ServiceClient, two_steps: list[dict[str, float]]
) -> None:
    """Before its model is loaded the service does not know the vocabulary yet."""
    with new_trainer(service, "tiny-qwen3") as trainer:
        failed = trainer.forward_backward([ts.Datum([VOCABULARY], {"target_tokens": [5]})])
        with pytest.raises(ts.InvalidDatum, match=f"datum 0.*vocabulary of {VOCABULARY}"):
            failed.result(60)
        trainer.zero_grad()
        assert step(trainer)["loss:sum"] > 0


SAMPLES: dict[str, tuple[Call, Error, tuple[str, ...]]] = {
    "outside-the-vocabulary": (
        sample([5, VOCABULARY]),
        ts.InvalidDatum,
        ("prompt", str(VOCABULARY), f"vocabulary of {VOCABULARY}"),
    ),
    "one-of-a-list": (sample([PROMPT, [VOCABULARY + 5]]), ts.InvalidDatum, ("request 1", str(VOCABULARY + 5))),
    "longer-than-the-context": (
        sample([5] * (CONTEXT + 1)),
        ts.PromptTooLong,
        ("prompt", str(CONTEXT + 1), f"context of {CONTEXT}"),
    ),
    "no-room-for-a-token": (sample([5] * CONTEXT), ts.PromptTooLong, ("prompt", f"context of {CONTEXT}")),
    "no-room-for-all-tokens": (
        sample([5] * 500, max_tokens=13),
        ts.PromptTooLong,
        ("500", "max_tokens=13", f"context of {CONTEXT}"),
    ),
    "stop-outside-the-vocabulary": (sample(PROMPT, stop=[VOCABULARY]), ts.InvalidRequest, ("stop", str(VOCABULARY))),
    "bias-outside-the-vocabulary": (
        sample(PROMPT, logit_bias={VOCABULARY: 1.0}),
        ts.InvalidRequest,
        ("logit_bias", str(VOCABULARY)),
    ),
    "logprobs-outside-the-vocabulary": (
        lambda trainer: trainer.base_sampling_client().compute_logprobs([VOCABULARY]),
        ts.InvalidDatum,
        ("prompt", f"vocabulary of {VOCABULARY}"),
    ),
    "logprobs-longer-than-the-context": (
        lambda trainer: trainer.base_sampling_client().compute_logprobs([5] * (CONTEXT + 1)),
        ts.PromptTooLong,
        (f"context of {CONTEXT}",),
    ),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_a_bad_sample_costs_nothing_and_harms_nobody(
    service: ts.ServiceClient, two_steps: list[dict[str, float]], case: str
) -> None:
    call, error, words = SAMPLES[case]
    with new_trainer(service) as trainer:
        assert step(trainer) == two_steps[0]
        sampler = trainer.save_weights_and_get_sampling_client()
        params = ts.SamplingParams(max_tokens=4, seed=1)
        before = sampler.sample(PROMPT, 2, params).result(60)
        spent = trainer.usage().total
        with pytest.raises(ts.TrainSessionError) as caught:
            call(trainer).result(60)
        assert type(caught.value) is error
        assert_says(caught.value, words)
        assert trainer.usage().total == spent
        again = sampler.sample(PROMPT, 2, params).result(60)
        for one, other in zip(before.sequences, again.sequences, strict=True):
            assert one.logprobs == other.logprobs
        assert step(trainer) == two_steps[1]


def test_the_whole_context_is_no_bad_input(service: ts.ServiceClient) -> None:
    with service.create_sampling_client(MODEL) as sampler:
        whole = tokens(CONTEXT).tolist()
        assert len(sampler.compute_logprobs(whole).result(60)) == CONTEXT
        (sequence,) = (
            sampler.sample(whole[:-1], sampling_params=ts.SamplingParams(ignore_eos=True)).result(60).sequences
        )
        assert (len(sequence.tokens), sequence.stop_reason) == (1, "length")
