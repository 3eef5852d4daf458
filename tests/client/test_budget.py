"""A budget from both ends: an operator who types it, and a loop, a sampler and an OpenAI client that meet it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import trainsession as ts
from bench.null_engine import MODEL
from tests.cli.test_objects import run
from tests.server.keyed import keyed, make_key
from tests.server.owner import SpokenHost
from tests.service.money import TOKEN, priced


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return priced(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, keyed(home, SpokenHost.opener(tmp_path_factory.mktemp("files"))) as url:
        patch.delenv("TRAINSESSION_API_KEY", raising=False)
        patch.delenv("TRAINSESSION_BASE_URL", raising=False)
        yield url


def batch(tokens: list[int]) -> list[ts.Datum]:
    return [ts.Datum(tokens, {"target_tokens": tokens})]


def budget(home: Path, project: str, tokens: int, *more: str) -> dict[str, Any]:
    amount = f"{tokens * TOKEN:f}"
    return json.loads(run("projects", "set-budget", project, amount, *more, "--home", str(home), "--json")[0])


def test_a_loop_that_meets_its_budget_is_told_and_goes_on_when_it_is_raised(url: str, home: Path) -> None:
    key = make_key(home, "loop")
    assert budget(home, "loop", 10, "--per", "month")["period"] == "month"
    with ts.ServiceClient(url, key) as client:
        trainer = client.create_lora_training_client(MODEL, rank=1)
        first = trainer.forward_backward(batch([1, 2, 3]))  # 6
        second = trainer.forward_backward(batch([4, 5, 6]))
        step = trainer.optim_step(ts.AdamParams())
        assert first.result().usage.train == 3
        with pytest.raises(ts.BudgetExceeded, match=r"budget of 0\.00001 EUR \(month\)") as caught:
            second.result()
        assert caught.value.details["left"] == "0.000004000000"
        assert caught.value.request_id
        with pytest.raises(ts.IncompleteGradients):
            step.result()
        report = client.usage()
        assert report.budget is not None
        assert (report.budget.amount, report.budget.spent, report.budget.left) == (10 * TOKEN, 6 * TOKEN, 4 * TOKEN)
        assert report.budget.period == "month"
        assert report.budget.resets_at is not None
        assert "0.000004 left" in report._repr_html_()
        budget(home, "loop", 100)
        trainer.zero_grad()
        trainer.forward_backward(batch([4, 5, 6])).result()
        trainer.optim_step(ts.AdamParams()).result()
        assert client.usage().budget == ts.Budget(100 * TOKEN, "EUR", "total", 12 * TOKEN, Decimal(0), None)


def test_samples_that_fit_are_kept_and_the_others_say_so(url: str, home: Path) -> None:
    key = make_key(home, "sampler")
    with ts.ServiceClient(url, key) as client:
        sampler = client.create_sampling_client(MODEL)
        budget(home, "sampler", 25)  # a prompt of 2 with 3 tokens costs 11
        params = ts.SamplingParams(max_tokens=3)
        done, alone = (sampler.sample([1, 2], 1, params) for _ in range(2))
        assert len(done.result().sequences) == len(alone.result().sequences) == 1
        with pytest.raises(ts.BudgetExceeded, match="of the project's budget"):
            sampler.sample([1, 2], 1, params).result()
        assert client.usage().budget == ts.Budget(25 * TOKEN, "EUR", "total", 22 * TOKEN, Decimal(0), None)


def test_an_openai_client_is_told_once_and_pays_for_nothing(url: str, home: Path) -> None:
    key = make_key(home, "agents")
    budget(home, "agents", 11 + 10)
    sent: list[httpx.Request] = []
    http: Any = httpx.Client(event_hooks={"request": [sent.append]}, trust_env=False)
    client = openai.OpenAI(base_url=f"{url}/openai/v1", api_key=key, max_retries=5, http_client=http)
    ask = partial(client.completions.create, model=MODEL, max_tokens=3)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            ask(prompt=[[1, 2], [1, 2]], stream=stream)
        assert caught.value.code == caught.value.type == "insufficient_quota"
        assert "set-budget agents" in caught.value.message
    assert len(sent) == 2  # its five retries would change nothing
    with ts.ServiceClient(url, key) as own:
        report = own.usage()
        assert report.total.tokens == dict.fromkeys(report.total.tokens, 0)
        assert len(ask(prompt=[1, 2]).choices) == 1
        after = own.usage().budget
        assert after is not None
        assert (after.spent, after.reserved) == (11 * TOKEN, 0)
    assert len(sent) == 3


def test_an_operator_sets_lists_and_clears_budgets(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSESSION_HOME", str(home))
    make_key(home, "ops")
    table, _ = run("projects", "set-budget", "ops", "12.5", "--per", "month")
    assert re.search(r"ops +12\.500000000000 +0\.000000000000 +0\.\d+ +12\.500000000000 +EUR +month +20\d\d-", table)
    listed = {row["project"]: row["budget"] for row in json.loads(run("projects", "list", "--json")[0])}
    assert listed["ops"]["left"] == "12.500000000000"
    assert listed["default"] is None
    assert re.search(r"^ *ops .* 12\.500000000000 +EUR +month", run("projects", "list")[0], re.M)
    for amount, said in (("-1", "expected a number >= 0"), ("much", "expected an amount of money")):
        assert said in run("projects", "set-budget", "ops", "--", amount, code=1)[1]
    assert "no project nobody" in run("projects", "set-budget", "nobody", "1", code=1)[1]
    key = make_key(home, "ops")
    answer = httpx.get(f"{url}/v1/usage", headers={"Authorization": f"Bearer {key}"}, trust_env=False).json()
    assert answer["budget"] == listed["ops"]
    _, said = run("usage", "--base-url", url, "--api-key", key)
    assert "budget 12.500000 EUR a month: 0.000000 spent, 0.000000 reserved, 12.500000 left" in said
    assert "project ops has no budget" in run("projects", "clear-budget", "ops")[1]
    assert "and had none" in run("projects", "clear-budget", "ops")[1]
