"""Phase 11, task 5: how many replicas there should be, and which of them leave."""

from __future__ import annotations

import json
from random import Random

import pytest

from minicache.fleet.autoscaling import Autoscaler
from minicache.fleet.views import FleetView
from minicache_course.checks import call, that
from minicache_course.seeds import fresh, one_of


@pytest.fixture
def scaler():
    """`scaler(up=30, down=60)`: 8 requests a replica, 1 to 10 replicas."""

    def create(up=0.0, down=0.0, *, target=8, fewest=1, most=10):
        return Autoscaler(
            target_unfinished=target, min_replicas=fewest, max_replicas=most, upscale_delay=up, downscale_delay=down
        )

    return create


def view(now, unfinished, *, ready=2, starting=0, waiting=0):
    return FleetView(now, ready, starting, unfinished, waiting)


class Asked:
    """A fleet whose replicas start at once, and an autoscaler that is called repeatedly."""

    def __init__(self, autoscaler, ready=2):
        self.autoscaler, self.ready, self.state = autoscaler, ready, {}

    def at(self, now, unfinished, gives, **more):
        """Call at a moment, with that many requests: the number must be `gives`, which the fleet then has."""
        checked = call(self.autoscaler.decide, view(now, unfinished, ready=self.ready, **more), self.state)
        number, state = checked.value
        that(f"at {now} s, {unfinished} requests, {self.ready} replicas: the number", number).gives(gives)
        self.ready, self.state = number - more.get("starting", 0), state


# What is wanted


@pytest.mark.parametrize(
    ("unfinished", "wanted"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (80, 10), (81, 10)]
)
def test_as_many_as_it_takes(scaler, unfinished, wanted):
    """8 requests a replica, at least 1 and at most 10 replicas: rounded up, and kept within the bounds."""
    call(scaler().wanted, view(0, unfinished)).gives(wanted)


def test_requests_that_wait_are_load_too(scaler):
    """All replicas are full, and requests wait for one: they count."""
    call(scaler().wanted, view(0, 16, waiting=9)).gives(4)


def test_a_target_need_not_be_whole(scaler):
    """2.5 requests a replica: 11 requests want 5 replicas."""
    call(scaler(target=2.5).wanted, view(0, 10)).gives(4)
    call(scaler(target=2.5).wanted, view(0, 11)).gives(5)


def test_the_bounds_hold(scaler):
    """Never fewer than min_replicas, never more than max_replicas."""
    few, many = one_of((2, 5), [(2, 5), (3, 4), (4, 9)])
    bounded = scaler(fewest=few, most=many)
    call(bounded.wanted, view(0, 0)).gives(few)
    call(bounded.wanted, view(0, 1000)).gives(many)


# At once


def test_without_a_delay_the_fleet_follows_the_load(scaler):
    """No delays: as many as are wanted, at once, up and down."""
    asked = Asked(scaler())
    for now, (unfinished, number) in enumerate([(16, 2), (40, 5), (41, 6), (9, 2), (0, 1), (8, 1)]):
        asked.at(now, unfinished, number)


def test_the_first_call_knows_no_past(scaler):
    """With delays the first call, whose state is empty, changes nothing: nothing is known to have held."""
    Asked(scaler(up=30, down=60), ready=2).at(0, 80, 2)
    Asked(scaler(up=30, down=60), ready=5).at(0, 0, 5)


def test_replicas_that_start_are_there(scaler):
    """5 are wanted, 2 are ready and 3 are starting: that is enough, and no more are requested."""
    Asked(scaler(), ready=2).at(0, 40, 5, starting=3)
    Asked(scaler(), ready=2).at(0, 48, 6, starting=3)


def test_nothing_changes_what_starts(scaler):
    """2 are ready and 3 start, and nothing is known yet: there should be the 5 that there are."""
    Asked(scaler(up=30, down=60), ready=2).at(0, 16, 5, starting=3)


def test_a_fleet_outside_the_bounds(scaler):
    """3 to 10 replicas: with 1 there should be 3, with 12 there should be 10, at once and whatever the delays."""
    Asked(scaler(up=30, down=60, fewest=3), ready=1).at(0, 0, 3)
    Asked(scaler(up=30, down=60), ready=0).at(0, 0, 1)
    Asked(scaler(up=30, down=60), ready=12).at(0, 80, 10)
    Asked(scaler(up=30, down=60), ready=9).at(0, 80, 10, starting=4)


# Up


