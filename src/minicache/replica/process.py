"""One engine's process, as the server's process sees it: started, waited for, killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from minicache.replica.messages import EngineOptions


class EngineProcess(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its number."""

    async def wait(self) -> int:
        """Until it has ended; its exit status, negative for the signal that has ended it."""

    def kill(self) -> None:
        """End it at once. Nothing happens if it has ended."""


Start = Callable[[str], Awaitable[EngineProcess]]
"""Starts an engine's process; it connects to the ZeroMQ address that is given."""


class _Subprocess:
    """`python -m minicache.replica`.

    Its standard input is a pipe that nobody writes to: when this process ends, however that comes, the pipe does, and
    the other process with it.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


def starter(options: EngineOptions) -> Start:
    """What starts processes with an engine of these options."""

    async def start(address: str) -> EngineProcess:
        arguments = ("-m", "minicache.replica", address, msgspec.json.encode(options).decode())
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE)
        return _Subprocess(process)

    return start
