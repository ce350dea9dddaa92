"""Phase 11, task 7: our scheduler decides for an engine with requests, a cache and a loop of its own.

The engine of these tests does what transformers' continuous batching does, without a model: its cache holds tokens in
place of keys and values, and the next token is a function of those that are there. So an answer is right only if the
right tokens were computed at the right positions. tests/plugins runs the same adapter inside transformers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from minicache.errors import InvariantError, PluginError, RequestTooLargeError
from minicache.memory.blocks import blocks_for
from minicache.plugins.adapter import SchedulerAdapter
from minicache.scheduler import create_scheduler
from minicache.scheduler.audit import Auditor
from minicache.scheduler.observe import observe
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.follow import following
from minicache_course.language import joined
from minicache_course.seeds import fresh, one_of

STOP = 2
X = one_of(5, range(10, 60))


@pytest.fixture(autouse=True)
def _scenario():
    """A failure's message shows the scheduler, the requests, and the calls of adapter and engine."""
    with scenario.telling(), following(SchedulerAdapter, "abort", add=_add, schedule=_schedule, commit=_commit):
        yield


def _add(result, state, stop_token_ids=()):
    stops = list(stop_token_ids)
    return f"add {state.request_id!r}: {_tokens(state.initial_tokens)}, {state.max_new_tokens} to generate", (
        f"stop {stops}" if stops else ""
    )


def _schedule(batch):
    parts = [f"{state.request_id} {count}" for state, count in batch.scheduled]
    lost = [f"{state.request_id} preempted" for state in batch.preempted]
    return f"schedule() → {joined(', ', parts + lost) or 'nothing'}", ""


def _commit(finished):
    return f"commit() → {finished}", ""


def _tokens(tokens):
    return str(tokens) if len(tokens) <= 8 else f"{len(tokens)} tokens"


@dataclass
class State:
    """An engine's record of a request."""

    request_id: str
    initial_tokens: list[int]
    max_new_tokens: int | None = 4
    generated_tokens: list[int] = field(default_factory=list)
    tokens_to_process: list[int] = field(default_factory=list)
    remaining_prefill_tokens: list[int] = field(default_factory=list)
    position_offset: int = 0
    finished: bool = False


class Cache:
    """An engine's cache: how many blocks each request has, and what is stored at its positions 0, 1, 2, …."""

    def __init__(self, num_blocks, block_size):
        self.num_free, self.block_size = num_blocks, block_size
        self.num_held, self.stored = {}, {}

    def can_store_request_tokens(self, state, request_len):
        held = self.num_held.get(state.request_id, 0)
        missing = blocks_for(state.position_offset + request_len, self.block_size) - held
        if missing > self.num_free:
            return False
        self.num_free -= missing
        self.num_held[state.request_id] = held + missing
        self.stored.setdefault(state.request_id, [])
        return True

    def free_blocks(self, request_id):
        self.num_free += self.num_held.pop(request_id, 0)
        self.stored.pop(request_id, None)


def next_token(tokens):
    """The model's next token after `tokens`: it depends on each of them and its position. Never STOP."""
    return 3 + sum((place + 7) * token for place, token in enumerate(tokens)) % 89


def answer(state, stops=()):
    """The tokens that the request must get, whatever is scheduled."""
    tokens = list(state.initial_tokens)
    while len(tokens) < len(state.initial_tokens) + state.max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(state.initial_tokens) :]


class Engine:
    """The engine's loop. `compute` is the forward pass and the sampling after it."""

    def __init__(self, adapter, stops=()):
        self.adapter, self.cache, self.stops = adapter, adapter.cache, stops

    def compute(self, batch):
        """Compute a batch as it is prepared in the states; its finished requests leave the cache."""
        __tracebackhide__ = True
        for state, count in batch.scheduled:
            who = state.request_id
            that(f"tokens_to_process of {who!r}, their number", len(state.tokens_to_process)).gives(count)
            stored = self.cache.stored[who]
            that(f"position_offset of {who!r}, of what the cache holds of it", state.position_offset).gives(len(stored))
            stored += state.tokens_to_process
            state.position_offset += count
            if not state.remaining_prefill_tokens:
                self.sample(state, next_token(stored))

    def sample(self, state, token):
        state.generated_tokens.append(token)
        state.tokens_to_process = [token]
        if token in self.stops or len(state.generated_tokens) == state.max_new_tokens:
            state.finished = True
            self.cache.free_blocks(state.request_id)

    def step(self):
        __tracebackhide__ = True
        batch = call(self.adapter.schedule).value
        self.compute(batch)
        return batch


