"""HTTP answers and server-sent events from bytes in any pieces: against h11, and the specification's examples."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.serving.events import EventSplitter, event_data
from minicache.serving.load.wire import MAX_HEAD_NBYTES, ResponseReader, WireError

PLAIN = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nX: a\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'5;name="value"\r\nhello\r\n0A\r\n, world\r\n!\r\n0\r\nTrailer: x\r\n\r\n'
)
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nhello"


def read(pieces, *, eof=False):
    reader, body = ResponseReader(), b""
    for piece in pieces:
        body += reader.feed(piece)
    if eof:
        reader.feed_eof()
    return reader, body


def one_by_one(data):
    return [data[at : at + 1] for at in range(len(data))]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [(PLAIN, 404, b"hello"), (CHUNKED, 200, b"hello, world\r\n!"), (UNTIL_CLOSED, 200, b"hello")],
    ids=["length", "chunks", "until closed"],
)
def test_an_answer_in_two_pieces_cut_anywhere_or_byte_by_byte(answer, status, body):
    for pieces in [one_by_one(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))]:
        reader, got = read(pieces, eof=answer is UNTIL_CLOSED)
        assert (reader.status, got, reader.is_complete) == (status, body, True)


def test_it_is_not_complete_before_its_last_byte():
    for answer in (PLAIN, CHUNKED):
        assert not read([answer[:-1]])[0].is_complete
    reader, _ = read([UNTIL_CLOSED])
    assert not reader.is_complete


def test_headers_are_found_whatever_their_case():
    assert read([PLAIN])[0].headers == {"content-length": "5", "x": "a"}


def test_100_continue_is_no_answer():
    reader, body = read([b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN])
    assert (reader.status, body) == (404, b"hello")


@given(pieces=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_what_h11_writes_is_read(pieces, cuts):
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert isinstance(server.next_event(), h11.Request)
    wire = server.send(h11.Response(status_code=200, headers=[("Transfer-Encoding", "chunked")]))
    for piece in pieces:
        wire += server.send(h11.Data(data=piece))
    wire += server.send(h11.EndOfMessage())
    cut, at = [], 0
    for length in cuts:
        cut.append(wire[at : at + length])
        at += length
    reader, body = read([*cut, wire[at:]])
    assert (reader.is_complete, body) == (True, b"".join(pieces))


@pytest.mark.parametrize(
    ("answer", "saying"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 ok\r\n\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", "chunk data"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD_NBYTES, "no end of the headers"),
    ],
)
def test_what_is_no_answer_is_refused(answer, saying):
    with pytest.raises(WireError, match=saying):
        read([answer])


@pytest.mark.parametrize(
    ("answer", "saying"),
    [(b"", "before a response"), (PLAIN[:10], "before a response"), (PLAIN[:-1], "middle"), (CHUNKED[:-1], "middle")],
)
def test_an_answer_that_is_cut_off_is_none(answer, saying):
    with pytest.raises(WireError, match=saying):
        read([answer], eof=True)


def read_events(splitter, pieces):
    return [data for piece in pieces for event in splitter.push(piece) if (data := event_data(event))]


STREAMS = [
    # The examples of the HTML standard, section 9.2.6, without their event names and ids.
    ("data: YHOO\ndata: +2\ndata: 10\n\n", ["YHOO\n+2\n10"]),
    (": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n", None),
    ("data:test\n\ndata: test\n\n", ["test", "test"]),
    # What servers send besides.
    (": ping\n\n: ping\n\ndata: {}\n\nevent: end\n\n", ["{}"]),
    ("data: ñ € 😀\n\n", ["ñ € 😀"]),
    ("data: cut off\n", []),
    ("database: x\n\n", []),
]


@pytest.mark.parametrize(("stream", "events"), STREAMS, ids=range(len(STREAMS)))
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_events_cut_anywhere_with_any_end_of_line(stream, events, end):
    expected = ["first event", "second event", " third event"] if events is None else events
    data = stream.replace("\n", end).encode()
    for pieces in [one_by_one(data), *([data[:at], b"", data[at:]] for at in range(len(data) + 1))]:
        assert read_events(EventSplitter(), pieces) == expected


def test_an_event_is_told_with_its_last_byte_and_not_before():
    splitter = EventSplitter()
    assert read_events(splitter, [b"data: a\r\n\r"]) == []
    assert read_events(splitter, [b"\n"]) == ["a"]
    assert read_events(splitter, [b"data: c\n"]) == []
    assert read_events(splitter, [b"\n"]) == ["c"]


def test_what_is_no_utf_8_is_marked():
    assert event_data(b"data: a\xff\n\n") == "a\N{REPLACEMENT CHARACTER}"
