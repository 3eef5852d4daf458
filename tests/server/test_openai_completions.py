"""Text completions with the real client, and the list of models."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from openai.types import Completion

from tests.server.conftest import Door
from trainsession import SamplingParams

MODEL = "tiny-llama"
TEXTS = ["The capital of France", "What is 12 + 7?"]


def complete(door: Door, prompt: Any, **fields: Any) -> Completion:
    return door.openai.completions.create(**{"model": MODEL, "prompt": prompt, **fields})


def test_prompts_are_texts_or_tokens_one_or_many(door: Door) -> None:
    tokenizer = door.sdk.get_tokenizer(MODEL)
    ids = [tokenizer.encode(text) for text in TEXTS]
    one = complete(door, TEXTS[0], seed=1, max_tokens=5)
    assert complete(door, ids[0], seed=1, max_tokens=5).choices == one.choices
    many = complete(door, TEXTS, seed=1, max_tokens=5, n=2)
    assert complete(door, ids, seed=1, max_tokens=5, n=2).choices == many.choices
    with door.sdk.create_sampling_client(MODEL) as sampler:
        native = sampler.sample(TEXTS, 2, SamplingParams(max_tokens=5, seed=1)).result(60)
    assert [choice.text for choice in many.choices] == [s.text for response in native for s in response.sequences]
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage is not None
    assert many.usage.prompt_tokens == sum(map(len, ids)) == sum(response.usage.prefill for response in native)
    assert many.usage.completion_tokens == 20


def test_sixteen_tokens_unless_told_otherwise(door: Door) -> None:
    usage = complete(door, "a", logit_bias={"2": -100}).usage
    assert usage is not None
    assert usage.completion_tokens == 16


def test_echo_scores_the_prompt(door: Door) -> None:
    tokenizer = door.sdk.get_tokenizer(MODEL)
    with door.sdk.create_sampling_client(MODEL) as sampler:
        expected = sampler.compute_logprobs(TEXTS[0]).result(60)
    for max_tokens in (0, 1):
        answer = complete(door, tokenizer.encode(TEXTS[0]), echo=True, max_tokens=max_tokens, logprobs=2, seed=1)
        (choice,) = answer.choices
        assert choice.text.startswith(TEXTS[0])
        assert choice.logprobs is not None
        scored = choice.logprobs.token_logprobs
        assert scored is not None
        assert scored[: len(expected)] == expected
        assert len(scored) == len(expected) + max_tokens
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        for token, offset in list(zip(tokens, offsets, strict=True))[: len(expected)]:
            assert choice.text.startswith(token, offset)
        tops = choice.logprobs.top_logprobs
        assert tops is not None
        assert tops[0] is None
        for token, logprob, top in list(zip(tokens, scored, tops, strict=True))[1:]:
            assert top[token] == logprob
            assert 2 <= len(top) <= 3
            assert max(top.values()) >= logprob
    assert complete(door, TEXTS[0], echo=True, max_tokens=0).choices[0].text == TEXTS[0]


def test_offsets_are_places_in_the_text(door: Door) -> None:
    (choice,) = complete(door, "a", max_tokens=30, logprobs=0, seed=3).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs is None
    offsets = choice.logprobs.text_offset or []
    assert offsets[0] == 0
    assert np.all(np.diff(offsets) >= 0)
    placed = list(zip(choice.logprobs.tokens or [], offsets, strict=True))
    spelled = [(token, place) for token, place in placed if not token.startswith(("bytes:", "token_id:", "<|"))]
    assert len(spelled) > 10
    # Bytes that are no character are known as such, and replaced, with the token after them.
    for token, place in spelled:
        assert choice.text[place:].lstrip("\ufffd").startswith(token)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 2}, {"echo": True}, {"stop": "e"}])
def test_a_stream_put_together_is_the_whole_answer(door: Door, fields: dict[str, Any]) -> None:
    whole = complete(door, TEXTS, seed=4, max_tokens=10, **fields)
    before = door.metered()
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    given: dict[str, Any] = {"model": MODEL, "prompt": TEXTS, "seed": 4, "max_tokens": 10, **fields, **options}
    chunks: list[Completion] = list(door.openai.completions.create(**given))
    metered = door.metered()
    texts, logprobs = defaultdict(str), defaultdict(lambda: defaultdict(list))
    reasons = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                logprobs[choice.index][name] += values
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == (choice.logprobs.model_dump() if choice.logprobs else {})
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert metered.sample - before.sample == whole.usage.completion_tokens
    assert metered.prefill - before.prefill == whole.usage.prompt_tokens


def test_models_are_the_base_models_and_the_projects_weights(door: Door) -> None:
    trainer = door.sdk.create_lora_training_client(MODEL, rank=4)
    saved = trainer.save_weights_for_sampler("first").result(60)
    trainer.save_state("whole").result(60)
    ids = [model.id for model in door.openai.models.list()]
    assert {MODEL, "tiny-tools", saved.path} <= set(ids)
    assert not any("/state/" in name for name in ids)
    for name in (MODEL, saved.path, trainer.openai_model):
        assert door.openai.models.retrieve(name).id == name
    trainer.close()


def test_samples_of_a_base_model_have_one_payer(door: Door) -> None:
    def payers() -> list[str]:
        return [s.session_id for s in door.sdk.list_sessions() if s.name == "base model" and s.base_model == MODEL]

    complete(door, "a", max_tokens=2)
    (payer,) = payers()
    before = door.sdk.usage(payer).total.sample
    complete(door, "a", max_tokens=2)
    assert payers() == [payer]
    assert door.sdk.usage(payer).total.sample - before == 2
    door.sdk._connection.call("POST", f"/v1/sessions/{payer}/close")
    complete(door, "a", max_tokens=2)
    assert len(payers()) == 2
    complete(door, "a", max_tokens=2)
    assert len(payers()) == 2
    assert door.sdk.usage(payer).total.sample - before == 2
