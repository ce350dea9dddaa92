"""Phase 12, task 8: a folder of records that survives `kill -9`, a full disk and damage, and stays bounded.

Nothing here looks at which files there are, or at what is in them.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from minicache.errors import CorruptBlockError
from minicache.tiers.contract import seal, unseal
from minicache.tiers.disk import DiskTier
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.follow import following
from minicache_course.seeds import fresh, one_of
from minicache_course.templates import load

child = load(Path(__file__).with_name("child.py"))

MOST = 100_000


class Key(bytes):
    """A key, printed by its number."""

    def __repr__(self):
        return f"key {self.number}"


@cache
def key(number):
    made = Key(sha256(b"%d" % number).digest())
    made.number = number
    return made


def keys(numbers):
    return [key(number) for number in numbers]


class Record(bytes):
    """A record, printed by its length."""

    def __repr__(self):
        return f"a record of {len(self)} bytes"


def record(number, nbytes=2000):
    """A sealed block under key `number`; the same for the same arguments."""
    payload = random.Random(fresh(number)).randbytes(nbytes - 52)
    return Record(seal(key(number), payload))


@pytest.fixture(autouse=True)
def _scenario():
    """A failure tells the tier and the calls so far."""
    with following(DiskTier, "store", "touch", "discard", __init__=_opened, load=_loaded):
        yield


def _opened(tier, folder, max_nbytes):
    return f"DiskTier(folder, {max_nbytes})", ""


def _loaded(result, keys):
    given = f"{len(result)} records" if isinstance(result, list) else "no list"
    return f"load({keys if len(keys) < 9 else f'{len(keys)} keys'}) → {given}", ""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def filled(folder, numbers, max_nbytes=MOST, nbytes=2000):
    """A tier that has stored these, in their order."""
    tier = DiskTier(folder, max_nbytes)
    for number in numbers:
        tier.store(key(number), record(number, nbytes))
    return tier


def state(tier, number, nbytes=2000):
    """What a tier has under a key: "there", "gone", "damaged" if `unseal` refuses it; and else what is wrong."""
    found = call(tier.lookup, keys([number])).value
    loaded = call(tier.load, keys([number])).value
    if not isinstance(loaded, list) or len(loaded) != found or found not in (0, 1):
        return f"lookup gives {found}, and load {len(loaded) if isinstance(loaded, list) else loaded!r} records"
    if not loaded:
        return "gone"
    if loaded == [record(number, nbytes)]:
        return "there"
    try:
        unseal(key(number), loaded[0])
    except CorruptBlockError:
        return "damaged"
    return "another block"


def states(tier, numbers, nbytes=2000):
    return {number: state(tier, number, nbytes) for number in numbers}


def here(tier, numbers):
    """Which of these a tier has. Being asked for is no use."""
    return [number for number in numbers if call(tier.lookup, keys([number])).value]


def on_disk(folder):
    """Bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def an_hour_passes(folder):
    """All files are an hour older."""
    for path in folder.rglob("*"):
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns - 3600 * 10**9, stat.st_mtime_ns - 3600 * 10**9))
    scenario.done("an hour passes")


# A tier


def test_what_was_stored_comes_back(folder):
    """Each record byte by byte, whatever its length and its bytes."""
    tier = DiskTier(folder, MOST)
    wanted = {
        number: record(number, nbytes) for number, nbytes in enumerate((53, 1000, 4096, one_of(9999, range(60, 20000))))
    }
    for number, each in wanted.items():
        call(tier.store, key(number), each).gives(None)
    for number, each in wanted.items():
        loaded = call(tier.load, keys([number])).value
        that(f"whether load([key {number}]) gives the record that was stored", loaded == [each]).gives(True)


def test_the_longest_prefix_that_is_there(folder):
    """Of keys 0 to 5, number 3 is missing: a block is of no use without those before it."""
    tier = filled(folder, [0, 1, 2, 4, 5])
    call(tier.lookup, keys(range(6))).gives(3)
    that("records of load([key 0 … key 5])", len(call(tier.load, keys(range(6))).value)).gives(3)
    call(tier.lookup, keys([3, 0, 1])).gives(0)
    call(tier.load, keys([3, 0, 1])).gives([])
    call(tier.lookup, []).gives(0)
    call(tier.load, []).gives([])


