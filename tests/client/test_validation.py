"""What is wrong is said in the call itself, and takes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.fake import FakeService, i32
from trainsession import Datum, InvalidDatum, InvalidRequest, LimitExceeded, SamplingParams
from trainsession.client.checkpoint_files import read_adapter
from trainsession.client.training import TrainingClient

GOOD: dict[str, Any] = {"target_tokens": [2, 3, 4], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


def datum(**changes: Any) -> Datum:
    inputs = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    return Datum([1, 2, 3], inputs)


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        (datum(logprobs=[-1.0] * 2), "logprobs"),
        (datum(advantages=[1.0] * 4), "advantages"),
        (datum(advantages=None), "advantages"),
        (datum(rewards=[1.0] * 3), "rewards"),
        (datum(target_tokens=[2, 3]), "target_tokens"),
        (datum(target_tokens=[2, 3, -100]), "target_tokens"),
        (datum(target_tokens=None), "target_tokens"),
        (datum(advantages=[1.0, float("nan"), 1.0]), "advantages"),
        (datum(logprobs=[-1.0, float("-inf"), -1.0]), "logprobs"),
        (datum(temperature=0.0), "temperature"),
        (Datum([], {"target_tokens": []}), "model_input"),
    ],
)
def test_a_bad_datum_is_named_with_its_key(fake: FakeService, trainer: TrainingClient, bad: Datum, key: str) -> None:
    with pytest.raises(InvalidDatum, match="datum 1") as caught:
        trainer.forward_backward([datum(), bad], "importance_sampling")
    assert caught.value.details == {"datum": 1, "key": key}
    assert key in caught.value.message
    assert trainer.next_seq == 1
    assert fake.submits == []


@pytest.mark.parametrize(
    ("loss_fn", "config", "says"),
    [
        ("cross_entropi", None, "cross_entropy"),
        ("dro", {}, "beta"),
        ("ppo", {"clip": 0.2}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": float("nan")}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold"),
        ("importance_sampling", {"beta": 1.0}, "none"),
    ],
)
def test_a_bad_loss_says_what_exists(
    fake: FakeService, trainer: TrainingClient, loss_fn: Any, config: Any, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        trainer.forward_backward([datum()], loss_fn, config)
    assert trainer.next_seq == 1


def test_numpy_and_torch_scalars_are_configuration_too(fake: FakeService, trainer: TrainingClient) -> None:
    config = {"clip_low_threshold": np.float32(0.5), "clip_high_threshold": np.int64(2)}
    trainer.forward_backward([datum()], "ppo", config).result(10)  # type: ignore[arg-type]
    assert fake.submits[0]["params"]["loss_fn_config"] == {"clip_low_threshold": 0.5, "clip_high_threshold": 2}


@pytest.mark.parametrize("data", [[], (), datum(), {"a": 1}, None, [{"model_input": [1]}]])
def test_data_must_be_a_list_of_datums(trainer: TrainingClient, data: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"data|datum 0"):
        trainer.forward(data)
    assert trainer.next_seq == 1


@pytest.mark.parametrize("name", ["", "a/b", "..\\x", "x" * 129, "a b", 7])
def test_checkpoint_names(trainer: TrainingClient, name: Any) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        trainer.save_state(name)
    with pytest.raises(InvalidRequest, match="name"):
        trainer.save_weights_for_sampler(name)


def test_other_arguments(fake: FakeService, trainer: TrainingClient) -> None:
    for ttl in (0, -1, float("nan"), "1h"):
        with pytest.raises(InvalidRequest, match="ttl_seconds"):
            trainer.save_state("x", ttl_seconds=ttl)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ts://"):
        trainer.load_state("/some/where")
    with pytest.raises(InvalidRequest, match="AdamParams"):
        trainer.optim_step({"learning_rate": 1e-4})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="progress"):
        trainer.optim_step(progress={"loss": float("nan")})
    with pytest.raises(InvalidRequest, match="progress"):
        trainer.optim_step(progress=object())
    assert fake.submits == []


def test_sampling_arguments(fake: FakeService, trainer: TrainingClient) -> None:
    sampler = trainer.base_sampling_client()
    sampler._connection._tokenizers["tiny"] = _NothingEncoded()  # type: ignore[assignment]
    empty: list[Any] = [[], "", i32([])]
    for prompt in empty:
        with pytest.raises(InvalidRequest, match="empty"):
            sampler.sample(prompt)
    with pytest.raises(InvalidRequest, match="prompt 1"):
        sampler.sample([[1, 2], []])
    with pytest.raises(InvalidRequest, match="prompt 1"):
        sampler.sample([[1, 2], [1.5]])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="num_samples"):
        sampler.sample([1], num_samples=0)
    with pytest.raises(InvalidRequest, match="num_samples"):
        sampler.sample([1], num_samples=2.0)  # type: ignore[call-overload]
    with pytest.raises(LimitExceeded, match="max_num_samples"):
        sampler.sample([1], num_samples=1025)
    with pytest.raises(LimitExceeded, match="max_topk_logprobs"):
        sampler.sample([1], topk_logprobs=129)
    with pytest.raises(LimitExceeded, match="max_sampled_tokens"):
        sampler.sample([1], num_samples=1000, sampling_params=SamplingParams(max_tokens=5000))
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        sampler.sample([1], sampling_params={"max_tokens": 3})  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="chat messages are a list"):
        sampler.sample({"role": "user", "content": "hello"})  # type: ignore[call-overload]
    assert fake.samples == []


def test_a_text_or_a_function_where_none_belongs(trainer: TrainingClient, batch: list[Datum]) -> None:
    with pytest.raises(InvalidRequest, match="got a string; encode it"):
        Datum("hello", {"target_tokens": [1]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="forward_backward_custom takes a function"):
        trainer.forward_backward(batch, lambda data, logprobs: (logprobs[0].sum(), {}))  # type: ignore[arg-type]


class _NothingEncoded:
    def encode(self, text: str) -> list[int]:
        assert text == ""
        return []


def test_only_safetensors_adapters_are_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="not a directory"):
        read_adapter(tmp_path / "missing")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match=r"adapter_model.bin is pickled"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "training_args.bin").write_bytes(b"pickle")
    assert read_adapter(tmp_path) == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
