"""Phase 11, task 3: which replicas there are and the state of each, although messages are late or out of order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.fleet.membership import Membership
from minicache_course.checks import call, that
from minicache_course.seeds import fresh, one_of

MOST = 64


@pytest.fixture
def membership():
    """Two replicas, a and b, with nothing to do; a second failed probe in a row makes one unhealthy."""
    made = Membership(unhealthy_after=2)
    for name in "ab":
        call(made.join, name, max_unfinished=MOST).gives(None)
    return made


def send(membership, replica_id, *requests):
    """Send requests there; their attempts."""
    return [call(membership.on_sent, request, replica_id).value for request in requests]


def shows(membership, **expected):
    """The replicas that routers are shown, with their unfinished requests."""
    __tracebackhide__ = True
    seen = {view.replica_id: view.num_unfinished for view in membership.views()}
    that("num_unfinished of the replicas in views()", dict(sorted(seen.items()))).gives(expected)


def view_of(membership, replica_id):
    """The view of one replica."""
    views = {view.replica_id: view for view in membership.views()}
    that(f"whether {replica_id!r} is in views()", replica_id in views).gives(True)
    return views[replica_id]


def report(membership, replica_id, num_unfinished=None, **stats):
    """Probe a replica, which answers at once."""
    probe = call(membership.on_probed, replica_id).value
    if num_unfinished is not None:
        stats["num_unfinished"] = num_unfinished
    call(membership.on_report, probe, stats).gives(None)


def fail(membership, replica_id, times=1):
    """Probe a replica, which does not answer."""
    for _ in range(times):
        call(membership.on_failed, call(membership.on_probed, replica_id).value).gives(None)


# Joining


def test_a_replica_that_joins_takes_requests():
    """It is shown at once: idle, with the number that it takes, and nothing said so far."""
    membership, most = Membership(), one_of(8, range(2, 30))
    shows(membership)
    call(membership.join, "a", max_unfinished=most).gives(None)
    shows(membership, a=0)
    view = view_of(membership, "a")
    that("max_unfinished, stats", (view.max_unfinished, dict(view.stats))).gives((most, {}))


def test_one_name_joins_once(membership):
    """A second a is refused, and the first keeps its requests."""
    send(membership, "a", "r")
    call(membership.join, "a", max_unfinished=5).raises(ValueError)
    shows(membership, a=1, b=0)
    that("max_unfinished of a", view_of(membership, "a").max_unfinished).gives(MOST)


@pytest.mark.parametrize(("most", "error"), [(0, ValueError), (-1, ValueError), ("8", TypeError), (2.5, TypeError)])
def test_it_must_take_at_least_one(membership, most, error):
    """max_unfinished is an int of at least 1; a replica that is refused has not joined."""
    call(membership.join, "c", max_unfinished=most).raises(error)
    that("the members", sorted(membership.members)).gives(["a", "b"])


# Requests


def test_what_was_sent_counts(membership):
    """Three requests to a, one to b."""
    send(membership, "a", "p", "q", "r")
    send(membership, "b", "s")
    shows(membership, a=3, b=1)


def test_what_has_ended_does_not_count(membership):
    """Of three requests of a the second ends, then the first."""
    attempts = send(membership, "a", "p", "q", "r")
    call(membership.on_finished, attempts[1]).gives(None)
    shows(membership, a=2, b=0)
    call(membership.on_finished, attempts[0]).gives(None)
    shows(membership, a=1, b=0)


def test_every_attempt_has_its_own_number(membership):
    """Also of the same request, also after others are over: a number is never reused."""
    attempts = send(membership, "a", "p", "q")
    membership.on_finished(attempts[1])
    attempts += send(membership, "b", "q", "q")
    membership.on_finished(attempts[0])
    attempts += send(membership, "a", "p")
    that("different numbers of five attempts", len(set(attempts))).gives(5)


def test_an_attempt_ends_once(membership):
    """The client leaves in the moment in which the answer ends: both are noticed, and count once."""
    attempts = send(membership, "a", "p", "q")
    for _ in range(2):
        call(membership.on_finished, attempts[0]).gives(None)
    shows(membership, a=1, b=0)


def test_a_replica_may_get_more_than_it_takes(membership):
    """Routers leave out a full replica; what was sent to it still counts."""
    membership.join("c", max_unfinished=1)
    send(membership, "c", "p", "q")
    shows(membership, a=0, b=0, c=2)


def test_two_attempts_of_one_request(membership):
    """The same request was sent to a twice: each attempt counts until it ends."""
    first, second = send(membership, "a", "p", "p")
    shows(membership, a=2, b=0)
    membership.on_finished(second)
    shows(membership, a=1, b=0)
    membership.on_finished(first)
    shows(membership, a=0, b=0)


def test_nothing_is_sent_to_a_replica_that_is_not_there(membership):
    """ValueError for c, and nothing has changed: a c that joins afterwards is idle."""
    call(membership.on_sent, "p", "c").raises(ValueError)
    that("replica_of", membership.replica_of).gives({})
    membership.join("c", max_unfinished=1)
    shows(membership, a=0, b=0, c=0)


def test_a_full_replica_is_shown(membership):
    """A router may have to know that all are full. It is shown as full, until a request ends."""
    membership.join("c", max_unfinished=2)
    attempts = send(membership, "c", "p", "q")
    that("whether c is full", view_of(membership, "c").is_full).gives(True)
    membership.on_finished(attempts[0])
    that("whether c is full", view_of(membership, "c").is_full).gives(False)


# Leaving


def test_what_a_replica_had_is_lost_with_it(membership):
    """a dies with two of three requests unfinished. They are returned in the order in which they were sent."""
    attempts = send(membership, "a", "z", "q", "c")
    send(membership, "b", "s")
    membership.on_finished(attempts[1])
    call(membership.leave, "a").gives(["z", "c"])
    shows(membership, b=1)


def test_a_replica_leaves_once(membership):
    """The second time, and one that was never there: nothing is lost, and no error."""
    send(membership, "a", "p")
    call(membership.leave, "a").gives(["p"])
    call(membership.leave, "a").gives([])
    call(membership.leave, "c").gives([])
    shows(membership, b=0)


def test_an_idle_replica_leaves(membership):
    """Nothing is lost."""
    membership.on_finished(*send(membership, "a", "p"))
    call(membership.leave, "a").gives([])
    shows(membership, b=0)


def test_one_that_comes_back_begins_anew(membership):
    """a had two requests and a report. It leaves and joins again: idle, and nothing said."""
    send(membership, "a", "p", "q")
    report(membership, "a", 30, queue=7.0)
    membership.leave("a")
    membership.join("a", max_unfinished=5)
    shows(membership, a=0, b=0)
    view = view_of(membership, "a")
    that("max_unfinished, stats", (view.max_unfinished, dict(view.stats))).gives((5, {}))


def test_the_end_of_a_lost_attempt_frees_no_place(membership):
    """p was lost with a and is at b now. The end of its stream from a is noticed late: p is still at b."""
    [lost] = send(membership, "a", "p")
    membership.leave("a")
    [again] = send(membership, "b", "p")
    call(membership.on_finished, lost).gives(None)
    shows(membership, b=1)
    membership.on_finished(again)
    shows(membership, b=0)


def test_nor_at_a_replica_of_the_same_name(membership):
    """a dies and is replaced by another a, which gets p again: the first attempt is not the second."""
    [lost] = send(membership, "a", "p")
    membership.leave("a")
    membership.join("a", max_unfinished=MOST)
    [again] = send(membership, "a", "p")
    call(membership.on_finished, lost).gives(None)
    shows(membership, a=1, b=0)
    call(membership.leave, "a").gives(["p"])
    call(membership.on_finished, again).gives(None)
    shows(membership, b=0)


# Draining


def test_a_draining_replica_gets_nothing_new(membership):
    """It leaves the views, and finishes its requests; then it can be stopped."""
    attempts = send(membership, "a", "p", "q")
    call(membership.drain, "a").gives(None)
    shows(membership, b=0)
    for attempt, drained in zip(attempts, [False, True], strict=True):
        membership.on_finished(attempt)
        shows(membership, b=0)
        that("is_drained('a')", membership.is_drained("a")).gives(drained)
    call(membership.leave, "a").gives([])


def test_an_idle_replica_is_drained_at_once(membership):
    """And one that is not draining is not drained, though it is idle."""
    membership.drain("a")
    that("is_drained('a'), is_drained('b')", (membership.is_drained("a"), membership.is_drained("b"))).gives(
        (True, False)
    )


def test_a_draining_replica_may_die(membership):
    """Its requests are lost like any other's."""
    send(membership, "a", "p", "q")
    membership.drain("a")
    call(membership.leave, "a").gives(["p", "q"])


