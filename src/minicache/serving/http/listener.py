"""The socket that a server listens on: it keeps the process's file descriptors from running out.

No phase builds this module.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
from contextlib import suppress
from time import monotonic
from typing import Any, Final

MAX_DESCRIPTORS: Final = 10_240
"""So many file descriptors a server asks for, if the hard limit allows it (`ulimit -Hn`)."""

SHARE: Final = 2
"""Connections of clients may use every `SHARE`-th descriptor. The others are for a router's connections to workers, one
for each client, and for engines and files."""

MAX_ACCEPTED: Final = 16
"""So many connections are accepted in one turn of the event loop. (asyncio would take 2,048.)"""

LOG_SECONDS: Final = 10.0
"""That connections are refused is logged once in this time."""

logger = logging.getLogger("minicache.server")

_NO_MORE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard one, or to `MAX_DESCRIPTORS` if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """How many clients may be connected at a time, by the soft limit of file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)) // SHARE


class Listener(socket.socket):
    """A bound socket. Beyond `max_connections` it closes what it accepts, before TLS and before the first byte.

    A descriptor's number is the lowest that is free, so it says how many are in use.

    Args:
        host: the address to listen on.
        port: 0: any that is free.

    Attributes:
        num_refused: connections that were closed at once.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.num_refused = 0
        self._num_accepted = 0  # since there was none, or since the last turn
        self._logged_at = self._failed_at = -LOG_SECONDS
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: what a client does not read stays here, where it is seen, and not in the system.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 2**14)
        try:
            self.bind((host, port))
        except OSError:
            self.close()
            raise

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            BlockingIOError: there is none, it was refused, or MAX_ACCEPTED were accepted before it: asyncio then comes
                back in its next turn.
            OSError: at most once a second: there is no descriptor for it. asyncio then waits for a second; but before
                that, up to Python 3.13, it would try again some thousand times, and log each.
        """
        self._num_accepted += 1
        if self._num_accepted > MAX_ACCEPTED:
            self._num_accepted = 0
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            self._num_accepted = 0
            if error.errno in _NO_MORE:
                if monotonic() - self._failed_at < 1:
                    raise BlockingIOError from error
                self._failed_at = monotonic()
            raise
        if connection.fileno() < (most := max_connections()):
            return connection, address
        connection.close()
        self._count_refused(most)
        raise BlockingIOError

    def _count_refused(self, most: int) -> None:
        self.num_refused += 1
        if monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = monotonic()
            message = "connections are refused, %d so far: %d file descriptors are in use; raise the limit (ulimit -n)"
            logger.warning(message, self.num_refused, most)
