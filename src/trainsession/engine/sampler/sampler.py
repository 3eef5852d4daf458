"""The sampler: requests in, events out, one pass of the model per step."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ...errors import EngineError, InvalidRequest, NonFinite, TrainSessionError
from ...tokenization import IncrementalDetokenizer, Tokenizer
from ..api import SampleEvent, SampleItem
from ..lora import Adapter
from ..model import LoadedModel
from .admission import checked_max_tokens
from .blocks import BlockManager
from .kv_cache import KVCache, default_num_blocks
from .live import Live
from .runner import Runner, ScoredRows
from .sampling import Drawn, Row, draw, uniform
from .scheduler import Decode, Prefill, Scheduler
from .sequence import Request
from .sequence import Sequence as Sample
from .static import StaticDecoder
from .stopping import StopCondition

logger = logging.getLogger(__name__)

_DRAW_ROWS = {"cpu": 64, "cuda": 256}
"""Rows whose float32 and float64 copies of the logits exist at once. Each draw waits for the device once."""
_CHUNK_TOKENS = {"cpu": 1024, "cuda": 8192}


class Sampler:
    """Continuous batching over all requests, sessions and adapters of one base model.

    Args:
        model: The base model.
        tokenizer: Decodes samples, for stop strings and text.
        num_blocks: KV blocks; default: what `default_num_blocks` finds room for.
        block_size: Positions of a block. Prompts are prefilled and cached in whole blocks.
        max_running: Samples that decode at once.
        chunk_tokens: Prompt tokens of one prefill pass; default 1,024 on a CPU, 8,192 on a GPU.
        static: Decode in static steps (CUDA graphs on a GPU); default: where that is faster.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        *,
        num_blocks: int | None = None,
        block_size: int = 32,
        max_running: int = 256,
        chunk_tokens: int | None = None,
        static: bool | None = None,
    ) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self._blocks = BlockManager(num_blocks or default_num_blocks(model, block_size), block_size)
        is_static = StaticDecoder.suits(model) if static is None else static
        # Rows that only fill a static step up write to a page of their own.
        self._cache = KVCache(model, self._blocks.num_blocks + is_static, block_size)
        on_cuda = model.device.type == "cuda"
        decoder = StaticDecoder(model, self._cache, capture=on_cuda) if is_static else None
        self._runner = Runner(model, self._cache, decoder)
        self._scheduler = Scheduler(
            self._blocks,
            max_running=max_running,
            chunk_tokens=chunk_tokens or _CHUNK_TOKENS[model.device.type],
            cache_generated=not model.exact,
            runs_ahead=is_static,
        )
        self._live: dict[str, Live] = {}
        self._adapters: dict[str, Adapter | None] = {}
        self._cancelled: list[str] = []
        self._arrivals = itertools.count()
        self._versions: dict[str, tuple[weakref.ref[torch.nn.Parameter], int]] = {}
        self._next_version = itertools.count(1)
        self._sampled = 0
        self._passes = 0

    # --- requests --------------------------------------------------------------------------
    def submit(self, item: SampleItem, adapter: Adapter | None) -> None:
        """Queue a request; ``adapter`` is the frozen copy that ``item.weights`` names.

        Raises:
            InvalidRequest, PromptTooLong, LimitExceeded: see `checked_max_tokens`.
        """
        if item.request_id in self._live:
            raise InvalidRequest(f"request_id {item.request_id!r} is already running", details={"key": "request_id"})
        if (item.weights is None) != (adapter is None):
            raise ValueError(f"weights={item.weights!r} with adapter {adapter!r}: they go together")
        cache_tokens = self._blocks.num_blocks * self._blocks.block_size
        max_tokens = checked_max_tokens(item, self._model, cache_tokens)
        request = Request(
            item=item,
            arrival=next(self._arrivals),
            max_tokens=max_tokens,
            weights_version=self._version(item.weights, adapter),
        )
        self._scheduler.add(request)
        self._adapters[request.id] = adapter
        self._live[request.id] = Live(
            request=request,
            stops=[
                StopCondition(
                    item.params, max_tokens, self._model.eos_token_ids, IncrementalDetokenizer(self.tokenizer)
                )
                for _ in range(item.num_samples)
            ],
            unfinished=set(range(item.num_samples)),
            prompt_logprobs=[None] * len(request.prompt),
            topk_prompt_logprobs=[None] * len(request.prompt),
        )

    def cancel(self, request_id: str) -> None:
        """End a request's samples at the next step; an unknown or finished id is ignored."""
        if request_id in self._live:
            self._cancelled.append(request_id)

    def has_work(self) -> bool:
        return bool(self._live)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and the present state."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "requests": len(self._live),
            "free_blocks": self._blocks.num_free,
            "cached_blocks": self._blocks.num_cached,
            "num_blocks": self._blocks.num_blocks,
            "prefill_tokens": scheduler.num_prefill_tokens,
            "prefill_cached_tokens": scheduler.num_cached_tokens,
            "sampled_tokens": self._sampled,
            "preemptions": scheduler.num_preemptions,
            "passes": self._passes,
        }

    # --- one step --------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[SampleEvent]:
        """One prefill chunk or one decode step; the events that it brought, in order."""
        events: list[SampleEvent] = []
        for request_id in self._cancelled:
            self._end_cancelled(request_id, events)
        self._cancelled.clear()
        self._scrub()
        plan = self._scheduler.schedule()
        self._scrub()  # a block that it took from one sample and gave to another
        self._passes += plan is not None
        if isinstance(plan, Prefill):
            self._prefill(plan, events)
        elif isinstance(plan, Decode):
            self._decode(plan, events)
        self._scrub()
        self._start_samples(events)
        return events

    def _prefill(self, plan: Prefill, events: list[SampleEvent]) -> None:
        def score(scored: ScoredRows) -> None:
            self._live[scored.request.id].score(scored)

        def run(ids: set[str]) -> None:
            chunks = [chunk for chunk in plan.chunks if chunk.request.id in ids]
            for request_id, logits_V in self._runner.prefill(chunks, self._adapters, score).items():
                self._live[request_id].start_logits_V = logits_V

        self._isolate({chunk.request.id for chunk in plan.chunks}, run, events)
        for chunk in plan.chunks:
            live = self._live.get(chunk.request.id)
            if live is None:
                continue
            self._scheduler.prefilled(chunk)
            if chunk.request.prompt_scored and not live.unfinished:
                self._finish_request(live, events)

    def _decode(self, plan: Decode, events: list[SampleEvent]) -> None:
        drawn_from: list[tuple[list[Sample], torch.Tensor]] = []

        def run(ids: set[str]) -> None:
            samples = [sample for sample in plan.sequences if sample.request.id in ids]
            drawn_from.append(self._runner.decode(samples, self._adapters))

        self._isolate({sample.request.id for sample in plan.sequences}, run, events)
        for sample in plan.sequences:
            self._scheduler.decoded(sample)
        drawn: list[tuple[Sample, Drawn]] = []
        for samples, logits_TV in drawn_from:
            drawn += self._draw(samples, lambda rows, logits_TV=logits_TV: logits_TV[rows.start : rows.stop])
        self._run_ahead(drawn)
        self._take(drawn, events)

    def _run_ahead(self, drawn: list[tuple[Sample, Drawn]]) -> None:
        """Start the next step on the device, which computes while the host looks at these tokens.

        A sample that ends with its token has a row for nothing; nobody reads it.
        """
        if not self._runner.runs_ahead or self._scheduler.has_prompts():
            return
        self._scrub()  # of requests that just failed, before their blocks are written to again
        going_on = [
            (sample, token.token)
            for sample, token in drawn
            if math.isfinite(token.logprob)
            and len(sample.output) + 1 < sample.request.max_tokens
            and self._scheduler.grow(sample)
        ]
        try:
            self._runner.run_ahead(going_on, self._adapters)
        except Exception as error:  # the step itself comes again, and tells whose fault it is
            logger.debug("no step ahead: %s", error)

    def _start_samples(self, events: list[SampleEvent]) -> None:
        forks = self._scheduler.forks()
        self._cache.copy_blocks([fork.copy for fork in forks if fork.copy is not None])
        fresh = [fork.sequence for fork in forks if not fork.sequence.output]
        starts = [self._live[sample.request.id].start_logits_V for sample in fresh]

        def logits(rows: range) -> torch.Tensor:
            return torch.stack([start for start in starts[rows.start : rows.stop] if start is not None])

        self._take(self._draw(fresh, logits), events)
        for live in self._live.values():
            if not live.request.pending:
                live.start_logits_V = None

    def _isolate(self, ids: set[str], run: Callable[[set[str]], None], events: list[SampleEvent]) -> None:
        """Run requests in one pass; if it raises, each alone, so that only the guilty one fails."""
        try:
            run(ids)
        except Exception as error:  # reported below, as the error of a request
            if len(ids) == 1:
                self._fail(next(iter(ids)), error, events)
                return
            logger.warning("a sampling pass failed; its %d requests run one by one", len(ids))
            for request_id in sorted(ids):
                self._isolate({request_id}, run, events)

    # --- tokens ----------------------------------------------------------------------------
    def _draw(
        self, samples: Sequence[Sample], logits_of: Callable[[range], torch.Tensor]
    ) -> list[tuple[Sample, Drawn]]:
        drawn: list[tuple[Sample, Drawn]] = []
        count = _DRAW_ROWS[self._model.device.type]
        for start in range(0, len(samples), count):
            rows = range(start, min(start + count, len(samples)))
            batch = [samples[row] for row in rows]
            asked = [self._row(sample) for sample in batch]
            drawn += zip(batch, draw(logits_of(rows), asked), strict=True)
        return drawn

    def _take(self, drawn: list[tuple[Sample, Drawn]], events: list[SampleEvent]) -> None:
        for sample, token in drawn:
            live = self._live.get(sample.request.id)
            if live is None:
                continue  # failed with an earlier sample of this step
            try:
                self._append(live, sample, token, events)
            except Exception as error:  # of this request alone; reported as its event
                self._fail(sample.request.id, error, events)

    def _row(self, sample: Sample) -> Row:
        item = sample.request.item
        stop = self._live[item.request_id].stops[sample.index]
        seed = (item.params.seed or 0) + sample.index
        position = len(sample.output)
        return Row(
            params=item.params,
            uniform=uniform(seed, position) if item.params.temperature > 0 else 0.0,
            prompt=sample.request.prompt,
            output=sample.output,
            banned=stop.end_tokens if position + 1 < item.params.min_tokens else (),
            topk=item.topk_logprobs,
        )

    def _append(self, live: Live, sample: Sample, drawn: Drawn, events: list[SampleEvent]) -> None:
        if not math.isfinite(drawn.logprob):
            raise NonFinite(
                f"sample {sample.index}, token {len(sample.output)}: the model's logits are not finite",
                details={"sample": sample.index, "token": len(sample.output)},
            )
        sample.output.append(drawn.token)
        self._sampled += 1
        stop = live.stops[sample.index]
        delta, reason = stop.add(drawn.token, len(sample.output))
        events.append(
            SampleEvent(
                request_id=live.request.id,
                index=sample.index,
                tokens=[drawn.token],
                logprobs=[drawn.logprob],
                topk=[drawn.topk] if live.request.item.topk_logprobs else [],
                text_delta=delta,
                stop_reason=reason,
                text=stop.text if reason else "",
            )
        )
        if reason:
            self._scheduler.finish(sample)
            live.unfinished.discard(sample.index)
            if not live.unfinished:
                self._finish_request(live, events)

    # --- ends ------------------------------------------------------------------------------
    def _finish_request(self, live: Live, events: list[SampleEvent]) -> None:
        item = live.request.item
        self._forget(live.request.id)
        events.append(
            SampleEvent(
                request_id=item.request_id,
                done=True,
                prompt_logprobs=live.prompt_logprobs if item.prompt_logprobs else None,
                topk_prompt_logprobs=live.topk_prompt_logprobs if item.topk_prompt_logprobs else None,
            )
        )

    def _end_cancelled(self, request_id: str, events: list[SampleEvent]) -> None:
        live = self._live.get(request_id)
        if live is None:
            return  # cancelled twice, or finished meanwhile
        self._scheduler.drop(live.request)
        for index in sorted(live.unfinished):
            stop = live.stops[index]
            delta = stop.end()
            events.append(
                SampleEvent(
                    request_id=request_id, index=index, text_delta=delta, stop_reason="cancelled", text=stop.text
                )
            )
        if not live.request.prompt_scored:
            live.request.item = _without_prompt_logprobs(live.request.item)
        self._finish_request(live, events)

    def _fail(self, request_id: str, error: Exception, events: list[SampleEvent]) -> None:
        """End a request with its error; the others go on."""
        if not isinstance(error, TrainSessionError):
            logger.error("sampling request %s failed", request_id, exc_info=error)
            error = EngineError(f"sampling failed: {type(error).__name__}")
        # Its blocks may hold the NaN that it failed with.
        self._scheduler.drop(self._live[request_id].request, poisoned=True)
        self._forget(request_id)
        events.append(SampleEvent(request_id=request_id, done=True, error=error))

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        del self._adapters[request_id]
        if not self._live:
            self._runner.release()

    def _scrub(self) -> None:
        self._cache.scrub(self._blocks.to_scrub)
        self._blocks.to_scrub.clear()

    # --- weights ---------------------------------------------------------------------------
    def _version(self, weights: str | None, adapter: Adapter | None) -> int:
        """A number that differs whenever the adapter behind a name does: it keys the prefix cache."""
        if weights is None or adapter is None:
            return 0
        parameter = adapter.parameters()[0]
        known = self._versions.get(weights)
        if known is None or known[0]() is not parameter:
            self._versions = _alive(self._versions.items())
            known = (weakref.ref(parameter), next(self._next_version))
            self._versions[weights] = known
        return known[1]


def _alive(
    versions: Iterable[tuple[str, tuple[weakref.ref[torch.nn.Parameter], int]]],
) -> dict[str, tuple[weakref.ref[torch.nn.Parameter], int]]:
    return {name: known for name, known in versions if known[0]() is not None}


def _without_prompt_logprobs(item: SampleItem) -> SampleItem:
    """Cancelled before they were complete: none rather than some."""
    return SampleItem(
        request_id=item.request_id,
        prompt=item.prompt,
        num_samples=item.num_samples,
        params=item.params,
        weights=item.weights,
    )
