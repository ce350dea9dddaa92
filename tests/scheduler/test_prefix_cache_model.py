"""Prefix cache and chunks against a model of a production scheduler, written with lists and whole prefixes, no hash.

The model does what vLLM's scheduler does: blocks are cached as soon as a step is scheduled that fills them, and a hit
leaves at least one token to compute. A request frees its blocks from the last to the first, cached ones to the back of
the free list, the others to its front, from which blocks are allocated (without a cache the list is first in, first
out). With chunks, one budget of tokens a step goes
to the batch first, and then to waiting requests, of which one is admitted only if the blocks of its whole prompt are
free (or, if that is turned off, those of its first chunk). Compared are block ids, hits, chunks, preemptions and the
order of all of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, Scheduler, create_scheduler

BLOCK = 4


@dataclass
class Model:
    num_blocks: int
    max_num_seqs: int
    budget: int
    chunked: bool = False
    threshold: int = 0
    caching: bool = True
    reserve: bool = True
    left: int = 0
    waiting: list[dict[str, Any]] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    references: dict[int, int] = field(default_factory=dict)
    cached: list[tuple[Any, int]] = field(default_factory=list)  # (salt and whole prefix, block), oldest first

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    def find(self, it: dict[str, Any]) -> list[int]:
        found = []
        for end in range(BLOCK, len(it["tokens"]), BLOCK):  # the last token is never in it
            blocks = [block for key, block in self.cached if key == (it["salt"], tuple(it["tokens"][:end]))]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def take(self) -> int:
        block = self.free.pop(0)
        self.cached = [(key, each) for key, each in self.cached if each != block]
        self.references[block] = 1
        return block

    def let_go(self, it: dict[str, Any]) -> None:
        for block in reversed(it["blocks"]):
            self.references[block] -= 1
            if not self.references[block]:
                to_front = self.caching and all(each != block for _, each in self.cached)
                self.free.insert(0 if to_front else len(self.free), block)
        it["blocks"], it["computed"] = [], 0

    def cache(self, it: dict[str, Any], num_new: int) -> None:
        for end in range(BLOCK, it["computed"] + num_new + 1, BLOCK):
            block = it["blocks"][end // BLOCK - 1]
            if end > it["computed"] and all(each != block for _, each in self.cached):
                self.cached.append(((it["salt"], tuple(it["tokens"][:end])), block))

    def chunk(self, it: dict[str, Any], num_computed: int) -> int:
        num_new = len(it["tokens"]) - num_computed
        return min(num_new, self.threshold or num_new, self.left) if self.chunked else num_new

    def step(self) -> tuple[dict[int, tuple[int, list[int]]], list[int]]:
        """id → (tokens, blocks), and the ids of preempted requests."""
        work, preempted, turn, self.left = {}, [], 0, self.budget
        while turn < len(self.running) and (self.left or not self.chunked):
            it = self.running[turn]
            num_new = self.chunk(it, it["computed"])
            missing = max(0, -(-(it["computed"] + num_new) // BLOCK) - len(it["blocks"]))
            while missing > len(self.free) and it in self.running:
                victim = self.running.pop()
                self.let_go(victim)
                self.waiting.insert(0, victim)
                preempted.append(victim["id"])
            if it not in self.running:
                break
            it["blocks"] += [self.take() for _ in range(missing)]
            self.schedule(it, num_new, work)
            turn += 1
        while self.waiting and not preempted and len(self.running) < self.max_num_seqs and self.left > 0:
            it = self.waiting[0]
            found = self.find(it) if self.caching else []
            num_new = self.chunk(it, len(found) * BLOCK)
            missing = -(-(len(found) * BLOCK + num_new) // BLOCK) - len(found)
            reserved = -(-len(it["tokens"]) // BLOCK) - len(found) if self.reserve else missing
            if num_new > self.left or reserved + sum(block in self.free for block in found) > len(self.free):
                break
            for block in found:
                if block in self.free:
                    self.free.remove(block)
                self.references[block] = self.references.get(block, 0) + 1
            it["blocks"] = found + [self.take() for _ in range(missing)]
            it["computed"] = len(found) * BLOCK
            self.running.append(self.waiting.pop(0))
            self.schedule(it, num_new, work)
        return work, preempted

    def schedule(self, it: dict[str, Any], num_new: int, work: dict[int, tuple[int, list[int]]]) -> None:
        if self.caching:
            self.cache(it, num_new)
        work[it["id"]] = (num_new, list(it["blocks"]))
        self.left -= num_new

    def commit(self, work: dict[int, Any], token_ids: dict[int, int]) -> None:
        for it in [each for each in self.running if each["id"] in work]:
            it["computed"] += work[it["id"]][0]
            if it["computed"] == len(it["tokens"]):
                it["tokens"].append(token_ids[it["id"]])
                it["left"] -= 1
                if not it["left"]:
                    self.running.remove(it)
                    self.let_go(it)


def a_workload(rng: random.Random, budget: int, num_blocks: int) -> list[tuple[int, list[int], int, str | None]]:
    """Prompts that begin alike, some of them the whole of an earlier one: (step of arrival, prompt, answer, salt)."""
    stems = [[rng.randrange(3) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    most = min(budget, num_blocks * BLOCK - 8)
    requests = []
    for _ in range(rng.randint(3, 14)):
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 9))]
        requests.append((rng.randint(0, 12), prompt[:most], rng.randint(1, 7), rng.choice([None, None, "a"])))
    return sorted(requests, key=lambda each: each[0])


@pytest.mark.parametrize("name", ["paged", "fair"])
@pytest.mark.parametrize("seed", range(150))
def test_blocks_hits_and_victims_are_the_models(name: str, seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, slots, budget = rng.randint(8, 20), rng.randint(1, 6), rng.choice([24, 40, 200])
    model = Model(num_blocks, slots, budget)
    scheduler: Scheduler = create_scheduler(
        name,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        prefix_caching=True,
    )
    coming = a_workload(rng, budget, num_blocks)
    assert_the_same(scheduler, model, coming, rng)


@pytest.mark.parametrize("seed", range(300))
def test_chunks_are_the_models(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, slots, budget = rng.randint(8, 20), rng.randint(1, 6), rng.choice([3, 5, 8, 24, 200])
    threshold, caching, reserve = rng.choice([0, 0, 2, 5]), rng.random() < 0.7, rng.random() < 0.7
    model = Model(num_blocks, slots, budget, True, threshold, caching, reserve)
    scheduler = ChunkedPrefillScheduler(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        prefix_caching=caching,
        long_prefill_threshold=threshold,
        reserve_full_prompt=reserve,
    )
    assert_the_same(scheduler, model, a_workload(rng, 10**6, num_blocks), rng)


def assert_the_same(
    scheduler: Scheduler, model: Model, coming: list[tuple[int, list[int], int, str | None]], rng: random.Random
) -> None:
    """Run both, step by step, to the end."""
    requests: dict[int, Request] = {}
    for step in range(2000):
        for arrival in [each for each in coming if each[0] == step]:
            _, prompt, left, salt = arrival
            number = len(requests)
            requests[number] = Request(number, prompt, left, cache_salt=salt)
            scheduler.add_request(requests[number])
            model.waiting.append(
                {"id": number, "tokens": list(prompt), "left": left, "salt": salt, "blocks": [], "computed": 0}
            )
        output, (work, preempted) = scheduler.schedule(), model.step()
        got = {
            each.request_id: (output.num_scheduled_tokens[each.request_id], each.block_ids) for each in output.scheduled
        }
        assert (got, output.preempted) == (work, preempted)
        token_ids = {request_id: rng.randrange(3) for request_id in work}
        scheduler.update_from_output(output, token_ids)
        model.commit(work, token_ids)
        scheduler.check()
        assert scheduler.pool.num_free == len(model.free)
        if not scheduler.has_unfinished and step > 12:
            return
    pytest.fail("requests are left")
