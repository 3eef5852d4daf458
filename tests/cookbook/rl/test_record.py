from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

import trainsession as ts
from cookbook.lib.rl.env import Step
from cookbook.lib.rl.record import Record, write_page
from cookbook.lib.rl.rollouts import Trajectory, TrajectoryGroup, Turn

EVIL = "</pre><script>alert(1)</script> & Grüße"


class Page(HTMLParser):
    """Its text, and the tags that were left open or closed without having been opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.tags = "", list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_was_recorded_can_be_read_again_and_looked_at(tmp_path: Path, tiny_tokenizer: ts.Tokenizer):
    prompt, answer = tiny_tokenizer.encode(EVIL), tiny_tokenizer.encode("3 + 4 = 7")
    action = ts.SampledSequence(answer, [-0.5] * len(answer), "stop", "3 + 4 = 7")
    whole = Trajectory([Turn(prompt, action, Step(1.0, None, {"right": 1.0}))], extra_reward=0.5)
    failed = Trajectory([Turn(prompt, action, Step(0.25))], error=f"turn 2: step: {EVIL}")
    group = TrajectoryGroup("<sum>", [whole], [failed])
    file = tmp_path / "trajectories.jsonl"
    record = Record(file, tiny_tokenizer)
    record.add(1, [group], [np.array([0.75])])
    record.add(2, [TrajectoryGroup("", [], [Trajectory(error="make: OSError")])])

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["group"], row["reward"], row.get("error"), row.get("advantage")) for row in rows] == [
        (1, 0, 1.5, None, 0.75),
        (1, 0, 0.25, f"turn 2: step: {EVIL}", None),
        (2, 0, 0.0, "make: OSError", None),
    ]
    (turn,) = rows[0]["turns"]
    assert turn["observation"] == EVIL
    assert (turn["observation_tokens"], turn["tokens"]) == (prompt, answer)
    assert "".join(turn["pieces"]) == turn["action"] == "3 + 4 = 7"
    assert turn["metrics"] == {"right": 1.0}

    write_page(file, tmp_path / "page.html", title="A & B")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.tags <= {"meta", "title", "style", "h1", "details", "summary", "pre", "span", "small"}
    assert "http" not in text
    assert "mean reward 1.5" in page.text, "of those that ended"
    assert "step 2: 1 episodes in 1 groups, all failed" in page.text
    for shown in ("A & B", EVIL, "3 + 4 = 7", "<sum>: rewards 1.5, 0.25", "advantage +0.75", "make: OSError"):
        assert shown in page.text
