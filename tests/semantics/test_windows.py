"""Accumulation windows through the SDK: what a step may use, and what `progress` and exports then hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import trainsession as ts

from .loop import ADAM, batch, datum, logprobs_of, new_trainer, rl_datum, step


def test_zero_grad_drops_what_was_accumulated(service: ts.ServiceClient, two_steps: list[dict[str, float]]) -> None:
    with new_trainer(service) as trainer:
        trainer.forward_backward([datum(20, 9)])
        trainer.zero_grad()
        assert step(trainer) == two_steps[0]
        trainer.forward_backward([datum(20, 9)])
        trainer.zero_grad()
        with pytest.raises(ts.NoGradients):
            trainer.optim_step(ADAM).result(60)
        assert step(trainer) == two_steps[1], "the step that failed moved neither weights, moments nor count"
        with pytest.raises(ts.NoGradients):
            trainer.optim_step(ADAM).result(60)


def test_forward_adds_nothing_to_a_window(service: ts.ServiceClient, two_steps: list[dict[str, float]]) -> None:
    with new_trainer(service) as trainer:
        trainer.forward(batch())
        with pytest.raises(ts.NoGradients):
            trainer.optim_step(ADAM).result(60)
        loss = trainer.forward_backward(batch())
        trainer.forward([datum(20, 9)])
        stepped = trainer.optim_step(ADAM)
        assert loss.result(60).metrics | stepped.result(60).metrics == two_steps[0]


def test_an_incomplete_window_is_stepped_only_when_asked_for(service: ts.ServiceClient) -> None:
    with new_trainer(service) as trainer, new_trainer(service) as clean:
        part = batch()[:1]
        trainer.forward_backward(part)
        failed = trainer.forward_backward([rl_datum(), rl_datum(logprobs=np.full(7, -1e30))], "importance_sampling")
        with pytest.raises(ts.NonFinite):
            failed.result(60)
        with pytest.raises(ts.IncompleteGradients):
            trainer.optim_step(ADAM).result(60)
        metrics = trainer.optim_step(ADAM, allow_incomplete=True).result(60).metrics
        clean.forward_backward(part)
        assert metrics == clean.optim_step(ADAM).result(60).metrics
        assert step(trainer) == step(clean), "the window that follows is whole again"


def test_a_part_that_was_cancelled_is_missing_too(service: ts.ServiceClient, two_steps: list[dict[str, float]]) -> None:
    with new_trainer(service) as trainer:
        futures = [trainer.forward_backward(batch()) for _ in range(40)]
        cancelled = [future for future in reversed(futures) if future.cancel()]
        assert cancelled, "the last of forty had not started yet"
        with pytest.raises(ts.IncompleteGradients, match="cancelled"):
            trainer.optim_step(ADAM).result(60)
        with pytest.raises(ts.Cancelled):
            cancelled[0].result(60)
        trainer.zero_grad()
        assert step(trainer) == two_steps[0]


def test_a_custom_loss_that_raised_is_missing_from_its_window(
    service: ts.ServiceClient, two_steps: list[dict[str, float]]
) -> None:
    def broken(data: list[ts.Datum], logprobs: list[torch.Tensor]) -> Any:
        raise KeyError("reward")

    with new_trainer(service) as trainer:
        failed = trainer.forward_backward_custom(batch(), broken)
        trainer.forward_backward(batch())
        with pytest.raises(ts.IncompleteGradients):
            trainer.optim_step(ADAM).result(60)
        with pytest.raises(KeyError, match="reward"):
            failed.result(60)
        trainer.zero_grad()
        assert step(trainer) == two_steps[0]


def test_progress_is_committed_with_its_step_and_only_with_it(service: ts.ServiceClient) -> None:
    trainer = new_trainer(service)
    assert trainer.info().progress is None
    trainer.forward_backward(batch())
    trainer.optim_step(ADAM, progress={"epoch": 1, "seen": [3, 4]}).result(60)
    assert trainer.info().progress == {"epoch": 1, "seen": [3, 4]}
    with pytest.raises(ts.NoGradients):
        trainer.optim_step(ADAM, progress={"epoch": 2}).result(60)
    trainer.forward_backward(batch())
    trainer.optim_step(ADAM).result(60)  # none given: the last one stays
    again = service.attach(trainer.session_id)
    assert again.progress == {"epoch": 1, "seen": [3, 4]}
    assert again.info().step == 2
    again.close()


@pytest.mark.parametrize("train_unembed", [False, True])
def test_a_merged_export_is_the_model_in_transformers(
    service: ts.ServiceClient, tmp_path: Path, train_unembed: bool
) -> None:
    """Of a model with tied embeddings; training the unembedding unties them and leaves the embedding alone."""
    with new_trainer(service, train_unembed=train_unembed) as trainer:
        step(trainer)
        data = [datum(15, 6)]
        expected = logprobs_of(trainer, data)
        directory = trainer.export(tmp_path / "merged", merged=True).result(60)
    merged = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = merged(input_ids=torch.tensor(data[0].model_input.to_ints())[None]).logits[0]
    found = logits.log_softmax(-1).gather(1, data[0].loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    assert bool(merged.config.tie_word_embeddings) is not train_unembed
    every = dict(merged.named_parameters(remove_duplicate=False))
    tied = torch.equal(every["lm_head.weight"], every["model.embed_tokens.weight"])
    assert tied is not train_unembed
