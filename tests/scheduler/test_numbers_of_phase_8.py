"""The numbers on phase 8's pages, computed again: the pages must not drift from what the code does."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minicache.engine.beam import BeamSearch, BeamSearchParams
from minicache.memory import prefix
from minicache.memory.prefix import CachingBlockPool, block_hash, root_hash
from minicache.request import Request, RequestStatus
from minicache.scheduler import PrefixCachingScheduler, SharingScheduler
from minicache.scheduler.output import SchedulerOutput

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/en/phase-08-prefix-sharing"
COMMON, BLOCKS, POOL = (
    f"theory/0{name}.md"
    for name in ("1-what-two-requests-have-in-common", "2-what-a-hash-must-cover", "3-a-pool-that-remembers")
)
FINDING, COPIES, CHILDREN, BEAMS, SAVES, MEMORY = (
    f"theory/0{name}.md"
    for name in (
        "4-finding-a-prefix",
        "5-copy-on-write",
        "6-a-child-with-other-tokens",
        "7-parallel-sampling-and-beam-search",
        "8-what-it-saves",
        "9-how-much-memory-it-takes",
    )
)


@cache
def page(name: str) -> str:
    """A page as one line, wherever its lines are broken."""
    return " ".join((PAGES / name).read_text(encoding="utf-8").split())


def missing_on(name: str, *stated: str) -> list[str]:
    return [number for number in stated if number not in page(name)]


def table(name: str, heading: str) -> list[list[str]]:
    """The cells of the table whose heading row is given, row by row; it may stand in a fold."""
    lines = [line.strip() for line in (PAGES / name).read_text(encoding="utf-8").splitlines()]
    rows: list[list[str]] = []
    for line in lines[lines.index(heading) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return found


def ints(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def step(scheduler: SharingScheduler, token: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, token))
    return output


def serve(scheduler: SharingScheduler, *requests: Request) -> list[int]:
    """Serve these to their end; of each the tokens that its first step computed."""
    first: dict[object, int] = {}
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished:
        first = dict(step(scheduler).num_scheduled_tokens) | first
    return [first[request.request_id] for request in requests]


def forked(num_prompt: int, num_children: int, outputs: list[int] | None = None, **options: int) -> SharingScheduler:
    """A request with its first token, and its children."""
    scheduler = SharingScheduler(**{"num_blocks": 200, "block_size": 4} | options)
    scheduler.add_request(Request(0, [1] * num_prompt, 4))
    step(scheduler)
    for number in range(1, num_children + 1):
        scheduler.fork_request(0, number, outputs)
    return scheduler


# --- what two requests have in common -------------------------------------------------------------------------------


def test_the_example_of_the_index():
    scheduler = SharingScheduler(num_blocks=20, prefix_caching=True)
    assert [serve(scheduler, Request(name, list(range(48)), 2))[0] for name in "ab"] == [48, 16]
    assert not missing_on("index.md", "computes 48 and 16", "The other 32")


def test_two_questions_after_one_system_prompt():
    scheduler = SharingScheduler(num_blocks=20, prefix_caching=True)
    a = Request("a", [*range(36), *[100] * 10], 5)
    b = Request("b", [*range(36), *[200] * 20], 5)
    for request in (a, b):
        scheduler.add_request(request)
    assert step(scheduler).num_scheduled_tokens == {"a": 46, "b": 24}
    assert (len(a.block_ids), len(b.block_ids), scheduler.pool.num_used) == (3, 4, 5)
    assert a.block_ids[:2] == b.block_ids[:2]
    assert not missing_on(COMMON, "they need 5", "computes 24 tokens where it would have computed 56")


@pytest.mark.parametrize(("prefix_caching", "column"), [(False, 2), (True, 3)])
def test_the_turns_of_a_chat(prefix_caching, column):
    scheduler, said, computed = SharingScheduler(num_blocks=64, prefix_caching=prefix_caching), [], []
    rows = table(COMMON, "| turn | prompt | computed without a cache | computed with it |")
    for turn, row in enumerate(rows[:4]):
        said = [*said, *range(1000 * turn, 1000 * turn + 20)]
        request = Request(turn, said, 60)
        assert ints(row[1]) == [len(said)]
        computed += serve(scheduler, request)
        said = [*said, *request.output_token_ids]
    assert [ints(row[column])[0] for row in rows] == [*computed, sum(computed)]


def test_what_is_found_of_a_prompt():
    rows = table(COMMON, "| prompt | full blocks | found | computed |")
    for length, full, found, computed in (map(int, row) for row in rows):
        scheduler = SharingScheduler(num_blocks=20, prefix_caching=True)
        counted = [serve(scheduler, Request(name, list(range(length)), 1))[0] for name in "ab"]
        assert (counted, full, found) == ([length, computed], length // 16, length - computed)


def test_the_arithmetic_of_341_tokens():
    row, weights, slots = 819_200, 12.85e9, 15_728
    assert not missing_on(
        COMMON,
        f"{341 * row / 1e6:.0f} MB",
        f"{30 * 341 * row / 1e9:.1f} GB, of the {slots * row / 1e9:.1f} GB",
        f"{2 * weights * 341 / 1e12:.1f} \\cdot 10^{{12}}",
        f"{2 * weights * 341 / (0.6 * 312e12) * 1e3:.0f} ms of an A100",
    )


def test_a_clock_in_front_and_at_the_end():
    """The check of the first page: 351 tokens each, or 15 from the second on."""
    for prompts, wanted in (
        ([[n, *range(340), *[9] * 10] for n in range(3)], [351, 351, 351]),
        ([[*range(340), n, *[9] * 10] for n in range(3)], [351, 15, 15]),
    ):
        scheduler = SharingScheduler(num_blocks=200, prefix_caching=True)
        assert serve(scheduler, *(Request(n, prompt, 1) for n, prompt in enumerate(prompts))) == wanted
    assert not missing_on(COMMON, "compute 351 each", "21 full blocks are found, 336 tokens", "compute 15")


# --- what a hash must cover -----------------------------------------------------------------------------------------


def test_the_digits_of_the_hashes():
    root = root_hash(None, None)
    first = block_hash(root, [1, 2, 3, 4])
    second = block_hash(first, [5, 6, 7, 8])
    other = block_hash(root, [9, 9, 9, 9])
    names = [name.hex()[:8] for name in (first, second, other, block_hash(other, [5, 6, 7, 8]))]
    rows = table(BLOCKS, "| | block 0 | block 1 |")
    assert [cell.strip("`") for row in rows for cell in row[1:]] == names


def test_the_arithmetic_of_hashing():
    whole = sum(range(16, 1601, 16))
    assert f"{whole:,} tokens" in page(BLOCKS)
    assert round((10**6) ** 2 / 2**65 * 1e8) == 3
    assert hash((0, 5)) == hash((2**61 - 1, 5))
    assert not missing_on(BLOCKS, "3 in 100 million", "420 blocks instead of 21")
    assert 20 * (341 // 16) == 420


@pytest.mark.parametrize(("salts", "found"), [((None, None), [(38, 4)]), (("a", "b"), [])])
def test_a_tenant_who_guesses(salts, found):
    scheduler = SharingScheduler(num_blocks=500, block_size=4, prefix_caching=True)
    serve(scheduler, Request("a", [5, 6, 3, 8, 1, 1], 3, cache_salt=salts[0]))
    hits = []
    for guess in range(100):
        request = Request(guess, [5, 6, guess // 10, guess % 10, 1], 1, cache_salt=salts[1])
        serve(scheduler, request)
        hits += [(guess, request.num_cached_tokens)] if request.num_cached_tokens else []
    assert hits == found
    assert "| the same salt, or none | 100 | `5 6 3 8`: 4 tokens |" in page(BLOCKS)


# --- a pool that remembers ------------------------------------------------------------------------------------------


def test_seven_moments_of_a_pool():
    pool, names = CachingBlockPool(6, 4), [bytes([number]) * 32 for number in range(3)]
    lines, cached = [], []

    def look() -> None:
        """The line is what a copy of the pool hands out, asked for all of it."""
        lines.append(deepcopy(pool).allocate(pool.num_free))
        cached.append([pool.find([name]) for name in names])

    look()
    a = pool.allocate(3)
    pool.cache(a, names)
    look()
    pool.free(a[::-1])
    look()
    pool.share(pool.find(names[:2]))
    look()
    assert pool.allocate(2) == [3, 4]
    look()
    assert pool.allocate(2) == [5, 2]
    look()
    assert pool.find(names) == [0, 1]
    look()
    rows = table(POOL, "| | free blocks, the next one first | cached |")
    assert [ints(row[1]) for row in rows] == lines
    assert cached == [[[], [], []], *[[[0], [1], [2]]] * 4, *[[[0], [1], []]] * 2]


def test_tails_and_the_two_ends():
    """The free list after a request of 9 tokens, and after each of four with 3, with one end and with two."""
    scheduler = SharingScheduler(num_blocks=4, block_size=4, prefix_caching=True)
    serve(scheduler, Request("a", [1] * 9, 1))
    one_end, happened = [3, 2, 1, 0], []
    for number in range(5):
        happened.append((one_end, deepcopy(scheduler.pool).allocate(4)))
        serve(scheduler, Request(number, [2] * 3, 1))
        one_end = [*one_end[1:], one_end[0]]
    rows = table(POOL, "| | first in, first out | two ends |")
    assert [(ints(row[1].split(",")[0]), ints(row[2])) for row in rows] == happened
    assert scheduler.stats.num_evicted_blocks == 0


def test_what_is_computed_twice():
    """48 tokens, twice at once: the third block is there twice, and both have the hash."""
    scheduler = SharingScheduler(num_blocks=20, prefix_caching=True)
    a, b = (Request(name, list(range(48)), 5) for name in "ab")
    for request in (a, b):
        scheduler.add_request(request)
        step(scheduler)
    assert (a.block_ids, b.block_ids[:3], scheduler.pool.num_cached) == ([0, 1, 2, 3], [0, 1, 4], 4)
    assert not missing_on(POOL, "A has blocks 0, 1, 2, and 3", "the last 16 tokens into block 4", "blocks 2 and 4")


def test_two_in_one_step():
    scheduler = SharingScheduler(num_blocks=20, block_size=4, prefix_caching=True)
    for name in "ab":
        scheduler.add_request(Request(name, [1] * 9, 3))
    assert step(scheduler).num_scheduled_tokens == {"a": 9, "b": 1}
    assert "A computes 9 tokens, B finds 8 and computes 1" in page(FINDING)


def test_noted_and_hashed():
    scheduler = SharingScheduler(num_blocks=10, block_size=4, prefix_caching=True)
    scheduler.add_request(a := Request("A", [1] * 6, 20))
    rows = table(FINDING, "| step | A computes | which fills | noted at the end of the step | cached blocks |")
    for number, (_, computes, _, noted, cached) in enumerate(rows):
        if number == 3:
            scheduler.add_request(Request("B", [*a.token_ids(0, 8), 0], 5))
        first = a.num_computed_tokens
        output = step(scheduler)
        positions = list(range(first, a.num_computed_tokens))
        assert ints(computes) in (positions, [positions[0], positions[-1]])
        assert ints(noted) == [each for entry in scheduler._filled for each in entry[1:]]
        assert int(cached) == scheduler.pool.num_cached
    assert output.num_scheduled_tokens == {"A": 1, "B": 1}


def test_a_victim_with_a_partial_last_block():
    scheduler = SharingScheduler(num_blocks=6, block_size=4, prefix_caching=True)
    old, young = Request("old", [5] * 8, 9), Request("young", [6] * 6, 9)
    for request in (old, young):
        scheduler.add_request(request)
    seen = []
    for _ in range(10):
        if len(seen) == 5:
            assert (young.num_tokens, young.num_computed_tokens) == (11, 10)
        output = step(scheduler)
        free = deepcopy(scheduler.pool).allocate(scheduler.pool.num_free)
        seen.append([old.block_ids.copy(), young.block_ids.copy(), free])
    rows = table(FINDING, "| step | old's blocks | young's blocks | free, the next one first | |")
    assert [[ints(cell) for cell in row[1:4]] for row in rows] == [seen[int(row[0])] for row in rows]
    assert output.num_scheduled_tokens == {"young": 3}
    assert not missing_on(FINDING, "8 of its 11 tokens are found, and 3 computed")


def test_what_admission_counts():
    scheduler = SharingScheduler(num_blocks=5, block_size=4, prefix_caching=True)
    serve(scheduler, Request("a", [1] * 9, 1))
    scheduler.add_request(Request("x", [2] * 7, 9))
    step(scheduler)
    b = Request("b", [1] * 14, 3)
    assert scheduler.find_prefix(b) == [0, 1]
    counted = [
        scheduler.blocks_to_admit(b),
        2,
        scheduler.blocks_to_take(b, scheduler.find_prefix(b)),
        scheduler.pool.num_free,
    ]
    rows = table(FINDING, "| it takes | blocks |")
    assert [ints(row[1])[0] for row in rows] == counted
    assert scheduler.num_new_tokens(b, scheduler.find_prefix(b)) == 6
    assert "The free list is 4 1 0." in page(FINDING)
    assert deepcopy(scheduler.pool).allocate(3) == [4, 1, 0]
    scheduler.add_request(b)
    step(scheduler)
    assert b.status is RequestStatus.WAITING


@pytest.mark.parametrize(("prefix_caching", "row"), [(False, 0), (True, 1)])
def test_a_victim_comes_back(prefix_caching, row):
    scheduler = SharingScheduler(num_blocks=10, prefix_caching=prefix_caching)
    for number in (0, 1):
        scheduler.add_request(Request(number, [number] * 80, 20))
    preempted, returns = [], []
    for number in range(40):
        if not scheduler.has_unfinished:
            break
        output = step(scheduler)
        preempted += [number] * len(output.preempted)
        returns += [(number, output.num_scheduled_tokens[1])] if number and 1 in output.num_scheduled_tokens else []
    rows = table(FINDING, "| | tokens computed at the return |")
    assert (preempted, returns[0]) == ([1], (20, int(rows[row][1])))
    assert not missing_on(FINDING, "step 1 the second is preempted. It comes back in step 20", "48 tokens")


def test_where_lru_fails():
    for row in table(POOL, "| blocks of 4 | hit rate |"):
        [num_blocks], [percent] = ints(row[0]), ints(row[1])
        scheduler = SharingScheduler(num_blocks=num_blocks, block_size=4, prefix_caching=True)
        for number in range(50):
            serve(scheduler, Request(number, [number % 5] * 16 + [9], 1))
        assert round(100 * scheduler.stats.hit_rate) == percent
    assert (scheduler.stats.num_hit_tokens, scheduler.stats.num_queried_tokens) == (720, 850)


# --- copy-on-write --------------------------------------------------------------------------------------------------


def test_the_first_write_copies():
    scheduler = SharingScheduler(num_blocks=20, block_size=4)
    a = Request("a", [1] * 6, 20)
    scheduler.add_request(a)
    step(scheduler)
    b = scheduler.fork_request("a", "b")
    happened = [(a.block_ids.copy(), b.block_ids.copy(), [], scheduler.pool.num_used)]
    for _ in range(3):
        copies = [each for pair in step(scheduler).blocks_to_copy for each in pair]
        happened.append((a.block_ids.copy(), b.block_ids.copy(), copies, scheduler.pool.num_used))
    rows = table(COPIES, "| | a's blocks | b's blocks | copies | blocks used |")
    assert [(ints(row[1]), ints(row[2]), ints(row[3]), int(row[4])) for row in rows] == happened


def test_a_copy_that_is_not_needed_any_more():
    for num_blocks, num_children, work, copies, preempted in ((2, 1, [0], [], [1]), (3, 2, [0, 1], [(1, 2)], [2])):
        scheduler = forked(6, num_children, num_blocks=num_blocks)
        output = step(scheduler)
        assert [*output.num_scheduled_tokens] == work
        assert (output.blocks_to_copy, output.preempted) == (copies, preempted)
    assert "b is alone on block 1" in page(COPIES)


def test_children_with_other_tokens():
    rows = table(CHILDREN, "| the child has generated | in common | counts as computed | its blocks | it computes |")
    assert len(rows) == 6
    for said, agree, computed, blocks, left in rows:
        scheduler = SharingScheduler(num_blocks=20, block_size=4)
        scheduler.add_request(a := Request("a", [1] * 6, 20))
        for _ in range(3):
            step(scheduler)
        assert (a.output_token_ids, a.num_computed_tokens, a.block_ids) == ([7, 7, 7], 8, [0, 1])
        outputs = ints(said)
        both = 6 + next((n for n, (x, y) in enumerate(zip([7, 7, 7], outputs, strict=False)) if x != y), len(outputs))
        b = scheduler.fork_request("a", "b", outputs)
        counted = [both, b.num_computed_tokens, b.block_ids, b.num_tokens - b.num_computed_tokens]
        assert [int(agree), ints(computed)[0], ints(blocks), int(left)] == counted


def test_which_block_the_parent_has_filled():
    rows = table(CHILDREN, "| child | shared | s | would count as computed | n | parent computed | m | |")
    for said, shared, s, computed, n, parent, m, why in rows:
        outputs = ints(said)
        both = 6 + next((i for i, (x, y) in enumerate(zip([7, 7, 7], outputs, strict=False)) if x != y), len(outputs))
        assert (int(shared), int(computed), int(parent)) == (both, min(8, both, 5 + len(outputs)), 8)
        assert (int(s), int(n), int(m)) == (int(shared) // 4, int(computed) // 4, int(parent) // 4)
        assert ("s = n < m" in why) == (int(s) == int(n) < int(m))


@pytest.mark.parametrize(("prefix_caching", "row"), [(False, 0), (True, 1)])
def test_siblings_that_run_out_of_memory(prefix_caching, row):
    scheduler = SharingScheduler(num_blocks=5, block_size=4, prefix_caching=prefix_caching)
    scheduler.add_request(a := Request("a", [1] * 8, 8))
    step(scheduler, 10)
    firsts = {"a": 10, "b": 20, "c": 30}
    siblings = [a, *(scheduler.fork_request("a", name, [firsts[name]]) for name in "bc")]
    seen, preempted, computed = {}, {}, {}
    for number in range(1, 14):
        output = scheduler.schedule()
        scheduler.update_from_output(output, {name: firsts[name] + number for name in output.num_scheduled_tokens})
        free = deepcopy(scheduler.pool).allocate(scheduler.pool.num_free)
        seen[number] = [*(each.block_ids.copy() for each in siblings), free]
        preempted[number] = output.preempted
        computed[number] = dict(output.num_scheduled_tokens)
    rows = table(CHILDREN, "| step | a | b | c | free | |")
    for cells in rows[:2]:
        assert [ints(cell) for cell in cells[1:5]] == seen[int(cells[0])]
    assert (preempted[5], a.status.is_finished) == (["c", "b"], True)
    at_return = table(CHILDREN, "| tokens computed at the return | b, step 8 | c, step 11 |")
    assert [int(cell) for cell in at_return[row][1:]] == [computed[8]["b"], computed[11]["c"]]


@pytest.mark.parametrize("outputs", [[7, 7, 9], []])
def test_the_check_of_a_child(outputs):
    scheduler = SharingScheduler(num_blocks=20, block_size=4)
    scheduler.add_request(a := Request("a", [1] * 5, 20))
    for _ in range(4):
        step(scheduler)
    assert (a.output_token_ids, a.num_computed_tokens) == ([7, 7, 7, 7], 8)
    assert scheduler.fork_request("a", "b", outputs).num_computed_tokens == 4


@pytest.mark.parametrize(("num_prompt", "copies"), [(21, 5), (20, 0)])
def test_six_of_one_prompt(num_prompt, copies):
    scheduler = forked(num_prompt, 5)
    assert len(step(scheduler).blocks_to_copy) == copies
    assert scheduler.pool.num_used == 11
    assert not missing_on(COPIES, "5 copies", "5 + 6 = 11 blocks are used; without sharing 36")


# --- several answers ------------------------------------------------------------------------------------------------


def test_four_answers_to_one_prompt():
    scheduler = forked(21, 3, [])
    used = [scheduler.pool.num_used]
    for _ in range(3):
        output = scheduler.schedule()
        used.append(scheduler.pool.num_used)
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    assert used == [6, 9, 9, 9]
    without = SharingScheduler(num_blocks=200, block_size=4)
    for number in range(4):
        without.add_request(Request(number, [number] * 21, 4))
    most = 0
    while without.has_unfinished:
        output = without.schedule()
        most = max(most, without.pool.num_used)
        without.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    assert [int(row[2]) for row in table(BEAMS, "| | what happens | blocks used |")] == [6, 6, 9, 9, most]


def test_a_beam_search_by_hand():
    """The three steps of the page, and what greedy decoding finds with the same numbers."""
    names = ["fish", "rice", "`.`"]
    after = {
        (): {0: -1.0, 2: -2.25, 1: -4.0},
        (0,): {1: -2.0, 2: -5.0, 0: -9.0},
        (1,): {0: -1.0, 2: -1.5, 1: -9.0},
        (0, 1): {0: -4.0, 1: -9.0, 2: -9.0},
        (1, 0): {1: -1.5, 0: -9.0, 2: -9.0},
    }
    search, said, steps = BeamSearch(BeamSearchParams(2, length_penalty=1.0), [2], 3), [], 0
    for cells in (PAGES / BEAMS).read_text(encoding="utf-8").split("| rank | hypothesis | sum | |")[1:]:
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in cells.split("\n\n")[0].splitlines()[2:]]
        said.append([(int(rank), way, float(total.replace("−", "-"))) for rank, way, total, _ in rows])
    while not search.is_over:
        ways = [
            (beam.log_prob + log_prob, [*beam.token_ids, token])
            for beam in search.beams
            for token, log_prob in after[beam.token_ids].items()
        ]
        ways.sort(reverse=True)
        shown = [(rank, " ".join(names[token] for token in way), total) for rank, (total, way) in enumerate(ways)]
        assert said[steps] == shown[: len(said[steps])]
        search.advance([list(after[beam.token_ids].items()) for beam in search.beams])
        steps += 1
    assert steps == len(said) == 3
    greedy, total = [], 0.0
    for _ in range(3):
        token = max(after[tuple(greedy)], key=after[tuple(greedy)].__getitem__)
        total += after[tuple(greedy)][token]
        greedy.append(token)
    assert [(answer.token_ids, round(answer.score, 2)) for answer in search.answers] == [
        ([1, 0, 1], -2.17),
        ([2], -2.25),
    ]
    assert (greedy, total, round(total / 3, 2)) == ([0, 1, 0], -7.0, -2.33)
    assert not missing_on(BEAMS, "*rice fish rice* (−2.17) and *.* (−2.25)", "takes *fish rice fish*", "sum of −7")


def test_what_is_said_of_the_memory_saved():
    """The words about the table: what agrees with the paper, and what does not."""
    told = results("sharing")
    saved = {
        (way, load): [told[way][load][str(size)]["saved_percent"] for size in (2, 4, 6)]
        for way in ("parallel", "beam")
        for load in ("alpaca", "sharegpt")
    }
    least, most = ({(way, load): told["paper"][way][load][end] for way, load in saved} for end in ("least", "most"))
    assert all(values == sorted(values) for values in saved.values()), "more answers save more"
    for way in ("parallel", "beam"):
        assert all(long > short for long, short in zip(saved[way, "sharegpt"], saved[way, "alpaca"], strict=True))
    for load in ("alpaca", "sharegpt"):
        pairs = zip(saved["beam", load], saved["parallel", load], strict=True)
        assert all(beams > 2 * samples for beams, samples in pairs), "several times as much"
    each = "parallel", "sharegpt"
    assert least[each] <= saved[each][0] <= most[each], "begins inside"
    assert round(saved[each][-1] - most[each]) == 1, "ends one point above"
    each = "parallel", "alpaca"
    assert least[each] <= saved[each][0] <= most[each], "begins inside"
    assert round(saved[each][-1] - most[each]) == 3, "ends three points above"
    each = "beam", "alpaca"
    assert round(least[each] - saved[each][0]) == 5, "five points below"
    assert least[each] <= saved[each][-1] <= most[each], "ends inside"
    each = "beam", "sharegpt"
    assert least[each] <= saved[each][0] <= most[each]
    assert saved[each][1] > most[each]
    assert all(
        value < 100 * (1 - 1 / n) for values in saved.values() for n, value in zip((2, 4, 6), values, strict=True)
    )
    assert saved[each][-1] > 0.9 * 100 * (1 - 1 / 6), "near the most there can be"
    assert saved["parallel", "sharegpt"][-1] < 0.5 * 100 * (1 - 1 / 6)
    assert told["replayed"] == told["direct"], "the replay loses nothing"
    assert (told["num_requests"], told["num_families"]) == (300, 8)
    assert round(told["branching"]["4"]["num_steps"] / told["branching"]["4"]["num_searches"], -1) == 300


# --- what it saves --------------------------------------------------------------------------------------------------


def test_the_example_by_hand_is_that_of_the_table():
    """2,000 sentences behind 80 tokens: what is saved by hand is what the simulation saves."""
    run = results("prefix_cache")["system_prompt"]
    assert (run["num_requests"], run["own_prompt_tokens"]) == (2000, 30)
    without, saved = 2000 * 110, 1999 * 80
    assert without - saved == 110 + 1999 * 30
    assert run["80"]["prefill_without"] - run["80"]["prefill_with"] == pytest.approx(saved, rel=0.01)
    assert run["80"]["saved_percent"] == pytest.approx(100 * saved / without, abs=1)
    rows = table(SAVES, "| | prompt tokens computed |")
    assert [row[1].split(",")[0] for row in rows] == ["220", "110", "59", "159"]
    assert rows[-1][1] == f"{saved:,}, which are {saved / without:.0%}".replace("%", " %")
    assert not missing_on(SAVES, f"{without:,}", f"{1999 * 30:,}", "40 · 7 = 280 blocks, with it 5 + 40 · 2 = 85")


def test_the_arithmetic_of_the_last_check():
    per_token = 140 / 1000
    long, short, saved = 400 * 30 + 400 * per_token, 20 * 30 + 400 * per_token, 336 * per_token
    assert not missing_on(
        SAVES,
        f"{saved:.0f} ms of {long:,.0f} are {saved / long:.1%}".replace("%", " %"),
        f"{saved:.0f} of {short:.0f} ms are {saved / short:.0%}".replace("%", " %"),
        f"{40 * saved / 1000:.1f} s of the server's time",
    )


def test_what_is_said_of_a_system_prompt():
    told = results("prefix_cache")
    for shared in ("80", "341"):
        run = told["system_prompt"][shared]
        assert run["requests_per_second"]["without"] < 1.11 * run["requests_per_second"]["oracle"], "a tenth at most"
        assert run["batch"]["with"] > 2 * run["batch"]["without"]
        by_answer = [told["by_answer"][answer][shared] for answer in ("20", "40", "80")]
        for key in ("with_over_without", "with_over_oracle"):
            factors = [each[key] for each in by_answer]
            assert factors == sorted(factors, reverse=True), "short answers gain more than long ones"
        assert by_answer[1]["with_over_oracle"] == run["with_over_oracle"]
    assert all(each["341"][key] > each["80"][key] for each in told["by_answer"].values() for key in each["80"]), (
        "341 shared tokens gain more than 80"
    )
    longest = told["by_answer"]["80"]
    assert longest["341"]["with_over_oracle"] == pytest.approx(told["system_prompt"]["341"]["paper"], rel=0.05)
    assert longest["80"]["with_over_oracle"] > told["system_prompt"]["80"]["paper"]


def test_how_old_a_cache_is():
    assert (f"{(1024 - 300) / 20:.0f}", f"{(1024 - 300) / 25:.0f}") == ("36", "29")
    assert not missing_on(
        MEMORY, "30 seconds", "724 blocks at 20 a second last 36 seconds", "At 25 a second they last 29"
    )


def test_what_is_said_of_chats():
    told = results("prefix_cache")
    saved = [point["with"]["saved_percent"] for point in told["chat"]["points"]]
    assert len(saved) == 6
    assert saved == sorted(saved, reverse=True), "the busier the server, the less it saves"
    first, last = told["chat"]["points"][0], told["chat"]["points"][-1]
    assert first["with"]["preemptions"] == 0 < last["with"]["preemptions"]
    assert 1 < told["chat"]["throughput_ratio"] < told["chat"]["light"]["ttft_ratio"]
    points = {point["num_blocks"]: point for point in told["hit_rate"]["points"]}
    ceiling = told["hit_rate"]["ceiling_percent"]
    assert [told["hit_rate"]["points"][place]["num_blocks"] for place in (1, 3, 5, 7)] == [
        1024,
        2048,
        4096,
        8192,
    ]
    assert {size for size, point in points.items() if point["percent"] == ceiling} == {s for s in points if s >= 8192}
    assert points[8192]["evicted"] > 0


# --- the labs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lab/00-hashes-and-the-pool.md", "lab/01-the-prefix-cache.md", "lab/02-forks-and-beams.md"]
)
def test_the_worked_examples_of_the_labs(name):
    """What the labs' pages show at the prompt is what comes out."""
    text = (PAGES / name).read_text(encoding="utf-8")
    examples = "\n\n".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL))
    names = {each: getattr(prefix, each) for each in ("CachingBlockPool", "block_hash", "root_hash")}
    names |= {each.__name__: each for each in (Request, PrefixCachingScheduler, SharingScheduler)}
    if "Beam" in examples:
        beam = importlib.import_module("minicache.engine.beam")
        names |= {each: getattr(beam, each) for each in ("BeamSearch", "BeamSearchParams", "Step")}
    case = doctest.DocTestParser().get_doctest(examples, names, name, None, 0)
    runner = doctest.DocTestRunner()
    runner.run(case)
    assert runner.summarize() == (0, len(case.examples))
    assert len(case.examples) > 15
