"""The incident room is what its table says: each bug shows in its counter, and each fix removes it."""

from __future__ import annotations

from importlib import import_module

import pytest

from minicache.scheduler.fair import FairScheduler
from minicache.scheduler.paged import PagedScheduler
from minicache_course.incidents import broken
from minicache_course.incidents.table import INCIDENTS, Incident, Workload, measure

each_incident = pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.slug)

COUNTERS = {
    "cap": (0, 1),
    "order": ("0", "1"),
    "thrash": (17_000, 170),
    "victim": (74, 0),
    "ignore": (10, 0),
    "livelock": ("LivelockError", ""),
    "feasible": (1, 0),
    "copy": ("OutOfBlocksError", ""),
}
"""Of each incident, the counter that proves it: with the bug, and without."""


def test_there_are_eight() -> None:
    assert [incident.number for incident in INCIDENTS] == list(range(1, 9))
    assert list(COUNTERS) == [incident.slug for incident in INCIDENTS]


@each_incident
def test_the_counter_proves_it(incident: Incident) -> None:
    with_bug, without = COUNTERS[incident.slug]
    kinds = [incident.broken, incident.fixed, *([] if incident.slug == "livelock" else [incident.base])]
    counts = [getattr(measure(incident.workload, kind), incident.counter) for kind in kinds]
    assert counts == [with_bug, *[without] * (len(kinds) - 1)]


@each_incident
def test_the_exposing_test_tells_them_apart(incident: Incident) -> None:
    module = import_module(incident.module)
    assert getattr(module, incident.fixed.__name__) is incident.fixed
    module.expose(incident.fixed)
    with pytest.raises(Exception, match=r".+"):
        module.expose(incident.broken)


@each_incident
def test_the_fix_serves_everybody(incident: Incident) -> None:
    counters = measure(incident.workload, incident.fixed)
    forked = [incident.workload.fork[1]] if incident.workload.fork else []
    names = [name for name, *_ in incident.workload.requests]
    assert sorted(counters.finished) == sorted(names + forked)
    assert (counters.num_unfinished, counters.num_unbacked_tokens, counters.num_idle_blocks) == (0, 0, 0)


def test_thrash_has_the_reported_numbers() -> None:
    """As read in the report and worked out by hand; the fair scheduler and the paged one have the right ones too."""
    workload = INCIDENTS[2].workload
    kinds = [broken.ThrashScheduler, INCIDENTS[2].fixed, PagedScheduler, FairScheduler]
    counted = [measure(workload, kind) for kind in kinds]
    assert [(each.num_steps, each.num_prefill_tokens, each.num_preemptions) for each in counted] == [
        (200, 17_000, 100),
        (100, 170, 0),
        (100, 170, 0),
        (100, 170, 0),
    ]
    assert [each.max_batch_size for each in counted] == [1, 2, 2, 2]


def test_who_was_seated_by_force_waits_its_passes_again() -> None:
    """A count that is never set back evicts at every step: 89,619 prefill tokens here."""
    workload = Workload({"num_blocks": 25}, (("0", 195, 200, "text"), ("1", 200, 200, "text")))
    fixed, engine = (measure(workload, kind) for kind in (INCIDENTS[3].fixed, INCIDENTS[3].base))
    assert fixed == engine
    assert (fixed.num_prefill_tokens, fixed.num_unfinished) == (2357, 0)


def test_a_cap_of_four_holds_three() -> None:
    workload = Workload({"num_blocks": 64, "max_num_seqs": 4}, tuple((str(n), 10, 5, "text") for n in range(4)))
    assert measure(workload, broken.CapScheduler).max_batch_size == 3
    assert measure(workload, INCIDENTS[0].fixed).max_batch_size == 4


def test_forty_equal_requests_thrash_and_wait() -> None:
    """Incidents 2 and 3 at once take more than three times the steps, and serve the oldest last."""
    options = {"num_blocks": 80}
    requests = tuple((str(number), 60, 100, "text") for number in range(40))
    before = measure(Workload(options, requests, max_steps=5000), broken.StarvingScheduler)
    after = measure(Workload(options, requests), FairScheduler)
    assert after.num_steps * 3 < before.num_steps
    assert after.num_preemptions * 50 < before.num_preemptions
    assert after.finished[:8] == [str(number) for number in range(8)]
    assert before.finished[0] != "0"