def make(name="chunked", *, num_blocks=16, block_size=4, num_engine_blocks=None, observers=(), **options):
    """An engine with an adapter around the scheduler `name`, without requests."""
    scheduler = create_scheduler(name, num_blocks=num_blocks, block_size=block_size, **options)
    told = "".join(f", {key}={value}" for key, value in options.items())
    scenario.given(f"a {name!r} scheduler, {num_blocks} blocks of {block_size}{told}")
    cache = Cache(num_blocks if num_engine_blocks is None else num_engine_blocks, block_size)
    return Engine(SchedulerAdapter(observe(scheduler, *observers), cache))


def add(engine, *states, stops=()):
    __tracebackhide__ = True
    for state in states:
        call(engine.adapter.add, state, list(stops)).gives(None)
    return states[0]


def records(engine, state):
    """Both records of an unfinished request, which must agree after a commit."""
    scheduler = engine.adapter.scheduler
    waiting = [each for each in scheduler.waiting.values() if each.request_id == state.request_id]
    request = [*waiting, *(each for each in scheduler.running if each.request_id == state.request_id)][0]
    return request


# A request is added


def test_a_request_gets_a_record_of_ours():
    """The scheduler's request has the engine's prompt, limit and stop tokens, and `states` has the engine's record."""
    engine = make()
    state = add(engine, State("a", [X, 6, 7], 4), stops=(STOP, 9))
    request = records(engine, state)
    that("prompt_token_ids of the scheduler's request", request.prompt_token_ids).gives([X, 6, 7])
    that("its max_tokens", request.max_tokens).gives(4)
    that("its stop_token_ids", request.stop_token_ids).gives(frozenset({STOP, 9}))
    that("whether adapter.states has the engine's record", engine.adapter.states.get("a") is state).gives(True)


def test_a_request_without_a_limit_is_refused():
    """max_new_tokens is None: it may grow without end. Nothing has changed."""
    engine = make()
    call(engine.adapter.add, State("a", [X, 6], None)).raises(RequestTooLargeError)
    that("adapter.states", engine.adapter.states).gives({})
    that("waiting requests of the scheduler", engine.adapter.scheduler.num_waiting).gives(0)


@pytest.mark.parametrize(
    ("name", "limit"), [("chunked", 24), ("paged", 10)], ids=["the whole pool", "and one step's tokens"]
)
def test_what_fits_with_all_of_its_tokens_is_taken(name, limit):
    """Prompt and output together fit to the last token, and one token more is refused."""
    engine = make(name, num_blocks=6, max_num_batched_tokens=10)
    call(engine.adapter.add, State("long", [X] * 5, limit - 4)).raises(RequestTooLargeError)
    that("adapter.states", engine.adapter.states).gives({})
    state = add(engine, State("a", [X] * 5, limit - 5))
    while engine.adapter.scheduler.has_unfinished:
        engine.step()
        call(engine.adapter.commit)
    that("the answer", state.generated_tokens).gives(answer(state))


def test_what_the_scheduler_refuses_is_not_kept():
    """The scheduler raises for an id that is in use: `states` still has the first record."""
    engine = make()
    first = add(engine, State("a", [X, 6], 2))
    call(engine.adapter.add, State("a", [X, 6, 7], 2)).raises(ValueError)  # the id is in use
    that("whether adapter.states still has the first record", engine.adapter.states.get("a") is first).gives(True)


# One request, step by step


def test_a_prompt_is_handed_over_whole():
    """Five tokens, a budget for all: they are to process, none remain, and they have two blocks of four."""
    engine = make()
    state = add(engine, State("a", [X, 6, 7, 8, 9]))
    batch = call(engine.adapter.schedule).value
    that("scheduled", [(each.request_id, count) for each, count in batch.scheduled]).gives([("a", 5)])
    that("whether it is the engine's own record", batch.scheduled[0][0] is state).gives(True)
    that("preempted", batch.preempted).gives([])
    that("tokens_to_process", state.tokens_to_process).gives([X, 6, 7, 8, 9])
    that("remaining_prefill_tokens", state.remaining_prefill_tokens).gives([])
    that("blocks that it holds in the engine's cache", engine.cache.num_held.get("a")).gives(2)


