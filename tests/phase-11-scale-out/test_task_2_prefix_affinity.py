"""Phase 11, task 2: a request goes where its prompt has been, unless that replica is too busy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import NoReplicaError
from minicache.fleet.affinity import PrefixAffinityRouter
from minicache.fleet.views import ReplicaView
from minicache_course.checks import call, that
from minicache_course.seeds import fresh, one_of


@pytest.fixture
def routed(prompt):
    """`routed(a=["ABC"], b=["AB"], …options…)`: a router that has sent these prompts there, replica by replica."""

    def create(*, options=None, **prompts):
        router = PrefixAffinityRouter(**(options or {}))
        for replica_id, sent in prompts.items():
            for letters in sent:
                call(router.on_sent, prompt(letters), replica_id).gives(None)
        return router

    return create


def remembers(router, replica_id, prompt, expected):
    """Of each prompt, so many blocks are remembered: `{"ABC": 2}`."""
    __tracebackhide__ = True
    for letters, count in expected.items():
        that(
            f"num_remembered({letters or 'a prompt without blocks'}, {replica_id!r})",
            call(router.num_remembered, prompt(letters), replica_id).value,
        ).gives(count)


# What is remembered


def test_nothing_is_remembered_at_first(routed, prompt):
    """Nothing has been sent: 0 blocks, of any replica."""
    call(routed().num_remembered, prompt("ABC"), "a").gives(0)


def test_a_prompt_that_was_sent_is_remembered(routed, prompt):
    """ABC was sent to a: of another prompt, the blocks that it has in common from the beginning on are there."""
    router = routed(a=["ABC"])
    remembers(router, "a", prompt, {"ABC": 3, "ABCD": 3, "ABD": 2, "AB": 2, "A": 1, "BC": 0, "XBC": 0, "": 0})
    remembers(router, "b", prompt, {"ABC": 0, "A": 0})


def test_prompts_of_one_replica_add_up(routed, prompt):
    """Two prompts sent to a, one to b."""
    router = routed(a=["ABC", "XY"], b=["AZ"])
    remembers(router, "a", prompt, {"ABC": 3, "XYZ": 2, "AZ": 1})
    remembers(router, "b", prompt, {"ABC": 1, "AZ": 2, "XY": 0})


def test_a_gap_ends_the_prefix(prompt):
    """The first and the third block are there, the second is not: 1. A block is of no use without those before it."""
    router, request = PrefixAffinityRouter(), prompt("ABC")
    router.remember(request.block_hashes[0], "a")
    router.remember(request.block_hashes[2], "a")
    call(router.num_remembered, request, "a").gives(1)


def test_a_prompt_without_blocks_is_sent(routed, prompt):
    """A prompt shorter than a block has no hashes: nothing to remember, and no error."""
    router = routed(a=[""])
    remembers(router, "a", prompt, {"": 0, "A": 0})
    router = routed(a=["AB", ""])
    remembers(router, "a", prompt, {"AB": 2})


# Forgetting


def test_the_end_of_the_oldest_prompt_goes_first(routed, prompt):
    """4 blocks: ABC, then XY. One too many: the end of ABC is forgotten, as a cache evicts ends first."""
    router = routed(options={"capacity_blocks": 4}, a=["ABC", "XY"])
    remembers(router, "a", prompt, {"ABC": 2, "XY": 2})


def test_exactly_full_forgets_nothing(routed, prompt):
    """5 blocks for ABC and XY: all are remembered; with one more prompt of 1 block, the end of ABC goes."""
    router = routed(options={"capacity_blocks": 5}, a=["ABC", "XY"])
    remembers(router, "a", prompt, {"ABC": 3, "XY": 2})
    router.on_sent(prompt("Z"), "a")
    remembers(router, "a", prompt, {"ABC": 2, "XY": 2, "Z": 1})


def test_used_again_is_recent(routed, prompt):
    """4 blocks: AB, XY, then AB again, then Z: now XY is the older one."""
    router = routed(options={"capacity_blocks": 4}, a=["AB", "XY", "AB", "Z"])
    remembers(router, "a", prompt, {"AB": 2, "XY": 1, "Z": 1})


def test_what_two_prompts_share_is_used_by_both(routed, prompt):
    """4 blocks: ABC and ABD are A, AB, ABC, ABD. New prompts push out ABC, ABD, AB and then A, in this order."""
    router = routed(options={"capacity_blocks": 4}, a=["ABC", "ABD", "X"])
    remembers(router, "a", prompt, {"ABC": 2, "ABD": 3, "X": 1})
    router.on_sent(prompt("Y"), "a")
    remembers(router, "a", prompt, {"ABC": 2, "ABD": 2, "X": 1, "Y": 1})
    router.on_sent(prompt("Z"), "a")
    remembers(router, "a", prompt, {"ABC": 1, "ABD": 1, "X": 1, "Y": 1, "Z": 1})


@pytest.mark.parametrize(("capacity", "count"), [(1, 1), (3, 3), (5, 5), (6, 5)])
def test_a_prompt_longer_than_the_capacity(routed, prompt, capacity, count):
    """Of ABCDE the beginning is remembered, and nothing of the earlier blocks if there is no room."""
    router = routed(options={"capacity_blocks": capacity}, a=["XYZ", "ABCDE"])
    remembers(router, "a", prompt, {"ABCDE": count, "XYZ": capacity - count})


def test_each_replica_has_its_own_capacity(routed, prompt):
    """4 blocks each: blocks sent to b evict nothing of a."""
    router = routed(options={"capacity_blocks": 4}, a=["ABC"], b=["XYZ", "UVW"])
    remembers(router, "a", prompt, {"ABC": 3})
    remembers(router, "b", prompt, {"XYZ": 1, "UVW": 3})


def test_choosing_is_not_sending(fleet, routed, prompt):
    """Nothing is remembered, and nothing becomes more recent, until on_sent."""
    router = routed(options={"capacity_blocks": 4}, a=["AB", "XY"])
    call(router.choose, prompt("AB"), fleet(a=0)).gives("a")
    call(router.choose, prompt("Q"), fleet(a=0)).gives("a")
    remembers(router, "a", prompt, {"AB": 2, "XY": 2, "Q": 0})
    router.on_sent(prompt("Z"), "a")
    remembers(router, "a", prompt, {"AB": 1, "XY": 2})


def test_a_replica_that_left_is_forgotten(fleet, routed, prompt):
    """Its cache went with it. Its successor of the same name has an empty one; the others keep theirs."""
    router = routed(a=["ABC", "XY"], b=["AB"])
    call(router.on_left, "a").gives(None)
    remembers(router, "a", prompt, {"ABC": 0, "XY": 0})
    remembers(router, "b", prompt, {"ABC": 2})
    call(router.choose, prompt("ABC"), fleet(a=0, b=3)).gives("b")
    call(router.choose, prompt("XY"), fleet(a=0, b=0)).gives("a")
    router.on_sent(prompt("AX"), "a")
    remembers(router, "a", prompt, {"AX": 2, "ABC": 1, "XY": 0})
    call(router.choose, prompt("ABC"), fleet(a=0, b=3)).gives("b")


def test_a_replica_that_was_never_sent_anything_may_leave(routed, prompt):
    """on_left of a replica of which nothing is remembered, and twice: nothing happens."""
    router = routed(a=["AB"])
    call(router.on_left, "b").gives(None)
    call(router.on_left, "a").gives(None)
    call(router.on_left, "a").gives(None)
    remembers(router, "a", prompt, {"AB": 0})


# Where a request goes


def test_the_longest_prefix_wins(fleet, routed, prompt):
    """a has ABC, b has AB, c has more blocks than both, of other prompts."""
    router = routed(a=["ABC"], b=["AB"], c=["UVWXYZ", "MN"])
    replicas = fleet(a=3, b=0, c=0)
    call(router.choose, prompt("ABCD"), replicas).gives("a")
    call(router.choose, prompt("MNO"), replicas).gives("c")


@pytest.mark.parametrize(
    ("load", "chosen"),
    [(0, "a"), (8, "a"), (9, "b"), (40, "b")],
)
def test_a_busy_replica_loses_what_it_had(fleet, routed, prompt, load, chosen):
    """a has the prompt. With up to 8 more unfinished requests than b, a is chosen; with 9 more, b is."""
    call(routed(a=["ABC"]).choose, prompt("ABC"), fleet(a=load, b=0)).gives(chosen)


@pytest.mark.parametrize("least", [3, 12, 30])
def test_the_bound_is_relative_to_the_least_busy(fleet, routed, prompt, least):
    """All are busy: only a's difference to the least busy one counts."""
    router = routed(a=["ABC"])
    call(router.choose, prompt("ABC"), fleet(a=least + 8, b=least, c=least + 20)).gives("a")
    call(router.choose, prompt("ABC"), fleet(a=least + 9, b=least, c=least + 20)).gives("b")


