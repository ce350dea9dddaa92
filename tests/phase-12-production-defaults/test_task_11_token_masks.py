"""Phase 12, task 11: the tokens that a state of an automaton allows, found through a trie of the vocabulary.

The automata of these tests are tables, written down or drawn: task 10 is not needed.
"""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from minicache.structured.token_masks import TokenMasks, TokenTrie
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.effort import effort
from minicache_course.seeds import fresh


class Table:
    """An automaton that is a table, and counts how often it is asked.

    Args:
        next_states: state → byte → state.
        accepting: the states in which a text may end.
    """

    start = 0

    def __init__(self, next_states, accepting=()):
        self.table, self.accepting, self.num_asked = next_states, set(accepting), 0

    def next_states(self, state):
        self.num_asked += 1
        return self.table[state]

    def is_accepting(self, state):
        self.num_asked += 1
        return state in self.accepting

    def read(self, state, text):
        for byte in text:
            state = self.table[state].get(byte)
            if state is None:
                return None
        return state


def of_text(text):
    """An automaton that reads this text and no other. State n: n bytes are read."""
    return Table({at: ({text[at]: at + 1} if at < len(text) else {}) for at in range(len(text) + 1)}, [len(text)])


def the_masks(automaton, tokens, ends=()):
    """Masks over a vocabulary, noted for a failure."""
    masks = TokenMasks(automaton, TokenTrie(tokens), ends)
    if len(tokens) < 20:
        scenario.given(f"tokens {dict(enumerate(tokens))}, end tokens {sorted(ends)}")
    return masks


# The trie


def texts_of(trie):
    """What leads to each node, from the root on: node → bytes. A node that is reached twice, or never, is an error."""
    __tracebackhide__ = True
    found, left = {0: b""}, [0]
    while left:
        node = left.pop()
        for byte, child in trie.children[node].items():
            that(f"whether node {child} has one way from the root", child in found).gives(False)
            found[child] = found[node] + bytes([byte])
            left.append(child)
    that("nodes, counted by children", len(trie.children)).gives(len(found))
    that("nodes, counted by token_ids", len(trie.token_ids)).gives(len(found))
    return found


def test_tokens_share_the_nodes_of_their_common_beginning():
    """a, ab, ac, b, and ab again: the root and four nodes, not one for each byte of each token."""
    trie = TokenTrie([])
    for token_id, text in ((1, b"a"), (2, b"ab"), (3, b"ac"), (4, b"b"), (9, b"ab")):
        call(trie.insert, token_id, text).gives(None)
    its = {text: trie.token_ids[node] for node, text in texts_of(trie).items()}
    that("the tokens of each node, by its bytes", its).gives({b"": [], b"a": [1], b"b": [4], b"ab": [2, 9], b"ac": [3]})


def test_a_token_that_others_continue_is_on_their_way():
    """The longest first: the nodes of abc are there when a, ab come. Only a token's last node has its id."""
    trie = TokenTrie([b"abc", b"ab", b"", b"a", b"\xc3", b"\xc3\xa9"])
    its = {text: trie.token_ids[node] for node, text in texts_of(trie).items()}
    expected = {b"": [], b"a": [3], b"ab": [1], b"abc": [0], b"\xc3": [4], b"\xc3\xa9": [5]}
    that("the tokens of each node, by its bytes", its).gives(expected)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_vocabulary(seed):
    """120 tokens of up to five letters: every beginning of a token is one node, and has the tokens that end there."""
    rng = random.Random(fresh(seed))
    tokens = [bytes(rng.choices(b"ab\xc3\xa9", k=rng.randint(0, 5))) for _ in range(120)]
    trie = TokenTrie(tokens)
    expected = {text[:end]: [] for text in tokens for end in range(len(text) + 1)}
    for token_id, text in enumerate(tokens):
        if text:
            expected[text].append(token_id)
    its = {text: trie.token_ids[node] for node, text in texts_of(trie).items()}
    that("the tokens of each node, by its bytes", its).gives(expected)


# What is allowed

AGE = {
    b"": 0,
    **{text: n for n, text in enumerate([b'{"', b"age", b'":', b" ", b"1", b"4", b"42", b"2}", b"}", b"old", b"0"], 1)},
}


