"""How much memory sharing saves: several answers to one prompt, sampled or searched for, next to the paper.

The PagedAttention paper (Kwon et al. 2023, section 6.3) divides the blocks that sharing saves by the blocks without
sharing. Here both are counted at every step of phase 8's `SharingScheduler`, and summed: the blocks in the tables of
all requests, and those of them that are different ones.

- `parallel`: n answers to each prompt, forked right after it, as `LLM` does. Prompts and answers have the lengths of
  Alpaca and ShareGPT (`minicache.simulator.workload`), all answers to one prompt the same. NUM_FAMILIES prompts are in
  the batch at once, and the next one comes when one has ended. No model: which tokens are drawn shares no block.
- `branching`: beam search on MiniGPT, watched from outside: which beam each beam comes from, at every step. MiniGPT
  sees 512 positions, and knows a small language; how a large model branches is not known here.
- `beam`: that branching, replayed at the lengths of the workloads. Where an answer is longer than a search that was
  watched, it goes on as another one does.
- `direct`, `replayed`: searches at Alpaca's lengths, counted while MiniGPT ran, and replayed without it: to be equal.

    python -m benchmarks.sharing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from random import Random
from statistics import fmean
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.engine.beam import BeamSearchParams
from minicache.engine.beam_requests import beam_search
from minicache.engine.llm import LLM
from minicache.grammar import Tokenizer, sample_text
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.sharing import SharingScheduler
from minicache.simulator.workload import ALPACA, SHAREGPT, Workload, generate

SIZES: Final = (2, 4, 6)
"""Answers to a prompt, or beams: the paper's."""
LOADS: Final = {"alpaca": ALPACA, "sharegpt": SHAREGPT}
NUM_REQUESTS: Final = 300
NUM_FAMILIES: Final = 8
BLOCK_SIZE: Final = 16
NUM_SEARCHES: Final = 24
LONGEST_SEARCH: Final = 300
"""Tokens of the searches whose branching is replayed."""
PAPER: Final = {
    "parallel": {"alpaca": {"least": 6.1, "most": 9.8}, "sharegpt": {"least": 16.2, "most": 30.5}},
    "beam": {"alpaca": {"least": 37.6, "most": 55.2}, "sharegpt": {"least": 44.3, "most": 66.3}},
}

Parents = Sequence[int]
"""A step of a search: for each of its beams, which of the beams before it comes from."""
Lengths = tuple[int, int]
"""Tokens of a prompt, and of each answer to it."""


def main() -> None:
    torch.set_num_threads(1)
    searches = {width: long_searches(width) for width in track(SIZES, description="Searching")}
    found: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_requests": NUM_REQUESTS,
        "num_families": NUM_FAMILIES,
        "lengths": {load: means(lengths_of(workload)) for load, workload in LOADS.items()},
        "paper": PAPER,
        "branching": {str(width): told(steps) for width, steps in searches.items()},
    }
    jobs = [(load, size) for load in LOADS for size in SIZES]
    for way in ("parallel", "beam"):
        found[way] = {load: {} for load in LOADS}
        for load, size in track(jobs, description=way):
            lengths = lengths_of(LOADS[load])
            families = sampled(lengths, size) if way == "parallel" else searched(lengths, searches[size])
            found[way][load][str(size)] = serve(families, NUM_FAMILIES).told()
    found["direct"], found["replayed"] = {}, {}
    for width in track(SIZES, description="Counting twice"):
        direct, again = counted_twice(width)
        found["direct"][str(width)], found["replayed"][str(width)] = direct.told(), again.told()
    record("sharing", found)


def lengths_of(workload: Workload) -> list[Lengths]:
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in generate(workload, NUM_REQUESTS, seed=0)]


def means(lengths: Sequence[Lengths]) -> dict[str, float]:
    return {
        "prompt": round(fmean(each for each, _ in lengths), 2),
        "output": round(fmean(each for _, each in lengths), 2),
    }


# --- counting ---------------------------------------------------------------------------------------------------------