@pytest.mark.parametrize("bound", [0, 1, 20])
def test_the_bound_is_an_option(fleet, routed, prompt, bound):
    """max_imbalance 0: only the least busy, among which the prefix still decides."""
    router = routed(options={"max_imbalance": bound}, a=["ABC"])
    call(router.choose, prompt("ABC"), fleet(b=2, a=2 + bound)).gives("a")
    call(router.choose, prompt("ABC"), fleet(b=2, a=3 + bound)).gives("b")


def test_a_full_replica_does_not_set_the_bound(fleet, routed, prompt):
    """b is full with 2 of 2. Of those that are not full, c is the least busy: a has 8 more, and is chosen."""
    router = routed(a=["ABC"])
    call(router.choose, prompt("ABC"), fleet(a=20, b=(2, 2), c=12)).gives("a")
    call(router.choose, prompt("ABC"), fleet(a=21, b=(2, 2), c=12)).gives("c")
    call(router.choose, prompt("ABC"), fleet(a=21, b=(2, 2))).gives("a")


def test_the_second_longest_prefix(fleet, routed, prompt):
    """a has ABC and is too busy, b has AB and is busier than c, which has nothing: b."""
    router = routed(a=["ABC"], b=["AB"])
    call(router.choose, prompt("ABC"), fleet(a=30, b=5, c=0)).gives("b")
    call(router.choose, prompt("ABC"), fleet(a=30, b=9, c=0)).gives("c")


