"""An HTTP/1.1 answer as it comes over the wire, in whatever pieces the network makes of it.

Nothing here does input or output. It is here because a general HTTP client costs more per event than a small server
does: of 64 streams, one event through httpx took more than 200 µs of one core, and then the client is what is measured.
Part of phase 10's load client.
"""

from __future__ import annotations

from typing import Final

from httptools import HttpParserError, HttpResponseParser

MAX_HEAD_NBYTES: Final = 64 * 1024
"""The most bytes of a status line with its headers: more is no HTTP."""


class WireError(ValueError):
    """The bytes are no HTTP/1.1 answer, or end before the answer does."""


class ResponseReader:
    """One HTTP/1.1 answer. The body may be chunked, of a given length, or end with the connection.

    Attributes:
        status: the status code, 0 until the head is there.
        headers: by name in lower case; of a repeated one the last.
        is_complete: the whole answer is there.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._parser = HttpResponseParser(self)
        self._num_head_nbytes = 0
        self._pieces: list[bytes] = []  # of the body

    def feed(self, data: bytes) -> bytes:
        """Take more of the answer.

        Returns:
            What these bytes add to the body.

        Raises:
            WireError: this is no HTTP/1.1 answer.
        """
        self._num_head_nbytes += 0 if self.status else len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            if not self.is_complete:  # what comes after the answer does not matter
                raise WireError(f"not an HTTP/1.1 response: {error}") from None
        if not self.status and self._num_head_nbytes > MAX_HEAD_NBYTES:
            raise WireError(f"no end of the headers within {MAX_HEAD_NBYTES:,} bytes")
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def feed_eof(self) -> None:
        """The connection has ended.

        Raises:
            WireError: the answer has not.
        """
        if not self.status:
            raise WireError("the connection was closed before a response")
        has_end = "content-length" in self.headers or "transfer-encoding" in self.headers
        if has_end and not self.is_complete:
            raise WireError("the connection was closed in the middle of the response")
        self.is_complete = True

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which says nothing that matters here."""
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is there. "100 Continue" and its like are none: the answer is still to come."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:
            self.headers.clear()

    def on_body(self, piece: bytes) -> None:
        """More of the body."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The end."""
        self.is_complete = self.status > 0
