# Phase 12, production-defaults: your file. It stands in for minicache.structured.regex.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
"""A regular expression as an automaton over bytes.

Phase 12 builds it. An automaton is all that a mask has to know of an expression: after the bytes so far, which bytes
may come next, and may the text end here? It is made while it is used: a state is there when it is first reached. A
table of all states would have a million lines for `(a|b)*a(a|b){20}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicache.structured.expressions import Either, Letter, Node, Range, Repeated, Sequenced, parse, utf8_sequences


class Automaton:
    """A deterministic automaton over bytes.

    A state is a number; what it stands for is up to the automaton. Texts that lead to one state have the same
    continuations; there are finitely many states, however long the texts. From every state some text leads to
    acceptance: a byte after which the expression could not be completed leads nowhere.

    Args:
        pattern: the expression, as `parse` takes it.

    Attributes:
        start: the state before the first byte.

    Raises:
        ConstraintError: as `parse`.
    """

    start: int

    def __init__(self, pattern: str) -> None:
        """Ready to be asked from `start` on. The cost depends on the expression, and not on its number of states."""
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def next_states(self, state: int) -> dict[int, int]:
        """Byte → the state after it, for every byte that may come next.

        Asked a second time for a state, it gives the same dict without any work. Do not change it.

        Args:
            state: `start`, or one that was given as a next one.
        """
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def is_accepting(self, state: int) -> bool:
        """Whether the text that led here matches the expression as it stands.

        Args:
            state: as in `next_states`.
        """
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def read(self, state: int, text: bytes) -> int | None:
        """The state after some bytes; None if they cannot stand here.

        Args:
            state: before them.
            text: the bytes; they need not be whole letters.
        """
        for byte in text:
            following = self.next_states(state).get(byte)
            if following is None:
                return None
            state = following
        return state

    def matches(self, text: str) -> bool:
        """Whether the whole text matches the expression."""
        state = self.read(self.start, text.encode())
        return state is not None and self.is_accepting(state)