def test_a_full_replica_is_never_chosen(fleet, routed, prompt):
    """a has the prompt, and 4 of 4 requests; b has less of it."""
    router = routed(a=["ABC"], b=["A"])
    call(router.choose, prompt("ABC"), fleet(a=(4, 4), b=6, c=0)).gives("b")
    call(router.choose, prompt("ABC"), fleet(a=(5, 4), b=6, c=0)).gives("b")


def test_a_replica_that_is_not_listed_is_not_chosen(fleet, routed, prompt):
    """a has the prompt, but takes no requests just now: it is draining or does not answer. It keeps its cache."""
    router = routed(a=["ABC"], b=["A"])
    call(router.choose, prompt("ABC"), fleet(b=2, c=0)).gives("b")
    call(router.choose, prompt("ABC"), fleet(a=2, b=2, c=0)).gives("a")


def test_of_equal_prefixes_the_least_busy(fleet, routed, prompt):
    """a and b have the whole prompt, and b has fewer unfinished requests, wherever it stands."""
    router = routed(a=["ABC"], b=["ABC"], c=["AB"])
    call(router.choose, prompt("ABC"), fleet(a=4, b=3, c=0)).gives("b")
    call(router.choose, prompt("ABC"), fleet(c=0, b=4, a=3)).gives("a")


def test_without_a_prefix_the_least_busy(fleet, routed, prompt):
    """No replica has anything of the prompt, or it has no block: the least busy."""
    router = routed(a=["ABC"], b=["XY"])
    call(router.choose, prompt("Q"), fleet(a=2, b=1, c=3)).gives("b")
    call(router.choose, prompt(""), fleet(a=2, b=5, c=1)).gives("c")


