"""Server-sent events as they come over the wire: cut into whole ones, and read (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from minicache.errors import BrokenStreamError

DONE: Final = b"data: [DONE]\n\n"
"""The last event of every stream of OpenAI's API."""

MAX_EVENT_NBYTES: Final = 16 * 2**20

_END = re.compile(rb"\n\r?\n")  # no server ends its lines with CR alone, as the standard would allow


class EventSplitter:
    """Cuts the bytes of a stream, in any pieces, after each event. A client must not get half of one: nothing could
    follow it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The events that are complete now, each with the empty line at its end, byte for byte.

        Raises:
            BrokenStreamError: what should be one event does not end.
        """
        searched = max(0, len(self._rest) - 2)  # an end of three bytes may have begun
        self._rest += data
        events, begin = [], 0
        for end in _END.finditer(self._rest, searched):
            events.append(self._rest[begin : end.end()])
            begin = end.end()
        self._rest = self._rest[begin:]
        if len(self._rest) > MAX_EVENT_NBYTES:
            raise BrokenStreamError(f"an event of more than {MAX_EVENT_NBYTES} bytes")
        return events


def event_data(event: bytes) -> str:
    """What an event says: its `data:` lines, joined by LF; "" for a comment. What is no UTF-8 becomes U+FFFD."""
    data = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(data).decode(errors="replace")


def event_json(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None if it has none."""
    try:
        found = json.loads(event_data(event))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
