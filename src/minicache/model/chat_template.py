"""A model's chat template, filled in by a process of its own.

A template is a program that comes with a model: it may loop for hours over a conversation, or write gigabytes. Nothing
in a process can end a thread that does, so it runs in a process that a timer ends. Jinja's sandbox keeps it from
everything else. The environment is that of `transformers`, for which templates are written. No phase builds this
module.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

SECONDS: Final = 1.0
"""How long a template may compute for one conversation."""

MAX_NBYTES: Final = 2**29
"""The memory of its process."""

MAX_CHARS: Final = 2**21
"""The longest text that it may write."""


class ChatTemplate:
    """Turns conversations into the texts of prompts. Its process is started when it is first needed.

    Args:
        source: the template, in Jinja's language.
        variables: what it can name besides the messages: special tokens.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._head = _line([source, dict(variables)])
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a prompt.

        Args:
            messages: each with "role" and "content".

        Raises:
            ValueError: the template refuses them, or takes too long, too much memory or too many characters.
        """
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(_line(list(messages)))
                self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise ValueError(self._bury())
        said: dict[str, str] = json.loads(answer)
        if "error" in said:
            raise ValueError(said["error"])
        return said["text"]

    def _start(self) -> None:
        # By its path: with the package, it would import far more than it needs.
        command = [sys.executable, "-P", __file__]
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(self._head)

    def _bury(self) -> str:
        """The process has ended; why."""
        assert self._process is not None
        assert self._end is not None
        status = self._process.wait()
        self._end()
        self._process = None
        if status == -signal.SIGPROF:
            return f"it takes more than {SECONDS:.0f} s to fill in"
        return f"its process ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            assert pipe is not None
            pipe.close()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


# In the process


def main() -> None:
    """Fill in the template of the first line for the conversation of each other line, until there is none."""
    import resource

    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`transformers`' mark of what the model has written, which changes nothing here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Its body."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    with suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    source, variables = json.loads(sys.stdin.buffer.readline())
    template = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of computing; its signal ends the process, whatever that is at
        try:
            template = template or environment.from_string(source)
            text = template.render(
                **variables, messages=json.loads(line), tools=None, documents=None, add_generation_prompt=True
            )
            if len(text) > MAX_CHARS:
                raise ValueError(f"it writes more than {MAX_CHARS:,} characters")
            answer = {"text": text}
        except MemoryError:
            answer = {"error": f"it takes more than {MAX_NBYTES >> 20} MiB of memory"}
        except Exception as error:  # a program of the model's authors may raise what it likes
            answer = {"error": str(error) or type(error).__name__}
        sys.stdout.buffer.write(_line(answer))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