def test_then_the_one_of_which_least_is_remembered(fleet, routed, prompt):
    """Equally busy: the replica of which the fewest blocks are remembered has most room for a new prompt."""
    router = routed(a=["ABC", "XY"], b=["AB"], c=["XYZ"])
    call(router.choose, prompt("Q"), fleet(a=1, b=1, c=1)).gives("b")
    call(router.choose, prompt("Q"), fleet(a=1, b=1, c=1, d=1)).gives("d")
    call(router.choose, prompt("XY"), fleet(a=1, b=1, c=1)).gives("c")


def test_then_the_first_by_name(fleet, routed, prompt):
    """Nothing else differs: by name, in whatever order they are listed."""
    call(routed().choose, prompt("Q"), fleet(c=0, b=0, d=0)).gives("b")
    call(routed(b=["AB"], c=["AB"]).choose, prompt("AB"), fleet(c=0, b=0, a=0)).gives("b")


def test_no_replica_is_an_error(fleet, routed, prompt):
    """None, or all are full: NoReplicaError, though the prompt is known."""
    router = routed(a=["ABC"])
    call(router.choose, prompt("ABC"), []).raises(NoReplicaError)
    call(router.choose, prompt("ABC"), fleet(a=(4, 4), b=(1, 1))).raises(NoReplicaError)


def test_stats_are_not_looked_at(routed, prompt):
    """A replica's report may be old: only `num_unfinished` counts."""
    replicas = [ReplicaView("a", 3, 64, {"num_unfinished": 50.0}), ReplicaView("b", 0, 64, {"num_unfinished": 0.0})]
    call(routed(a=["ABC"]).choose, prompt("ABC"), replicas).gives("a")


def test_stats_break_no_tie(routed, prompt):
    """Of equals the first by name, whatever the reports: only the blocks remembered here count as fullness."""
    busy = {"num_unfinished": 9.0, "num_running": 9.0, "num_waiting": 9.0, "memory": 0.9, "kv_cache_usage": 0.9}
    replicas = [ReplicaView("a", 1, 64, busy), ReplicaView("b", 1, 64, dict.fromkeys(busy, 0.0))]
    call(routed(a=["AB"], b=["XY"]).choose, prompt("Q"), replicas).gives("a")


def test_the_replicas_are_not_changed_or_kept(fleet, routed, prompt):
    """The list belongs to the caller, and changes between two calls; a tuple will do."""
    router, replicas = routed(a=["ABC"]), fleet(c=3, a=2, b=0)
    before = list(replicas)
    call(router.choose, prompt("ABC"), replicas).gives("a")
    that("the replicas after a choice", replicas).gives(before)
    replicas[1] = fleet(a=9)[0]
    call(router.choose, prompt("ABC"), replicas).gives("b")
    call(router.choose, prompt("ABC"), tuple(fleet(a=1, b=0))).gives("a")


# What comes of it


def route(router, replicas, requests):
    """Send each request, none of which ends; how many each replica has got."""
    views = {name: ReplicaView(name, 0, 10**6) for name in replicas}
    for request in requests:
        name = router.choose(request, list(views.values()))
        router.on_sent(request, name)
        views[name] = ReplicaView(name, views[name].num_unfinished + 1, 10**6)
    return {name: view.num_unfinished for name, view in views.items()}


def test_one_hot_prompt_does_not_overload_a_replica(prompt):
    """200 requests with one system prompt, four replicas: none gets more than 9 more than another."""
    bound = one_of(8, range(4, 12))
    requests = [prompt("SYSTEM" + chr(200 + number)) for number in range(200)]
    got = route(PrefixAffinityRouter(max_imbalance=bound), "abcd", requests)
    difference = max(got.values()) - min(got.values())
    told = f"whether the busiest of {got} has at most {bound + 1} more than the least"
    that(told, difference <= bound + 1).gives(True)


def test_new_prompts_are_spread(fleet, prompt):
    """100 different prompts arrive at an idle fleet of four, one at a time: 25 each, so each cache is used."""
    router, replicas, chosen = PrefixAffinityRouter(), fleet(a=0, b=0, c=0, d=0), []
    for number in range(100):
        request = prompt(chr(200 + number) + "BC")
        chosen.append(router.choose(request, replicas))
        router.on_sent(request, chosen[-1])
    that("requests to each replica", {name: chosen.count(name) for name in "abcd"}).gives(dict.fromkeys("abcd", 25))


