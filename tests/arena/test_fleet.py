"""The second league: what a router and an autoscaler are worth, and what they may not do."""

from __future__ import annotations

import pytest

from minicache.fleet import RoundRobinRouter
from minicache_course.arena import fleet
from minicache_course.arena.baselines import FLEETS, text_of
from minicache_course.arena.fleet import bound, checked_run, requests_of
from minicache_course.arena.loop import PolicyRefusedError
from minicache_course.arena.machine import PRICE

FLEET = """
from minicache.fleet import Autoscaler, RoundRobinRouter

class Router(RoundRobinRouter):
{router}

class Scaler(Autoscaler):
{scaler}

def create(arena):
    router = Router()
    router.arena = arena
    return router, Scaler(target_unfinished=24, max_replicas=arena.max_replicas)
"""


def policy(router="pass", scaler="pass"):
    parts = ("\n".join(f"    {line}" for line in part.strip("\n").splitlines()) for part in (router, scaler))
    return FLEET.format(router=next(parts), scaler=next(parts))


@pytest.fixture(scope="module")
def sent():
    """The first requests of a load."""
    return requests_of(0, 0)[:150]


@pytest.mark.parametrize("name", FLEETS)
def test_baselines_keep_to_the_rules_and_to_the_bound(name, sent):
    report, _ = checked_run(text_of(name), sent)
    assert report.num_finished == len(sent)
    cost = PRICE * sum(each.seconds for each in report.replicas)
    assert 0 < report.num_finished - cost <= bound(sent) < len(sent)


def test_requests_are_the_same_each_time_and_in_order():
    sent = requests_of(1, 3)
    assert sent == requests_of(1, 3) != requests_of(1, 4)
    assert [each.start for each in sent] == sorted(each.start for each in sent)


CHEATS = {
    "a full fleet": ("machine", policy(scaler="def decide(self, view, state):\n    return 9, state")),
    "no fleet": ("machine", policy(scaler="def decide(self, view, state):\n    return 0, state")),
    "a replica that is not there": ("machine", policy("def choose(self, request, replicas):\n    return 'replica-77'")),
    "no replica is good enough": (
        "error",
        policy("def choose(self, request, replicas):\n    raise ValueError('none')"),
    ),
    "an exception": ("error", policy("def choose(self, request, replicas):\n    return replicas['a']")),
    "a clock": ("import", "import time\n"),
    "a router alone": ("create", "from minicache.fleet import RoundRobinRouter\ndef create(arena):\n    return 3\n"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_policy_is_refused(cheat, sent):
    rule, text = CHEATS[cheat]
    with pytest.raises(PolicyRefusedError) as refused:
        checked_run(text, sent)
    assert refused.value.rule == rule


def test_knowledge_of_the_future_is_found(monkeypatch):
    """A router that knows every length, from outside, and sends the long ones elsewhere."""
    sent = [each for each in requests_of(0, 0) if each.start < fleet.SECONDS * 0.6]
    taken = []

    class Knowing(RoundRobinRouter):
        def choose(self, request, replicas):
            longest = taken[-1].get(request.request_id, sent[request.request_id].turns[0].length)
            return max(each.replica_id for each in replicas) if longest > 300 else super().choose(request, replicas)

    serve = fleet._serve
    monkeypatch.setattr(
        fleet, "_serve", lambda text, sent, lengths: taken.append(lengths) or serve(text, sent, lengths)
    )
    monkeypatch.setattr(fleet, "load", lambda text: lambda arena: (Knowing(), fleet.Autoscaler(target_unfinished=24)))
    with pytest.raises(PolicyRefusedError) as refused:
        checked_run("", sent)
    assert refused.value.rule == "future"
