"""What lies in every slot, on the device and in CPU swap space: whose token, and after which others.

A scheduler decides where keys and values go and where they are read; this model carries that out, with the tokens
themselves in place of tensors. So it can tell whether a request reads what was computed for it. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput

Entry = bytes | None
"""What a slot holds: the sequence up to this token, as `sequence` has it; None: nothing that any request may read."""
_TOKENS: Final = bytes(range(10))


def sequence(request: Request, tokens: Iterable[int]) -> bytes:
    """Tokens of a request, a byte each, after its cache_salt: what two salts have computed is not the same.

    Args:
        request: its salt has no digits 0 … 9 as bytes: any printable one.
        tokens: token ids below 10.
    """
    return (request.cache_salt or "").encode() + bytes(tokens)


def parts(entry: bytes) -> tuple[str | None, tuple[int, ...]]:
    """The salt and the tokens of a `sequence`."""
    salt = entry.rstrip(_TOKENS)
    return salt.decode() or None, tuple(entry[len(salt) :])


@dataclass(slots=True)
class Work:
    """A request's share of a step, as it was when the step was scheduled.

    Attributes:
        start: the position of the first token that the step computes.
        tokens: all of the request's tokens, to the end of the step.
        block_ids: the request's blocks at that time.
        lacks_token: whether the step before, which runs, generates the last of `tokens`.
    """

    request: Request
    start: int
    tokens: list[int]
    block_ids: list[int]
    lacks_token: bool = False


def work_of(output: SchedulerOutput) -> list[Work]:
    """The shares of a step that was just scheduled, in batch order."""
    work = []
    for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_new
        tokens = request.token_ids(0, min(end, request.num_tokens))
        work.append(Work(request, start, tokens, request.block_ids[:], lacks_token=end > request.num_tokens))
    return work


@dataclass(slots=True)
class Memory:
    """The contents of every slot.

    Attributes:
        block_size: slots of a block.
        blocks: block → what its slots hold.
        host_blocks: CPU block → what its slots hold.
    """

    block_size: int
    blocks: dict[int, list[Entry]] = field(default_factory=dict)
    host_blocks: dict[int, list[Entry]] = field(default_factory=dict)

    def block(self, block_id: int) -> list[Entry]:
        """What a block holds; a list to be changed."""
        return self.blocks.setdefault(block_id, [None] * self.block_size)

    def operations(self, output: SchedulerOutput, work: list[Work]) -> list[Callable[[], None]]:
        """All that carries out a step, in order: a failure may come after any of them."""
        operations: list[Callable[[], None]] = []
        for pairs in output.swapped_out.values():
            operations += [partial(self._copy, self.blocks, *pair, self.host_blocks) for pair in pairs]
        for pairs in output.swapped_in.values():
            operations += [partial(self._copy, self.host_blocks, *pair, self.blocks) for pair in pairs]
        operations.append(partial(self._copy_at_once, list(output.blocks_to_copy)))
        operations += [partial(self.write, each) for each in work]
        return operations

    def _copy(self, of: dict[int, list[Entry]], source: int, target: int, to: dict[int, list[Entry]]) -> None:
        to[target] = list(of.get(source) or [None] * self.block_size)

    def _copy_at_once(self, pairs: list[tuple[int, int]]) -> None:
        self.blocks.update({target: list(self.block(source)) for source, target in pairs})

    def write(self, work: Work, *, garbage: bool = False) -> None:
        """Write what a request computes in a step, or what a failure leaves in its place."""
        tokens, block_size, blocks = sequence(work.request, work.tokens), self.block_size, self.blocks
        num_salt = len(tokens) - len(work.tokens)
        for position in range(work.start, len(work.tokens)):
            block_id = work.block_ids[position // block_size]
            block = blocks.get(block_id)
            if block is None:
                block = blocks[block_id] = [None] * block_size
            block[position % block_size] = None if garbage else tokens[: num_salt + position + 1]

    def reads_right(self, work: Work) -> bool:
        """Whether all that the request attends to is what was computed for its tokens."""
        return self.holds(work.request, work.tokens, work.block_ids, self.blocks)

    def holds(
        self, request: Request, tokens: Sequence[int], block_ids: list[int], blocks: dict[int, list[Entry]]
    ) -> bool:
        """Whether these blocks, in order, hold these tokens of a request.

        Args:
            request: whose tokens they are.
            tokens: the tokens.
            block_ids: as many as they need; with fewer, they do not.
            blocks: `blocks`, or `host_blocks`.
        """
        block_size = self.block_size
        if len(tokens) > len(block_ids) * block_size:
            return False
        wanted = sequence(request, tokens)
        num_salt = len(wanted) - len(tokens)
        for position in range(len(tokens)):
            block = blocks.get(block_ids[position // block_size])
            if block is None or block[position % block_size] != wanted[: num_salt + position + 1]:
                return False
        return True