def test_a_replica_that_is_not_there_drains_without_error(membership):
    """It may have died a moment ago."""
    call(membership.drain, "c").gives(None)
    shows(membership, a=0, b=0)


def test_a_report_does_not_end_a_drain(membership):
    """A draining replica answers its probes, or not: it gets no requests either way."""
    membership.drain("a")
    report(membership, "a", 0)
    shows(membership, b=0)
    fail(membership, "a", 2)
    report(membership, "a", 0)
    shows(membership, b=0)


def test_one_that_comes_back_does_not_drain(membership):
    """a drains, leaves, and another a joins."""
    membership.drain("a")
    membership.leave("a")
    membership.join("a", max_unfinished=MOST)
    shows(membership, a=0, b=0)


# Probes


def test_a_probe_knows_what_the_replica_had(membership):
    """A probe of a has its name, and how many requests a has from here now; later probes have larger numbers."""
    send(membership, "a", "p", "q", "r")
    first = call(membership.on_probed, "a").value
    that("replica_id, num_sent", (first.replica_id, first.num_sent)).gives(("a", 3))
    send(membership, "a", "s")
    second = call(membership.on_probed, "a").value
    that("num_sent with one request more", second.num_sent).gives(4)
    that("whether the second probe's number is larger", second.number > first.number).gives(True)
    that("num_sent of b", call(membership.on_probed, "b").value.num_sent).gives(0)


