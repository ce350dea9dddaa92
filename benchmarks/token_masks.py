"""What the mask of a step costs over a real vocabulary: SmolLM2's 49,152 tokens, by phase 12's automaton and trie.

    minicache pull smollm2
    python -m benchmarks.token_masks

ANSWER is read token by token by an automaton of PATTERN. At each of its states the mask is found three times: by trying
every token, by the walk through trie and automaton, and again, remembered. Seconds are those of the clock, the
least of REPEATS; each walk begins with an automaton that has not made its states yet.

Keys of results/token_masks.json: vocabulary, nodes (of the trie), trie_seconds (to build it); `.steps`, one for each
token of ANSWER and one for its end: token (as text), allowed, asked (how often the automaton was asked, which is how
many nodes with children were reached), tried_ms, walk_ms, again_us. `.number`: the step in front of the number;
`.string`: the slowest walk, in the name. cheap: the steps in which fewer than FEW tokens are allowed; cheap_walk_ms:
the slowest walk of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks._record import record
from minicache.engine.loading import find_model, load_tokenizer
from minicache.structured import Automaton, TokenMasks, TokenTrie

PATTERN: Final = r'\{"name": "[^"\\]{1,24}", "kind": "(animal|plant|tool|food|place)", "grams": (0|[1-9]\d{0,3})\}'
ANSWER: Final = '{"name": "Granny Smith", "kind": "food", "grams": 12}'
NUMBER: Final = '"grams": '
FEW: Final = 100
REPEATS: Final = 5


class Counted(Automaton):
    """Counts how often it is asked."""

    num_asked = 0

    def next_states(self, state: int) -> dict[int, int]:
        """As the automaton."""
        self.num_asked += 1
        return super().next_states(state)


def main() -> None:
    tokenizer: Any = load_tokenizer(find_model("smollm2"))
    tokens: list[bytes] = tokenizer.token_bytes()
    ends = sorted(tokenizer.end_token_ids)
    trie_seconds, trie = least(lambda: TokenTrie(tokens))
    answer = [*tokenizer.encode(ANSWER), ends[0]]
    steps = [step(trie, ends, answer[:at], tokenizer, answer[at]) for at in range(len(answer))]
    texts = ["".join(each["token"] for each in steps[:at]) for at in range(len(steps))]
    cheap = [each for each in steps if each["allowed"] < FEW]
    figures: dict[str, Any] = {
        "vocabulary": len(tokens),
        "nodes": len(trie.children),
        "trie_seconds": round(trie_seconds, 3),
        "number": next(each for each, text in zip(steps, texts, strict=True) if text.endswith(NUMBER)),
        "string": max(steps, key=lambda each: each["walk_ms"]),
        "cheap": len(cheap),
        "cheap_walk_ms": max(each["walk_ms"] for each in cheap),
        "steps": steps,
    }
    for each in steps:
        print(each)
    record("token_masks", figures)


def step(trie: TokenTrie, ends: list[int], read: list[int], tokenizer: Any, token_id: int) -> dict[str, Any]:
    """One step's figures: which token comes, and what its mask costs."""

    def fresh() -> tuple[TokenMasks, int]:
        masks = TokenMasks(Counted(PATTERN), trie, ends)
        state = masks.automaton.start
        for each in read:
            state = masks.advance(state, each)
        return masks, state

    walks = []
    for _ in range(REPEATS):
        masks, state = fresh()
        masks.automaton.num_asked = 0  # type: ignore[attr-defined]
        walks.append(seconds_of(masks.allowed, state)[0])
        asked = masks.automaton.num_asked  # type: ignore[attr-defined]
    again, allowed = least(lambda: masks.allowed(state))
    automaton = masks.automaton
    tried, expected = least(
        lambda: [each for each, text in enumerate(trie.tokens) if text and automaton.read(state, text) is not None]
    )
    assert [each for each in allowed if each not in ends] == expected
    return {
        "token": "" if token_id in ends else tokenizer.decode([token_id]),
        "allowed": len(allowed),
        "asked": asked,
        "tried_ms": round(1e3 * tried, 2),
        "walk_ms": round(1e3 * min(walks), 3),
        "again_us": round(1e6 * again, 2),
    }


def least(run: Callable[[], Any]) -> tuple[float, Any]:
    """The least seconds of REPEATS runs, and what the last gave."""
    found = [seconds_of(run) for _ in range(REPEATS)]
    return min(each for each, _ in found), found[-1][1]


def seconds_of(run: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds of the clock, and what came back."""
    start = time.perf_counter()
    found = run(*args)
    return time.perf_counter() - start, found


if __name__ == "__main__":
    main()
