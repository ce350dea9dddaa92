"""The tokens that an automaton's states allow: those that llguidance allows, over a vocabulary of bytes and pieces."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minicache.structured import Automaton, TokenMasks, TokenTrie

PAGES = Path("docs/es/phase-01-dense-cache/theory")


@cache
def vocabulary() -> tuple[bytes, ...]:
    """An end token, all bytes, and pieces of Spanish pages, of which many begin or end inside a letter."""
    text = b"".join(page.read_bytes() for page in sorted(PAGES.glob("*.md")))
    counts = Counter(text[at : at + length] for length in range(2, 7) for at in range(0, len(text) - length, 3))
    pieces = [piece for piece, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
    halves = [piece for piece in pieces if piece[-1] >= 0x80 or piece[0] >= 0x80]
    rng = random.Random(0)
    more = [rng.choice(["", " "]) + "".join(rng.choices("abc01é😀.,", k=rng.randrange(2, 5))) for _ in range(150)]
    chosen = dict.fromkeys((*(bytes([byte]) for byte in range(256)), *pieces[:500], *halves[:150]))
    return (b"", *chosen, *(each.encode() for each in dict.fromkeys(more)), b"a", b"")


@cache
def theirs() -> Any:
    from llguidance import LLTokenizer

    class Words:
        is_tokenizer_wrapper = True
        eos_token_id, bos_token_id = 0, None
        special_token_ids: list[int] = []  # noqa: RUF012
        tokens = vocabulary()

        def __call__(self, text: str) -> list[int]:
            raise NotImplementedError

    words: Any = Words()
    return LLTokenizer(words, n_vocab=len(vocabulary()), eos_token=0, slices=[])


def expression(rng: random.Random, depth: int) -> str:
    """Any expression of the syntax."""
    if depth == 0:
        atoms = [
            *"abcé01 ,",
            "😀",
            r"\.",
            ".",
            r"\d",
            r"\w",
            r"\s",
            r"\D",
            r"\W",
            "[a-c]",
            "[^ab]",
            "[é-ü_]",
            r"\n",
            "de",
        ]
        return rng.choice(atoms)
    parts = [expression(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    match rng.randrange(4):
        case 0:
            return f"({'|'.join(parts)})"
        case 1:
            return "".join(parts)
        case 2:
            return f"(?:{parts[0]}){rng.choice('*+?')}{''.join(parts[1:])}"
        case _:
            least = rng.randrange(3)
            counts = rng.choice([f"{{{least}}}", f"{{{least},}}", f"{{{least},{least + 2}}}"])
            return f"({parts[0]}){counts}{''.join(parts[1:])}"


def their_mask(matcher: Any) -> set[int]:
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return set() if matcher.is_error() else {each for each in range(len(vocabulary())) if bits >> each & 1}


@pytest.mark.parametrize("part", range(6))
def test_masks_are_llguidances(part: int) -> None:
    """300 expressions, each along a random text of up to six tokens."""
    from llguidance import LLMatcher, regex_to_lark

    rng, trie, num_inside = random.Random(part), TokenTrie(vocabulary()), 0
    for _ in range(50):
        pattern = expression(rng, rng.randrange(1, 4))
        lark = f'%llguidance {{"no_forcing": true}}\nstart: /{regex_to_lark(pattern, use_ascii="dws")}/'
        matcher = LLMatcher(theirs(), json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
        assert not matcher.is_error(), (pattern, matcher.get_error())
        masks = TokenMasks(Automaton(pattern), trie, [0])
        state = masks.automaton.start
        for _ in range(6):
            allowed = masks.allowed(state)
            assert set(allowed) == their_mask(matcher), pattern
            if not (going_on := [each for each in allowed if each]):
                break
            token_id = rng.choice(going_on)
            num_inside += trie.tokens[token_id][-1] >= 0x80
            state = masks.advance(state, token_id)
            matcher.consume_token(token_id)
    assert num_inside > 20


def test_a_step_costs_what_is_allowed_and_not_the_vocabulary() -> None:
    class Counted(Automaton):
        num_asked = 0

        def next_states(self, state: int) -> dict[int, int]:
            self.num_asked += 1
            return super().next_states(state)

    automaton = Counted(r"\d\d?")
    masks = TokenMasks(automaton, TokenTrie(vocabulary()), [0])
    allowed = masks.allowed(automaton.start)
    assert automaton.num_asked <= 2 * len(allowed)
    asked = automaton.num_asked
    assert masks.allowed(automaton.start) == allowed
    assert automaton.num_asked == asked


def test_end_tokens_stand_where_the_automaton_accepts() -> None:
    tokens = [b"", b"a", b"b", b"ab", b"", b"a"]
    masks = TokenMasks(Automaton("ab?"), TokenTrie(tokens), [0, 4])
    state = masks.automaton.start
    assert masks.allowed(state) == (1, 3, 5)
    behind_a, behind_ab = masks.advance(state, 1), masks.advance(state, 3)
    assert masks.allowed(behind_a) == (0, 2, 4)
    assert masks.allowed(behind_ab) == (0, 4)
    assert masks.advance(behind_a, 4) == behind_a
    for state, token_id in ((behind_ab, 1), (masks.automaton.start, 0), (masks.automaton.start, 2)):
        with pytest.raises(ValueError, match=f"token {token_id}, .* is not allowed"):
            masks.advance(state, token_id)


def test_a_vocabulary_without_the_letters_allows_nothing() -> None:
    masks = TokenMasks(Automaton("xyz"), TokenTrie([b"", b"a"]), [0])
    assert masks.allowed(masks.automaton.start) == ()
