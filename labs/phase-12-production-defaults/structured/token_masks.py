# Phase 12, production-defaults: your file. It stands in for minicache.structured.token_masks.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
"""Which tokens of a vocabulary an automaton allows next, found without looking at all of them.

Phase 12 builds it. A vocabulary has 49,152 tokens, and after `{"age": ` perhaps eleven of them are allowed. Trying
each token costs as much whatever is allowed. A trie of the tokens' bytes is walked together with the automaton instead:
where the automaton cannot go on, all tokens below are left out at once. Once found, the tokens of a state are
remembered: the automaton is soon back in it, in this answer or in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicache.structured.regex import Automaton


class TokenTrie:
    """A vocabulary's tokens, by their bytes. Nodes are numbers; 0 is the root.

    Args:
        tokens: token id → its bytes. A token without bytes is special, and in no text.

    Attributes:
        children: node → byte → node.
        token_ids: node → the tokens whose bytes lead from the root to it, in ascending order; mostly one or none.
        tokens: as given.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.children: list[dict[int, int]] = [{}]
        self.token_ids: list[list[int]] = [[]]
        for token_id, text in enumerate(tokens):
            if text:
                self.insert(token_id, text)

    def insert(self, token_id: int, text: bytes) -> None:
        """Add a token, and the nodes that are missing on its way.

        Args:
            token_id: higher than those that are in it.
            text: its bytes, at least one.
        """
        raise NotImplementedError(
            "phase 12, task 11: Token masks; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )


class TokenMasks:
    """The tokens that each state of an automaton allows.

    Args:
        automaton: what an answer is held to.
        trie: of the vocabulary. Several automata can share one: it is not changed.
        end_token_ids: the tokens that end an answer: allowed where the automaton accepts, and nowhere else. They are
            no text, whatever their bytes.
    """

    def __init__(self, automaton: Automaton, trie: TokenTrie, end_token_ids: Iterable[int]) -> None:
        self.automaton = automaton
        self.trie = trie
        self._end_token_ids = frozenset(end_token_ids)
        self._found: dict[int, tuple[int, ...]] = {}

    def allowed(self, state: int) -> tuple[int, ...]:
        """The tokens that may come next, in ascending order, each once. A second call for a state looks nothing up.

        Args:
            state: of the automaton.

        Returns:
            Those that `find` finds, without the end tokens; and all end tokens if the automaton accepts. Empty if no
            token of the vocabulary can follow: the answer cannot be completed.
        """
        raise NotImplementedError(
            "phase 12, task 11: Token masks; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def find(self, state: int) -> list[int]:
        """The tokens whose bytes the automaton can read from a state on, in any order.

        A token that ends inside a letter is one of them if the letter can be completed.

        It asks the automaton once for each node of the trie whose bytes can be read, and never looks at the nodes
        below the others. A node with few children costs little even if many bytes may come, and so does a node with
        many children if few bytes may.

        Args:
            state: of the automaton.
        """
        raise NotImplementedError(
            "phase 12, task 11: Token masks; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def advance(self, state: int, token_id: int) -> int:
        """The state after a token.

        Args:
            state: of the automaton.
            token_id: allowed in it; an end token changes nothing.

        Raises:
            ValueError: the token is not allowed.
        """
        raise NotImplementedError(
            "phase 12, task 11: Token masks; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )
