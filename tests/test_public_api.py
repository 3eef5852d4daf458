"""What `import trainsession` offers, how fast, and that twins are twins."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from typing import Any

import pytest

import trainsession as ts
from trainsession import errors

TRAINER = {
    "forward",
    "forward_backward",
    "forward_backward_custom",
    "optim_step",
    "zero_grad",
    "save_state",
    "load_state",
    "load_state_with_optimizer",
    "save_weights_for_sampler",
    "save_weights_and_get_sampling_client",
    "export",
    "base_sampling_client",
    "log",
    "get_tokenizer",
    "usage",
    "close",
}
SERVICE = {
    "create_lora_training_client",
    "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer",
    "create_sampling_client",
    "attach",
    "import_adapter",
    "download_checkpoint",
    "list_base_models",
    "list_sessions",
    "list_checkpoints",
    "delete_checkpoint",
    "usage",
}
SAMPLER = {"sample", "stream", "compute_logprobs", "get_tokenizer"}
CLIENTS: list[type[Any]] = [ts.ServiceClient, ts.TrainingClient, ts.SamplingClient]


def test_every_listed_name_exists_and_every_public_name_is_listed() -> None:
    missing = [name for name in ts.__all__ if not hasattr(ts, name)]
    assert missing == []
    unlisted = [
        name
        for name, value in vars(ts).items()
        if not name.startswith("_") and name not in ts.__all__ and not inspect.ismodule(value)
    ]
    assert set(unlisted) <= {"TYPE_CHECKING", "annotations"}
    assert ts.Tokenizer.__name__ == "Tokenizer"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ts.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_error_is_public() -> None:
    tree = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.TrainSessionError)
    }
    assert {error.__name__ for error in tree} <= set(ts.__all__)


@pytest.mark.parametrize(
    ("client", "methods"), [(ts.TrainingClient, TRAINER), (ts.ServiceClient, SERVICE), (ts.SamplingClient, SAMPLER)]
)
def test_the_promised_methods_exist_and_say_what_they_do(client: type[Any], methods: set[str]) -> None:
    for name in methods:
        assert (getattr(client, name).__doc__ or "").strip(), f"{client.__name__}.{name} has no docstring"


@pytest.mark.parametrize("client", CLIENTS)
def test_async_twins_have_the_signature_of_their_method(client: type[Any]) -> None:
    twins = [name for name in vars(client) if name.endswith("_async")]
    assert len(twins) >= 4
    for name in twins:
        method, twin = getattr(client, name.removesuffix("_async")), getattr(client, name)
        assert inspect.iscoroutinefunction(twin), name
        assert inspect.signature(twin) == inspect.signature(method), name
        assert twin.__name__ == name


@pytest.mark.parametrize("client", CLIENTS)
def test_what_takes_time_has_a_twin(client: type[Any]) -> None:
    sync_only = {"stream", "base_sampling_client", "get_base_model", "fetch", "metrics_log", "wait"}
    sync_only |= {"openai_client", "async_openai_client"}  # they send nothing; the second is the first's twin
    for name, value in vars(client).items():
        if not name.startswith("_") and inspect.isfunction(value) and not name.endswith("_async"):
            assert name in sync_only or hasattr(client, f"{name}_async"), f"{client.__name__}.{name}"


def test_signatures_that_code_from_elsewhere_relies_on() -> None:
    create = list(inspect.signature(ts.ServiceClient.create_lora_training_client).parameters)
    assert create[1:8] == ["base_model", "rank", "alpha", "seed", "train_attn", "train_mlp", "train_unembed"]
    assert list(inspect.signature(ts.ServiceClient).parameters) == [
        "base_url",
        "api_key",
        "project",
        "storage",
        "role_arn",
    ]
    sample = list(inspect.signature(ts.SamplingClient.sample).parameters)
    assert sample[1:6] == [
        "prompt",
        "num_samples",
        "sampling_params",
        "include_prompt_logprobs",
        "topk_prompt_logprobs",
    ]
    assert list(inspect.signature(ts.TrainingClient.forward_backward).parameters)[1:] == [
        "data",
        "loss_fn",
        "loss_fn_config",
    ]
    assert list(inspect.signature(ts.TrainingClient.save_state).parameters)[1:] == ["name", "ttl_seconds", "overwrite"]


def test_sagemaker_arguments_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(ts.InvalidRequest, match="sagemaker"):
        ts.ServiceClient("sagemaker://us-west-2")
    with pytest.raises(ts.InvalidRequest, match="storage"):
        ts.ServiceClient("http://127.0.0.1:9", storage="s3://bucket")
    with pytest.raises(ts.InvalidRequest, match="role_arn"):
        ts.ServiceClient(role_arn="arn:aws:iam::1:role/x")
    with pytest.raises(ts.ConnectionFailed, match="http://host"):
        ts.ServiceClient("ftp://nowhere").list_sessions()


def test_a_wrong_address_is_an_error_within_seconds() -> None:
    started = time.monotonic()
    with ts.ServiceClient("http://127.0.0.1:9") as service, pytest.raises(ts.ConnectionFailed, match=r"127\.0\.0\.1:9"):
        service.list_base_models()
    assert time.monotonic() - started < 20


def test_the_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; started = time.perf_counter(); import trainsession; "
        "print(time.perf_counter() - started, *sorted(m for m in sys.modules if '.' not in m))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    loaded = set(runs[0][1:])
    heavy = {"torch", "transformers", "fastapi", "starlette", "uvicorn", "sqlalchemy", "httpx", "tokenizers", "tqdm"}
    assert loaded & heavy == set()
    # 0.5 s is the promise on an idle machine (bench/overhead.py measures it); others may be at work here.
    assert min(float(run[0]) for run in runs) < 2.0
