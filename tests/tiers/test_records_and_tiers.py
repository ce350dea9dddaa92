"""What a tier guarantees, of each of them; and what a disk may do to a record."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from minicache.errors import CorruptBlockError
from minicache.tiers import disk
from minicache.tiers.contract import Tier, seal, unseal
from minicache.tiers.cpu import CPUTier
from minicache.tiers.disk import DiskTier
from minicache.tiers.specs import open_tier, parse_size

Make = Callable[[int], Tier]


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


@pytest.fixture(params=["cpu", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return CPUTier if request.param == "cpu" else lambda max_nbytes: DiskTier(tmp_path / "kv", max_nbytes)


# Records


def test_a_sealed_block_comes_back_as_it_was() -> None:
    assert unseal(key(0), seal(key(0), b"keys and values")) == b"keys and values"


def test_every_flipped_bit_is_found() -> None:
    record = seal(key(0), bytes(range(64)))
    for position in range(len(record)):
        for bit in range(8):
            broken = bytearray(record)
            broken[position] ^= 1 << bit
            with pytest.raises(CorruptBlockError):
                unseal(key(0), bytes(broken))


def test_every_cut_is_found() -> None:
    record = seal(key(0), b"keys and values")
    for length in range(len(record)):
        with pytest.raises(CorruptBlockError):
            unseal(key(0), record[:length])
    with pytest.raises(CorruptBlockError):
        unseal(key(0), record + b"\0")


def test_a_block_under_another_key_is_refused() -> None:
    with pytest.raises(CorruptBlockError, match="another block's key"):
        unseal(key(1), seal(key(0), b"keys and values"))


# Each tier


def test_a_tier_finds_a_prefix_and_returns_its_records(make: Make) -> None:
    tier = make(1000)
    for number in (0, 1, 3):
        tier.store(key(number), b"%d" % number)
    keys = [key(number) for number in range(4)]
    assert tier.lookup(keys) == 2
    assert tier.load(keys) == [b"0", b"1"]
    assert tier.lookup([key(9), *keys]) == 0
    assert tier.load([key(9)]) == []


def test_a_tier_evicts_what_was_used_least_recently(make: Make) -> None:
    tier = make(1000)
    for number in range(10):
        tier.store(key(number), bytes(100))
    tier.load([key(0)])
    tier.touch([key(2)])
    tier.store(key(10), bytes(100))
    here = [number for number in range(11) if tier.lookup([key(number)])]
    assert 1 not in here
    assert {0, 2, 10} <= set(here)
    assert len(here) >= 9


def test_the_end_of_a_prefix_goes_before_its_beginning(make: Make) -> None:
    tier, keys = make(1000), [key(number) for number in range(10)]
    for each in keys:
        tier.store(each, bytes(100))
    tier.touch(keys)
    tier.store(key(10), bytes(250))
    assert tier.lookup(keys) in (6, 7)


def test_a_tier_never_exceeds_its_bound(make: Make) -> None:
    tier, choose = make(1000), random.Random(0)
    for number in range(100):
        tier.store(key(number), bytes(choose.randrange(400)))
        held = sum(len(record) for each in range(number + 1) for record in tier.load([key(each)]))
        assert held <= 1000
    tier.store(key(1000), bytes(1001))
    assert tier.lookup([key(1000)]) == 0


def test_discarded_records_are_gone(make: Make) -> None:
    tier = make(1000)
    tier.store(key(0), b"0")
    tier.store(key(1), b"1")
    tier.discard([key(0), key(7)])
    assert [tier.lookup([key(number)]) for number in (0, 1)] == [0, 1]
    tier.store(key(0), b"anew")
    assert tier.load([key(0), key(1)]) == [b"anew", b"1"]


def test_a_key_keeps_its_record(make: Make) -> None:
    tier = make(1000)
    tier.store(key(0), b"first")
    tier.store(key(0), b"second")
    assert tier.load([key(0)]) == [b"first"]


def test_threads_may_use_a_tier_at_once(make: Make) -> None:
    tier, errors = make(2000), []

    def use(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(200):
                number = choose.randrange(40)
                tier.store(key(number), b"%d" % number * 50)
                for record in tier.load([key(choose.randrange(40))]):
                    assert len(set(record.split(b"0"))) >= 1
                if choose.random() < 0.1:
                    tier.discard([key(choose.randrange(40))])
        except Exception as error:  # reported by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    assert sum(len(record) for number in range(40) for record in tier.load([key(number)])) <= 2000


# The folder


def test_a_folder_outlives_its_tier(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1000).store(key(0), b"0")
    again = DiskTier(tmp_path, 1000)
    assert again.load([key(0)]) == [b"0"]


def test_two_tiers_may_share_a_folder(tmp_path: Path) -> None:
    one, two = DiskTier(tmp_path, 1000), DiskTier(tmp_path, 1000)
    one.store(key(0), b"0")
    assert two.load([key(0)]) == [b"0"]
    two.discard([key(0)])
    assert one.load([key(0)]) == []


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    for number in range(10):
        tier.store(key(number), bytes(100))
    again = DiskTier(tmp_path, 300)
    assert sum(again.lookup([key(number)]) for number in range(10)) == 2  # a bit more is freed than must be
    assert again.lookup([key(9)])


def test_tiers_that_share_a_folder_keep_its_bound(tmp_path: Path) -> None:
    one, two = DiskTier(tmp_path, 10_000), DiskTier(tmp_path, 10_000)
    for number in range(300):  # each by turns writes a whole bound, and more
        (one, two)[number // 150].store(key(number), bytes(100))
        if number % 10 == 9:
            assert sum(each.stat().st_size for each in tmp_path.glob("??/*")) <= 10_500


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    others = [tmp_path / "notes.txt", tmp_path / "ab" / "notes.txt"]
    for each in others:
        each.write_bytes(bytes(500))
    tier = DiskTier(tmp_path, 300)
    for number in range(10):
        tier.store(key(number), bytes(100))
    assert all(each.read_bytes() == bytes(500) for each in others)
    assert tier.lookup([key(9)])


def test_a_file_in_the_making_is_removed_if_no_process_makes_it(tmp_path: Path) -> None:
    left_over, alive = tmp_path / "dead-0.making", tmp_path / "alive-0.making"
    left_over.write_bytes(bytes(10))
    with alive.open("wb") as file:
        flock(file, LOCK_EX)
        DiskTier(tmp_path, 1000)
        assert not left_over.exists()
        assert alive.exists()
    DiskTier(tmp_path, 1000)
    assert not alive.exists()


def test_a_file_that_another_process_removes_too_early_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, lists = DiskTier(tmp_path, 1000), [True]

    def slow_lock(file: Any, how: int) -> None:
        if how == LOCK_EX and lists.pop():
            DiskTier(tmp_path, 1000)
            lists.append(False)
        flock(file, how)

    monkeypatch.setattr(disk, "flock", slow_lock)
    tier.store(key(0), b"0")
    assert tier.load([key(0)]) == [b"0"]
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == [key(0).hex()]


def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    """The system refuses to write more than 50 bytes of the file, as if there were no more space."""
    tier, before = DiskTier(tmp_path, 1000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tier.store(key(0), bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tier.lookup([key(0)]) == 0
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
    tier.store(key(0), bytes(100))
    assert tier.lookup([key(0)]) == 1


# Chaos: a process that opens, reads, writes and evicts in several threads is killed at any moment.

BOUND = 1_500_000
USER = """
import random, sys, threading
from hashlib import sha256
from pathlib import Path
from minicache.tiers.contract import seal, unseal
from minicache.tiers.disk import DiskTier

