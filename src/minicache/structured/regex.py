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
        self._nfa = _ByteNFA()
        first = self._nfa.new_state()
        self._accepting = self._nfa.add(parse(pattern), first)
        self._sets: list[frozenset[int]] = []
        self._numbers: dict[frozenset[int], int] = {}
        self._next: list[dict[int, int] | None] = []  # state → byte → state, once it was asked for
        self.start = self._number(self._nfa.closure((first,)))

    def next_states(self, state: int) -> dict[int, int]:
        """Byte → the state after it, for every byte that may come next.

        Asked a second time for a state, it gives the same dict without any work. Do not change it.

        Args:
            state: `start`, or one that was given as a next one.
        """
        found = self._next[state]
        if found is None:
            reached: dict[int, set[int]] = {}
            for each in self._sets[state]:
                for (first, last), target in self._nfa.edges[each]:
                    for byte in range(first, last + 1):
                        reached.setdefault(byte, set()).add(target)
            known: dict[frozenset[int], int] = {}  # many bytes lead to the same states
            found = {}
            for byte, targets in reached.items():
                key = frozenset(targets)
                if key not in known:
                    known[key] = self._number(self._nfa.closure(key))
                found[byte] = known[key]
            self._next[state] = found
        return found

    def is_accepting(self, state: int) -> bool:
        """Whether the text that led here matches the expression as it stands.

        Args:
            state: as in `next_states`.
        """
        return self._accepting in self._sets[state]

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

    def _number(self, states: frozenset[int]) -> int:
        """The number of a set of the other automaton's states."""
        if states not in self._numbers:
            self._numbers[states] = len(self._sets)
            self._sets.append(states)
            self._next.append(None)
        return self._numbers[states]


class _ByteNFA:
    """An automaton that may be in several states at once (Thompson, CACM 1968). `add` fills it.

    Attributes:
        edges: state → its edges: a range of bytes, and the state after it.
        free: state → the states that it is also in without reading anything.
    """

    def __init__(self) -> None:
        self.edges: list[list[tuple[Range, int]]] = []
        self.free: list[list[int]] = []

    def new_state(self) -> int:
        """A state without edges."""
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def add(self, node: Node, start: int) -> int:
        """Add what a part of an expression reads from a state on; returns the state after it."""
        match node:
            case Letter(ranges):
                end = self.new_state()
                for first, last in ranges:
                    for sequence in utf8_sequences(first, last):
                        self._add_path(sequence, start, end)
                return end
            case Sequenced(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Either(options):
                end = self.new_state()
                for option in options:
                    self.free[self.add(option, start)].append(end)
                return end
            case Repeated(part, least, most):
                return self._add_repeated(part, least, most, start)

    def _add_path(self, sequence: Sequence[Range], start: int, end: int) -> None:
        for bytes_ in sequence[:-1]:
            state = self.new_state()
            self.edges[start].append((bytes_, state))
            start = state
        self.edges[start].append((sequence[-1], end))

    def _add_repeated(self, part: Node, least: int, most: int | None, start: int) -> int:
        """`least` copies; then as many that may be left out as are allowed, or one that may begin again."""
        for _ in range(least):
            start = self.add(part, start)
        if most is None:
            again, end = self.new_state(), self.new_state()
            self.free[start].append(again)
            self.free[again].append(end)
            self.free[self.add(part, again)].append(again)
            return end
        end = self.new_state()
        for _ in range(most - least):
            self.free[start].append(end)
            start = self.add(part, start)
        self.free[start].append(end)
        return end

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """All states that these are also in without reading anything, these included."""
        found, left = set(states), list(states)
        while left:
            new = [each for each in self.free[left.pop()] if each not in found]
            found.update(new)
            left += new
        return frozenset(found)
