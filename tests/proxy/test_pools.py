"""The proxy's connections to its workers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpcore
import httpx
import pytest

from minicache.fleet import create_router
from minicache.serving.proxy.metrics import Metrics
from minicache.serving.proxy.pools import Pools
from minicache.serving.proxy.workers import Workers


def test_connections_are_used_again_and_each_request_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpcore looks at all connections of a pool for each request; and at each that is idle for all the others."""
    num_looks = num_connections = 0
    is_idle = httpcore.AsyncHTTP11Connection.is_idle

    def counted(connection: httpcore.AsyncHTTP11Connection) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_idle(connection)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async def crowd() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with httpx.AsyncClient(transport=Pools(idle_seconds=60, verify=False)) as client:
            for _ in range(3):
                answers = await asyncio.gather(*(client.get(url) for _ in range(96)))
                assert {each.text for each in answers} == {"ok"}
        server.close()

    monkeypatch.setattr(httpcore.AsyncHTTP11Connection, "is_idle", counted)
    asyncio.run(asyncio.wait_for(crowd(), 60))
    assert num_connections <= 96
    assert num_looks < 3 * 96 * 50


def test_probes_keep_no_connection() -> None:
    num_open = num_probes = most_open = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open, num_probes, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                num_probes += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        num_open -= 1
        writer.close()

    async def watch() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        workers = Workers(urls, create_router("round_robin"), Metrics(urls), max_unfinished=8, check_seconds=0.001)
        await workers.start()
        while num_probes < 60:
            await asyncio.sleep(0.01)
        await workers.stop()
        server.close()

    asyncio.run(asyncio.wait_for(watch(), 60))
    assert most_open <= 2
