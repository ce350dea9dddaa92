"""Phase 6, task 6: the bytes move: to the host, back, and from block to block."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minicache.cache.paged import PagedStorage
from minicache.cache.swap import HostStorage, copy_blocks
from minicache.memory.blocks import BlockPool
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

LAYERS, BLOCK_SIZE, HEADS, HEAD_DIM = 3, 4, 2, 5


def a_storage(num_blocks, dtype=torch.float32):
    """A storage whose every number is another, with all digits that `dtype` holds, and a second one like it."""
    pair = [PagedStorage(BlockPool(num_blocks, BLOCK_SIZE), LAYERS, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(fresh(num_blocks))
    for layer in range(LAYERS):
        for part in ("k", "v"):
            rows = torch.randn(num_blocks, BLOCK_SIZE, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
            for storage in pair:
                getattr(storage, part)(layer).copy_(rows)
    return pair


def contents(storage, block):
    """Keys and values of all layers of a block, `[2, LAYERS, BLOCK_SIZE, HEADS, HEAD_DIM]`."""
    parts = [storage.k, storage.v]
    return torch.stack([torch.stack([part(layer)[block] for layer in range(LAYERS)]) for part in parts])


def spoil(storage, blocks):
    """What a block holds once another request has it: NaN, here."""
    for layer in range(LAYERS):
        storage.k(layer)[list(blocks)] = float("nan")
        storage.v(layer)[list(blocks)] = float("nan")


def check(storage, expected, when):
    """Every block is, in all layers, keys and values, what `expected` says: a dict block → contents."""
    for block, numbers in expected.items():
        that(f"block {block} {when}", contents(storage, block)).gives(numbers)


class Copied(TorchDispatchMode):
    """Counts the numbers in every tensor that is made meanwhile; a view of one that is there is none."""

    num_numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self.num_numbers += each.numel()
        return made


class Moved(TorchDispatchMode):
    """Counts the numbers that go from one device to another, and moves none: "meta", the GPU here, has none."""

    num_numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
        elif func is torch.ops.aten._to_copy.default:
            source = args[0]
            target = torch.empty_like(source, device=kwargs.get("device", source.device))
        else:
            return func(*args, **kwargs)
        if target.device == source.device:
            return func(*args, **kwargs)
        self.num_numbers += source.numel() if source.is_floating_point() else 0
        return target


def numbers_made(function, *arguments):
    """How many numbers the tensors have that a call makes."""
    with Copied() as copied:
        call(function, *arguments).gives(None)
    return copied.num_numbers


def swap(pairs):
    return [(host_block, block) for block, host_block in pairs]


# There and back


def test_blocks_go_out_and_come_back():
    """Two blocks go to the host, are spoilt on the device, and come back as they were: all layers, keys and values."""
    storage, original = a_storage(6)
    host = call(HostStorage, storage, 4).value
    call(host.swap_out, [(1, 2), (4, 0)]).gives(None)
    spoil(storage, [1, 4])
    call(host.swap_in, [(2, 1), (0, 4)]).gives(None)
    check(storage, {block: contents(original, block) for block in range(6)}, "after the way back")


def test_the_blocks_that_move_are_copied_and_no_others():
    """Two blocks move, of 6 and of 60, and of as many CPU blocks: as many numbers are copied, each way."""
    costs = []
    for num_blocks in (6, 60):
        storage, _ = a_storage(num_blocks)
        host = HostStorage(storage, num_blocks)
        calls = (host.swap_out, [(1, 2), (4, 0)]), (host.swap_in, [(2, 1), (0, 4)]), (copy_blocks, storage, [(0, 3)])
        costs.append([numbers_made(*each) for each in calls])
    called = "numbers in the tensors made by swap_out, swap_in and copy_blocks, with 60 blocks"
    that(f"{called}, where 6 blocks take {costs[0]}", costs[1]).gives(costs[0])


def test_the_host_is_the_cpu_and_only_what_moves_goes_there():
    """A storage on another device ("meta"): of 6 blocks 2 move, and only their numbers go to the CPU and back."""
    storage = PagedStorage(BlockPool(6, BLOCK_SIZE), LAYERS, HEADS, HEAD_DIM, device="meta")
    host, moved = HostStorage(storage, 4), []
    for move, pairs in ((host.swap_out, [(1, 2), (4, 0)]), (host.swap_in, [(2, 1), (0, 4)])):
        with Moved() as counting:
            call(move, pairs).gives(None)
        moved.append(counting.num_numbers)
    numbers = 2 * contents(storage, 0).numel()
    that("numbers moved between the devices by swap_out, by swap_in", moved).gives([numbers, numbers])


def test_back_to_other_blocks():
    """CPU blocks come back into whatever blocks the request has then; what else lies there is not touched."""
    storage, original = a_storage(6)
    host = HostStorage(storage, 4)
    call(host.swap_out, [(0, 3), (1, 1)]).gives(None)
    call(host.swap_in, [(3, 5), (1, 0)]).gives(None)
    expected = {5: contents(original, 0), 0: contents(original, 1)}
    check(storage, {n: contents(original, n) for n in range(6)} | expected, "after the way back")


def test_block_ids_and_host_block_ids_are_different_things():
    """Block 2 goes to CPU block 0, and block 0 to CPU block 2: the same numbers on both sides, and no mix-up."""
    storage, original = a_storage(3)
    host = HostStorage(storage, 3)
    call(host.swap_out, [(2, 0), (0, 2)]).gives(None)
    spoil(storage, [0, 2])
    call(host.swap_in, [(2, 0), (0, 2)]).gives(None)
    check(storage, {block: contents(original, block) for block in range(3)}, "after the way back")


def test_swapping_out_changes_nothing_here():
    """The storage is read, not written; the host, on the way in, likewise: the same blocks can be had twice."""
    storage, original = a_storage(4)
    host = HostStorage(storage, 4)
    call(host.swap_out, [(0, 1), (3, 2)]).gives(None)
    check(storage, {block: contents(original, block) for block in range(4)}, "after swap_out")
    call(host.swap_in, [(1, 1)]).gives(None)
    call(host.swap_in, [(1, 2)]).gives(None)
    check(storage, {1: contents(original, 0), 2: contents(original, 0)}, "after swapping one CPU block in twice")


def test_host_blocks_keep_what_they_have():
    """Later swaps write their own CPU blocks, and no others."""
    storage, original = a_storage(6)
    host = HostStorage(storage, 5)
    for block in range(5):
        call(host.swap_out, [(block, 4 - block)]).gives(None)
    spoil(storage, range(6))
    call(host.swap_out, [(0, 2)]).gives(None)  # spoilt by now
    call(host.swap_in, [(4 - block, block) for block in (0, 1, 3, 4)]).gives(None)
    check(storage, {block: contents(original, block) for block in (0, 1, 3, 4)}, "after the way back")


def test_a_copy_is_a_copy():
    """What is written to the storage after swap_out does not reach the host: another request has the block now."""
    storage, original = a_storage(2)
    host = HostStorage(storage, 1)
    call(host.swap_out, [(0, 0)]).gives(None)
    storage.k(1)[0, 2] += 1
    storage.v(0)[0] *= 2
    call(host.swap_in, [(0, 1)]).gives(None)
    that("block 1", contents(storage, 1)).gives(contents(original, 0))


def test_out_and_in_within_one_step():
    """A step's copies in their order: A's blocks go out, then B's come in over them. Both are whole afterwards."""
    storage, original = a_storage(4)
    host = HostStorage(storage, 4)
    host.swap_out([(2, 0), (3, 1)])  # B, earlier
    spoil(storage, [2, 3])
    call(host.swap_out, [(0, 2), (1, 3)]).gives(None)  # A
    call(host.swap_in, [(0, 0), (1, 1)]).gives(None)  # B, where A was
    call(host.swap_in, [(2, 2), (3, 3)]).gives(None)  # A, where B was
    expected = {0: 2, 1: 3, 2: 0, 3: 1}
    check(storage, {block: contents(original, was) for block, was in expected.items()}, "after all")


