"""An engine's options (`minicache.engine.options`) as those of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from minicache.engine.options import EngineOptions, Face, Option

_Command = TypeVar("_Command", bound=Callable[..., Any])

_AS_IT_IS = Face("")


def engine_options(kind: type[EngineOptions], face: str, only: tuple[str, ...] = ()) -> Callable[[_Command], _Command]:
    """Give a command an option for each field, which it gets by name: its last parameter is `**options`.

    Args:
        kind: whose fields.
        face: the command, as the fields name it where they differ there.
        only: the names of those that it asks for; (): all that are not left out.
    """

    def decorated(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        types = get_type_hints(kind)
        made: list[inspect.Parameter] = []
        for each in fields(kind):
            option: Option = each.metadata["option"]
            differs = option.faces.get(face, _AS_IT_IS)
            if each.name in only or not (only or differs.is_left_out):
                default = each.default if differs.default is ... else differs.default
                made.append(_parameter(each.name, types[each.name], default, option, differs.help or option.help))
        own = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in signature.parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        first = [each for each in made if each.name == "model"]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*first, *own, *(each for each in made if each not in first)]
        )
        return command

    return decorated


def _parameter(name: str, its_type: Any, default: Any, option: Option, help: str) -> inspect.Parameter:
    """A field as a parameter that Typer makes an option of. What is on by default has a flag to turn it off."""
    flag = option.flag or f"--{name.replace('_', '-')}"
    shown: dict[str, Any] = {"help": help, "metavar": option.metavar, "min": option.at_least}
    if default is True:
        flag, default = f"--no-{name.replace('_', '-')}", False
        shown["callback"] = _inverted
    told = typer.Option(flag, rich_help_panel=option.panel, **shown)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[its_type | None if default is None else its_type, told],
    )


def _inverted(is_off: bool) -> bool:
    return not is_off