def test_only_a_replica_of_the_fleet_is_probed(membership):
    """A replica that is not in the fleet is not probed: ValueError."""
    call(membership.on_probed, "c").raises(ValueError)


def test_a_report_is_shown(membership):
    """The report of a is in its view as it came, whole; the next report replaces it."""
    report(membership, "a", cache_usage=0.5, queue=3.0)
    that("stats of a", dict(view_of(membership, "a").stats)).gives({"cache_usage": 0.5, "queue": 3.0})
    that("stats of b", dict(view_of(membership, "b").stats)).gives({})
    report(membership, "a", cache_usage=0.25)
    that("stats of a, after its second report", dict(view_of(membership, "a").stats)).gives({"cache_usage": 0.25})


def test_a_report_is_copied(membership):
    """The sender may use its dict again."""
    stats = {"queue": 3.0}
    membership.on_report(membership.on_probed("a"), stats)
    stats["queue"] = 99.0
    send(membership, "a", "p")
    that("stats of a", dict(view_of(membership, "a").stats)).gives({"queue": 3.0})


# What a replica has from elsewhere


def test_what_others_have_sent_counts_too(membership):
    """a has 3 from here and reports 10: 7 are from other routers. They count until the next report."""
    attempts = send(membership, "a", "p", "q", "r")
    report(membership, "a", 10)
    shows(membership, a=10, b=0)
    attempts += send(membership, "a", "s", "t")
    shows(membership, a=12, b=0)
    membership.on_finished(attempts[0])
    shows(membership, a=11, b=0)
    report(membership, "a", 6)
    shows(membership, a=6, b=0)
    membership.on_finished(attempts[1])
    shows(membership, a=5, b=0)


def test_what_was_sent_since_it_was_asked_comes_on_top(membership):
    """a had 3 when it was probed and reports 10. While its answer was on its way, 2 more were sent: 7 + 5."""
    send(membership, "a", "p", "q", "r")
    probe = membership.on_probed("a")
    send(membership, "a", "s", "t")
    call(membership.on_report, probe, {"num_unfinished": 10}).gives(None)
    shows(membership, a=12, b=0)