def test_records_come_in_the_order_of_the_keys(folder):
    """Not in the order in which they were stored, and the same key twice gives the record twice."""
    tier = filled(folder, [2, 0, 1])
    for numbers in ([0, 1, 2], [2, 1, 0], [1, 1, 0]):
        loaded = call(tier.load, keys(numbers)).value
        that(f"whether load({keys(numbers)}) gives their records", loaded == [record(each) for each in numbers]).gives(
            True
        )


def test_keys_are_compared_as_a_whole(folder):
    """Keys that differ in the last byte alone are different, and so are those that differ in the first."""
    tier, base = DiskTier(folder, MOST), bytes(key(0))
    others = [base[:-1] + bytes([base[-1] ^ 1]), bytes([base[0] ^ 1]) + base[1:], base[:16] + bytes(16)]
    tier.store(base, record(0))
    for number, each in enumerate(others):
        that(f"lookup of another key, number {number}", call(tier.lookup, [each]).value).gives(0)
    for number, each in enumerate(others):
        tier.store(each, record(number + 1))
    loaded = [call(tier.load, [each]).value for each in (base, *others)]
    that("whether each key gives its own record", loaded == [[record(number)] for number in range(4)]).gives(True)


def test_a_key_keeps_its_record(folder):
    """What is stored under a key that has a record is not kept: it is the same."""
    tier = filled(folder, [0])
    call(tier.store, key(0), record(0, 500)).gives(None)
    that("key 0", state(tier, 0)).gives("there")


def test_discarded_records_are_gone(folder):
    """Those, and no others. A key without a record is skipped. What is stored afterwards is there."""
    tier = filled(folder, range(4))
    call(tier.discard, keys([7, 1, 2])).gives(None)
    that("the records that are there", here(tier, range(4))).gives([0, 3])
    call(tier.store, key(1), record(1, 777)).gives(None)
    that("key 1", state(tier, 1, 777)).gives("there")


def test_what_has_no_record_is_not_touched(folder):
    """`touch` skips keys without a record: it makes none."""
    tier = filled(folder, [0])
    call(tier.touch, keys([5, 0, 6])).gives(None)
    that("the records that are there", here(tier, [0, 5, 6])).gives([0])


def test_the_folder_is_made(tmp_path):
    """With its parents, or as it is there."""
    for _ in range(2):
        call(DiskTier, tmp_path / "a" / "b", MOST).value.store(key(0), record(0))
    that("key 0", state(DiskTier(tmp_path / "a" / "b", MOST), 0)).gives("there")


@pytest.mark.parametrize(("most", "error"), [(0, ValueError), (-5, ValueError), ("9", TypeError), (2.5, TypeError)])
def test_no_such_bound(folder, most, error):
    """max_nbytes is an int of at least 1; nothing is made otherwise."""
    call(DiskTier, folder, most).raises(error)
    that("whether the folder is there", folder.exists()).gives(False)


# The bound


def test_a_full_folder_evicts_the_least_recently_used(folder):
    """Ten of 2,000 bytes fill 20,000. Another one comes: the first goes, and perhaps the next, for a tenth in all."""
    tier = filled(folder, range(10), 20_000)
    call(tier.store, key(10), record(10)).gives(None)
    kept = here(tier, range(11))
    that("the records that are there", kept if kept == list(range(2, 11)) else list(range(1, 11))).gives(kept)


def test_a_load_is_a_use(folder):
    """Of ten, the first was loaded since: the second goes before it. `lookup` is no use."""
    tier = filled(folder, range(10), 20_000)
    tier.load(keys([0]))
    call(tier.lookup, keys([1, 2])).gives(2)
    call(tier.store, key(10), record(10)).gives(None)
    kept = here(tier, range(11))
    that("whether keys 0, 1 and 10 are there", [number in kept for number in (0, 1, 10)]).gives([True, False, True])


@pytest.mark.parametrize("use", ["touch", "load"])
def test_the_end_of_a_prefix_goes_first(folder, use):
    """All ten were used at once, as a prefix: then the last counts as the least recently used."""
    tier = filled(folder, range(10), 20_000)
    getattr(tier, use)(keys(range(10)))
    call(tier.store, key(10), record(10, 6000)).gives(None)
    kept = here(tier, range(11))
    that("the records that are there", kept).gives([*range(len(kept) - 1), 10])
    that("how many of the ten", len(kept) - 1 in (6, 7)).gives(True)