@pytest.mark.parametrize("seed", range(8))
def test_any_blocks_to_any_blocks(seed):
    """Random blocks to random CPU blocks and back to other ones: a model of dicts says what must be where."""
    rng = random.Random(fresh(seed))
    storage, original = a_storage(9)
    host = HostStorage(storage, 7)
    device = {block: contents(original, block) for block in range(9)}
    hosted = {}
    for _ in range(12):
        if rng.random() < 0.5 or not hosted:
            count = rng.randint(0, 7)
            pairs = list(zip(rng.sample(range(9), count), rng.sample(range(7), count), strict=True))
            call(host.swap_out, pairs).gives(None)
            hosted |= {host_block: device[block] for block, host_block in pairs}
        else:
            count = rng.randint(0, len(hosted))
            pairs = list(zip(rng.sample(sorted(hosted), count), rng.sample(range(9), count), strict=True))
            call(host.swap_in, pairs).gives(None)
            device |= {block: hosted[host_block] for host_block, block in pairs}
        check(storage, device, "after random swaps")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype(dtype):
    """The host keeps numbers as they are, whatever their type."""
    storage, original = a_storage(3, dtype)
    host = HostStorage(storage, 2)
    call(host.swap_out, [(0, 1)]).gives(None)
    call(host.swap_in, [(1, 2)]).gives(None)
    that("block 2", contents(storage, 2)).gives(contents(original, 0))


