"""What a type checker must conclude from the SDK's signatures; pyright reads this file in ``make lint``."""

from __future__ import annotations

from typing import assert_type

import numpy as np

import trainsession as ts


def futures(trainer: ts.TrainingClient, batch: list[ts.Datum]) -> None:
    assert_type(trainer.forward_backward(batch), ts.OperationFuture[ts.ForwardBackwardOutput])
    assert_type(trainer.forward_backward(batch).result(), ts.ForwardBackwardOutput)
    assert_type(trainer.optim_step().result(), ts.OptimStepResponse)
    assert_type(trainer.zero_grad().result(), None)
    assert_type(trainer.save_state("x").result().path, str)
    trainer.forward_backward(batch, "ppo", {"clip_low_threshold": 0.9})
    trainer.forward_backward(batch, "no_such_loss")  # pyright: ignore[reportArgumentType]
    trainer.forward_backward(batch[0])  # pyright: ignore[reportArgumentType]
    trainer.optim_step({"learning_rate": 1.0})  # pyright: ignore[reportArgumentType]


def samples(sampler: ts.SamplingClient) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert_type(sampler.sample("text"), ts.OperationFuture[ts.SampleResponse])
    assert_type(sampler.sample([1, 2]), ts.OperationFuture[ts.SampleResponse])
    assert_type(sampler.sample(np.array([1, 2])), ts.OperationFuture[ts.SampleResponse])
    assert_type(sampler.sample(ts.ModelInput.from_ints([1])), ts.OperationFuture[ts.SampleResponse])
    assert_type(sampler.sample(chat), ts.OperationFuture[ts.SampleResponse])
    assert_type(sampler.sample(["a", "b"]), ts.OperationFuture[list[ts.SampleResponse]])
    assert_type(sampler.sample([[1], [2]]), ts.OperationFuture[list[ts.SampleResponse]])
    assert_type(sampler.sample([chat, chat]), ts.OperationFuture[list[ts.SampleResponse]])
    assert_type(sampler.compute_logprobs([1, 2]).result(), list[float | None])
    sampler.sample([1], sampling_params={"max_tokens": 3})  # pyright: ignore[reportArgumentType, reportCallIssue]


async def coroutines(service: ts.ServiceClient, batch: list[ts.Datum]) -> None:
    trainer = await service.create_lora_training_client_async("m", rank=8)
    assert_type(trainer, ts.TrainingClient)
    future = await trainer.forward_backward_async(batch)
    assert_type(future, ts.OperationFuture[ts.ForwardBackwardOutput])
    assert_type(await future, ts.ForwardBackwardOutput)
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    assert_type(await sampler.sample_async([1, 2]), ts.SampleResponse)
    async for delta in sampler.stream("text"):
        assert_type(delta.text, str)