def test_what_has_ended_since_it_was_asked_is_gone(membership):
    """a had 3 when it was probed and reports 10. While its answer was on its way, 2 of the 3 finished: 7 + 1."""
    attempts = send(membership, "a", "p", "q", "r")
    probe = membership.on_probed("a")
    membership.on_finished(attempts[0])
    membership.on_finished(attempts[2])
    call(membership.on_report, probe, {"num_unfinished": 10}).gives(None)
    shows(membership, a=8, b=0)


def test_a_replica_that_says_less_than_was_sent(membership):
    """Of 3 requests, 2 have not arrived yet when a is probed: it reports 1. All 3 count."""
    send(membership, "a", "p", "q", "r")
    report(membership, "a", 1)
    shows(membership, a=3, b=0)


def test_a_report_that_says_no_number(membership):
    """Then nothing is known of other routers: requests sent from here count, and earlier reports do not."""
    send(membership, "a", "p")
    report(membership, "a", 9)
    shows(membership, a=9, b=0)
    report(membership, "a", cache_usage=0.5)
    shows(membership, a=1, b=0)


def test_others_may_fill_a_replica(membership):
    """c takes 8. It has 2 from here, and reports 8: it is full."""
    membership.join("c", max_unfinished=8)
    send(membership, "c", "p", "q")
    report(membership, "c", 8)
    that("whether c is full", view_of(membership, "c").is_full).gives(True)


def test_a_replica_is_not_drained_while_others_use_it(membership):
    """a has no requests from here, and reports 2: it is drained when it reports 0."""
    membership.drain("a")
    report(membership, "a", 2)
    that("is_drained('a')", membership.is_drained("a")).gives(False)
    report(membership, "a", 0)
    that("is_drained('a')", membership.is_drained("a")).gives(True)


# Reports that come late


def test_an_older_report_is_ignored(membership):
    """Two probes of a: the answer to the second arrives first. The first is old."""
    first = membership.on_probed("a")
    send(membership, "a", "p")
    second = membership.on_probed("a")
    membership.on_report(second, {"num_unfinished": 4, "queue": 4.0})
    call(membership.on_report, first, {"num_unfinished": 9, "queue": 9.0}).gives(None)
    shows(membership, a=4, b=0)
    that("stats of a", dict(view_of(membership, "a").stats)).gives({"num_unfinished": 4, "queue": 4.0})


def test_a_report_counts_once(membership):
    """One probe is answered, then reported as failed, then answered again: only the first answer counts."""
    probe = membership.on_probed("a")
    membership.on_report(probe, {"num_unfinished": 3})
    call(membership.on_failed, probe).gives(None)
    call(membership.on_report, probe, {"num_unfinished": 8}).gives(None)
    shows(membership, a=3, b=0)


def test_reports_of_one_replica_are_not_older_than_those_of_another(membership):
    """b was probed after a and answers before it: a's answer is still the latest of a."""
    of_a, of_b = membership.on_probed("a"), membership.on_probed("b")
    membership.on_report(of_b, {"num_unfinished": 2})
    call(membership.on_report, of_a, {"num_unfinished": 5}).gives(None)
    shows(membership, a=5, b=2)


def test_a_report_of_a_replica_that_left_is_ignored(membership):
    """It was probed, then it left. If another a joins meanwhile, the answer is not that one's."""
    one, other = membership.on_probed("a"), membership.on_probed("a")
    membership.leave("a")
    call(membership.on_report, one, {"num_unfinished": 50}).gives(None)
    shows(membership, b=0)
    membership.join("a", max_unfinished=MOST)
    call(membership.on_report, other, {"num_unfinished": 50}).gives(None)
    shows(membership, a=0, b=0)
    that("stats of the new a", dict(view_of(membership, "a").stats)).gives({})
    report(membership, "a", 3)
    shows(membership, a=3, b=0)