def test_a_long_prompt_is_handed_over_in_chunks():
    """Six tokens, a budget of four: four are processed, two remain; then those two, and none."""
    engine = make(max_num_batched_tokens=4)
    state = add(engine, State("a", [X, 6, 7, 8, 9, 10]))
    batch = call(engine.adapter.schedule).value
    that("tokens_to_process", state.tokens_to_process).gives([X, 6, 7, 8])
    that("remaining_prefill_tokens", state.remaining_prefill_tokens).gives([9, 10])
    engine.compute(batch)
    that("what the cache holds", engine.cache.stored["a"]).gives([X, 6, 7, 8])
    call(engine.adapter.schedule)
    that("tokens_to_process", state.tokens_to_process).gives([9, 10])
    that("remaining_prefill_tokens", state.remaining_prefill_tokens).gives([])
    that("blocks that it holds in the engine's cache", engine.cache.num_held["a"]).gives(2)


def test_a_step_is_committed():
    """The token that the engine has sampled is the scheduler's too."""
    engine = make()
    state = add(engine, State("a", [X, 6, 7]))
    request = records(engine, state)
    engine.step()
    call(engine.adapter.commit).gives([])
    that("output_token_ids of the scheduler's request", request.output_token_ids).gives(state.generated_tokens)
    that("its num_computed_tokens", request.num_computed_tokens).gives(3)
    that("adapter.output", engine.adapter.output).gives(None)


def test_nothing_is_committed_twice():
    """Without a step there is nothing to commit, and after `commit` neither."""
    engine = make()
    call(engine.adapter.commit).gives([])
    state = add(engine, State("a", [X, 6, 7]))
    request = records(engine, state)
    engine.step()
    call(engine.adapter.commit).gives([])
    call(engine.adapter.commit).gives([])
    that("output_token_ids of the scheduler's request", request.output_token_ids).gives(state.generated_tokens)


def test_a_chunk_brings_no_token():
    """The prompt goes on: it is committed as computed, and no token is."""
    engine = make(max_num_batched_tokens=4)
    state = add(engine, State("a", [X, 6, 7, 8, 9, 10]))
    request = records(engine, state)
    engine.step()
    call(engine.adapter.commit).gives([])
    that("output_token_ids of the scheduler's request", request.output_token_ids).gives([])
    that("its num_computed_tokens", request.num_computed_tokens).gives(4)


def test_schedule_commits_if_nobody_has():
    """An engine that never calls `commit` goes on in decode, with the token of the last step."""
    engine = make()
    state = add(engine, State("a", [X, 6, 7]))
    request = records(engine, state)
    engine.step()
    first = list(state.generated_tokens)
    call(engine.adapter.schedule)
    that("output_token_ids of the scheduler's request", request.output_token_ids).gives(first)
    that("tokens_to_process in decode", state.tokens_to_process).gives(first)
    that("remaining_prefill_tokens", state.remaining_prefill_tokens).gives([])


def test_a_step_may_be_empty():
    """No requests: an empty batch, and nothing to commit."""
    engine = make()
    batch = call(engine.adapter.schedule).value
    that("scheduled and preempted", (batch.scheduled, batch.preempted)).gives(([], []))
    call(engine.adapter.commit).gives([])


# The end of a request


def test_both_finish_after_the_same_token():
    """`commit` returns the ids of those that have finished, and `states` loses them."""
    engine = make()
    a, b = State("a", [X, 6, 7], 2), State("b", [8, 9], 1)
    add(engine, a, b)
    engine.step()
    call(engine.adapter.commit).gives(["b"])
    that("ids in adapter.states", list(engine.adapter.states)).gives(["a"])
    engine.step()
    call(engine.adapter.commit).gives(["a"])
    that("ids in adapter.states", list(engine.adapter.states)).gives([])
    that("the answers", (a.generated_tokens, b.generated_tokens)).gives((answer(a), answer(b)))
    that("whether the scheduler has anything left", engine.adapter.scheduler.has_unfinished).gives(False)


def test_a_stop_token_finishes_for_both():
    """The third token of the answer is a stop token: the scheduler finishes the request where the engine does."""
    engine = make()
    state = State("a", [X, 6, 7], 9)
    stop = answer(state)[2]
    engine.stops = (stop,)
    add(engine, state, stops=(stop,))
    finished = []
    while not state.finished:
        engine.step()
        finished += call(engine.adapter.commit).value
    that("what commit() returned in all", finished).gives(["a"])
    that("the answer", state.generated_tokens).gives(answer(state, (stop,)))


