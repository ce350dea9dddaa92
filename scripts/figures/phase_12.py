"""The figures of phase 12: a trie and an automaton walked together, and what that costs along an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minicache.palette import INK, Scheme, color
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw them all."""
    draw("token-masks-walk", walk, size=(7.2, 3.9))
    draw("token-masks-steps", steps, size=(7.2, 3.6))


# --- theory 4: only what is allowed -----------------------------------------------------------------------------------

TOKENS = ('{"', "age", '":', "1", "4", "42", "2}", "}", "0")
"""The vocabulary of the page's example, from token 1 on."""

EXPRESSION, READ = r"(0|[1-9]\d?)\}", "4"
"""Its expression, and the number's first digit, which has been read."""


NAMES = {" ": "␣", "": "∎"}


def walk(figure: Figure, scheme: Scheme) -> None:
    """The trie of nine tokens, walked from the state behind one digit."""
    from minicache.structured import Automaton, TokenTrie

    trie, automaton = TokenTrie([b"", *(token.encode() for token in TOKENS)]), Automaton(EXPRESSION)
    state = automaton.read(automaton.start, READ.encode())
    assert state is not None
    diagram = Diagram(figure, scheme, width=24, height=13)
    column, height, width = 7.6, 1.05, 2.6
    order = sorted(trie.children[0], key=lambda byte: (automaton.read(state, bytes([byte])) is None, byte))
    diagram.cell(0.4, 4.5, "root", "prompt", width=width, height=height)
    diagram.text(0.4, 6.1, f"next: {_next(automaton, state)}", fontsize=SMALL)
    for row, byte in enumerate(order):
        node, text, at, before = trie.children[0][byte], bytes([byte]), state, (3.0, 4.5 + height / 2)
        depth = 0
        while True:
            x, y = 6.4 + column * depth, 0.5 + 1.3 * row
            following = automaton.read(at, text[-1:])
            role = None if following is None else "shared" if trie.token_ids[node] else "prompt"
            diagram.cell(x, y, text.decode(), role, width=width, height=height)
            diagram.arrow(before, (x, y + height / 2))
            if following is None:
                names = [TOKENS[each - 1] for each in _behind(trie, node)]
                diagram.text(x + 3.0, y + height / 2, f"out: {'   '.join(names)}", fontsize=SMALL)
                break
            at, before = following, (x + width, y + height / 2)
            if not trie.children[node]:
                break
            diagram.text(x + width + 0.3, y + 0.1, f"next: {_next(automaton, at)}", fontsize=SMALL)
            [(byte, node)] = trie.children[node].items()
            text, depth = text + bytes([byte]), depth + 1
    for (role, meaning), x in zip(
        {"shared": "a token: allowed", "prompt": "looked at, no token ends here"}.items(), (0.4, 7.0), strict=True
    ):
        diagram.legend({role: meaning}, x, 12.1, size=0.6)
    diagram.cell(16.9, 12.1, width=0.6, height=0.6)
    diagram.text(17.7, 12.4, "its last byte may not come", fontsize=TYPE_SIZE * 0.9)


def _next(automaton: Any, state: int) -> str:
    """The bytes that may come next, digits in short."""
    text = "".join(map(chr, sorted(automaton.next_states(state))))
    return " ".join(text.replace("0123456789", "0-9 ").split())


def _behind(trie: Any, node: int) -> list[int]:
    """The tokens of a node and of those behind it."""
    found = [*trie.token_ids[node]]
    for child in trie.children[node].values():
        found += _behind(trie, child)
    return found


def steps(figure: Figure, scheme: Scheme) -> None:
    """How many tokens are allowed and how many nodes are looked at, token by token of an answer."""
    found: dict[str, Any] = json.loads((RESULTS / "token_masks.json").read_text(encoding="utf-8"))
    each = found["steps"]
    axes = plot(figure, xlabel="the next token of the answer", ylabel="tokens, or nodes")
    places = range(len(each))
    axes.axhline(found["vocabulary"], color=INK[scheme], linewidth=1.2, linestyle="--")
    axes.annotate(
        f"{found['vocabulary']:,} tokens: every one tried",
        (0.98, found["vocabulary"]),
        (0, 4),
        ("axes fraction", "data"),
        "offset points",
        size=SMALL,
        ha="right",
    )
    axes.plot(places, [step["asked"] for step in each], "s--", color=color("end", scheme), label="nodes walked through")
    axes.plot(
        places, [step["allowed"] for step in each], "o-", color=color("generated", scheme), label="tokens allowed"
    )
    axes.set(yscale="log", ylim=(0.7, 400_000))
    axes.set_yticks([10**power for power in range(6)], [f"{10**power:,}" for power in range(6)])
    axes.minorticks_off()
    axes.set_xticks(list(places), [NAMES.get(step["token"], step["token"].strip()) for step in each])
    axes.tick_params(axis="x", rotation=60, labelsize=SMALL)
    axes.legend(loc="center right")