# Health


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_failures_in_a_row_take_a_replica_out(bound):
    """`unhealthy_after` failed probes: it is shown no more. With one less it still is."""
    membership = Membership(unhealthy_after=bound)
    membership.join("a", max_unfinished=MOST)
    for count in range(1, bound + 2):
        fail(membership, "a")
        shows(membership, **({"a": 0} if count < bound else {}))


def test_an_answer_brings_it_back(membership):
    """An unhealthy replica has kept its requests and its last report. One answer, and it is shown again."""
    attempts = send(membership, "a", "p", "q")
    report(membership, "a", 5)
    fail(membership, "a", 3)
    shows(membership, b=0)
    membership.on_finished(attempts[0])
    report(membership, "a", 4)
    shows(membership, a=4, b=0)


def test_only_failures_in_a_row_count(membership):
    """Every second probe fails, for a long time: it stays."""
    for _ in range(4):
        fail(membership, "a")
        report(membership, "a", 1)
    fail(membership, "a")
    shows(membership, a=1, b=0)


def test_failures_after_an_answer_are_counted_anew(membership):
    """Out, back, and one failure: it is still in."""
    fail(membership, "a", 2)
    report(membership, "a", 0)
    fail(membership, "a")
    shows(membership, a=0, b=0)
    fail(membership, "a")
    shows(membership, b=0)


def test_a_failure_keeps_what_is_known(membership):
    """One failed probe: the last report still stands, and no request is lost."""
    send(membership, "a", "p")
    report(membership, "a", 6, queue=2.0)
    fail(membership, "a")
    shows(membership, a=6, b=0)
    that("stats of a", dict(view_of(membership, "a").stats)).gives({"num_unfinished": 6, "queue": 2.0})


def test_an_unhealthy_replica_may_die(membership):
    """Its requests are lost when it leaves, and not when it becomes unhealthy."""
    send(membership, "a", "p", "q")
    fail(membership, "a", 2)
    call(membership.leave, "a").gives(["p", "q"])
    membership.join("a", max_unfinished=MOST)
    fail(membership, "a")
    shows(membership, a=0, b=0)


def test_a_failure_counts_once(membership):
    """The connection is reset, and then the probe times out: one probe has failed, not two."""
    probe = membership.on_probed("a")
    for _ in range(2):
        call(membership.on_failed, probe).gives(None)
    shows(membership, a=0, b=0)


def test_an_old_failure_is_ignored(membership):
    """Two probes wait until they time out; a third has been answered since. The replica answers: it stays."""
    slow = [membership.on_probed("a"), membership.on_probed("a")]
    report(membership, "a", 0)
    for probe in slow:
        call(membership.on_failed, probe).gives(None)
    shows(membership, a=0, b=0)


def test_an_old_answer_is_ignored(membership):
    """a answered a probe long ago, and the answer was held up; since then two probes have failed. It stays out."""
    held_up = membership.on_probed("a")
    fail(membership, "a", 2)
    call(membership.on_report, held_up, {}).gives(None)
    shows(membership, b=0)


def test_a_failure_of_a_former_replica_is_ignored(membership):
    """Probes of the dead a time out when its successor has joined: they say nothing about it."""
    slow = [membership.on_probed("a"), membership.on_probed("a")]
    membership.leave("a")
    call(membership.on_failed, slow[0]).gives(None)
    membership.join("a", max_unfinished=MOST)
    for probe in slow:
        call(membership.on_failed, probe).gives(None)
    shows(membership, a=0, b=0)


# All together


def test_two_routers_in_front_of_the_same_replicas():
    """Each knows its own requests, and the other's by reports: after one, both know the replica's total."""
    rng, names = random.Random(fresh(11)), "abc"
    memberships, attempts, truth = [Membership(), Membership()], [[], []], dict.fromkeys(names, 0)
    for membership in memberships:
        for name in names:
            membership.join(name, max_unfinished=MOST)
    for number in range(300):
        here, name = rng.randrange(2), rng.choice(names)
        if attempts[here] and rng.random() < 0.45:
            attempt, name = attempts[here].pop(rng.randrange(len(attempts[here])))
            memberships[here].on_finished(attempt)
            truth[name] -= 1
        else:
            attempts[here].append((memberships[here].on_sent(number, name), name))
            truth[name] += 1
        if number % 20 == 19:
            for membership in memberships:
                for each in names:
                    report(membership, each, truth[each])
                shows(membership, **truth)


