"""What comes over the wire: an HTTP/1.1 answer, and the server-sent events in its body.

Both readers are fed whatever pieces the network makes of the bytes, and do no input or output themselves. They are here
because a general HTTP client costs more per event than a small server does: of 64 streams, one event through httpx took
more than 200 µs of one core, and then the client is what is measured. Part of phase 10's load client. Pure standard
library.
"""

from __future__ import annotations

from typing import Final

MAX_HEAD_NBYTES: Final = 64 * 1024
"""The most bytes of a status line with its headers, or of a chunk's size line: more is no HTTP."""


class WireError(ValueError):
    """The bytes are no HTTP/1.1 answer, or end before the answer does."""


class ResponseReader:
    """One HTTP/1.1 answer, from its bytes in any pieces. The body may be chunked, of a given length, or end with the
    connection (RFC 9112, section 6).

    Attributes:
        status: the status code, 0 until the head is there.
        headers: by name in lower case; of a repeated one the last.
        is_complete: the whole answer is there.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = b""
        self._is_chunked = False
        self._in_trailer = False  # after the last chunk
        self._left: int | None = None  # bytes still to come: of the chunk, or of the body; None: not known

    def feed(self, data: bytes) -> bytes:
        """Take more of the answer.

        Returns:
            What these bytes add to the body.

        Raises:
            WireError: this is no HTTP/1.1 answer.
        """
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        body, self._buffer = self._buffer[: self._left], b""  # a slice up to None is all
        if self._left is not None:
            self._left -= len(body)
            self.is_complete = self._left == 0
        return body

    def feed_eof(self) -> None:
        """The connection has ended.

        Raises:
            WireError: the answer has not.
        """
        if not self.status:
            raise WireError("the connection was closed before a response")
        if (self._is_chunked or self._left is not None) and not self.is_complete:
            raise WireError("the connection was closed in the middle of the response")
        self.is_complete = True

    def _read_head(self) -> bool:
        """Read status and headers once they are all there; whether they are."""
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            if len(head) > MAX_HEAD_NBYTES:
                raise WireError(f"no end of the headers within {MAX_HEAD_NBYTES:,} bytes")
            return False
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise WireError(f"not an HTTP/1.1 response: {status_line[:80]!r}")
        self._buffer = rest
        if status.startswith("1"):  # "100 Continue" and its like: the answer is still to come
            return self._read_head()
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = int(status[:3])
        self._is_chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length")
        if not self._is_chunked and length is not None:
            if not length.isdecimal():
                raise WireError(f"content-length is not a number: {length!r}")
            self._left = int(length)
        return True

    def _read_chunks(self) -> bytes:
        buffer, at, pieces = self._buffer, 0, []
        while not self._in_trailer:
            if self._left is None:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    break
                self._left = _chunk_size(buffer[at:end])
                at = end + 2
                if self._left == 0:
                    self._in_trailer = True
                    break
            piece = buffer[at : at + self._left]
            pieces.append(piece)
            at += len(piece)
            self._left -= len(piece)
            if self._left or len(buffer) < at + 2:
                break
            if buffer[at : at + 2] != b"\r\n":
                raise WireError("a chunk is longer than its size")
            at += 2
            self._left = None
        while self._in_trailer and not self.is_complete and (end := buffer.find(b"\r\n", at)) >= 0:
            self.is_complete = end == at
            at = end + 2
        self._buffer = buffer[at:]
        if (self._left is None or self._in_trailer) and len(self._buffer) > MAX_HEAD_NBYTES:
            raise WireError(f"no end of a chunk's size within {MAX_HEAD_NBYTES:,} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _chunk_size(line: bytes) -> int:
    """The size at the beginning of a chunk's first line; extensions after a semicolon mean nothing to us."""
    digits = line.partition(b";")[0].strip()
    try:
        if not digits.isalnum():  # int() would take a sign, or an underscore
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise WireError(f"invalid chunk size: {line[:80]!r}") from None


class EventReader:
    """The `data` of server-sent events, from the body's bytes in any pieces (WHATWG HTML, section 9.2.6).

    Lines may end with LF, CR or CRLF; several `data` lines of one event are joined by LF; comments, other fields and
    events without data are left out, and so is an event that the body's end cuts off.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._after_cr = False  # the piece before ended with a CR: an LF that follows belongs to it

    def feed(self, body: bytes) -> list[str]:
        """Take more of the body.

        Returns:
            The data of each event that these bytes complete. What is no UTF-8 becomes U+FFFD.
        """
        if self._after_cr and body:
            body = body.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in body:
            self._after_cr = body.endswith(b"\r")
            body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._buffer = (self._buffer + body).split(b"\n")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode(errors="replace"))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                self._data.append(b"")
        return events
