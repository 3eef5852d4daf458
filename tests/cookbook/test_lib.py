from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import trainsession as ts
from cookbook import arithmetic_rl, chat_sl, gsm8k_rl, preference
from cookbook.lib.config import BaseConfig, UsageError, command_line, option, parse
from cookbook.lib.estimates import Proportion
from cookbook.lib.plot import running_mean, save_curve
from cookbook.lib.run import Run, usage_table
from cookbook.lib.schedule import cosine


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    group_size: int = option(8, "samples")
    held_out: int | None = option(None, "problems")
    rate: float = option(1e-4, "learning rate")
    control: bool = option(False, "a switch")


def test_flags_fill_the_settings():
    argv = [
        "--steps",
        "3",
        "--group-size",
        "4",
        "--held-out",
        "7",
        "--rate",
        "0.5",
        "--control",
        "--out",
        "here",
        "--base-url",
        "http://x",
    ]
    config = parse(Config, "test", "help", argv)
    assert config == Config(steps=3, group_size=4, held_out=7, rate=0.5, control=True, out="here", base_url="http://x")
    assert parse(Config, "test", "help", []) == Config()


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(Config, "test", "help", ["--lr", "1"])
    assert "--lr" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [arithmetic_rl, chat_sl, gsm8k_rl, preference])
def test_every_recipe_has_the_common_flags(recipe, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        command_line(recipe.main, recipe.Config, "recipe", recipe.__doc__, ["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--base-url", "--model", "--data", "--steps", "--seed", "--out"))


def test_an_error_of_the_caller_is_one_line(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"^chat_sl: needs --data"):
        command_line(chat_sl.main, chat_sl.Config, "chat_sl", chat_sl.__doc__, ["--out", str(tmp_path)])


def test_run_writes_settings_metrics_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    run = Run("recipe", Config(seed=5, out=str(out)))
    run.log("train", 1, {"reward": 0.25}, {"grad_norm": 2.0, "step": 7})
    run.log("train", 2, {"reward": float("nan")})
    usage = ts.UsageReport(
        ts.Usage(prefill=1_000_000, sample=2_000_000, train=500_000, cost=0.85),
        {},
        {"m": {"prefill": 0.1, "prefill_cached": 0.05, "sample": 0.3, "train": 0.3}},
        wall_seconds=10.0,
        busy_seconds=4.0,
    )
    run.finish({"model": "m", "greedy": Proportion(3, 4)}, usage)

    assert json.loads((out / "config.json").read_text())["seed"] == 5
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["phase"], row["step"]) for row in rows] == [("train", 1), ("train", 2)]
    assert (rows[0]["reward"], rows[0]["grad_norm"]) == (0.25, 2.0)
    assert np.isnan(rows[1]["reward"])  # shown, never hidden
    summary = (out / "summary.txt").read_text()
    printed = capsys.readouterr().out
    assert "train 1  reward 0.25\n" in printed
    assert summary in printed
    for line in ("75.0% (3 of 4", "10 s wall = 4 s engine + 6 s idle", "0.600000 USD", "0.850000 USD"):
        assert line in summary


def test_a_run_never_overwrites_another(tmp_path: Path):
    config = Config(out=str(tmp_path))
    Run("recipe", config).log("train", 1, {"reward": 1.0})
    with pytest.raises(UsageError, match="another --out"):
        Run("recipe", config)


def test_usage_table_costs_add_up():
    total = ts.Usage(prefill=10, prefill_cached=20, sample=30, train=40, cost=1e-5)
    prices = {"prefill": 0.1, "prefill_cached": 0.1, "sample": 0.1, "train": 0.1}
    lines = usage_table(ts.UsageReport(total, {}, {"m": prices}))
    assert [line.split()[:2] for line in lines[1:]] == [
        ["prefill", "10"],
        ["prefill_cached", "20"],
        ["sample", "30"],
        ["train", "40"],
        ["total", "100"],
    ]
    costs = [float(line.split()[-2]) for line in lines[1:]]
    assert sum(costs[:-1]) == pytest.approx(costs[-1], abs=2e-6)


@pytest.mark.parametrize("successes", [0, 1, 37, 199, 200])
def test_wilson_interval_solves_its_equation(successes: int):
    """The bounds are the p with |p_hat - p| = z sqrt(p (1 - p) / n)."""
    share = Proportion(successes, 200)
    low, high = share.interval
    assert 0 <= low <= share.value <= high <= 1
    for bound in (low, high):
        deviation = 1.959964 * np.sqrt(bound * (1 - bound) / 200)
        assert abs(share.value - bound) == pytest.approx(deviation, abs=1e-9)


def test_cosine_schedule():
    factors = [cosine(step, 10, warmup=4) for step in range(10)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[7] == pytest.approx(0.5)
    assert 0 < factors[9] < factors[8] < factors[7]
    assert cosine(0, 1) == 1.0
    assert cosine(1, 3, warmup=5) == pytest.approx(0.4)


def test_running_mean():
    assert running_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


def test_curve_is_a_png_and_leaves_pyplot_alone(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: cookbook)")
    path = tmp_path / "curve.png"
    points = [(0, Proportion(64, 200)), (3, Proportion(150, 200))]
    save_curve(path, title="t", ylabel="y", name="reward", values=[0.1, 0.3, 0.2], held_out={"greedy": points})
    assert path.read_bytes().startswith(b"\x89PNG")
    save_curve(path, title="t", ylabel="y", name="nll", values=[], held_out={"held-out": [(0, 2.5)]})
    assert path.stat().st_size > 1000