def test_what_may_follow_a_number():
    """One digit, perhaps a second one, and a brace: a token may go over a border of the grammar, as 2} does."""
    digits = dict.fromkeys(b"0123456789", 1)
    automaton = Table({0: digits, 1: {**dict.fromkeys(b"0123456789", 2), ord("}"): 3}, 2: {ord("}"): 3}, 3: {}}, [3])
    masks = the_masks(automaton, list(AGE), [0])
    for state, expected in (
        (0, [b"1", b"4", b"42", b"2}", b"0"]),
        (1, [b"1", b"4", b"2}", b"}", b"0"]),
        (2, [b"}"]),
        (3, [b""]),
    ):
        scenario.given(f"state {state} of an automaton: a digit or two, then a brace")
        call(masks.allowed, state).gives(tuple(sorted(AGE[text] for text in expected)))


def test_a_token_may_end_inside_a_letter():
    """é is C3 A9. C3 alone is allowed before it, A9 alone behind that; C3 with another second byte is not."""
    masks = the_masks(of_text("é!".encode()), [b"", b"\xc3", b"\xc3\xa9", b"\xa9", b"\xc3\xa0", b"\xa9!", b"e"], [0])
    call(masks.allowed, 0).gives((1, 2))
    call(masks.allowed, 1).gives((3, 5))
    call(masks.advance, 0, 1).gives(1)
    call(masks.advance, 1, 5).gives(3)
    call(masks.advance, 0, 4).raises(ValueError)


def test_find_is_about_text():
    """find knows nothing of end tokens; allowed adds them where the automaton accepts. Ids need not be in order."""
    masks = the_masks(Table({0: {97: 0, 98: 0}}, [0]), [b"b", b"", b"ab", b"c", b"a", b"ca", b"ac"], [1])
    that("what find finds, sorted", sorted(call(masks.find, 0).value)).gives([0, 2, 4])
    call(masks.allowed, 0).gives((0, 1, 2, 4))


def test_two_tokens_with_the_same_bytes():
    """Both are allowed."""
    call(the_masks(of_text(b"ab"), [b"ab", b"a", b"ab", b"b"]).allowed, 0).gives((0, 1, 2))


def test_no_token_can_follow():
    """A vocabulary without the letter: nothing is allowed. And behind a whole text only the end."""
    masks = the_masks(of_text(b"x"), [b"", b"a", b"xy"], [0])
    call(masks.allowed, 0).gives(())
    call(masks.allowed, 1).gives((0,))
    call(the_masks(of_text(b""), [b"", b"a"], []).allowed, 0).gives(())


def test_end_tokens():
    """Several; one has bytes, and is no text for that. Allowed where the automaton accepts, and nowhere else."""
    masks = the_masks(Table({0: {97: 1}, 1: {97: 1}}, [1]), [b"", b"a", b"a", b"", b"aa"], [0, 2])
    call(masks.allowed, 0).gives((1, 4))
    call(masks.allowed, 1).gives((0, 1, 2, 4))
    for token_id in (0, 2):
        call(masks.advance, 1, token_id).gives(1)
        call(masks.advance, 0, token_id).raises(ValueError)


def test_advance_refuses_what_is_not_allowed():
    """A token that cannot stand there as a whole; and a special token, which has no bytes and ends nothing."""
    masks = the_masks(of_text(b"abc"), [b"ab", b"abd", b"", b"c", b""], [4])
    call(masks.advance, 0, 0).gives(2)
    call(masks.advance, 2, 3).gives(3)
    call(masks.advance, 3, 4).gives(3)
    for state, token_id in ((0, 1), (0, 3), (0, 2), (3, 2), (2, 4), (3, 0)):
        call(masks.advance, state, token_id).raises(ValueError)


@pytest.mark.parametrize("seed", range(10))
def test_against_every_token_tried(seed):
    """Random automata and vocabularies: exactly the tokens that can be read, each tried, along a random answer."""
    rng = random.Random(fresh(seed))
    letters, num_states = b"ab\xc3\xa9 {"[: rng.randint(2, 6)], rng.randint(1, 6)
    table = {
        state: {byte: rng.randrange(num_states) for byte in letters if rng.random() < 0.6}
        for state in range(num_states)
    }
    automaton = Table(table, rng.sample(range(num_states), rng.randint(0, num_states)))
    tokens = [bytes(rng.choices(letters + b"z", k=rng.randint(0, 5))) for _ in range(150)]
    ends = rng.sample(range(150), rng.randint(0, 3))
    trie = TokenTrie(tokens)
    before = deepcopy((trie.children, trie.token_ids))
    masks, state = TokenMasks(automaton, trie, ends), rng.randrange(num_states)
    for _ in range(8):
        readable = {
            each
            for each, text in enumerate(tokens)
            if text and each not in ends and automaton.read(state, text) is not None
        }
        expected = readable | (set(ends) if state in automaton.accepting else set())
        call(masks.allowed, state).gives(tuple(sorted(expected)))
        if not readable:
            break
        token_id = rng.choice(sorted(readable))
        state = call(masks.advance, state, token_id).value
    that("the trie", (trie.children, trie.token_ids)).gives(before)


