"""One engine's process, as the server's process sees it: started, waited for, killed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from minicache.engine.options import ReplicaOptions
from minicache.serving.replica.logs import EngineLog


class EngineProcess(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its number."""

    async def wait(self) -> int:
        """Until it has ended; its exit status, negative for the signal that has ended it."""

    def kill(self) -> None:
        """End it at once. Nothing happens if it has ended."""

    def cpu_seconds(self) -> float | None:
        """The processor time that it and its children have used; None: that is not known."""


Start = Callable[[int, str], Awaitable[EngineProcess]]
"""Starts the process of the engine with a number; it connects to the ZeroMQ address that is given."""


class _Subprocess:
    """`python -m minicache.serving.replica`.

    Its standard input is a pipe without data: when this process exits, for any reason, the pipe closes, and the other
    process exits too. Its standard error is its log.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: EngineLog) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    async def wait(self) -> int:
        try:
            return await self._process.wait()
        finally:
            self._log.close()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def cpu_seconds(self) -> float | None:
        try:
            return _cpu_seconds(self.pid)
        except (OSError, IndexError):  # it has ended, or this system has no /proc
            return None


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children: ranks of a model, compilers. Linux only."""
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    num_ticks = sum(map(int, fields[11:15]))  # its own, and that of children that have ended
    children = [child for file in folder.glob("task/*/children") for child in file.read_text().split()]
    return num_ticks / os.sysconf("SC_CLK_TCK") + sum(_cpu_seconds(int(child)) for child in children)


def starter(options: ReplicaOptions) -> Start:
    """What starts processes with an engine of these options."""

    async def start(number: int, address: str) -> EngineProcess:
        arguments = ("-m", "minicache.serving.replica", address, msgspec.json.encode(options).decode())
        here, there = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stderr=there
            )
        except BaseException:
            os.close(here)
            raise
        finally:
            os.close(there)
        return _Subprocess(process, EngineLog(number, here))

    return start
