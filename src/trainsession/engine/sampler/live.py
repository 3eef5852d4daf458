"""A request under way: what the scheduler need not know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ...errors import NonFinite
from .runner import ScoredRows
from .sampling import topk_logprobs
from .sequence import Request
from .stopping import StopCondition


@dataclass(slots=True, eq=False)
class Live:
    """A request that has not ended, with what the scheduler need not know."""

    request: Request
    stops: list[StopCondition]
    unfinished: set[int]
    start_logits_V: torch.Tensor | None = None
    """Of the prompt's last position; each sample's first token is drawn from it."""
    prompt_logprobs: list[float | None] = field(default_factory=list)
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)

    def score(self, scored: ScoredRows) -> None:
        """Fill in the logprobs of the prompt tokens that these rows predict, at T=1."""
        prompt = self.request.prompt
        stop = min(scored.stop, len(prompt) - 1)  # nothing follows the last token
        if stop <= scored.start:
            return
        logprobs_TV = torch.log_softmax(scored.logits_TV[: stop - scored.start].float(), dim=-1)
        targets = torch.tensor(prompt[scored.start + 1 : stop + 1], device=logprobs_TV.device)
        values = logprobs_TV.gather(1, targets[:, None])[:, 0].tolist()
        for offset, value in enumerate(values):
            if math.isnan(value):
                raise NonFinite(
                    f"prompt token {scored.start + offset + 1}: the model's logits are not finite",
                    details={"key": "prompt", "position": scored.start + offset + 1},
                )
        self.prompt_logprobs[scored.start + 1 : stop + 1] = values
        count = self.request.item.topk_prompt_logprobs
        if count:
            self.topk_prompt_logprobs[scored.start + 1 : stop + 1] = topk_logprobs(logprobs_TV, [count] * len(values))