def test_chats_stay_where_they_are(fleet, prompt):
    """12 chats of 6 turns, in random order: each turn goes where the chat began."""
    rng, router, replicas = random.Random(fresh(3)), PrefixAffinityRouter(), fleet(a=0, b=0, c=0)
    turns, places = dict.fromkeys("ABCDEFGHIJKL", 0), {}
    for _ in range(72):
        chat = rng.choice([name for name, count in turns.items() if count < 6])
        turns[chat] += 1
        request = prompt("s" + chat + "xyzuvw"[: turns[chat]])
        name = call(router.choose, request, replicas).value
        router.on_sent(request, name)
        that(f"where turn {turns[chat]} of chat {chat} goes", name).gives(places.setdefault(chat, name))


# Against a slow model of it


class SlowModel:
    """The replica that a router must choose, computed from the whole history of sent requests."""

    def __init__(self, max_imbalance, capacity_blocks):
        self.max_imbalance, self.capacity_blocks, self.history = max_imbalance, capacity_blocks, []

    def blocks(self, replica_id):
        """The most recently used blocks, as many as are remembered. The beginning of a prompt is used last."""
        last_use = {}
        for time, (request, name) in enumerate(self.history):
            if request is None:
                last_use = {} if name == replica_id else last_use
            elif name == replica_id:
                last_use |= {block: (time, -depth) for depth, block in enumerate(request.block_hashes)}
        return set(sorted(last_use, key=last_use.get, reverse=True)[: self.capacity_blocks])

    def found(self, request, replica_id):
        """The longest prefix that is there."""
        blocks, size = self.blocks(replica_id), len(request.block_hashes)
        return max(count for count in range(size + 1) if blocks.issuperset(request.block_hashes[:count]))

    def choose(self, request, replicas):
        """The first of the replicas in order of preference, None without one."""
        able = [replica for replica in replicas if replica.max_unfinished - replica.num_unfinished > 0]
        near = [one for one in able if all(one.num_unfinished - x.num_unfinished <= self.max_imbalance for x in able)]
        order = sorted(near, key=lambda one: one.replica_id)
        order.sort(key=lambda one: len(self.blocks(one.replica_id)))
        order.sort(key=lambda one: one.num_unfinished)
        order.sort(key=lambda one: self.found(request, one.replica_id), reverse=True)
        return order[0].replica_id if order else None


PROMPTS = st.sampled_from(["", "A", "AB", "ABC", "ABCD", "ABX", "ABXY", "B", "BC", "BCD", "Q"])
LOADS = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 6), st.sampled_from([3, 8])), max_size=4)
STEPS = st.lists(st.tuples(st.sampled_from(["sent", "sent", "sent", "left"]), PROMPTS, st.sampled_from("abc")))


@settings(max_examples=150)
@given(steps=STEPS, wanted=PROMPTS, loads=LOADS, max_imbalance=st.integers(0, 4), capacity_blocks=st.integers(1, 6))
def test_any_history(prompt, fleet, steps, wanted, loads, max_imbalance, capacity_blocks):
    """Whatever was sent, and whichever replicas left: the same replica as a model that looks at everything anew."""
    router = PrefixAffinityRouter(max_imbalance=max_imbalance, capacity_blocks=capacity_blocks)
    model = SlowModel(max_imbalance, capacity_blocks)
    for kind, letters, name in steps:
        if kind == "sent":
            router.on_sent(prompt(letters), name)
            model.history.append((prompt(letters), name))
        else:
            router.on_left(name)
            model.history.append((None, name))
    request, replicas = prompt(wanted), fleet(**loads)
    for name in "abc":
        call(router.num_remembered, request, name).gives(model.found(request, name))
    choice, expected = call(router.choose, request, replicas), model.choose(request, replicas)
    choice.gives(expected) if expected else choice.raises(NoReplicaError)
