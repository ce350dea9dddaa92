"""Phase 8, task 1: a hash of a block's contents. Blocks with the same hash have the same keys and values."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.memory.prefix import block_hash, root_hash
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

VOCAB_SIZE = 151_936  # Qwen's


def chain(token_ids, *extra_keys, block_size=4):
    """The hashes of a sequence's full blocks."""
    digests = [call(root_hash, *extra_keys).value]
    for end in range(block_size, len(token_ids) + 1, block_size):
        digests.append(call(block_hash, digests[-1], token_ids[end - block_size : end]).value)
    return digests[1:]


def in_common(one, other):
    """The number of blocks that two sequences can share, by their hashes."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# What a hash is


@pytest.mark.parametrize("keys", [(), (None, None), ("tenant a", None)])
def test_a_root_is_32_bytes(keys):
    """32 bytes, the size of SHA-256, for any number of keys."""
    digest = call(root_hash, *keys).value
    that("its type and length", (type(digest), len(digest))).gives((bytes, 32))


def test_a_hash_is_32_bytes():
    """32 bytes, the size of SHA-256."""
    digest = call(block_hash, bytes(32), [1, 2, 3, 4]).value
    that("its type and length", (type(digest), len(digest))).gives((bytes, 32))


def test_the_same_block_has_the_same_hash_again():
    """The same tokens after the same prefix have the same hash, at every call, in a list or in a tuple."""
    root = call(root_hash, "a", None).value
    call(root_hash, "a", None).gives(root)
    digest = call(block_hash, root, [5, 6, 7]).value
    call(block_hash, root, [5, 6, 7]).gives(digest)
    call(block_hash, root, (5, 6, 7)).gives(digest)


def test_equal_keys_have_one_root_though_they_are_two_objects():
    """Keys are compared by value. Two equal strings are one key, even if they are two objects.

    pickle writes a string that it has written before as "that one again", and an equal one out in full.
    """
    salt, copy = "tenant a", "".join("tenant a")
    same = call(root_hash, salt, salt).value == call(root_hash, salt, copy).value
    that("whether root_hash(a, a) and root_hash(a, a copy of a) are the same", same).gives(True)


def test_a_hash_is_the_same_in_another_process():
    """One server may look up blocks that another has cached: a hash depends only on its input, not on the process."""
    digest = call(block_hash, call(root_hash, "tenant a", "adapter").value, [5, 6, 7]).value
    file = sys.modules[root_hash.__module__].__file__
    told = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, file],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    that("the hash of the same block in another process", told.stdout.strip()).gives(digest.hex())


ELSEWHERE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("minicache.memory.prefix", sys.argv[1])
prefix = module_from_spec(spec)
sys.modules["minicache.memory.prefix"] = prefix
spec.loader.exec_module(prefix)
print(prefix.block_hash(prefix.root_hash("tenant a", "adapter"), [5, 6, 7]).hex())
"""


def test_token_ids_of_any_size_have_hashes_of_their_own():
    """Token ids are not limited to 255, to 65,535, or to any number of bytes: each of these blocks has another hash."""
    blocks = [[0], [255], [256], [65_535], [65_536], [VOCAB_SIZE - 1], [2**31], [2**64], [2**64 + 1]]
    that("different hashes of 9 blocks", len({call(block_hash, bytes(32), block).value for block in blocks})).gives(9)


# What it covers: the block


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([1, 2, 3, 4], [1, 3, 2, 4]),
        ([1, 23], [12, 3]),
        ([1, 2, 3], [12, 3]),
        ([1, 1, 2], [1, 2, 2]),
        ([1, 2], [1, 2, 0]),
        ([0, 0], [0, 0, 0]),
        ([3, 1], [2, 2]),
        ([10], [1, 0]),
        ([256], [0]),
        ([256], [1, 0]),
        ([65_536 + 5], [5]),
    ],
)
def test_other_tokens_have_another_hash(one, other):
    """A hash depends on which tokens there are, how many, and in which order."""
    same = block_hash(bytes(32), one) == block_hash(bytes(32), other)
    that(f"whether {one} and {other} have the same hash", same).gives(False)


@pytest.mark.parametrize("size", [16, 64])
def test_every_token_of_a_large_block_counts(size):
    """A block may have 16 tokens, or 64. Each of them counts, including the last."""
    block = list(range(100, 100 + size))
    others = [[*block[:place], 7, *block[place + 1 :]] for place in range(size)]
    digests = {block_hash(bytes(32), each) for each in (block, *others)}
    that(f"hashes of a block of {size} tokens, and of it with another token in each place", len(digests)).gives(
        size + 1
    )


def test_blocks_with_one_python_hash_have_two_hashes():
    """These two blocks collide under Python's hash(). A client that chooses its tokens can construct such pairs."""
    one, other = [0, 5], [2**61 - 1, 5]
    same = block_hash(bytes(32), one) == block_hash(bytes(32), other)
    that(f"whether {one} and {other} have the same hash", same).gives(False)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), min_size=2, max_size=8, unique_by=tuple))
def test_different_blocks_have_different_hashes(blocks):
    """Any blocks that differ."""
    that(f"different hashes of {blocks}", len({block_hash(bytes(32), each) for each in blocks})).gives(len(blocks))


def test_twenty_thousand_blocks_have_as_many_hashes():
    """No two of 20,000 random blocks have one hash. With 32-bit hashes such a pair would not be unlikely."""
    rng = random.Random(fresh(0))
    blocks = {tuple(rng.randrange(VOCAB_SIZE) for _ in range(4)) for _ in range(20_000)}
    digests = {block_hash(bytes(32), block) for block in blocks}
    that("different hashes", len(digests)).gives(len(blocks))
    that("different last bytes", len({digest[-1] for digest in digests})).gives(256)


