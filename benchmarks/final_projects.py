"""What the two worked examples of the final projects change.

A limit per key: 60 requests of one key, 200 + 64 tokens each, are in the queue when five of another key come behind
them, 100 + 32 tokens. The steps until each of the five has its first token are counted, with no limit and with three
ways to hold one: six batch slots of eight for a key. An eviction policy: 600 prompts for a pool of 256 blocks, three
in ten of which begin as others do; what part of their tokens is found in the prefix cache, over seeds. Everything is
counted, and nothing timed.

    python -m benchmarks.final_projects
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any, Final
from unittest.mock import patch

from benchmarks._record import record
from minicache.memory.blocks import FreeList
from minicache.memory.eviction import EVICTION
from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, fair

MOST: Final = 6
SEEDS: Final = 10


class Skipping(ChunkedPrefillScheduler):
    """At most MOST requests of a key in the batch: the first that fits is next."""

    def head(self) -> Request | None:
        """The first waiting request whose key has room."""
        running = [request.cache_salt for request in self.running]
        for request in self.waiting.values():
            if running.count(request.cache_salt) < MOST:
                return request
        return None


class Waiting(ChunkedPrefillScheduler):
    """At most MOST requests of a key in the batch: the next is as before, and waits."""

    def head(self) -> Request | None:
        """As the stage's, if its key has room."""
        request = super().head()
        running = [each.cache_salt for each in self.running]
        return request if request is None or running.count(request.cache_salt) < MOST else None


class KeyLimit(ChunkedPrefillScheduler):
    """At most MOST requests of a key in the batch: others go ahead, within the stage's bound."""

    def has_room(self, request: Request) -> bool:
        """Whether the request's key has fewer than MOST in the batch."""
        return [each.cache_salt for each in self.running].count(request.cache_salt) < MOST

    def head(self) -> Request | None:
        """As the stage's; if its key has no room, the first that fits, unless the bound forbids."""
        request = super().head()
        if request is None or self.has_room(request):
            return request
        if self.protected is not None or self.num_bypasses >= fair.STARVATION_BOUND:
            return None
        for each in self.waiting.values():
            if self.is_compatible(each) and self.has_room(each):
                return each
        return None


class FoundLast(OrderedDict[int, None]):
    """Evicts blocks that no request has found before those that one has; of each kind the oldest first."""

    forgets = True

    def __init__(self) -> None:
        super().__init__()
        self.found: OrderedDict[int, None] = OrderedDict()
        self.was_found: set[int] = set()

    def append(self, block_id: int, /) -> None:
        """Add a block at the back of its kind."""
        (self.found if block_id in self.was_found else self)[block_id] = None

    def remove(self, block_id: int, /) -> None:
        """A request has found this block."""
        self.was_found.add(block_id)
        del (self.found if block_id in self.found else self)[block_id]

    def popleft(self) -> int:
        """Take out the block to evict. What it held is forgotten, and so is that it was found."""
        block_id = (self if super().__len__() else self.found).popitem(last=False)[0]
        if self.forgets:
            self.was_found.discard(block_id)
        return block_id

    def __len__(self) -> int:
        return super().__len__() + len(self.found)

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        yield from self.found


class NeverForgets(FoundLast):
    """The same, with a mistake: a block stays found when it holds something else."""

    forgets = False


def serve(scheduler: ChunkedPrefillScheduler, requests: list[Request], most_waiting: int) -> dict[Any, int]:
    """Serve requests, with so many in the queue at most; the step in which each had its first token, from 1."""
    first: dict[Any, int] = {}
    coming, step = iter(requests), 0
    while True:
        while len(scheduler.waiting) < most_waiting and (request := next(coming, None)) is not None:
            scheduler.add_request(request)
        if not scheduler.has_unfinished:
            return first | {"steps": step}
        step += 1
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        for each in output.scheduled:
            if each.output_token_ids:
                first.setdefault(each.request_id, step)


def behind_a_flood(kind: type[ChunkedPrefillScheduler]) -> dict[str, Any]:
    """Steps to the first token of each request of the quiet key, and of all requests together."""
    scheduler = kind(num_blocks=512, block_size=16, max_num_seqs=8, max_num_batched_tokens=256)
    flood = [Request(number, [1] * 200, 64, cache_salt="flood", arrival_time=number / 100) for number in range(60)]
    quiet = [Request(60 + number, [1] * 100, 32, cache_salt="quiet", arrival_time=1 + number) for number in range(5)]
    first = serve(scheduler, flood + quiet, most_waiting=65)
    return {"first": [first[request.request_id] for request in quiet], "steps": first["steps"]}


def hit_rate(policy: Callable[[], FreeList], seed: int) -> float:
    """The part of the prompts' tokens that is found."""
    chance = random.Random(seed)
    prompts = []
    for number in range(600):
        is_alike = chance.random() < 0.3
        beginning = [number // 100 % 2 * 4 + chance.randrange(4)] * 320 if is_alike else []
        prompts.append(beginning + [chance.randrange(10, 10_000) for _ in range(360 - len(beginning))])
    with patch.dict(EVICTION, lru=policy):
        options = {"num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "prefix_caching": True}
        scheduler = ChunkedPrefillScheduler(**options)  # type: ignore[arg-type]
    serve(scheduler, [Request(number, prompt, 8) for number, prompt in enumerate(prompts)], most_waiting=2)
    return scheduler.stats.hit_rate


def main() -> None:
    kinds = {"none": ChunkedPrefillScheduler, "skipping": Skipping, "waiting": Waiting, "key_limit": KeyLimit}
    policies = {"lru": EVICTION["lru"], "found_last": FoundLast, "never_forgets": NeverForgets}
    record(
        "final_projects",
        {
            "key_limit": {name: behind_a_flood(kind) for name, kind in kinds.items()},
            "eviction": {
                name: mean(hit_rate(policy, seed) for seed in range(SEEDS)) for name, policy in policies.items()
            },
        },
    )


if __name__ == "__main__":
    main()
