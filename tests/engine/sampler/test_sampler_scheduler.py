"""The scheduler, simulated on integers: a model of the cache says what every position holds."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsession.engine.api import SampleItem
from trainsession.engine.sampler.blocks import BlockManager, chain, chain_root
from trainsession.engine.sampler.scheduler import Decode, Fork, Prefill, Scheduler
from trainsession.engine.sampler.sequence import Request, Sequence
from trainsession.types import SamplingParams


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    num_samples: int
    num_tokens: int
    salt: str = ""
    weights: str | None = None
    arrives: int = 0
    cancelled_at: int | None = None
    may_draw: int | None = None
    """Its ``max_tokens``, where it ends sooner."""


class Simulation:
    """Drives a scheduler as the sampler does, with token ``t`` of sample ``i`` being ``100 + i + t``.

    ``memory`` holds, per slot, what a real cache would: everything that the position's keys and
    values depend on.
    """

    def __init__(
        self, jobs: list[Job], *, num_blocks: int, block_size: int, max_running: int, chunk_tokens: int
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.blocks, max_running=max_running, chunk_tokens=chunk_tokens, cache_generated=num_blocks % 2 == 0
        )
        # Requests are numbered in order of arrival, as the sampler numbers them.
        self.jobs = sorted(jobs, key=lambda job: job.arrives)
        self.memory: dict[int, tuple[object, ...]] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.first_tokens: list[int] = []
        """Arrival numbers, in order of first tokens."""
        self.requests: dict[int, Request] = {}
        self.steps = 0

    def run(self) -> None:
        waiting = list(range(len(self.jobs)))
        while waiting or self.scheduler.has_work():
            while waiting and (self.jobs[waiting[0]].arrives <= self.steps or not self.scheduler.has_work()):
                self._add(waiting.pop(0))
            for number, request in list(self.requests.items()):
                at = self.jobs[number].cancelled_at
                if at is not None and self.steps >= at:
                    self.scheduler.drop(request)
                    del self.requests[number]
            self.step()
            self.blocks.check()
            self.steps += 1
            assert self.steps < 5_000, "no progress"

    def _add(self, number: int) -> None:
        job = self.jobs[number]
        item = SampleItem(
            request_id=str(number),
            prompt=np.array(job.prompt, dtype=np.int32),
            num_samples=job.num_samples,
            params=SamplingParams(max_tokens=job.num_tokens),
            weights=job.weights,
            cache_salt=job.salt,
            prompt_logprobs=job.num_samples == 0,
        )
        self.requests[number] = Request(item=item, arrival=number, max_tokens=job.may_draw or job.num_tokens)
        self.scheduler.add(self.requests[number])

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if isinstance(plan, Prefill):
            total = sum(chunk.stop - chunk.start for chunk in plan.chunks)
            assert 0 < total <= self.scheduler.chunk_tokens
            for chunk in plan.chunks:
                request = chunk.request
                assert chunk.start % self.blocks.block_size == 0
                self._expect(request, request.prompt, request.prompt_blocks, chunk.start)
                for position in range(chunk.start, chunk.stop):
                    self._write(request, request.prompt, request.prompt_blocks, position)
                self.scheduler.prefilled(chunk)
        elif isinstance(plan, Decode):
            assert len(plan.sequences) <= self.scheduler.max_running
            for sequence in plan.sequences:
                tokens = sequence.request.prompt + sequence.output
                assert sequence.next_input == tokens[sequence.computed]
                self._expect(sequence.request, tokens, sequence.blocks, sequence.computed)
                self._write(sequence.request, tokens, sequence.blocks, sequence.computed)
            for sequence in plan.sequences:
                wants = sequence.wants_token
                self.scheduler.decoded(sequence)
                if wants:
                    self._append(sequence)
        forks = self.scheduler.forks()
        for fork in forks:
            self._copy(fork)
        for fork in forks:
            sequence = fork.sequence
            self._expect(sequence.request, sequence.request.prompt, sequence.blocks, len(sequence.request.prompt))
            if not sequence.output:
                self._append(sequence)
        for number, request in list(self.requests.items()):
            if request.prompt_scored and not request.pending and not request.running:
                del self.requests[number]

    def _append(self, sequence: Sequence) -> None:
        number = sequence.request.arrival
        if not sequence.output and sequence.index == 0:
            self.first_tokens.append(number)
        sequence.output.append(100 + sequence.index + len(sequence.output))
        if len(sequence.output) == self.jobs[number].num_tokens:
            self.outputs[number, sequence.index] = list(sequence.output)
            self.scheduler.finish(sequence)

    def _slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self.blocks.block_size] * self.blocks.block_size + position % self.blocks.block_size

    def _content(self, request: Request, tokens: list[int], position: int) -> tuple[object, ...]:
        return (request.item.cache_salt, request.item.weights, *tokens[: position + 1])

    def _write(self, request: Request, tokens: list[int], blocks: list[int], position: int) -> None:
        slot = self._slot(blocks, position)
        content = self._content(request, tokens, position)
        holders = [s for s in self.scheduler.running if slot // self.blocks.block_size in s.blocks]
        for other in holders:  # a shared block may only be written with what it already holds
            if other.request is not request or other.blocks is not blocks:
                assert self.memory.get(slot) in (None, content) or position >= other.computed
        self.memory[slot] = content

    def _expect(self, request: Request, tokens: list[int], blocks: list[int], stop: int) -> None:
        for position in range(stop):
            assert self.memory[self._slot(blocks, position)] == self._content(request, tokens, position)

    def _copy(self, fork: Fork) -> None:
        if fork.copy is None:
            return
        source, target = (block * self.blocks.block_size for block in fork.copy)
        for offset in range(self.blocks.block_size):
            if source + offset in self.memory:
                self.memory[target + offset] = self.memory[source + offset]


jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
    num_samples=st.integers(0, 5),
    num_tokens=st.integers(1, 10),
    salt=st.sampled_from(["", "other"]),
    weights=st.sampled_from([None, "snapshot"]),
    arrives=st.integers(0, 30),
    cancelled_at=st.none() | st.none() | st.integers(0, 40),
)


@settings(max_examples=300, deadline=None)
@given(
    jobs=st.lists(jobs, min_size=1, max_size=8),
    spare=st.integers(0, 20),
    block_size=st.sampled_from([1, 2, 4]),
    max_running=st.integers(1, 8),
    chunk_blocks=st.integers(1, 4),
)
def test_everyone_finishes_with_the_right_keys_and_no_block_is_lost(
    jobs: list[Job], spare: int, block_size: int, max_running: int, chunk_blocks: int
) -> None:
    need = max(-(-(len(job.prompt) + max(job.num_tokens - 1, 0)) // block_size) for job in jobs)
    simulation = Simulation(
        jobs,
        num_blocks=need + spare,
        block_size=block_size,
        max_running=max_running,
        chunk_tokens=chunk_blocks * block_size,
    )
    simulation.run()
    assert simulation.blocks.num_free == simulation.blocks.num_blocks
    for number, job in enumerate(simulation.jobs):
        for index in range(job.num_samples):
            expected = [100 + index + t for t in range(job.num_tokens)]
            if job.cancelled_at is None:
                assert simulation.outputs[number, index] == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=2, max_size=8), st.integers(1, 6))
def test_first_tokens_come_in_order_of_arrival(shapes: list[tuple[int, int]], max_running: int) -> None:
    jobs = [Job(tuple(range(length)), samples, 6) for length, samples in shapes]
    simulation = Simulation(jobs, num_blocks=12, block_size=2, max_running=max_running, chunk_tokens=4)
    simulation.run()
    assert simulation.first_tokens == list(range(len(jobs)))


def crowd(count: int, salt: str, arrives: int = 0, cancelled_at: int | None = None) -> list[Job]:
    return [Job((1, 2, 3), 1, 6, salt=salt, arrives=arrives, cancelled_at=cancelled_at) for _ in range(count)]


def of_project(simulation: Simulation) -> list[str]:
    """Whose first tokens came, in order."""
    return [simulation.jobs[number].salt for number in simulation.first_tokens]


SMALL = {"num_blocks": 24, "block_size": 2, "max_running": 4, "chunk_tokens": 8}


def test_a_thousand_prompts_of_one_project_do_not_hold_up_anothers_first() -> None:
    simulation = Simulation([*crowd(1000, "heavy"), *crowd(1, "light", arrives=40)], **SMALL)
    simulation.run()
    started = of_project(simulation).index("light")
    before = 40  # at most one first token a step until it arrives
    assert started <= before + 2 * SMALL["max_running"]


def test_projects_share_the_engine_by_tokens_whatever_they_queue() -> None:
    long = [Job((1, 2, 3), 1, 15, salt="long", arrives=10) for _ in range(100)]
    simulation = Simulation([*crowd(400, "short", arrives=10), *long], **SMALL)
    simulation.run()
    half = of_project(simulation)[:100]  # a short one has 9 tokens, a long one 18: two for one
    assert 60 <= half.count("short") <= 72


def test_what_was_cancelled_is_not_held_against_the_next() -> None:
    cancelled = crowd(100, "gone", cancelled_at=5)
    simulation = Simulation([*crowd(60, "busy"), *cancelled, *crowd(20, "gone", arrives=8)], **SMALL)
    simulation.run()
    started = of_project(simulation)
    assert started[:50].count("gone") >= 20


def test_who_was_idle_has_no_claim_on_the_past() -> None:
    simulation = Simulation([*crowd(60, "busy"), *crowd(20, "late", arrives=60)], **SMALL)
    simulation.run()
    started = of_project(simulation)
    both = started[started.index("late") :][:20]
    assert 9 <= both.count("late") <= 11


def test_what_a_request_may_draw_is_not_held_against_its_project_before_it_draws_it() -> None:
    """One project leaves ``max_tokens`` to the context and ends soon; the other names what it draws."""
    open_ended = [Job((1, 2, 3), 1, 6, salt="open", may_draw=40) for _ in range(100)]
    simulation = Simulation([*open_ended, *crowd(100, "named")], **SMALL)
    simulation.run()
    assert 45 <= of_project(simulation)[:100].count("open") <= 55


def test_a_project_that_draws_much_more_than_lately_usual_pays_for_it() -> None:
    long = [Job((1, 2, 3), 1, 40, salt="long", arrives=100) for _ in range(60)]
    simulation = Simulation([*crowd(30, "short"), *crowd(400, "short", arrives=100), *long], **SMALL)
    simulation.run()
    both = of_project(simulation)[30:130]  # a short one has 9 tokens, a long one 43
    assert 75 <= both.count("short") <= 88


def test_projects_that_come_and_go_starve_nobody() -> None:
    guests = [Job((1, 2, 3), 1, 6, salt=f"guest {n % 8}", arrives=n) for n in range(400)]
    simulation = Simulation([*crowd(20, "regular"), *guests], **SMALL)
    simulation.run()
    last = max(n for n, salt in enumerate(of_project(simulation)) if salt == "regular")
    assert last < 20 * 9 + 10


def test_thousands_of_waiting_requests_are_dropped_at_once() -> None:
    simulation = Simulation(crowd(10_000, "gone"), **SMALL)
    for number in range(10_000):
        simulation._add(number)
    simulation.step()
    assert simulation.scheduler.num_waiting > 9_990
    began = time.process_time()
    for number in reversed(range(10_000)):
        simulation.scheduler.drop(simulation.requests[number])
    assert time.process_time() - began < 0.5
    assert not simulation.scheduler.has_work()
    assert simulation.blocks.num_free == simulation.blocks.num_blocks


def test_a_prompt_is_prefilled_once_for_all_its_samples() -> None:
    simulation = Simulation([Job(tuple(range(10)), 8, 4)], num_blocks=64, block_size=4, max_running=8, chunk_tokens=64)
    simulation.run()
    assert simulation.scheduler.num_prefill_tokens == 10
    assert simulation.scheduler.num_preemptions == 0


def test_a_long_run_under_memory_pressure_preempts_and_ends() -> None:
    jobs = [Job(tuple(n % 3 for n in range(i % 9 + 1)), i % 4 + 1, 3 + i % 20, arrives=i) for i in range(120)]
    simulation = Simulation(jobs, num_blocks=16, block_size=2, max_running=8, chunk_tokens=8)
    simulation.run()
    assert simulation.scheduler.num_preemptions > 20
    assert simulation.scheduler.num_cached_tokens > 20
    assert len(simulation.outputs) == sum(job.num_samples for job in jobs)


def test_cached_prefixes_belong_to_their_salt_and_weights() -> None:
    tokens = list(range(8))
    keys = [
        chain(chain_root(salt, weights, version), tokens, 4)
        for salt, weights, version in [("", None, 0), ("s", None, 0), ("", "w", 1), ("", "w", 2), ("", "base", 0)]
    ]
    assert len({digest for digests in keys for digest in digests}) == 2 * len(keys)


def test_the_cache_evicts_the_least_recently_used_prefix_from_its_tail() -> None:
    blocks = BlockManager(4, 2)
    first = [blocks.allocate() for _ in range(2)]
    for block, digest in zip(first, [b"a0", b"a1"], strict=True):
        blocks.register(block, digest)
    second = [blocks.allocate()]
    blocks.register(second[0], b"b0")
    blocks.release(first)
    blocks.release(second)
    assert (blocks.num_free, blocks.num_cached) == (4, 3)
    blocks.allocate()  # the one that was never used
    assert blocks.num_cached == 3
    blocks.allocate()
    assert (blocks.find(b"a0"), blocks.find(b"a1"), blocks.find(b"b0")) == (first[0], None, second[0])
    blocks.check()


def test_a_poisoned_block_leaves_the_cache_and_is_scrubbed_when_free() -> None:
    blocks = BlockManager(2, 2)
    block = blocks.allocate()
    blocks.register(block, b"x")
    blocks.share(block)
    blocks.release([block], poisoned=True)
    assert blocks.find(b"x") is None
    assert blocks.to_scrub == []
    blocks.release([block])
    assert blocks.to_scrub == [block]
    blocks.check()


def test_a_block_cannot_be_released_twice() -> None:
    blocks = BlockManager(1, 1)
    block = blocks.allocate()
    blocks.release([block])
    with pytest.raises(RuntimeError, match="released twice"):
        blocks.release([block])


def test_scheduling_imports_no_torch() -> None:
    code = "import sys, trainsession.engine.sampler.scheduler; print(*({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
