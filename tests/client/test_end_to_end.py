"""The whole path: SDK, transport, service and engine, with a tiny real model."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainsession as ts

MODEL = "tiny-llama"
TEXT = "The quick brown fox jumps over the lazy dog."


def new_trainer(service: ts.ServiceClient, **options: Any) -> ts.TrainingClient:
    return service.create_lora_training_client(MODEL, **{"rank": 4, "seed": 1, **options})


def data_of(trainer: ts.TrainingClient, text: str = TEXT) -> list[ts.Datum]:
    ids = trainer.get_tokenizer().encode(text)
    return [ts.Datum(ids[:-1], {"target_tokens": ids[1:]})]


def train(trainer: ts.TrainingClient, data: list[ts.Datum], steps: int) -> list[float]:
    """Losses of pipelined steps."""
    losses = []
    for _ in range(steps):
        losses.append(trainer.forward_backward(data))
        trainer.optim_step(ts.AdamParams(learning_rate=1e-2))
    return [future.result(60).metrics["loss:sum"] for future in losses]


def test_a_loop_learns_and_its_sampler_stays_frozen(service: ts.ServiceClient) -> None:
    with new_trainer(service, name="loop", tags=["test"], metadata={"k": [1]}) as trainer:
        data = data_of(trainer)
        before = train(trainer, data, 3)
        sampler = trainer.save_weights_and_get_sampling_client()
        frozen = sampler.compute_logprobs(data[0].model_input).result(60)
        now = trainer.forward(data).result(60)
        after = train(trainer, data, 5)
        assert after[-1] < after[0] < before[0]
        assert frozen[0] is None
        np.testing.assert_allclose(np.array(frozen[1:], float), now.logprobs[0].to_numpy()[:-1], rtol=1e-4, atol=1e-5)
        assert sampler.compute_logprobs(data[0].model_input).result(60) == frozen
        newer = trainer.save_weights_and_get_sampling_client().compute_logprobs(data[0].model_input).result(60)
        assert newer != frozen
        assert trainer.base_sampling_client().compute_logprobs(data[0].model_input).result(60) not in (frozen, newer)
        info = trainer.info()
        assert (info.name, info.tags, info.metadata, info.step) == ("loop", ("test",), {"k": [1]}, 8)
    assert trainer.info().state == "closed"


def test_samples_of_tokens_text_and_chat(service: ts.ServiceClient) -> None:
    sampler = service.create_sampling_client(MODEL)
    tokenizer = sampler.get_tokenizer()
    params = ts.SamplingParams(max_tokens=6, seed=3)
    text = sampler.sample(TEXT, num_samples=3, sampling_params=params).result(60)
    tokens = sampler.sample(tokenizer.encode(TEXT), num_samples=3, sampling_params=params).result(60)
    assert len({sequence.text for sequence in text.sequences}) > 1
    for one, other in zip(text.sequences, tokens.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert one.text == tokenizer.decode(one.tokens, skip_special_tokens=True)
        assert len(one.tokens) == len(one.logprobs)
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    both: Any = sampler.sample([chat, rendered], 2, sampling_params=params).result(60)
    # The second of a list begins at the next free seed, so that its draws are its own.
    alone = sampler.sample(rendered, 2, sampling_params=ts.SamplingParams(max_tokens=6, seed=5)).result(60)
    for expected, response in ((sampler.sample(chat, 2, params).result(60), both[0]), (alone, both[1])):
        for one, other in zip(expected.sequences, response.sequences, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
    assert text.usage.sample == sum(len(sequence.tokens) for sequence in text.sequences)
    sampler.close()


def test_a_stream_says_what_sample_says(service: ts.ServiceClient) -> None:
    sampler = service.create_sampling_client(MODEL)
    params = ts.SamplingParams(max_tokens=12, seed=5)
    whole = sampler.sample(TEXT, num_samples=2, sampling_params=params).result(60)
    stream = sampler.stream(TEXT, num_samples=2, sampling_params=params)
    deltas = list(stream)
    for index, sequence in enumerate(whole.sequences):
        mine = [delta for delta in deltas if delta.index == index]
        assert [token for delta in mine for token in delta.tokens] == sequence.tokens
        assert "".join(delta.text for delta in mine) == sequence.text
        assert [delta.stop_reason for delta in mine if delta.stop_reason] == [sequence.stop_reason]
    assert len(deltas) > 4
    assert stream.usage == whole.usage


def test_a_custom_loss_trains_as_the_built_in_one(service: ts.ServiceClient) -> None:
    def cross_entropy(data: list[ts.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, Mapping[str, Any]]:
        total = sum(
            ((lp * datum.loss_fn_inputs["mask"].to_torch()).sum() for lp, datum in zip(logprobs, data, strict=True)),
            start=torch.zeros(()),
        )
        return -total, {"largest:max": max(lp.max() for lp in logprobs)}

    steps, metrics = [], []
    for custom in (False, True):
        trainer = new_trainer(service)
        ids = data_of(trainer)[0].model_input.to_ints()
        mask = [0.5] * (len(ids) - 1)
        inputs = {"target_tokens": ids[1:], "mask" if custom else "weights": mask}
        data = [ts.Datum(ids[:-1], inputs), ts.Datum(ids[:4], {**inputs, "target_tokens": ids[1:5]} | _cut(inputs, 4))]
        backward = trainer.forward_backward_custom(data, cross_entropy) if custom else trainer.forward_backward(data)
        steps.append(trainer.optim_step(ts.AdamParams(learning_rate=1e-2)).result(60).metrics)
        metrics.append(backward.result(60))
        trainer.close()
    assert steps[1] == pytest.approx(steps[0], rel=1e-5)
    assert metrics[1].metrics["loss:sum"] == pytest.approx(metrics[0].metrics["loss:sum"], rel=1e-5)
    assert metrics[1].metrics["largest:max"] <= 0
    assert metrics[1].usage == metrics[0].usage
    for one, other in zip(metrics[0].logprobs, metrics[1].logprobs, strict=True):
        assert one == other


def _cut(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    return {key: value[:length] for key, value in inputs.items() if key != "target_tokens"}


def test_a_broken_custom_loss_leaves_no_half_batch(service: ts.ServiceClient) -> None:
    def broken(data: list[ts.Datum], logprobs: list[torch.Tensor]) -> Any:
        raise ZeroDivisionError("reward")

    trainer = new_trainer(service)
    data = data_of(trainer)
    trainer.forward_backward(data)
    failed = trainer.forward_backward_custom(data, broken)
    step = trainer.optim_step()
    with pytest.raises(ZeroDivisionError, match="reward"):
        failed.result(60)
    with pytest.raises(ts.IncompleteGradients):
        step.result(60)
    trainer.zero_grad().result(60)
    trainer.forward_backward(data)
    assert trainer.optim_step().result(60).metrics["step"] == 1
    trainer.close()


def test_checkpoints_there_and_back(service: ts.ServiceClient, tmp_path: Path) -> None:
    trainer = new_trainer(service)
    data = data_of(trainer)
    train(trainer, data, 2)
    state, weights = trainer.save_state("two").result(60), trainer.save_weights_for_sampler("two").result(60)
    with pytest.raises(ts.CheckpointExists):
        trainer.save_state("two").result(60)
    uninterrupted = train(trainer, data, 3)
    with_optimizer = service.create_training_client_from_state_with_optimizer(state.path)
    without = service.create_training_client_from_state(state.path)
    assert train(with_optimizer, data, 3) == uninterrupted
    cold = train(without, data, 3)
    assert cold[0] == uninterrupted[0]
    assert cold[1:] != uninterrupted[1:]
    trainer.load_state_with_optimizer(state.path).result(60)
    assert train(trainer, data, 3) == uninterrupted

    listed = {checkpoint.path: checkpoint for checkpoint in service.list_checkpoints(trainer.session_id)}
    assert listed[state.path].has_optimizer
    assert listed[weights.path].kind == "weights"
    service.download_checkpoint(weights.path, tmp_path / "adapter")
    imported = service.import_adapter(tmp_path / "adapter", base_model=MODEL, name=f"mine-{uuid.uuid4().hex[:8]}")
    prompt = data[0].model_input
    here = service.create_sampling_client(path=weights.path).compute_logprobs(prompt).result(60)
    assert service.create_sampling_client(path=imported.path).compute_logprobs(prompt).result(60) == here

    exported = trainer.export(tmp_path / "merged", merged=True).result(60)
    assert (exported / "config.json").is_file()
    assert (exported / "model.safetensors").is_file()
    service.delete_checkpoint(weights.path)
    with pytest.raises(ts.NotFound):
        service.create_sampling_client(path=weights.path)
    with pytest.raises(ts.CheckpointMismatch, match="state checkpoint"):
        service.create_sampling_client(path=state.path)
    for client in (trainer, with_optimizer, without):
        client.close()


def test_attach_goes_on_where_the_last_client_was(service: ts.ServiceClient) -> None:
    first = new_trainer(service)
    data = data_of(first)
    train(first, data, 1)
    first.forward_backward(data)
    step = first.optim_step(progress={"batch": 2}).result(60)
    second = service.attach(first.session_id)
    assert second.progress == {"batch": 2}
    assert second.next_seq == first.next_seq
    assert second.lora == first.lora
    with pytest.raises(ts.SessionFenced):
        first.forward_backward(data).result(60)
    fetched = [second.fetch(operation_id).result(60) for operation_id in second.unfetched]
    assert step in fetched, "only acknowledged in a later poll, so still there"
    second.forward_backward(data)
    assert second.optim_step().result(60).metrics["step"] == 3
    with pytest.raises(ts.NotFound):
        service.attach("s_unknown")
    with pytest.raises(ts.InvalidRequest, match="no trainer"):
        service.attach(str(service.create_sampling_client(MODEL).session_id))
    second.close()
    with pytest.raises(ts.SessionClosed):
        second.forward(data)


def test_what_only_the_service_can_know_is_typed_and_leaves_the_session_usable(service: ts.ServiceClient) -> None:
    trainer = new_trainer(service)
    data = data_of(trainer)
    with pytest.raises(ts.InvalidDatum, match="vocabulary") as caught:
        trainer.forward_backward([*data, ts.Datum([1, 10_000], {"target_tokens": [1, 2]})]).result(60)
    assert caught.value.details["datum"] == 1
    trainer.zero_grad().result(60)
    with pytest.raises(ts.NoGradients):
        trainer.optim_step().result(60)
    sampler = trainer.save_weights_and_get_sampling_client()
    with pytest.raises(ts.InvalidRequest, match="vocabulary"):
        sampler.sample([10_000], sampling_params=ts.SamplingParams(max_tokens=1)).result(60)
    with pytest.raises(ts.PromptTooLong):
        sampler.sample([5] * 600, sampling_params=ts.SamplingParams(max_tokens=1)).result(60)
    with pytest.raises(ts.NotFound):
        trainer.load_state("ts://s_unknown/state/x").result(60)
    with pytest.raises(ts.InvalidRequest, match="nothing_like_it"):
        new_trainer(service, target_modules=["nothing_like_it"]).forward(data).result(60)
    assert train(trainer, data, 1)[0] > 0
    trainer.close()


def test_unknown_models_and_absurd_adapters_are_said_at_once(service: ts.ServiceClient) -> None:
    with pytest.raises(ts.UnknownModel, match=MODEL):
        service.create_lora_training_client("no/such-model")
    with pytest.raises(ts.InvalidRequest, match="rank"):
        new_trainer(service, rank=0)
    with pytest.raises(ts.LimitExceeded, match="max_rank"):
        new_trainer(service, rank=10_000)
    with pytest.raises(ts.InvalidRequest, match="base_model"):
        service.create_lora_training_client("")
    with pytest.raises(ts.InvalidRequest, match="one of the two"):
        service.create_sampling_client()
    assert MODEL in [model.name for model in service.list_base_models()]


def test_usage_and_the_metrics_log(service: ts.ServiceClient) -> None:
    trainer = new_trainer(service)
    data = data_of(trainer)
    length = data[0].model_input.length
    train(trainer, data, 2)
    trainer.forward(data).result(60)
    usage = trainer.usage()
    assert (usage.total.train, usage.total.prefill) == (2 * length, length)
    assert usage.total.cost > 0
    assert trainer.session_id in service.usage().by_session
    assert trainer.session_id in usage._repr_html_()
    trainer.log({"loss": torch.tensor(1.5), "bad": float("nan"), "n": np.int64(3), "note": "x"}, step=1).result(60)
    (row,) = trainer.metrics_log()
    assert row["step"] == 1
    assert np.isnan(row["metrics"].pop("bad"))
    assert row["metrics"] == {"loss": 1.5, "n": 3, "note": "x"}
    trainer.close()


def test_coroutines_all_the_way(service: ts.ServiceClient) -> None:
    async def loop() -> float:
        trainer = await service.create_lora_training_client_async(MODEL, rank=2)
        data = data_of(trainer)
        backward = await trainer.forward_backward_async(data)
        step = await trainer.optim_step_async(ts.AdamParams())
        await step
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        responses = await asyncio.gather(
            *(sampler.sample_async([5, index], 1, ts.SamplingParams(max_tokens=2)) for index in range(8))
        )
        assert all(len(response.sequences[0].tokens) <= 2 for response in responses)
        await trainer.close_async()
        return (await backward).metrics["loss:sum"]

    assert asyncio.run(loop()) > 0


def test_a_forked_process_may_use_the_clients(service: ts.ServiceClient) -> None:
    sampler = service.create_sampling_client(MODEL)
    params = ts.SamplingParams(max_tokens=4, temperature=0)
    parent = sampler.sample(TEXT, sampling_params=params).result(60).text
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, sampler.sample(TEXT, sampling_params=params).result(60).text.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read().decode() == parent
    os.waitpid(child, 0)
    assert sampler.sample(TEXT, sampling_params=params).result(60).text == parent


def test_a_model_by_a_relative_path(
    service: ts.ServiceClient, models: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models / "models")
    for path in ("./tiny-llama", Path("tiny-llama")):
        with service.create_lora_training_client(path, rank=2) as trainer:
            assert Path(trainer.base_model) == tiny_model.resolve()
            assert trainer.get_tokenizer().encode("hello")