def test_a_record_above_the_bound_is_not_kept(folder):
    """And none is evicted for it. One of just the bound is kept, alone."""
    tier = filled(folder, range(5), 10_000)
    call(tier.store, key(9), record(9, 10_001)).gives(None)
    that("the records that are there", here(tier, [*range(5), 9])).gives([0, 1, 2, 3, 4])
    call(tier.store, key(8), record(8, 10_000)).gives(None)
    that("the records that are there", here(tier, [*range(5), 8])).gives([8])


def test_a_smaller_bound_holds_at_once(folder):
    """A folder of 20,000 bytes is opened with 10,000."""
    filled(folder, range(10), 20_000)
    tier = call(DiskTier, folder, 10_000).value
    kept = here(tier, range(10))
    that("the records that are there", kept if kept == list(range(6, 10)) else list(range(5, 10))).gives(kept)


class Watched:
    """A tier, and which records it must have: the rule from outside.

    `order` has the records, the least recently used first.
    """

    def __init__(self, folder, most):
        self.folder, self.most = folder, most
        self.tier, self.order = DiskTier(folder, most), {}

    def use(self, numbers):
        for number in reversed(numbers):
            if number in self.order:
                self.order[number] = self.order.pop(number)

    def do(self, rng, numbers, largest):
        """Something, drawn at random. Whether records may have been evicted for it."""
        what, some = rng.random(), rng.sample(numbers, rng.randint(1, 5))
        if what < 0.55:
            number, nbytes = some[0], rng.randint(60, largest)
            is_new = number not in self.order
            call(self.tier.store, key(number), record(number, nbytes)).gives(None)
            if is_new and nbytes <= self.most:
                self.order[number] = nbytes
            elif not is_new and number in here(self.tier, [number]):
                self.order = self.after_a_second_store(number)
        elif what < 0.7:
            there = next((place for place, number in enumerate(some) if number not in self.order), len(some))
            loaded = call(self.tier.load, keys(some)).value
            wanted = [record(number, self.order[number]) for number in some[:there]]
            that("whether load gives the records of the longest prefix", loaded == wanted).gives(True)
            self.use(some[:there])
        elif what < 0.85:
            call(self.tier.touch, keys(some)).gives(None)
            self.use(some)
        elif what < 0.92:
            call(self.tier.discard, keys(some)).gives(None)
            self.order = {number: nbytes for number, nbytes in self.order.items() if number not in some}
        else:
            self.tier = DiskTier(self.folder, self.most)
        return what < 0.55 or what >= 0.92

    def after_a_second_store(self, number):
        """Whether that is a use is left open, so it is one."""
        self.tier.touch(keys([number]))
        return {each: nbytes for each, nbytes in self.order.items() if each != number} | {number: self.order[number]}

    def check(self, numbers):
        """Those that are evicted were used before all others, and no more of them than necessary."""
        __tracebackhide__ = True
        kept = here(self.tier, numbers)
        that("records that were never stored, or discarded", [each for each in kept if each not in self.order]).gives(
            []
        )
        evicted = [number for number in self.order if number not in kept]
        by_use = list(self.order)
        story = f"evicted, of {by_use}, the least recently used first"
        that(story, evicted).gives(by_use[: len(evicted)])
        before = sum(self.order.values())
        after = sum(self.order[number] for number in kept)
        that(f"bytes of all records: {after}; whether that is at most {self.most}", after <= self.most).gives(True)
        if evicted:
            that(f"bytes of all records before: {before}; whether something had to go", before > self.most).gives(True)
            one_more = after + self.order[evicted[-1]]
            story = f"bytes kept: {after}; whether they would be more than 9/10 of {self.most} with one more record"
            that(story, 10 * one_more > 9 * self.most).gives(True)
        self.order = {number: nbytes for number, nbytes in self.order.items() if number in kept}


@pytest.mark.parametrize("scale", [1, 20])
@pytest.mark.parametrize("seed", range(3))
def test_by_the_order_of_use(folder, seed, scale):
    """Random calls, and the folder is opened anew now and then: what is there follows from the order of use."""
    rng, numbers = random.Random(fresh(seed)), list(range(30))
    watched = Watched(folder, scale * rng.choice([20_000, 30_000]))
    for _ in range(60 if scale == 1 else 120):
        if watched.do(rng, numbers, scale * rng.choice([900, 4000])):
            watched.check(numbers)


