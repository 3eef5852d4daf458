"""A request for samples and its sequences: tokens, blocks and progress, as plain integers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..api import SampleItem
from .blocks import chain, chain_root

NEVER = 2**63


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request.

    ``computed`` positions have their keys and values in ``blocks``. A sample that was preempted
    keeps its output; it starts again from the prompt and is fed its own tokens.
    """

    request: Request
    index: int
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    prepaid: int = 0
    """Tokens that are charged and not drawn yet."""

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def next_input(self) -> int:
        """The token at position ``computed``, which the next decode step takes."""
        offset = self.computed - len(self.request.prompt)
        return self.output[offset]

    @property
    def wants_token(self) -> bool:
        """Whether the next decode step brings a new token, or only catches up."""
        return self.computed == self.length - 1

    @property
    def priority(self) -> tuple[int, int]:
        """Smaller is older, and is preempted later."""
        return self.request.turn, self.index


@dataclass(slots=True, eq=False)
class Request:
    """A `SampleItem` on its way through the scheduler.

    While samples are ``pending``, the request holds the prompt's blocks (``prompt_blocks``,
    computed up to ``prompt_computed``), from which each sample starts.
    """

    item: SampleItem
    arrival: int
    max_tokens: int
    weights_version: int = 0
    """Tells weights apart that carry the same name."""
    turn: int = field(init=False, default=NEVER)
    """Its place among those that were admitted, smallest first."""
    prompt: list[int] = field(init=False)
    digests: list[bytes] = field(init=False, default_factory=list)
    """Of the prompt's full blocks."""
    prompt_blocks: list[int] = field(init=False, default_factory=list)
    prompt_computed: int = field(init=False, default=0)
    prompt_prepaid: int = field(init=False, default=0)
    """Tokens of it that are charged and not computed yet."""
    prompt_scored: bool = field(init=False, default=False)
    """The prompt's logprobs are complete, or nobody asked for them."""
    pending: deque[Sequence] = field(init=False)
    running: list[Sequence] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = [int(token) for token in self.item.prompt]
        self.pending = deque(Sequence(self, index) for index in range(self.item.num_samples))
        self.prompt_scored = not self.item.prompt_logprobs and not self.item.topk_prompt_logprobs

    @property
    def id(self) -> str:
        return self.item.request_id

    @property
    def project(self) -> str:
        """Whose it is, as far as the engine can tell."""
        return self.item.cache_salt

    @property
    def weights_key(self) -> tuple[str, int]:
        """Sorts rows of the same weights together; the base model comes first."""
        return ("", 0) if self.item.weights is None else (self.item.weights, self.weights_version)

    @property
    def holds_prompt(self) -> bool:
        return bool(self.prompt_blocks)

    @property
    def prompt_done(self) -> bool:
        return self.holds_prompt and self.prompt_computed == len(self.prompt)

    def chain_prompt(self, block_size: int) -> None:
        root = chain_root(self.item.cache_salt, self.item.weights, self.weights_version)
        self.digests = chain(root, self.prompt, block_size)

    def chain_sample(self, sequence: Sequence, block_size: int) -> list[bytes]:
        """Digests of the full computed blocks of a sample, its prompt's included."""
        whole_prompt_blocks = len(self.digests)
        root = (
            self.digests[-1]
            if self.digests
            else chain_root(self.item.cache_salt, self.item.weights, self.weights_version)
        )
        tokens = (self.prompt + sequence.output)[whole_prompt_blocks * block_size : sequence.computed]
        return self.digests + chain(root, tokens, block_size)