def test_nbytes():
    """nbytes: keys and values of all layers, of every CPU block. `host.storage` is the storage that was given."""
    storage, _ = a_storage(6)
    host = HostStorage(storage, 5)
    that("nbytes", host.nbytes).gives(2 * LAYERS * 5 * BLOCK_SIZE * HEADS * HEAD_DIM * 4)
    that("num_host_blocks", host.num_host_blocks).gives(5)
    that("whether its storage is the one given", host.storage is storage).gives(True)
    half, _ = a_storage(6, torch.float16)
    that("nbytes in half precision", HostStorage(half, 5).nbytes).gives(host.nbytes // 2)


# What is refused


def test_sizes_that_are_refused():
    """A host needs a whole number of blocks, at least one."""
    storage, _ = a_storage(2)
    for bad in (0, -3):
        call(HostStorage, storage, bad).raises(ValueError)
    for bad in (1.0, "2", None, True):
        call(HostStorage, storage, bad).raises(TypeError)


BAD = [
    pytest.param([(4, 0)], IndexError, id="no such block"),
    pytest.param([(0, 6)], IndexError, id="no such CPU block"),
    pytest.param([(0, 0), (-1, 1)], IndexError, id="a block counted from the end"),
    pytest.param([(0, 0), (1, -1)], IndexError, id="a CPU block counted from the end"),
    pytest.param([(0, 0), (1, 0)], ValueError, id="one CPU block twice"),
    pytest.param([(0, 0), (2, 3), (0, 1)], ValueError, id="one block twice"),
    pytest.param([(0, 0), (1.0, 1)], TypeError, id="a float"),
    pytest.param([(0, 0), (1, "1")], TypeError, id="a string"),
    pytest.param([(0, 0), (True, 1)], TypeError, id="True"),
]


@pytest.mark.parametrize(("pairs", "error"), BAD)
def test_swaps_that_are_refused(pairs, error):
    """4 blocks, 6 CPU blocks. Not an int: TypeError; no such id: IndexError; twice: ValueError. Nothing is copied."""
    storage, original = a_storage(4)
    host = HostStorage(storage, 6)
    host.swap_out([(3, 0)])
    call(host.swap_out, pairs).raises(error)
    call(host.swap_in, [(0, 0)]).gives(None)
    that("CPU block 0, which a refused swap_out named too", contents(storage, 0)).gives(contents(original, 3))
    storage, original = a_storage(4)
    host = HostStorage(storage, 6)
    call(host.swap_in, swap(pairs)).raises(error)
    check(storage, {block: contents(original, block) for block in range(4)}, "after a refused swap_in")


def test_no_pairs_copy_nothing():
    """No pairs, nothing happens."""
    storage, original = a_storage(3)
    host = HostStorage(storage, 3)
    call(host.swap_out, []).gives(None)
    call(host.swap_in, []).gives(None)
    call(copy_blocks, storage, []).gives(None)
    check(storage, {block: contents(original, block) for block in range(3)}, "after no swaps")


# On the device


def test_copy_blocks():
    """Sources are copied into targets, all layers, keys and values; one source may have several targets."""
    storage, original = a_storage(7)
    spoil(storage, [1, 4, 6])
    call(copy_blocks, storage, [(0, 4), (2, 6), (0, 1)]).gives(None)
    expected = {4: 0, 6: 2, 1: 0, 0: 0, 2: 2, 3: 3, 5: 5}
    check(storage, {block: contents(original, was) for block, was in expected.items()}, "after copy_blocks")


def test_sources_are_read_before_targets_are_written():
    """A block may be the target of one pair and the source of another: round in a circle, and in a chain."""
    storage, original = a_storage(6)
    call(copy_blocks, storage, [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5)]).gives(None)
    expected = {1: 0, 2: 1, 0: 2, 4: 3, 5: 4, 3: 3}
    check(storage, {block: contents(original, was) for block, was in expected.items()}, "after copy_blocks")


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ([(0, 1), (6, 2)], IndexError),
        ([(0, 1), (2, 6)], IndexError),
        ([(0, 1), (-1, 2)], IndexError),
        ([(0, 1), (2, -6)], IndexError),
        ([(0, 1), (2, 1)], ValueError),
        ([(0, 1), (2.0, 3)], TypeError),
        ([(0, 1), (2, False)], TypeError),
    ],
)
def test_copies_that_are_refused(pairs, error):
    """6 blocks: no such block, a target twice, not an int. Nothing is copied, not even the good pairs."""
    storage, original = a_storage(6)
    call(copy_blocks, storage, pairs).raises(error)
    check(storage, {block: contents(original, block) for block in range(6)}, "after a refused copy")
