"""What a policy may not do: each cheat is refused, by the name of its rule."""

from __future__ import annotations

from itertools import count

import pytest
from tests.arena.cheats import DONE, WRITTEN, policy
from tests.arena.small import few

from minicache.scheduler import ChunkedPrefillScheduler
from minicache_course.arena import score as scoring
from minicache_course.arena.baselines import BASELINES, ORACLES, text_of
from minicache_course.arena.limits import load_policy
from minicache_course.arena.loop import PolicyRefusedError
from minicache_course.arena.score import checked_run, score


@pytest.mark.parametrize("cheat", WRITTEN)
def test_a_file_is_refused_with_its_line(cheat):
    rule, line, text = WRITTEN[cheat]
    with pytest.raises(PolicyRefusedError) as refused:
        load_policy(text)
    assert refused.value.rule == rule
    assert not line or f"line {line}" in str(refused.value)


@pytest.mark.parametrize("cheat", DONE)
def test_a_policy_is_refused_by_what_it_does(cheat):
    rule, text = DONE[cheat]
    with pytest.raises(PolicyRefusedError) as refused:
        score(text, given=[("few", 1.0, few())])
    assert refused.value.rule == rule
    assert "few" in str(refused.value)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_keep_to_the_rules(name):
    run = checked_run(text_of(name), few(), oracle=name in ORACLES)
    assert len(run.outcomes) >= len(few())


def test_what_a_policy_may_write():
    text = policy("""
def __init__(self, **options):
    super().__init__(**options)
    self.seen = {}
def add_request(self, request):
    self.seen[request.request_id] = sum([0.1] * 10)
    super().add_request(request)
""")
    more = (
        "from __future__ import annotations\nimport collections.abc\nimport math\nfrom dataclasses import dataclass\n"
    )
    more += "LIMIT: float = math.inf\n@dataclass\nclass Pair:\n    a: int\n    b: collections.abc.Sequence\n"
    assert checked_run(more + text.lstrip("\n"), few()).num_good


def test_a_scheduler_may_be_written_from_scratch():
    text = """
from collections import deque

from minicache.request import RequestStatus
from minicache.scheduler import Scheduler, SchedulerOutput


class Own(Scheduler):
    def schedule(self):
        self.outstanding = output = SchedulerOutput()
        self.token_budget = 600
        for request in list(self.running):
            self.grow(request, output)
        for request in list(self.waiting.values()):
            if self.token_budget > 0 and self.pool.num_free > 300:
                self.waiting.remove(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                self.grow(request, output)
        return output

    def grow(self, request, output):
        num_new = min(request.num_tokens - request.num_computed_tokens, self.token_budget)
        if num_new:
            held = len(request.block_ids)
            request.block_ids += self.pool.allocate(-(-(request.num_computed_tokens + num_new) // 16) - held)
            output.num_scheduled_tokens[request.request_id] = num_new
            output.scheduled.append(request)
            self.token_budget -= num_new

    def check_size(self, request): pass
    def blocks_to_admit(self, request): return 0
    def schedule_running(self, output): pass
    def may_admit(self, output): return True
    def schedule_waiting(self, output): pass


def create(arena):
    return Own(**arena.options)
"""
    run = checked_run(text, few())
    assert run.num_good > 6


class Peeking(ChunkedPrefillScheduler):
    """Looks into the loop, where the answers are."""

    def __init__(self, arena):
        cells = [cell.cell_contents for cell in arena.service.__closure__]
        self.clients = next(each for each in cells if isinstance(each, dict))
        super().__init__(**(arena.options | {"max_num_seqs": 2}))

    def priority_key(self, request):
        return len(self.clients[request.request_id].answer), request.arrival_index


def test_knowledge_of_the_future_is_found_wherever_it_is_from(monkeypatch):
    monkeypatch.setattr(scoring, "load_policy", lambda text: Peeking)
    with pytest.raises(PolicyRefusedError) as refused:
        checked_run("", few())
    assert refused.value.rule == "future"


def test_so_is_a_clock_of_its_own(monkeypatch):
    ticks = count()

    class Clocked(ChunkedPrefillScheduler):
        def __init__(self, arena):
            super().__init__(**(arena.options | {"max_num_seqs": 2}))

        def priority_key(self, request):
            return request.arrival_index * (1 if next(ticks) < 30 else -1), request.arrival_index

    monkeypatch.setattr(scoring, "load_policy", lambda text: Clocked)
    with pytest.raises(PolicyRefusedError) as refused:
        checked_run("", few())
    assert refused.value.rule == "chance"