def test_more_when_more_were_wanted_for_the_delay(scaler):
    """upscale_delay 30: 5 are wanted from 10 s on, and there are 5 from 40 s on."""
    asked = Asked(scaler(up=30, down=60))
    for now, unfinished, number in [(0, 16, 2), (10, 40, 2), (20, 40, 2), (30, 40, 2), (39, 40, 2), (40, 40, 5)]:
        asked.at(now, unfinished, number)


def test_a_peak_that_is_over_changes_nothing(scaler):
    """upscale_delay 30: one call at which 2 are enough, and the 30 s begin anew."""
    asked = Asked(scaler(up=30, down=60))
    loads = [(0, 16), (10, 80), (20, 80), (30, 16), (40, 80), (50, 80), (60, 80)]
    for now, unfinished in loads:
        asked.at(now, unfinished, 2)
    asked.at(70, 80, 10)


def test_up_to_what_was_wanted_all_the_time(scaler):
    """upscale_delay 20: in the last 20 s between 4 and 9 were wanted: there should be 4, which all of it justifies."""
    asked = Asked(scaler(up=20, down=60))
    for now, unfinished, number in [(0, 48, 2), (10, 32, 2), (20, 72, 4), (30, 72, 4), (40, 72, 9)]:
        asked.at(now, unfinished, number)


# Down


def test_fewer_when_fewer_were_wanted_for_the_delay(scaler):
    """downscale_delay 60: 1 is wanted from 10 s on, and there is 1 from 70 s on."""
    asked = Asked(scaler(down=60), ready=4)
    for now, unfinished, number in [(0, 32, 4), (10, 3, 4), (40, 3, 4), (69, 3, 4), (70, 3, 1)]:
        asked.at(now, unfinished, number)


def test_down_to_what_was_wanted_at_most(scaler):
    """downscale_delay 60: in the last 60 s between 1 and 3 were wanted: there should be 3."""
    asked = Asked(scaler(down=60), ready=6)
    for now, unfinished, number in [(0, 8, 6), (30, 24, 6), (60, 0, 3), (90, 0, 3), (119, 0, 3), (120, 0, 1)]:
        asked.at(now, unfinished, number)


def test_a_load_that_swings_does_not_move_the_fleet(scaler):
    """From 3 to 6 replicas' worth and back, every 20 s: up once, and never down."""
    asked = Asked(scaler(down=60), ready=3)
    for turn in range(30):
        asked.at(20 * turn, 48 if turn % 2 else 24, 6 if turn else 3)


def test_the_delays_are_each_their_own(scaler):
    """upscale_delay 50, downscale_delay 10: what holds for 10 s is enough to shrink, and not enough to grow."""
    asked = Asked(scaler(up=50, down=10), ready=4)
    for now, unfinished, number in [
        (0, 8, 4),
        (5, 8, 4),
        (10, 8, 1),
        (20, 32, 1),
        (40, 32, 1),
        (69, 32, 1),
        (70, 32, 4),
    ]:
        asked.at(now, unfinished, number)


# The state


def test_what_was_wanted_holds_until_the_next_call(scaler):
    """Two calls far apart: at the first 5 were wanted, and so at every moment up to the second."""
    asked = Asked(scaler(up=30))
    asked.at(0, 40, 2)
    asked.at(100, 40, 5)


def test_what_holds_at_the_beginning_of_the_next_window_is_kept(scaler):
    """upscale_delay 30, calls at 0, 100, 110 s; four replicas die at 105. From 80 s on 6 were wanted: so said 0 s."""
    asked = Asked(scaler(up=30, down=30))
    asked.at(0, 48, 2)
    asked.at(100, 48, 6)
    asked.ready = 2
    asked.at(110, 48, 6)


def test_the_state_is_all_that_is_remembered(scaler):
    """One autoscaler is called for two fleets in turn, each with its own state."""
    autoscaler = scaler(up=10, down=10)
    first, second = Asked(autoscaler), Asked(autoscaler)
    for now, number in [(0, 2), (5, 2), (10, 5)]:
        first.at(now, 40, number)
        second.at(now, 16, 2)


def test_the_state_is_json_and_is_not_changed(scaler):
    """It survives json.dumps and back, and the call does not change its argument."""
    autoscaler, state, told = scaler(up=20, down=20), {}, []
    for now in range(0, 50, 10):
        before = json.dumps(state)
        number, new = autoscaler.decide(view(now, 40, ready=told[-1] if told else 2), json.loads(before))
        given = json.loads(before)
        autoscaler.decide(view(now, 40), given)
        that("the state that decide was given", json.dumps(given)).gives(before)
        state = json.loads(json.dumps(new))
        told.append(number)
    that("the numbers, 10 s apart", told).gives([2, 2, 5, 5, 5])


