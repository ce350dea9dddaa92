"""What a constrained answer is made from: an automaton or a parser, and the tokens that it allows next.

| module | owns | built in |
|---|---|---|
| `expressions` | a regular expression read from its text; letters as sequences of bytes | |
| `regex` | `Automaton`: a regular expression as an automaton over bytes | phase 12 |
| `token_masks` | `TokenTrie`, `TokenMasks`: the tokens that each of its states allows | phase 12 |
| `sentences` | `SentenceMasks`: the same for a context-free language, MiniGPT's | |

The engine has llguidance for all of it (`minicache.engine.constraints`). Pure standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.structured.regex import Automaton as Automaton
    from minicache.structured.sentences import SentenceMasks as SentenceMasks
    from minicache.structured.token_masks import TokenMasks as TokenMasks
    from minicache.structured.token_masks import TokenTrie as TokenTrie

__getattr__, __dir__ = lazily(
    __name__, regex="Automaton", sentences="SentenceMasks", token_masks="TokenMasks TokenTrie"
)
