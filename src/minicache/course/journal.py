"""The journal of a grading run: what the child process is about to do, and what came of it, one JSON object a line.

Whatever is begun is written down first. When the child dies or hangs, the last line says what it was doing; the parent
adds a `lost` line and starts the child again, which reads the journal and goes on with what is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal[
    "import",  # about to import the module `name`
    "file",  # about to collect the test file `name`
    "test",  # about to run the test `name`
    "task",  # the test files of `task` are read: it has `total` tests, those included that ran already
    "collected",  # all test files are read: `total` tests will run
    "unimportable",  # the module `name` could not be imported: `message`
    "result",  # the test, or test file, `name` is done: `outcome`, `message`, `printed`, `needs`, `distance`
    "lost",  # written by the parent: the process was lost in `name`, a module or a test of `task`: `message`
    "finished",  # the run came to its end
]


@dataclass(frozen=True)
class Event:
    """One line. Which fields are used depends on `kind`."""

    kind: Kind
    name: str = ""
    task: str = ""
    title: str = ""
    outcome: str = ""
    message: str = ""
    printed: str = ""
    needs: str = ""
    distance: int = 0
    total: int = 0


@dataclass
class Journal:
    """A journal file, written line by line and read from where it was read last."""

    file: Path
    _read_bytes: int = field(default=0, repr=False)

    def write(self, event: Event) -> None:
        """Add a line, and have it on disk before going on: the next thing may end the process."""
        line = json.dumps({key: value for key, value in asdict(event).items() if value})
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def new_events(self) -> Iterator[Event]:
        """The events that were added since the last call. A line that is still being written waits for the next."""
        if not self.file.exists():
            return
        with self.file.open("rb") as stream:
            stream.seek(self._read_bytes)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                yield Event(**json.loads(line))