def test_two_automata_share_a_trie():
    """Each has its own masks, kept by its own states."""
    trie = TokenTrie([b"", b"a", b"b", b"ab"])
    one, other = TokenMasks(of_text(b"ab"), trie, [0]), TokenMasks(of_text(b"b"), trie, [0])
    for _ in range(2):
        call(one.allowed, 0).gives((1, 3))
        call(other.allowed, 0).gives((2,))
        call(one.allowed, 1).gives((2,))
        call(other.allowed, 1).gives((0,))


# What it costs


def a_vocabulary(rng, num_tokens):
    """All bytes, numbers of one and two digits, and words, most of the tokens."""
    words = {bytes(rng.choices(b"abcdefghij", k=rng.randint(3, 6))) for _ in range(2 * num_tokens)}
    numbers = [b"%d" % each for each in range(10, 100)]
    return [bytes([each]) for each in range(256)] + numbers + sorted(words)[: num_tokens - 346]


def test_the_vocabulary_does_not_count():
    """Two digits: 100 tokens are allowed, of 1,000 or of 8,000. Both take the same work."""
    digits = dict.fromkeys(b"0123456789")
    work = {}
    for size in (1_000, 8_000):
        tokens = a_vocabulary(random.Random(fresh(size)), size)
        masks = TokenMasks(
            Table({0: dict.fromkeys(digits, 1), 1: dict.fromkeys(digits, 2), 2: {}}), TokenTrie(tokens), []
        )
        work[size] = effort(masks.find, 0)
        that(f"how many of {size:,} tokens are allowed", len(masks.allowed(0))).gives(100)
    times = f"{work[8_000] / work[1_000]:.1f} times the work"
    that(f"8,000 tokens take {times} of 1,000: whether that is below 1.5 times", work[8_000] < 1.5 * work[1_000]).gives(
        True
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_automaton_is_asked_once_for_each_beginning(seed):
    """At most as often as tokens have different beginnings that can be read, the empty one included; found twice: 0."""
    rng = random.Random(fresh(seed))
    tokens = a_vocabulary(rng, 2_000)
    letters = rng.sample(b"abcdefghij", 4)
    automaton = Table({0: dict.fromkeys(letters, 1), 1: dict.fromkeys(letters, 0)}, [1])
    beginnings = {text[:end] for text in tokens for end in range(len(text) + 1)}
    most = sum(automaton.read(0, text) is not None for text in beginnings)
    masks = TokenMasks(automaton, TokenTrie(tokens), [])
    found = call(masks.find, 0).value
    that("how many tokens are found", len(found) > 0).gives(True)
    asked = automaton.num_asked
    that(f"whether the automaton was asked at most {most} times: {asked}", asked <= most).gives(True)
    first, asked = masks.allowed(0), automaton.num_asked
    call(masks.allowed, 0).gives(first)
    that("how often the automaton was asked again", automaton.num_asked - asked).gives(0)


def test_an_empty_mask_is_remembered_too():
    """Nothing is allowed in a state, and found out once."""
    automaton = of_text(b"x")
    masks = the_masks(automaton, [b"a", b"b"])
    call(masks.allowed, 0).gives(())
    asked = automaton.num_asked
    call(masks.allowed, 0).gives(())
    that("how often the automaton was asked again", automaton.num_asked - asked).gives(0)


def test_few_children_or_few_bytes():
    """A node with one child where 256 bytes may come; a node with 256 children where one byte may."""
    length = 25
    long = TokenMasks(
        Table({0: dict.fromkeys(range(256), 0)}), TokenTrie([bytes([each]) * length for each in b"abcd"]), []
    )
    path = b"abcde" * 5
    broad = [path[:end] + bytes([each]) for end in range(length) for each in range(256)]
    narrow = TokenMasks(of_text(path), TokenTrie(broad), [])
    for what, masks, num_nodes in (
        ("256 bytes, one child", long, 4 * length),
        ("256 children, one byte", narrow, length),
    ):
        a_node = effort(masks.find, 0) // num_nodes
        that(f"{what}: whether a node costs at most 300 instructions: {a_node}", a_node <= 300).gives(True)
