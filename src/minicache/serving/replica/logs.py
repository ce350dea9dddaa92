"""The log of an engine's process: its standard error, which the server's process reads line by line and logs anew.

The engine's process writes each record as a line of JSON (`logging_to_server`). What else comes there (from a library
in C, from the other ranks of its model, from Python as it dies) is logged as it is, as a warning.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from types import TracebackType
from typing import Final

import msgspec

MAX_LINE_NBYTES: Final = 2**20
"""A longer line is logged in parts."""


class Record(msgspec.Struct, array_like=True, tag="minicache log"):
    """One record of `logging`, as far as it goes to the other process.

    Attributes:
        level: its number.
        message: with its arguments.
        exception: a traceback, or None.
    """

    level: int
    message: str
    exception: str | None = None


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Record).decode


# In the engine's process


class _Lines(logging.Formatter):
    """A `Record` in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else None
        return _encode(Record(record.levelno, record.getMessage(), exception)).decode()


def logging_to_server() -> None:
    """Write all logs to stderr for `EngineLog`: of minicache from info up, of libraries warnings and errors.

    So do Python's warnings, an exception that ends the process, and the stack of a crash.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    logging.getLogger().addHandler(handler)
    logging.getLogger("minicache").setLevel(logging.INFO)
    logging.captureWarnings(True)
    faulthandler.enable()

    def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        logging.getLogger("minicache").critical("the engine process is exiting", exc_info=(kind, error, traceback))

    sys.excepthook = last_words


# In the server's process


class EngineLog:
    """Logs what an engine's process writes to a pipe, as `minicache.engine.0`, by its number.

    Args:
        number: of the engine.
        descriptor: the end of the pipe to read; `close` closes it. The event loop reads it from now on.
    """

    def __init__(self, number: int, descriptor: int) -> None:
        self._logger = logging.getLogger(f"minicache.engine.{number}")
        self._descriptor = descriptor
        self._rest = b""
        self._is_open = True
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def close(self) -> None:
        """Log what is there, and read no more: the process has ended. (Another rank of its model may have the pipe.)"""
        while self._read():
            pass
        if self._is_open:
            self._end()

    def _read(self) -> bool:
        """Read what has come; whether there may be more."""
        try:
            data = os.read(self._descriptor, 65536) if self._is_open else b""
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)
        if len(self._rest) > MAX_LINE_NBYTES or (not data and self._rest):
            self._log(self._rest)
            self._rest = b""
        if not data and self._is_open:
            self._end()
        return bool(data)

    def _end(self) -> None:
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _log(self, line: bytes) -> None:
        try:
            record = _decode(line)
        except msgspec.DecodeError:
            text = line.decode(errors="replace").rstrip().rpartition("\r")[2]  # of a progress bar, the last state
            record = Record(logging.WARNING, text)
        if record.message and self._logger.isEnabledFor(record.level):
            self._logger.handle(self._made(record))

    def _made(self, record: Record) -> logging.LogRecord:
        made = self._logger.makeRecord(self._logger.name, record.level, "", 0, record.message, (), None)
        made.exc_text = record.exception
        return made