class Held(Observer):
    """Counts at every step the blocks that requests hold: with sharing, and as if each had its own."""

    def __init__(self) -> None:
        self.num_steps = self.num_with = self.num_without = self.num_copies = 0

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Count."""
        self.num_steps += 1
        self.num_with += scheduler.pool.num_used
        self.num_without += sum(len(request.block_ids) for request in scheduler.running)
        self.num_copies += len(output.blocks_to_copy)

    @property
    def saved_percent(self) -> float:
        """Blocks saved, in percent of the blocks without sharing."""
        return 100 * (1 - self.num_with / self.num_without)

    def told(self) -> dict[str, float]:
        """What is kept."""
        return {
            "saved_percent": round(self.saved_percent, 2),
            "blocks_without": round(self.num_without / self.num_steps, 1),
            "blocks_with": round(self.num_with / self.num_steps, 1),
            "num_copies": self.num_copies,
        }


# --- families: one prompt, and all that is generated for it -----------------------------------------------------------


class Sampled:
    """One prompt with n answers, forked when the first has its first token, as `LLM._fork` does.

    Args:
        name: of the prompt.
        lengths: of the prompt and of each answer.
        num_answers: n.
    """

    def __init__(self, name: RequestId, lengths: Lengths, num_answers: int) -> None:
        self.name = name
        self.num_answers = num_answers
        num_prompt, num_output = lengths
        self.answers = [Request((name, 0), [0] * num_prompt, num_output, ignore_eos=True)]

    def begin(self, scheduler: Any) -> None:
        """Queue the first request."""
        scheduler.add_request(self.answers[0])

    def go_on(self, scheduler: Any) -> bool:
        """After a step: fork, if it is time for that. Whether an answer is unfinished."""
        first = self.answers[0]
        if len(self.answers) == 1 and first.status.is_finished:  # of a single token: nothing is left to share
            return False
        if len(self.answers) == 1 and first.output_token_ids:
            names = [(self.name, number) for number in range(1, self.num_answers)]
            self.answers += [scheduler.fork_request(first.request_id, name, []) for name in names]
        return not all(answer.status.is_finished for answer in self.answers)


class Searched:
    """One prompt with beams that branch as given.

    Args:
        name: of the prompt.
        lengths: of the prompt and of each beam in the end.
        branching: a step of the search for each token, or more.
    """

    def __init__(self, name: RequestId, lengths: Lengths, branching: Iterator[Parents]) -> None:
        self.name = name
        self.num_named = 1
        self.branching = branching
        num_prompt, num_output = lengths
        self.beams = [Request((name, 0), [0] * num_prompt, num_output, ignore_eos=True)]

    def begin(self, scheduler: Any) -> None:
        """Queue the first request."""
        scheduler.add_request(self.beams[0])

    def go_on(self, scheduler: Any) -> bool:
        """After a step: end beams and fork beams, as `beam_search` does. Whether the search goes on."""
        before = self.beams
        if before[0].status.is_finished or not before[0].output_token_ids:
            return not before[0].status.is_finished
        parents = next(self.branching)
        for place in set(range(len(before))) - set(parents):
            scheduler.abort_request(before[place].request_id)
        self.beams, continued = [], set[int]()
        for parent in parents:
            beam = before[parent]
            if parent in continued:
                beam = scheduler.fork_request(beam.request_id, (self.name, self.num_named))
                self.num_named += 1
            continued.add(parent)
            self.beams.append(beam)
        return True


def sampled(lengths: Iterable[Lengths], num_answers: int) -> Iterator[Sampled]:
    return (Sampled(name, each, num_answers) for name, each in enumerate(lengths))


def searched(lengths: Iterable[Lengths], searches: Sequence[Sequence[Parents]]) -> Iterator[Searched]:
    rng = Random(0)
    return (Searched(name, each, endless(searches, Random(rng.random()))) for name, each in enumerate(lengths))


def endless(searches: Sequence[Sequence[Parents]], rng: Random) -> Iterator[Parents]:
    """One of the searches, and after its end others, from their second step on: the first is that of a single beam."""
    yield from rng.choice(searches)
    for _ in repeat(None):
        yield from rng.choice(searches)[1:]


def serve(families: Iterable[Sampled | Searched], num_at_once: int) -> Held:
    """Serve families, `num_at_once` of them in the batch, and count blocks. Memory and batch slots suffice for all."""
    held = Held()
    scheduler: Any = observe(
        SharingScheduler(num_blocks=100_000, block_size=BLOCK_SIZE, max_num_seqs=1000, max_num_batched_tokens=100_000),
        held,
    )
    coming, here = iter(families), list[Sampled | Searched]()
    while True:
        while len(here) < num_at_once and (family := next(coming, None)):
            family.begin(scheduler)
            here.append(family)
        if not here:
            return held
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
        here = [family for family in here if family.go_on(scheduler)]


# --- real searches ----------------------------------------------------------------------------------------------------


class Branching(Observer):
    """Takes down which beam each beam comes from, at every step. One search at a time, with room for all its forks."""

    def __init__(self) -> None:
        self.searches: list[list[Parents]] = []
        self._beams: list[RequestId] = []
        self._forks: list[tuple[RequestId, RequestId]] = []
        self._ended: set[RequestId] = set()
        self._has_begun = False

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """A search begins."""
        self.searches.append([])
        self._beams, self._forks, self._ended, self._has_begun = [request.request_id], [], set(), False

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """A beam has another continuation."""
        self._forks.append((parent.request_id, child.request_id))

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """A beam has no continuation."""
        self._ended.add(request.request_id)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """What happened since the last step was the search's decision."""
        if self._has_begun:
            kept = [place for place, name in enumerate(self._beams) if name not in self._ended]
            parents = kept + [self._beams.index(parent) for parent, _ in self._forks]
            self._beams = [self._beams[place] for place in kept] + [child for _, child in self._forks]
            self.searches[-1].append(parents)
        self._forks, self._ended, self._has_begun = [], set(), True