# What it covers: all before the block


def test_the_same_tokens_after_another_beginning_are_another_block():
    """Keys and values of a token depend on all earlier tokens: the second blocks have different hashes."""
    one, other = chain([1, 2, 3, 4, 9, 9, 9, 9]), chain([1, 2, 3, 5, 9, 9, 9, 9])
    that("blocks that they have in common", len({*one} & {*other})).gives(0)


def test_the_same_tokens_twice_in_a_row_are_two_blocks():
    """The same four tokens at position 0 and at position 4 have different hashes."""
    that("different hashes in 1 1 1 1, 1 1 1 1, 1 1 1 1", len(set(chain([1] * 12)))).gives(3)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), max_size=14), st.lists(st.integers(0, 2), max_size=14))
def test_as_many_hashes_as_blocks_in_common(one, other):
    """Two sequences have as many hashes in common as whole blocks, from the first token on."""
    ends = [end for end in range(2, min(len(one), len(other)) + 1, 2) if one[:end] == other[:end]]
    got = in_common(chain(one, block_size=2), chain(other, block_size=2))
    that(f"blocks of 2 that {one} and {other} have in common", got).gives(len(ends))
    shared = len({*chain(one, block_size=2)} & {*chain(other, block_size=2)})
    that("hashes that they have in common anywhere", shared).gives(len(ends))


@pytest.mark.parametrize("place", range(32))
def test_every_byte_of_the_parent_counts(place):
    """Parents whose hashes differ in one byte give different hashes."""
    other = bytes(place) + b"x" + bytes(31 - place)
    same = block_hash(bytes(32), [1, 2]) == block_hash(other, [1, 2])
    that(f"whether parents that differ in byte {place} give one hash", same).gives(False)


# What it covers besides tokens


def test_a_tenant_who_guesses_finds_nothing():
    """Tenant a has sent a secret. Tenant b tries prompts, and the response time shows which of them is cached.

    A cached prompt is answered sooner. So a client that shares the cache can find out, block by block, which prompts
    another has sent. A separate salt for each tenant, in the root, prevents this.
    """
    secret = [4, 8, 1, 5, 1, 6, 2, 3, 4, 2, 0, 7]
    cached = {*chain(secret, "tenant a", None)}
    found = sum(digest in cached for digest in chain(secret, "tenant b", None))
    that("blocks of tenant a that tenant b finds by guessing the whole prompt", found).gives(0)
    found = sum(digest in cached for digest in chain(secret))
    that("blocks found without keys", found).gives(0)
    found = sum(digest in cached for digest in chain(secret, "tenant a", None))
    that("blocks that tenant a finds for the same prompt", found).gives(3)


def test_each_extra_key_changes_the_root():
    """The same tokens have other keys and values under other weights: each key counts, not only the first."""
    roots = [root_hash(salt, adapter) for salt in (None, "a", "b") for adapter in (None, "a", "b")]
    that("different roots of 3 salts with 3 adapters", len(set(roots))).gives(9)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((None,), ("",)),
        ((None,), ("None",)),
        ((), (None,)),
        (("a",), ("a", None)),
        ((None, "a"), ("a", None)),
        (("", "a"), ("a", "")),
        (("ab", "c"), ("a", "bc")),
        (("a,b",), ("a", "b")),
        (("a", "b,c"), ("a,b", "c")),
        (("a, b",), ("a", "b")),
        (("a', 'b",), ("a", "b")),
        (("a\x00b",), ("a", "b")),
        (("a|b",), ("a", "b")),
        (("a\nb",), ("a", "b")),
        (("é",), ("e",)),
        (("é",), ("ü",)),
        (("a", "b", "c"), ("x", "b", "c")),
        (("a", "b", "c"), ("a", "x", "c")),
        (("A",), ("a",)),
        ((" a",), ("a",)),
        (("東",), ("京",)),
        (("🙂",), ("🙃",)),
        (("é",), ("e\u0301",)),
        (("\ud800",), ("\udfff",)),
        (("a" * 1000 + "x",), ("a" * 1000 + "y",)),
        (("x" + "a" * 1000,), ("y" + "a" * 1000,)),
    ],
)
def test_keys_that_look_alike_have_different_roots(one, other):
    """A salt may be any string. None is no key; "" is an empty key; two keys are not one with a comma in it."""
    same = root_hash(*one) == root_hash(*other)
    that(f"whether root_hash{one} and root_hash{other} are the same", same).gives(False)


SEPARATORS = [*map(chr, range(128)), "||", "::", "--", "\r\n", "\x00\x00", ", ", "', '", "<none>", "<sep>"]


def test_no_separator_is_safe():
    """A client may put any separator into a key: ("a…b",) and ("a", "b") are different keys.

    Nor is there a string that could stand for None.
    """
    for between in SEPARATORS:
        joined, two = root_hash(f"a{between}b", None), root_hash("a", "b")
        told = f"whether root_hash({f'a{between}b'!r}, None) and root_hash('a', 'b') are the same"
        that(told, joined == two).gives(False)
        one = root_hash(f"a{between}b")
        that(f"whether root_hash({f'a{between}b'!r}) and root_hash('a', 'b') are the same", one == two).gives(False)
        same = root_hash(between) == root_hash(None)
        that(f"whether root_hash({between!r}) and root_hash(None) are the same", same).gives(False)