def test_the_disk_holds_little_more_than_the_records(folder):
    """After 10 MB in a folder of 2 MB: at most half as much again, and 1 MB."""
    tier = DiskTier(folder, 2_000_000)
    for number in range(250):
        tier.store(key(number), record(number, 40_000))
        if number % 5 == 4:
            tier.discard(keys([number - 2]))
    size = on_disk(folder)
    that(f"bytes of all files: {size}; whether that is at most 4,000,000", size <= 4_000_000).gives(True)
    there = len(here(tier, range(250)))
    that(f"{there} of 50 possible records are there: whether that is at least 44", there >= 44).gives(True)


def test_files_of_others_stay(folder):
    """They are not read, counted, touched or removed, also in folders inside."""
    others = [folder / "notes.txt", folder / "more" / "notes.txt"]
    for each in others:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(bytes(50_000))
    tier = filled(folder, range(20), 20_000)
    that("files of others that are as they were", [each.read_bytes() == bytes(50_000) for each in others]).gives(
        [True] * 2
    )
    that("whether at least 9 records are there", len(here(tier, range(20))) >= 9).gives(True)


def test_a_store_does_not_look_at_all_the_others(folder):
    """In a full folder of 400 records, a store is at most four times the work of one of 40, on average over many.

    Listing 100,000 files for each block would take longer than computing it.
    """
    work = {}
    for size in (40, 400):
        tier = filled(folder / str(size), range(size), 200 * size, nbytes=200)
        work[size] = sum(child.num_calls(tier.store, key(each), record(each, 200)) for each in range(1000, 1040))
        that(f"whether the last of {size} is there", here(tier, [1039])).gives([1039])
    story = f"calls in 40 stores, in a folder of 400 records and in one of 40: {work[400]:,} and {work[40]:,}"
    that(f"{story}; whether the first are at most 4 times the others", work[400] <= 4 * work[40]).gives(True)


# It survives


def test_a_folder_outlives_its_process(folder):
    """Another process has stored ten records, and was killed right after. All are there, in their order of use."""
    child.do(lambda: DiskTier(folder, 20_000), lambda tier: _store_and_use(tier))
    scenario.done("another process stores 0 … 9, loads 1 and touches 0; it is killed after that")
    that("ten records", states(DiskTier(folder, 20_000), range(10))).gives(dict.fromkeys(range(10), "there"))


def _store_and_use(tier):
    for number in range(10):
        tier.store(key(number), record(number))
    tier.load(keys([1]))
    tier.touch(keys([0]))


def test_the_order_of_use_outlives_the_process(folder):
    """Of the ten, keys 1 and 0 were used last. In a bound of 10,000 bytes four or five are left."""
    child.do(lambda: DiskTier(folder, 20_000), lambda tier: _store_and_use(tier))
    scenario.done("another process stores 0 … 9, loads 1 and touches 0; it is killed after that")
    kept = here(DiskTier(folder, 10_000), range(10))
    that("the records that are there", kept if kept == [0, 1, 8, 9] else [0, 1, 7, 8, 9]).gives(kept)


def test_killed_in_a_store(folder):
    """At some moments: the five from before are there, and the sixth is there or not. Then it can be stored."""
    filled(folder, range(5))
    prepare, work = lambda: DiskTier(folder, MOST), lambda tier: tier.store(key(5), record(5))
    for moment in child.moments(lambda: DiskTier(folder / "other", MOST), work):
        place = child.killed(prepare, work, moment)
        scenario.done(f"a process that stores key 5 is killed {place}")
        tier = call(DiskTier, folder, MOST).value
        found = states(tier, range(6))
        that("keys 0 … 4 and 5", found).gives(
            dict.fromkeys(range(5), "there") | {5: "gone" if found[5] == "gone" else "there"}
        )
        call(tier.store, key(5), record(5)).gives(None)
        that("key 5, stored anew", state(tier, 5)).gives("there")
        tier.discard(keys([5]))