print("opens", flush=True)
tier = DiskTier(Path(sys.argv[1]), int(sys.argv[2]))

def use(seed):
    choose = random.Random(seed)
    while True:
        keys = [sha256(b"%d" % choose.randrange(200)).digest() for _ in range(4)]
        for key in keys:
            tier.store(key, seal(key, key * (1 + 10 * key[0])))
        for key, record in zip(keys, tier.load(keys)):
            unseal(key, record)
        tier.touch(keys)
        if choose.random() < 0.2:
            tier.discard(keys[:1])

for number in range(3):
    threading.Thread(target=use, args=(f"{sys.argv[3]} {number}",), daemon=True).start()
threading.Event().wait()
"""


def kill_users(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill such processes, and look at what each has left.

    Returns:
        How many files they have left in the making, and how many records were read back.
    """
    choose, num_left_over, num_read = random.Random(seed), 0, 0
    for number in range(times):
        command = [sys.executable, "-c", USER, str(folder), str(BOUND), f"{seed} {number}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "opens\n"
            time.sleep(choose.random() * choose.choice([0.01, 0.2]))
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        num_left_over += len(list(folder.glob("*.making")))
        tier = DiskTier(folder, BOUND)
        files = [each for each in folder.rglob("*") if each.is_file()]
        assert sum(each.stat().st_size for each in files) <= BOUND
        for each in files:
            its_key = bytes.fromhex(each.name)
            assert unseal(its_key, tier.load([its_key])[0]) == its_key * (1 + 10 * its_key[0])
        num_read += len(files)
    return num_left_over, num_read


def test_a_process_may_be_killed_while_it_uses_a_folder(tmp_path: Path) -> None:
    assert kill_users(tmp_path, 4, seed=0)[1] > 0


@pytest.mark.slow
def test_a_process_may_be_killed_often(tmp_path: Path) -> None:
    num_left_over, num_read = kill_users(tmp_path, 100, seed=1)
    print(f"{num_left_over} files were left in the making, {num_read} records read back")
    assert num_left_over > 0
    assert num_read > 1000


# Specifications


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512MB", 512 * 10**6), ("1.5GB", 15 * 10**8), ("1KB", 1000), ("2TB", 2 * 10**12)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("spec", ["", "cpu", "cpu:", "cpu:many", "cpu:0GB", "disk:", "disk:?max=1GB", "disk", "tape:1"])
def test_what_is_no_tier_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"no tier|no size"):
        open_tier(spec)


def test_tiers_by_their_specification(tmp_path: Path) -> None:
    disk = open_tier(f"disk:{tmp_path}/kv?max=1KB")
    assert isinstance(disk, DiskTier)
    assert disk.folder == tmp_path / "kv"
    disk.store(key(0), bytes(1001))
    assert disk.lookup([key(0)]) == 0
    assert isinstance(open_tier("cpu:1MB"), CPUTier)
    with pytest.raises(TypeError, match="named by a string"):
        open_tier(7)  # type: ignore[arg-type]