def test_the_finished_are_told_in_batch_order():
    """Four requests finish in one step, in the order of the batch and not of their names."""
    engine = make()
    states = [State(name, [X, place], 1) for place, name in enumerate("dbac")]
    add(engine, *states)
    engine.step()
    call(engine.adapter.commit).gives(["d", "b", "a", "c"])


@pytest.mark.parametrize("has_token", [True, False], ids=["its token is there", "it failed before its token"])
def test_a_request_may_leave_during_a_step(has_token):
    """`abort` between `schedule` and `commit`: the others of the step are committed."""
    engine = make()
    a, b = State("a", [X, 6, 7], 3), State("b", [8, 9], 3)
    add(engine, a, b)
    batch = call(engine.adapter.schedule).value
    if has_token:
        engine.compute(batch)
    else:
        engine.compute(batch._replace(scheduled=[each for each in batch.scheduled if each[0] is b]))
    engine.cache.free_blocks("a")
    call(engine.adapter.abort, "a")
    call(engine.adapter.commit).gives([])
    that("ids in adapter.states", list(engine.adapter.states)).gives(["b"])
    while not b.finished:
        engine.step()
        call(engine.adapter.commit)
    that("the other answer", b.generated_tokens).gives(answer(b))


@pytest.mark.parametrize("num_steps", [0, 1], ids=["in the prompt", "in decode"])
def test_an_engine_that_runs_ahead_is_refused(num_steps):
    """`commit` before the step's token is known: a PluginError, and nothing has changed."""
    engine = make()
    state = add(engine, State("a", [X, 6, 7], 3))
    request = records(engine, state)
    for _ in range(num_steps):
        engine.step()
    call(engine.adapter.schedule)
    before = request.num_computed_tokens
    engine.cache.stored["a"] += state.tokens_to_process
    state.position_offset += len(state.tokens_to_process)  # the forward pass has begun, and no token is known
    call(engine.adapter.commit).raises(PluginError)
    that("num_computed_tokens of the scheduler's request", request.num_computed_tokens).gives(before)
    engine.sample(state, next_token(engine.cache.stored["a"]))
    call(engine.adapter.commit).gives([])
    that("output_token_ids of the scheduler's request", request.output_token_ids).gives(state.generated_tokens)


# Memory runs out


def test_a_preempted_request_starts_over_with_what_it_had():
    """It loses its blocks and its position; later its prompt and its generated tokens are computed."""
    engine = make("paged", num_blocks=4)
    a, b = State("a", [X, 6, 7, 8], 9), State("b", [9, 10, 11, 12], 9)
    add(engine, a, b)
    for _ in range(5):
        batch = engine.step()
        that("preempted", [each.request_id for each in batch.preempted]).gives([])
    had = list(b.generated_tokens)
    batch = engine.step()  # a third block for a, and there is none
    that("preempted", [each.request_id for each in batch.preempted]).gives(["b"])
    that("whether it is the engine's own record", batch.preempted[0] is b).gives(True)
    that("blocks of b in the engine's cache", engine.cache.num_held.get("b", 0)).gives(0)
    that("position_offset of b", b.position_offset).gives(0)
    that("generated_tokens of b", b.generated_tokens).gives(had)
    while not a.finished:
        engine.step()
    call(engine.adapter.schedule)
    that("tokens_to_process of b", b.tokens_to_process).gives([9, 10, 11, 12, *had])


def test_blocks_are_freed_before_others_are_allocated():
    """The engine's cache is full: a scheduled request gets the blocks that a preempted one has lost."""
    engine = make("paged", num_blocks=4)
    a, b = State("a", [X, 6, 7, 8], 9), State("b", [9, 10, 11, 12], 9)
    add(engine, a, b)
    while not (a.finished and b.finished):
        engine.step()
    call(engine.adapter.commit)
    that("the answers", (a.generated_tokens, b.generated_tokens)).gives((answer(a), answer(b)))
    that("free blocks at the end", engine.cache.num_free).gives(4)