@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_killed_in_the_middle_of_a_write(folder, part):
    """It is killed when a part of the record is on the disk. The others are there, and this one is not, or whole."""
    nbytes = one_of(60_000, range(50_000, 80_000))
    filled(folder, range(3))
    child.killed_in_write(
        lambda: DiskTier(folder, MOST), lambda tier: tier.store(key(3), record(3, nbytes)), int(part * nbytes)
    )
    scenario.done(f"a process is killed when {int(part * nbytes)} of the {nbytes} bytes of key 3 are written")
    tier = call(DiskTier, folder, MOST).value
    that("keys 0 … 2", states(tier, range(3))).gives(dict.fromkeys(range(3), "there"))
    found = state(tier, 3, nbytes)
    that("key 3", found).gives("there" if found == "there" else "gone")
    call(tier.store, key(3), record(3, nbytes)).gives(None)
    that("key 3, stored anew", state(tier, 3, nbytes)).gives("there")


def test_killed_while_it_evicts(folder):
    """A full folder, and a large record comes: what is gone was used before all that is there, at every moment."""
    prepare, work = lambda: DiskTier(folder, 20_000), lambda tier: tier.store(key(10), record(10, 9000))
    for moment in child.moments(lambda: filled(folder, range(10), 20_000), work)[::2]:
        shutil.rmtree(folder)
        filled(folder, range(10), 20_000)
        place = child.killed(prepare, work, moment)
        scenario.done(f"a process that stores key 10 is killed {place}")
        tier = call(DiskTier, folder, 20_000).value
        kept = here(tier, range(10))
        that("which of keys 0 … 9 are there", kept).gives(list(range(10 - len(kept), 10)))
        that("whether at least four of them are", len(kept) >= 4).gives(True)
        that("these", states(tier, kept)).gives(dict.fromkeys(kept, "there"))
        found = state(tier, 10, 9000)
        that("key 10", found).gives("there" if found == "there" else "gone")


@pytest.mark.parametrize("what", ["discard", "touch", "load", "open"])
def test_killed_in_another_call(folder, what):
    """While it discards keys 0 and 1, touches or loads all, or opens the folder: keys 2 … 5 are there afterwards."""
    works = {
        "discard": lambda tier: tier.discard(keys([0, 1])),
        "touch": lambda tier: tier.touch(keys(range(6))),
        "load": lambda tier: str(len(tier.load(keys(range(6))))),
        "open": lambda tier: str(DiskTier(folder, MOST).lookup(keys(range(6)))),
    }
    work = works[what]
    filled(folder, range(6))
    for moment in child.moments(lambda: filled(folder / "other", range(6)), work):
        place = child.killed(lambda: DiskTier(folder, MOST), work, moment)
        scenario.done(f"a process that is in {what} is killed {place}")
        tier = call(DiskTier, folder, MOST).value
        found = states(tier, range(6))
        wanted = dict.fromkeys(range(6), "there")
        for number in (0, 1) if what == "discard" else ():
            wanted[number] = "gone" if found[number] == "gone" else "there"
        that("keys 0 … 5", found).gives(wanted)
        filled(folder, [0, 1])


def test_what_killed_processes_leave_does_not_pile_up(folder):
    """Twenty processes are killed in the middle of a record of 90,000 bytes. An hour later the folder is opened."""
    filled(folder, range(5))
    for number in range(10, 30):
        child.killed_in_write(
            lambda: DiskTier(folder, MOST),
            lambda tier, number=number: tier.store(key(number), record(number, 90_000)),
            80_000,
        )
    scenario.done("twenty processes are killed in the middle of storing 90,000 bytes")
    an_hour_passes(folder)
    tier = call(DiskTier, folder, MOST).value
    tier.store(key(6), record(6))
    size = on_disk(folder)
    that(f"bytes of all files: {size}; whether that is at most 1,150,000", size <= 1_150_000).gives(True)
    that("keys 0 … 4", states(tier, range(5))).gives(dict.fromkeys(range(5), "there"))


# A full disk


def test_a_full_disk(folder):
    """A store of 50,000 bytes fails on a disk that takes 10,000: an error, and the record is not there.

    Or it is: a folder that had reserved its place before. The others are as they were, and can be loaded.
    """
    tier = filled(folder, range(3))
    with child.files_up_to(10_000):
        outcome = call(tier.store, key(3), record(3, 50_000))
    if outcome.error is not None:
        scenario.done(f"store(key 3, …) raises {type(outcome.error).__name__}")
    that("key 3", state(tier, 3, 50_000)).gives("gone" if outcome.error is not None else "there")
    that("keys 0 … 2", states(tier, range(3))).gives(dict.fromkeys(range(3), "there"))
    call(tier.store, key(3), record(3, 50_000)).gives(None)
    that("key 3, stored when the disk has room again", state(tier, 3, 50_000)).gives("there")