class SlowModel:
    """The same account, kept as a list of everything that happened; each answer is found by going through it all."""

    def __init__(self, unhealthy_after):
        self.unhealthy_after, self.events = unhealthy_after, []

    def life(self, name):
        """The replica's history since it last joined; None if it is not there."""
        joins = [at for at, (kind, who, *_) in enumerate(self.events) if kind == "join" and who == name]
        leaves = [at for at, (kind, who, *_) in enumerate(self.events) if kind == "leave" and who == name]
        if not joins or (leaves and leaves[-1] > joins[-1]):
            return None
        return [event for event in self.events[joins[-1] :] if event[1] == name]

    def requests(self, name, until=None):
        """The attempts of requests that the replica has, or had at an event."""
        events = self.life(name) if until is None else self.life(name)[:until]
        over = {event[2] for event in events if event[0] == "finish"}
        return [event[2] for event in events if event[0] == "send" and event[2] not in over]

    def views(self):
        """name → unfinished requests, of those that take any."""
        shown = {}
        for name in "abc":
            if (life := self.life(name)) is None:
                continue
            asked = {event[2]: at for at, event in enumerate(life) if event[0] == "probe"}
            heard, elsewhere, failures, latest = [], 0, 0, -1
            for kind, _, key, *rest in life:
                if kind in ("report", "fail") and asked.get(key, -1) > latest:
                    latest = asked[key]
                    heard.append(kind)
                    failures = failures + 1 if kind == "fail" else 0
                    if kind == "report":
                        elsewhere = max(0, rest[0] - len(self.requests(name, until=latest)))
            if failures < self.unhealthy_after and not any(event[0] == "drain" for event in life):
                shown[name] = len(self.requests(name)) + elsewhere
        return shown


STEP = st.tuples(
    st.sampled_from(["join", "join", "send", "send", "send", "finish", "probe", "report", "fail", "leave", "drain"]),
    st.sampled_from("abc"),
    st.integers(0, 30),
)


@settings(max_examples=120)
@given(steps=st.lists(STEP, max_size=40), unhealthy_after=st.integers(1, 2))
def test_any_history(steps, unhealthy_after):
    """Whatever happens in whatever order: the views are those of a model that goes through the whole history."""
    membership, model = Membership(unhealthy_after=unhealthy_after), SlowModel(unhealthy_after)
    attempts, probes = [], []
    for kind, name, number in [("join", "a", 0), ("join", "b", 0), *steps]:
        is_there = model.life(name) is not None
        if kind == "join" and not is_there:
            membership.join(name, max_unfinished=MOST)
            model.events.append((kind, name, None))
        elif kind == "send" and is_there:
            attempts.append((call(membership.on_sent, f"r{number}", name).value, name))
            model.events.append((kind, *reversed(attempts[-1])))
        elif kind == "probe" and is_there:
            probes.append(call(membership.on_probed, name).value)
            model.events.append((kind, name, probes[-1].number))
        elif kind == "finish" and attempts:
            attempt, name = attempts[number % len(attempts)]
            call(membership.on_finished, attempt).gives(None)
            model.events.append((kind, name, attempt))
        elif kind in ("report", "fail") and probes:
            probe = probes[number % len(probes)]
            if kind == "report":
                call(membership.on_report, probe, {"num_unfinished": number}).gives(None)
            else:
                call(membership.on_failed, probe).gives(None)
            model.events.append((kind, probe.replica_id, probe.number, number))
        elif kind == "leave" and is_there:
            lost = len(model.requests(name))
            that(f"requests lost with {name}", len(call(membership.leave, name).value)).gives(lost)
            model.events.append((kind, name, None))
        elif kind == "drain" and is_there:
            call(membership.drain, name).gives(None)
            model.events.append((kind, name, None))
        shows(membership, **model.views())
