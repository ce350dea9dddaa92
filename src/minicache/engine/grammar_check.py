"""Whether llguidance can follow a grammar, found out in a process of its own.

Some schemas take it years: the patterns of an allOf are intersected before any of its limits counts. No phase builds
this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minicache.model.timed_process import TimedProcess, answer_lines


class GrammarCheck:
    """Checks grammars. Its process is started when it is first needed; threads may share it."""

    def __init__(self) -> None:
        self._process = TimedProcess(__file__, None)

    def problem(self, grammar: str) -> str:
        """What is wrong with a grammar, as llguidance says it; "" if nothing is.

        Args:
            grammar: as `llguidance.LLMatcher` takes it.

        Raises:
            ValueError: to find that out takes too long, or too much memory.
        """
        return str(self._process.ask(grammar))


def prepare(head: Any) -> Callable[[str], str]:
    """What checks a grammar."""
    from llguidance import LLMatcher, LLParserLimits

    def problem(grammar: str) -> str:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, limits=LLParserLimits(verbose_errors=False)
        )
        return messages[0] if is_error else ""

    return problem


if __name__ == "__main__":
    answer_lines(prepare)