def search(lengths: Sequence[Lengths], width: int, *observers: Observer) -> None:
    """A beam search on MiniGPT for each of these lengths, one after the other, over texts of its language."""
    scheduler = SharingScheduler(num_blocks=4096, block_size=BLOCK_SIZE, max_model_len=512)
    llm, rng, tokenizer = LLM("minigpt", scheduler=scheduler, observers=observers), Random(0), Tokenizer()
    for num_prompt, num_output in lengths:
        prompt: list[int] = []
        while len(prompt) < num_prompt:
            prompt += tokenizer.encode_words(sample_text(rng))
        params = BeamSearchParams(width, num_output, ignore_eos=True)
        beam_search(llm, [prompt[:num_prompt]], params)


def long_searches(width: int) -> list[list[Parents]]:
    """The steps of searches whose branching is replayed."""
    branching = Branching()
    search([(16, LONGEST_SEARCH)] * (NUM_SEARCHES // 2), width, branching)
    return branching.searches


def counted_twice(width: int) -> tuple[Held, Held]:
    """Searches at Alpaca's lengths, counted while they run, and again when they are replayed."""
    fitting = [each for each in lengths_of(ALPACA) if sum(each) <= 512][:NUM_SEARCHES]
    direct, branching = Held(), Branching()
    search(fitting, width, direct, branching)
    again = (
        Searched(name, each, iter(steps))
        for name, (each, steps) in enumerate(zip(fitting, branching.searches, strict=True))
    )
    return direct, serve(again, 1)


def told(searches: Sequence[Sequence[Parents]]) -> dict[str, float]:
    """How searches branch, their first step aside, in which one beam becomes all."""
    steps = [parents for steps in searches for parents in steps[1:]]
    survivors = fmean(len(set(parents)) for parents in steps)
    return {
        "num_searches": len(searches),
        "num_steps": sum(map(len, searches)),
        "survivors": round(survivors, 2),
        "forks_per_step": round(fmean(map(len, steps)) - survivors, 2),
        "common_back": round(fmean(common_back(each, end) for each in searches for end in range(1, len(each) + 1)), 1),
    }


def common_back(steps: Sequence[Parents], end: int) -> int:
    """How many tokens one must go back from the end of the first `end` steps to what all their beams have in common."""
    places, back = set(range(len(steps[end - 1]))), 0
    while len(places) > 1:
        places = {steps[end - 1 - back][place] for place in places}
        back += 1
    return back


if __name__ == "__main__":
    main()