def test_the_state_does_not_grow(scaler):
    """Called every second for an hour, with delays of 20 s: older entries are dropped."""
    autoscaler, state = scaler(up=20, down=5), {}
    for now in range(3600):
        _, state = autoscaler.decide(view(now, 16 + now % 7), state)
    assert len(json.dumps(state)) < 2000, f"after an hour the state is {len(json.dumps(state))} characters long"


def test_a_clock_that_was_set_back(scaler):
    """The clock is an hour behind the state: nothing is known of the last 30 s until they have passed."""
    asked = Asked(scaler(up=30))
    asked.at(3600, 40, 2)
    asked.at(0, 40, 2)
    asked.at(29, 40, 2)
    asked.at(30, 40, 5)


def test_what_is_yet_to_come_is_forgotten(scaler):
    """At 1000 s 2 were wanted; then it is 100 s, and 5 are wanted from then on: 30 s later there are 5."""
    autoscaler, state, ready = scaler(up=30, down=2000), {}, 2
    for now, unfinished, allowed in [
        (0, 40, [2]),
        (1000, 16, [2]),
        (100, 40, [2, 5]),
        (110, 40, [2, 5]),
        (130, 40, [5]),
    ]:
        ready, state = autoscaler.decide(view(now, unfinished, ready=ready), state)
        that(
            f"at {now} s, {unfinished} requests: {ready}, and whether that is one of {allowed}", ready in allowed
        ).gives(True)


def test_what_is_yet_to_come_keeps_nothing(scaler):
    """8 replicas; 1 is wanted at 0 s, 6 at 100 s. Then it is 10 s, and 2 are wanted: there should be 2, or still 8."""
    autoscaler, state = scaler(down=5), {}
    for now, unfinished, allowed in [(0, 8, [8]), (100, 48, [6]), (10, 16, [2, 8])]:
        number, state = autoscaler.decide(view(now, unfinished, ready=8), state)
        what = f"at {now} s, {unfinished} requests, 8 replicas: {number}, and whether that is one of {allowed}"
        that(what, number in allowed).gives(True)


def test_any_history(scaler):
    """Loads, gaps and delays at random, against all that was ever wanted, moment by moment."""
    rng = Random(fresh(5))
    for _ in range(100):
        up, down = rng.choice((0, 3, 10)), rng.choice((0, 4, 12))
        autoscaler, asked = scaler(up=up, down=down), []
        fleet, now = Asked(autoscaler, ready=rng.randint(1, 6)), 0
        for _ in range(25):
            now += rng.randint(1, 5)
            unfinished = rng.randint(0, 90)
            asked.append((now, autoscaler.wanted(view(now, unfinished))))
            fleet.at(now, unfinished, should_be(asked, fleet.ready, up, down))


def should_be(asked, ready, up, down):
    """Looks at every whole second: all times here are such."""
    now = asked[-1][0]

    def at(moment):
        return next((number for time, number in reversed(asked) if time <= moment), None)

    above = [at(moment) for moment in range(now - up, now + 1)]
    below = [at(moment) for moment in range(now - down, now + 1)]
    if None not in above and min(above) > ready:
        return min(above)
    if None not in below and max(below) < ready:
        return max(below)
    return ready


# Who leaves


def test_who_is_done_first_leaves(scaler, fleet):
    """Two of four leave: those with the fewest unfinished requests."""
    replicas = fleet(a=5, b=0, c=7, d=2)
    call(scaler().leaving, replicas, 2).gives(["b", "d"])
    call(scaler().leaving, replicas, 1).gives(["b"])
    call(scaler().leaving, replicas, 0).gives([])
    call(scaler().leaving, replicas, 4).gives(["b", "d", "a", "c"])
    that("the replicas' names afterwards", [each.replica_id for each in replicas]).gives(["a", "b", "c", "d"])


def test_of_equals_the_first_by_name_leaves(scaler, fleet):
    """In whatever order they are given."""
    call(scaler().leaving, fleet(c=3, a=3, b=3), 2).gives(["a", "b"])


def test_a_full_one_is_judged_by_its_load(scaler, fleet):
    """A full replica with 2 requests is done before an empty-looking one with 9 of 64."""
    call(scaler().leaving, fleet(a=9, b=(2, 2)), 1).gives(["b"])
