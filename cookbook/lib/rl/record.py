"""Trajectories as JSON Lines, and as a page to read them on.

record = Record(run.directory / "trajectories.jsonl", tokenizer)
record.add(step, groups, advantages)
write_page(run.directory / "trajectories.jsonl", run.directory / "trajectories.html")
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy.typing as npt

import trainsession as ts

from .rollouts import Trajectory, TrajectoryGroup

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; } details details { margin-left: 1.5rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .5rem; background: #f4f4f4; }
pre.action { background: #fff; border-left: 3px solid #2563eb; } pre.error { color: #b91c1c; }
span.token { border-radius: 2px; } small { color: #555; }
"""


class Record:
    """Appends trajectories to a file.

    Args:
        path: JSON Lines, one trajectory a row; made if it is not there.
        tokenizer: Whose text of observations is written beside their tokens.
    """

    def __init__(self, path: Path, tokenizer: ts.Tokenizer) -> None:
        self._path, self._tokenizer = path, tokenizer

    def add(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[npt.NDArray[Any]] | None = None,
    ) -> None:
        """The trajectories of one step, those that failed among them.

        Args:
            step: Of the run.
            groups: What was rolled out.
            advantages: By group, one per trajectory that ended.
        """
        with self._path.open("a", encoding="utf-8") as file:
            for index, group in enumerate(groups):
                for place, trajectory in enumerate([*group.trajectories, *group.failed]):
                    row = {"step": step, "group": index, "name": group.name, **self._row(trajectory)}
                    if advantages is not None and place < len(group.trajectories):
                        row["advantage"] = float(advantages[index][place])
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _row(self, trajectory: Trajectory) -> dict[str, Any]:
        turns = [
            {
                "observation": self._tokenizer.decode(list(turn.observation)),
                "observation_tokens": list(turn.observation),
                "action": turn.action.text,
                "tokens": list(turn.action.tokens),
                "pieces": [self._tokenizer.decode([token]) for token in turn.action.tokens],
                "logprobs": [float(value) for value in turn.action.logprobs],
                "stop_reason": turn.action.stop_reason,
                "reward": turn.step.reward,
                "metrics": dict(turn.step.metrics),
            }
            for turn in trajectory.turns
        ]
        row: dict[str, Any] = {"reward": trajectory.reward, "extra_reward": trajectory.extra_reward, "turns": turns}
        return {**row, "error": trajectory.error} if trajectory.error else row


def write_page(trajectories: Path, page: Path, *, title: str = "Trajectories") -> None:
    """One HTML file, without scripts or anything from elsewhere: steps, groups and episodes to unfold.

    A token's background is the darker the less likely it was; its logprob shows under the pointer.
    """
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
    with trajectories.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            steps.setdefault(row["step"], {}).setdefault(row["group"], []).append(row)
    parts = [f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{escape(title)}</h1>")
    for step, groups in sorted(steps.items()):
        rows = [row for group in groups.values() for row in group]
        ended = [row["reward"] for row in rows if "error" not in row]
        mean = f"mean reward {sum(ended) / len(ended):.3g}" if ended else "all failed"
        parts.append(f"<details><summary>step {step}: {len(rows)} episodes in {len(groups)} groups, {mean}</summary>")
        parts += [_group_html(index, group) for index, group in sorted(groups.items())]
        parts.append("</details>")
    page.write_text("\n".join(parts), encoding="utf-8")


def _group_html(index: int, rows: Sequence[dict[str, Any]]) -> str:
    name = f" {escape(rows[0]['name'])}" if rows[0]["name"] else ""
    rewards = ", ".join(f"{row['reward']:.3g}" for row in rows)
    episodes = "".join(_episode_html(place, row) for place, row in enumerate(rows))
    return f"<details><summary>group {index}{name}: rewards {rewards}</summary>{episodes}</details>"


def _episode_html(place: int, row: dict[str, Any]) -> str:
    advantage = f", advantage {row['advantage']:+.3g}" if "advantage" in row else ""
    parts = [f"<details><summary>episode {place}: reward {row['reward']:.3g}{advantage}</summary>"]
    for turn in row["turns"]:
        tokens = "".join(map(_token_html, turn["pieces"], turn["logprobs"]))
        metrics = "".join(f", {escape(name)} {value:.3g}" for name, value in turn["metrics"].items())
        parts.append(f"<pre>{escape(turn['observation'])}</pre><pre class='action'>{tokens}</pre>")
        parts.append(f"<small>{escape(turn['stop_reason'])}, reward {turn['reward']:.3g}{metrics}</small>")
    if "error" in row:
        parts.append(f"<pre class='error'>{escape(row['error'])}</pre>")
    return "".join([*parts, "</details>"])


def _token_html(piece: str, logprob: float) -> str:
    shade = round(0.6 * (1 - math.exp(min(0.0, logprob))), 2)
    style = f"background:rgba(234,88,12,{shade})"
    return f"<span class='token' style='{style}' title='{logprob:.3f}'>{escape(piece)}</span>"
