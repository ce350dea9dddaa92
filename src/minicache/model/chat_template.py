"""A model's chat template, filled in by a process of its own.

A template is a program that comes with a model: it may loop for hours over a conversation, or write gigabytes. So it
runs in a process that a timer ends (`minicache.model.timed_process`). Jinja's sandbox keeps it from everything else.
The environment is that of `transformers`, for which templates are written. No phase builds this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from minicache.model.timed_process import TimedProcess, answer_lines

MAX_CHARS: Final = 2**21
"""The longest text that it may write."""


class ChatTemplate:
    """Turns conversations into the texts of prompts. Its process is started when it is first needed.

    Args:
        source: the template, in Jinja's language.
        variables: what it can name besides the messages: special tokens.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._process = TimedProcess(__file__, [source, dict(variables)])

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a prompt.

        Args:
            messages: each with "role" and "content".

        Raises:
            ValueError: the template refuses them, or takes too long, too much memory or too many characters.
        """
        return str(self._process.ask(list(messages)))


# In the process


def prepare(head: tuple[str, dict[str, Any]]) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """What fills in a template for a conversation."""
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    source, variables = head
    template = environment.from_string(source)

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        text = template.render(**variables, messages=messages, tools=None, documents=None, add_generation_prompt=True)
        if len(text) > MAX_CHARS:
            raise ValueError(f"it writes more than {MAX_CHARS:,} characters")
        return text

    return render


if __name__ == "__main__":
    answer_lines(prepare)
