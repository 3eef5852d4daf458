"""Which sequences run in the next pass. Integers only: neither torch nor a model is imported.

Requests are admitted in turn, and none overtakes the one before it. Within a project (those that
share a ``cache_salt``) they are admitted in order of arrival; among projects the one that the fewest
tokens were computed for goes next (`WaitingLine`), so that thousands of prompts of one do not hold up
another's first. A request gets its turn when it is admitted and keeps it.

A request first gets its prompt computed, in chunks; then its samples start from the prompt's
shared blocks. When the blocks run out, the last in turn gives its blocks back and later starts
again from its prompt. So the first sample always gets on, and everyone finishes. "Older" and
"younger" below are by turn.

A pass is either a prefill (chunks of prompts) or a decode step (one token of every running
sample); while there is work of both kinds they take turns.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from .blocks import BlockManager
from .line import WaitingLine
from .sequence import NEVER, Request, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``start:stop`` of a request's prompt; ``start`` is a multiple of the block size."""

    request: Request
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prefill:
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Decode:
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True)
class Fork:
    """``sequence`` starts from its prompt; ``copy`` is the partial block (from, to), if any."""

    sequence: Sequence
    copy: tuple[int, int] | None


class Scheduler:
    """Admission, prefix reuse, forking and preemption.

    Args:
        blocks: The KV blocks.
        max_running: At most this many samples decode at once.
        chunk_tokens: At most this many prompt tokens in a prefill pass; a multiple of the block
            size.
        cache_generated: Whether blocks that decode steps filled may serve later prompts. Off in
            exact mode, where a decode step may round differently from a prefill.
        runs_ahead: A sample's next position may be written before it is known whether it goes on: the blocks
            from there on are scrubbed when it ends, in case that was NaN.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_running: int,
        chunk_tokens: int,
        cache_generated: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        self.blocks = blocks
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.cache_generated = cache_generated
        self.runs_ahead = runs_ahead
        self.line = WaitingLine()
        """Requests that were not admitted yet."""
        self.queue: list[Request] = []
        """Those that were, with samples to start or a prompt to compute, oldest first."""
        self.running: list[Sequence] = []
        """Oldest first."""
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_prefill_tokens = 0
        self._prefilled_last = False
        self._turns = itertools.count()

    # --- requests --------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        request.chain_prompt(self.blocks.block_size)
        self.line.add(request)

    @property
    def num_waiting(self) -> int:
        """Samples that have yet to start."""
        return self.line.samples + sum(len(request.pending) for request in self.queue)

    def has_work(self) -> bool:
        return bool(self.line or self.queue or self.running)

    def has_prompts(self) -> bool:
        """Whether another pass than a decode step of those that run may come next."""
        return bool(self.line or self.queue)

    def drop(self, request: Request, *, poisoned: bool = False) -> None:
        """Take a request out at once, wherever it stands."""
        self.line.remove(request)
        self.line.refund(request, *request.pending, *request.running)
        self._release_prompt(request, poisoned=poisoned)
        for sequence in request.running:
            self._release_sample(sequence, poisoned=poisoned)
        request.running.clear()
        request.pending.clear()
        if request.turn != NEVER:
            self.running = [sequence for sequence in self.running if sequence.request is not request]
            self.queue = [other for other in self.queue if other is not request]

    def finish(self, sequence: Sequence) -> None:
        """A running sample has all its tokens."""
        self.line.ended(sequence)
        if self.cache_generated:
            digests = sequence.request.chain_sample(sequence, self.blocks.block_size)
            for block, digest in zip(sequence.blocks, digests, strict=False):
                self.blocks.register(block, digest)
        self._stop(sequence)

    # --- passes ----------------------------------------------------------------------------
    def schedule(self) -> Prefill | Decode | None:
        """The next pass, its blocks allocated; None if there is nothing to compute."""
        if not (self._prefilled_last and self.running):
            chunks = self._next_chunks()
            if chunks:
                self._prefilled_last = True
                return Prefill(chunks)
        self._prefilled_last = False
        if self.running:
            return Decode(self._next_decode())
        return None

    def prefilled(self, chunk: Chunk) -> None:
        """The chunk's keys and values are in its blocks now."""
        request = chunk.request
        request.prompt_computed = chunk.stop
        request.prompt_prepaid = max(0, request.prompt_prepaid - (chunk.stop - chunk.start))
        self.num_prefill_tokens += chunk.stop - chunk.start
        size = self.blocks.block_size
        for i in range(chunk.start // size, chunk.stop // size):
            self.blocks.register(request.prompt_blocks[i], request.digests[i])
        if request.prompt_done:
            request.prompt_scored = True
            if not request.pending:
                self._leave_queue(request)

    def grow(self, sequence: Sequence) -> bool:
        """Whether a running sample has a slot for its next position; taken from nobody."""
        if sequence.computed == len(sequence.blocks) * self.blocks.block_size:
            if not self.blocks.num_free:
                return False
            sequence.blocks.append(self.blocks.allocate())
        return True

    def decoded(self, sequence: Sequence) -> None:
        if sequence.wants_token:  # catching up after a preemption is not its project's fault
            self.line.drew(sequence)
        sequence.computed += 1

    def forks(self) -> list[Fork]:
        """Start the samples whose prompt is computed, as far as there is room."""
        started: list[Fork] = []
        for request in list(self.queue):
            if not request.prompt_done:
                break
            while request.pending and request.prompt_done and len(self.running) < self.max_running:
                fork = self._fork(request)
                if fork is None:
                    return started
                started.append(fork)
            if request.pending:
                break
        return started

    # --- prefill ---------------------------------------------------------------------------
    def _next_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.chunk_tokens
        places = self.max_running - len(self.running)
        for request in self._in_turn():
            if budget <= 0 or places <= 0:
                break
            if not request.holds_prompt and not self._admit(request):
                break
            places -= len(request.pending)
            start = request.prompt_computed
            stop = min(len(request.prompt), start + budget)
            if stop < len(request.prompt):
                stop -= stop % self.blocks.block_size
            if stop > start:
                chunks.append(Chunk(request, start, stop))
                budget -= self.blocks.blocks_for(stop - start) * self.blocks.block_size
        return chunks

    def _in_turn(self) -> Iterator[Request]:
        """Those that were admitted once, then the next in line, as long as each is admitted."""
        yield from list(self.queue)
        while (request := self.line.first()) is not None:
            yield request

    def _admit(self, request: Request) -> bool:
        """Allocate all blocks of the prompt, reusing what is cached of it; one in line leaves it."""
        while True:
            cached = self._find_prefix(request)
            fresh = self.blocks.blocks_for(len(request.prompt)) - len(cached)
            needed = fresh + sum(self.blocks.is_idle(block) for block in cached)
            # Leave the running samples a block each to grow into: preempting them costs more.
            if needed + len(self.running) <= self.blocks.num_free:
                break
            if self.running:
                return False
            # Nothing runs, so only prompts hold blocks; a younger one must not keep this one out.
            holder = next((r for r in reversed(self.queue) if r.holds_prompt), None)
            if holder is None or holder.turn < request.turn:
                return False
            self._preempt_prompt(holder)
        for block in cached:
            self.blocks.share(block)
        request.prompt_blocks = cached + [self.blocks.allocate() for _ in range(fresh)]
        request.prompt_computed = len(cached) * self.blocks.block_size
        self.num_cached_tokens += request.prompt_computed
        if self.line.remove(request):
            request.turn = next(self._turns)
            self.queue.append(request)
            self.line.admitted(request)
        return True

    def _find_prefix(self, request: Request) -> list[int]:
        if not request.prompt_scored:
            return []  # every position's logprob is wanted, so every position is computed
        # The last token is always computed: its logits are what the samples start from.
        usable = request.digests[: (len(request.prompt) - 1) // self.blocks.block_size]
        return list(_until_missing(self.blocks, usable))

    # --- samples ---------------------------------------------------------------------------
    def _fork(self, request: Request) -> Fork | None:
        size = self.blocks.block_size
        partial = bool(len(request.prompt) % size)
        is_last = len(request.pending) == 1
        if not is_last and self.running and self.blocks.num_free < partial + len(self.running):
            return None
        sequence = request.pending.popleft()
        sequence.computed = len(request.prompt)
        if not sequence.output:
            self.line.drew(sequence)
        copy = None
        if is_last or (partial and not self.blocks.num_free):
            # Take the prompt's blocks over as they are. If samples are left, they wait until the
            # prompt is computed again: nothing runs now, so something has to start.
            sequence.blocks, request.prompt_blocks = request.prompt_blocks, []
            request.prompt_computed = 0
        else:
            whole = request.prompt_blocks[: len(request.prompt) // size]
            for block in whole:
                self.blocks.share(block)
            sequence.blocks = list(whole)
            if partial:
                copy = (request.prompt_blocks[-1], self.blocks.allocate())
                sequence.blocks.append(copy[1])
        request.running.append(sequence)
        insort(self.running, sequence, key=lambda s: s.priority)
        if not request.pending:
            self._leave_queue(request)
        return Fork(sequence, copy)

    def _next_decode(self) -> list[Sequence]:
        """All running samples, each with a slot for its next token."""
        ready: list[Sequence] = []
        for sequence in list(self.running):
            if not sequence.blocks:
                continue  # preempted for an older one, earlier in this loop
            if sequence.computed == len(sequence.blocks) * self.blocks.block_size:
                if not self._make_room(sequence):
                    continue
                sequence.blocks.append(self.blocks.allocate())
            ready.append(sequence)
        return [sequence for sequence in ready if sequence.blocks]

    def _make_room(self, sequence: Sequence) -> bool:
        """Free a block, taking from the youngest; False if that is ``sequence`` itself."""
        while not self.blocks.num_free:
            youngest = self.running[-1]
            holder = next((r for r in reversed(self.queue) if r.holds_prompt), None)
            if holder is not None and holder.turn >= youngest.request.turn:
                self._preempt_prompt(holder)
                continue
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._stop(sequence)
        sequence.computed = 0
        request = sequence.request
        request.pending.append(sequence)
        if request not in self.queue:
            insort(self.queue, request, key=lambda r: r.turn)

    def _preempt_prompt(self, request: Request) -> None:
        self.num_preemptions += request.holds_prompt
        self._release_prompt(request)

    def _stop(self, sequence: Sequence) -> None:
        self._release_sample(sequence)
        sequence.request.running.remove(sequence)
        self.running.remove(sequence)

    def _release_sample(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        whole = sequence.computed // self.blocks.block_size
        self.blocks.release(sequence.blocks[whole:], poisoned=poisoned or self.runs_ahead)
        self.blocks.release(sequence.blocks[:whole], poisoned=poisoned)
        sequence.blocks = []

    def _release_prompt(self, request: Request, *, poisoned: bool = False) -> None:
        self.blocks.release(request.prompt_blocks, poisoned=poisoned)
        request.prompt_blocks = []
        request.prompt_computed = 0

    def _leave_queue(self, request: Request) -> None:
        self._release_prompt(request)
        self.queue.remove(request)


def _until_missing(blocks: BlockManager, digests: list[bytes]) -> Iterator[int]:
    for digest in digests:
        block = blocks.find(digest)
        if block is None:
            return
        yield block