def test_what_a_preempted_request_has_generated_remains_to_be_computed():
    """A budget of 8: b lost the 12 tokens of its prompt and a generated one, which is last, in a second chunk."""
    engine = make(num_blocks=6, max_num_batched_tokens=8, reserve_full_prompt=False)
    a, b = State("a", [X, 12, 13, 14, 15, 16], 12), State("b", list(range(20, 32)), 4)
    add(engine, a, b)
    for _ in range(3):
        engine.step()
    that("generated_tokens of a and b, their numbers", (len(a.generated_tokens), len(b.generated_tokens))).gives((3, 1))
    that("preempted", [each.request_id for each in engine.step().preempted]).gives(["b"])
    had = list(b.generated_tokens)
    batch = call(engine.adapter.schedule).value
    that("scheduled", [(each.request_id, count) for each, count in batch.scheduled]).gives([("a", 1), ("b", 7)])
    that("tokens_to_process of b", b.tokens_to_process).gives(list(range(20, 27)))
    that("remaining_prefill_tokens of b", b.remaining_prefill_tokens).gives([*range(27, 32), *had])
    engine.compute(batch)
    that("generated_tokens of b, which has computed a part", b.generated_tokens).gives(had)
    while not b.finished:
        engine.step()
    that("the answers", (a.generated_tokens, b.generated_tokens)).gives((answer(a), answer(b)))


def test_a_preempted_prompt_in_chunks_starts_over():
    """Preempted while its prompt was computed in chunks: the answers are as without it."""
    engine = make(num_blocks=6, max_num_batched_tokens=6, watermark=0.0, reserve_full_prompt=False)
    states = [State("a", [X, 6, 7, 8], 12), State("b", list(range(20, 36)), 3)]
    add(engine, *states)
    lost = 0
    for _ in range(60):
        lost += len(engine.step().preempted)
    that("whether anything was preempted", lost > 0).gives(True)
    for state in states:
        that(f"the answer of {state.request_id!r}", state.generated_tokens).gives(answer(state))


def test_an_engine_with_less_memory_is_noticed():
    """The scheduler has blocks for a request, and the engine has not: a PluginError."""
    engine = make(num_blocks=6, num_engine_blocks=1)
    add(engine, State("a", [X] * 9))
    call(engine.adapter.schedule).raises(PluginError)


# Whole runs, against answers computed without any scheduler


@pytest.mark.parametrize(
    ("seed", "name"), list(enumerate(["static", "continuous", "paged", "fair", "chunked"])), ids=str
)
def test_every_scheduler_gives_the_same_answers(seed, name):
    """Random requests, stop tokens, one that leaves: every answer is as without a scheduler, in all five stages."""
    rng = random.Random(fresh(seed))
    for _ in range(6):
        num_blocks = rng.randrange(9, 14)
        auditor = Auditor()
        budget = rng.randrange(5, 12) if name == "chunked" else 36
        engine = make(name, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=budget, observers=(auditor,))
        engine.stops = (rng.randrange(3, 92),)
        states = [
            State(str(index), rng.choices(range(100), k=rng.randrange(1, 16)), rng.randrange(1, 16))
            for index in range(12)
        ]
        coming = list(states)
        gone = rng.choice(states)
        for _ in range(400):
            if coming and rng.random() < 0.6:
                add(engine, coming.pop(0), stops=engine.stops)
            engine.step()
            if gone.generated_tokens and not gone.finished:
                gone.finished = True
                call(engine.adapter.abort, gone.request_id)
                engine.cache.free_blocks(gone.request_id)
            call(engine.adapter.commit)
            _check_that_records_agree(engine)
            if not coming and not engine.adapter.scheduler.has_unfinished:
                break
        for state in states:
            expected = answer(state, engine.stops)[: len(state.generated_tokens) if state is gone else None]
            that(f"the answer of {state.request_id!r}", state.generated_tokens).gives(expected)
        that("free blocks at the end", engine.cache.num_free).gives(num_blocks)
        that("adapter.states at the end", engine.adapter.states).gives({})


def _check_that_records_agree(engine):
    __tracebackhide__ = True
    scheduler = engine.adapter.scheduler
    for request in [*scheduler.waiting.values(), *scheduler.running]:
        state = engine.adapter.states[request.request_id]
        name = f"of {request.request_id!r}: (output_token_ids, num_computed_tokens) and the engine's"
        ours = request.output_token_ids, request.num_computed_tokens
        that(name, (state.generated_tokens, state.position_offset)).gives(ours)
    try:
        scheduler.check()
    except InvariantError as error:
        that("whether the scheduler's books agree", str(error)).gives("they do")
