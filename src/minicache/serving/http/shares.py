"""A fair share for each client: whose request is next. No phase builds this module.

Every request gets a deadline on a clock that counts tokens, and the scheduler takes the earliest first (weighted fair
queueing: Demers, Keshav and Shenker, SIGCOMM 1989). A request's deadline lies as far ahead as it is large, and a
client's requests begin one after the other. So a small request goes before a large one, and a client with one request
before the rest of another's hundred; a client's requests of one size are in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

QUANTUM: Final = 1024
"""A client's next request begins so many tokens after this one, or after all its tokens if they are fewer: a large
request does not hold up the small ones behind it."""

MAX_DEADLINE: Final = 2**32 - 1


class Shares:
    """The deadlines of all clients' requests, in tokens. The clock starts again when no request is left."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}  # client → when its next request begins
        self._begun: dict[object, int] = {}  # unfinished request → when it began

    @contextmanager
    def deadline(self, client: str, num_tokens: int) -> Iterator[int]:
        """The deadline of a request, which is unfinished inside the context.

        Args:
            client: its key's name, or its address.
            num_tokens: the most that it may come to, prompt and answers.

        Yields:
            From 0 to MAX_DEADLINE.
        """
        request, now = object(), min(self._begun.values(), default=0)
        begun = self._begun[request] = max(now, self._next.get(client, 0))
        self._next[client] = begun + min(num_tokens, QUANTUM)
        try:
            yield min(begun + num_tokens, MAX_DEADLINE)
        finally:
            del self._begun[request]
            if not self._begun:
                self._next.clear()