def test_a_full_disk_again_and_again(folder):
    """Thirty stores of 50,000 bytes fail. They leave no bytes, and do not count: no record has to go for them."""
    tier = filled(folder, range(10))
    before = on_disk(folder)
    for number in range(20, 50):
        with child.files_up_to(10_000):
            call(tier.store, key(number), record(number, 50_000))
    scenario.done("thirty stores of 50,000 bytes fail")
    that("keys 20 … 49 that are there", here(tier, range(20, 50))).gives([])
    size = on_disk(folder)
    that(
        f"bytes of all files: {before} before, {size} now; whether that is 5,000 more at most", size <= before + 5_000
    ).gives(True)
    for number in range(10, 20):
        call(tier.store, key(number), record(number)).gives(None)
    that("keys 0 … 19", here(tier, range(20))).gives(list(range(20)))


# Damage


DAMAGES = {
    "emptied": lambda data, part: b"",
    "cut off": lambda data, part: data[: int(part * len(data))],
    "changed in a byte": lambda data, part: _changed(data, part, bytes([data[int(part * len(data))] ^ 4])),
    "overwritten with zeros, in a part": lambda data, part: _changed(data, part, bytes(len(data) // 4)),
    "overwritten with zeros": lambda data, part: bytes(len(data)),
    "longer than it was": lambda data, part: data + b"more",
}


def _changed(data, part, by):
    at = int(part * len(data))
    return data[:at] + by[: len(data) - at] + data[at + len(by) :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_costs_records_only(folder, damage):
    """One file after the other is damaged. Each record is there, gone, or refused by `unseal`, and can be replaced."""

    def work(tier):
        for each in range(5):
            tier.store(key(each), record(each))

    child.do(lambda: DiskTier(folder, MOST), work)
    files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.stat().st_size)[:6]
    parts = max(3, 20 // max(1, len(files))) if damage in ("cut off", "changed in a byte") else 3
    rng = random.Random(fresh(0))
    for number, name in enumerate(name for name in files for _ in range(parts)):
        copy = folder.with_name(str(number))
        shutil.copytree(folder, copy)
        part = (0.0, 0.999999, rng.random())[min(number % parts, 2)]
        (copy / name).write_bytes(DAMAGES[damage]((copy / name).read_bytes(), part))
        scenario.done(f"another process stores 0 … 4, and ends; then a file is {damage}")
        tier = call(DiskTier, copy, MOST).value
        found = states(tier, range(5))
        wrong = {each: now for each, now in found.items() if now not in ("there", "gone", "damaged")}
        that("keys 0 … 4, but for those that are there, gone or damaged", wrong).gives({})
        call(tier.discard, keys(each for each in range(5) if found[each] == "damaged")).gives(None)
        for each in range(5):
            call(tier.store, key(each), record(each)).gives(None)
        that("keys 0 … 4, stored anew", states(tier, range(5))).gives(dict.fromkeys(range(5), "there"))


# Several at once


def test_what_one_stores_another_finds(folder):
    """Two tiers of one folder: what one stores or discards, the other sees in its next call."""
    one, two = DiskTier(folder, MOST), DiskTier(folder, MOST)
    one.store(key(0), record(0))
    that("key 0, of the other", state(two, 0)).gives("there")
    two.store(key(1), record(1))
    that("keys 0 and 1, of the first", states(one, [0, 1])).gives({0: "there", 1: "there"})
    one.discard(keys([0]))
    that("keys 0 and 1, of the other", states(two, [0, 1])).gives({0: "gone", 1: "there"})
    two.store(key(0), record(0, 555))
    that("key 0, of the first", state(one, 0, 555)).gives("there")


@pytest.mark.parametrize("turns", [1, 70], ids=["by turns", "first one, then the other"])
def test_two_keep_one_bound(folder, turns):
    """Two tiers of one folder store 140 records of 2,000 bytes into 100,000: 110,000 at most at any time."""
    tiers = [DiskTier(folder, MOST), DiskTier(folder, MOST)]
    for number in range(140):
        tiers[number // turns % 2].store(key(number), record(number))
        if number % 10 == 9:
            num_here = len(here(tiers[0], range(number + 1)))
            story = f"records of 2,000 bytes after {number + 1} stores: {num_here}; whether they are 55 at most"
            that(story, num_here <= 55).gives(True)
    that("whether at least 44 are there", len(here(tiers[1], range(140))) >= 44).gives(True)


def test_a_folder_is_opened_while_another_stores(folder):
    """A process is held in the middle of a store; the folder is opened, and another record stored. Both succeed."""
    filled(folder, range(3))
    prepare, work = lambda: DiskTier(folder, MOST), lambda tier: tier.store(key(3), record(3))
    for moment in child.moments(lambda: DiskTier(folder / "other", MOST), work)[::2]:
        with child.held(prepare, work, moment):
            tier = call(DiskTier, folder, MOST).value
            call(tier.store, key(4), record(4)).gives(None)
        that("keys 0 … 4", states(tier, range(5))).gives(dict.fromkeys(range(5), "there"))
        tier.discard(keys([3, 4]))


def test_both_store_the_same(folder):
    """A process is held in the middle of a store, and the same record is stored here."""
    tier = filled(folder, range(3))
    prepare, work = lambda: DiskTier(folder, MOST), lambda tier: tier.store(key(3), record(3))
    for moment in child.moments(lambda: DiskTier(folder / "other", MOST), work)[::2]:
        with child.held(prepare, work, moment):
            call(tier.store, key(3), record(3)).gives(None)
        that("keys 0 … 3", states(tier, range(4))).gives(dict.fromkeys(range(4), "there"))
        tier.discard(keys([3]))


def test_what_is_stored_during_much_work_of_another_is_there(folder):
    """A process stores and discards 1.5 MB. It is held at some moments, and a record is stored here: it is not lost."""

    def work(tier):
        for _ in range(25):
            tier.store(key(9), record(9, 60_000))
            tier.discard(keys([9]))

    def prepare():
        return DiskTier(folder, 200_000)

    tier = filled(folder, range(3), 200_000)
    for moment in child.kinds(lambda: DiskTier(folder / "other", 200_000), work):
        with child.held(prepare, work, moment):
            call(tier.store, key(3), record(3)).gives(None)
        that("keys 0 … 3", states(tier, range(4))).gives(dict.fromkeys(range(4), "there"))
        tier.discard(keys([3]))


@pytest.mark.parametrize("what", ["load", "touch", "store"])
def test_a_record_goes_while_another_uses_it(folder, what):
    """A process is held in the middle of a load, a touch or an eviction, and the records go. That is no error."""
    numbers, most = range(6), 14_000
    works = {
        "load": lambda tier: _whole(tier.load(keys(numbers))),
        "touch": lambda tier: tier.touch(keys(numbers)),
        "store": lambda tier: tier.store(key(9), record(9, 8000)),
    }
    tier, work = filled(folder, numbers, most), works[what]
    for moment in child.moments(lambda: filled(folder / "other", numbers, most), work)[::2]:
        with child.held(lambda: DiskTier(folder, most), work, moment) as results:
            call(tier.discard, keys(numbers)).gives(None)
        if what == "load":
            that("the records that the other process has loaded", results).gives(["whole"])
        if what == "store":
            that("key 9", state(tier, 9, 8000)).gives("there")
        tier.discard(keys([*numbers, 9]))
        filled(folder, numbers, most)


def _whole(records):
    return "whole" if records == [record(number) for number in range(len(records))] else "others, or parts"


def test_threads_use_one_tier(folder):
    """Four threads of one process store, load and discard at random: no error, whole records, and the bound holds."""
    tier, errors = DiskTier(folder, 30_000), []

    def use(seed):
        rng = random.Random(fresh(seed))
        try:
            for _ in range(60):
                number = rng.randrange(25)
                tier.store(key(number), record(number))
                first = rng.randrange(24)
                if tier.load(keys([first, first + 1])) not in ([], [record(first)], [record(first), record(first + 1)]):
                    errors.append("load gives what was never stored")
                if rng.random() < 0.1:
                    tier.discard(keys([rng.randrange(25)]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    that("what has gone wrong in the threads", errors[:1]).gives([])
    num_here = len(here(tier, range(25)))
    that(f"records of 2,000 bytes: {num_here}; whether they are 15 at most", num_here <= 15).gives(True)
