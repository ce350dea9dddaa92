"""What a command asks for: an engine's options (`minicache.engine.options`), and groups of its own as dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from minicache.engine.options import EngineOptions, Face, Option

_Command = Callable[..., None]

_AS_IT_IS = Face("")


def asked(default: Any, help: str, metavar: str | None = None, *, panel: str | None = None, **more: Any) -> Any:
    """A field of a group of options.

    Args:
        default: of the option. One that is True or False is a flag that turns it on.
        help: one line.
        metavar: what its value is called.
        panel: under which heading it is listed; None: the first.
        more: what else `typer.Option` takes.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "rich_help_panel": panel, **more})


def with_options(
    engine: type[EngineOptions] | None = None, face: str = "", only: tuple[str, ...] = (), panel: str | None = None
) -> Callable[[_Command], _Command]:
    """Give a command an option for each field of a dataclass.

    A parameter whose type is a dataclass stands for its fields (`asked`), and the command gets the dataclass. The last
    parameter, `**options`, stands for the fields of the engine's options, and the command gets these by name.

    Args:
        engine: the engine's options, if the command asks for any.
        face: the command, as the engine's fields name it where they differ there.
        only: the names of those that it asks for; (): all that are not left out.
        panel: under which heading they are listed; None: their own.
    """

    def decorated(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = signature.parameters.values()
        groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
        of_engine = [] if engine is None else list(_of_engine(engine, face, only, panel))
        own: list[inspect.Parameter] = []
        for each in parameters:
            if each.name in groups:
                types = get_type_hints(each.annotation, include_extras=True)
                own += [_parameter(one, one.default, types, **one.metadata) for one in fields(each.annotation)]
            elif each.kind is not inspect.Parameter.VAR_KEYWORD:
                own.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @wraps(command)
        def called(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
            command(**values)

        first = [each for each in of_engine if each.name == "model"]
        last = [each for each in of_engine if each not in first]
        called.__signature__ = signature.replace(parameters=[*first, *own, *last])  # type: ignore[attr-defined]
        return called

    return decorated


def _of_engine(
    kind: type[EngineOptions], face: str, only: tuple[str, ...], panel: str | None
) -> Iterator[inspect.Parameter]:
    """The engine's options as parameters. What is on by default has a flag to turn it off."""
    types = get_type_hints(kind)
    for each in fields(kind):
        option: Option = each.metadata["option"]
        differs = option.faces.get(face, _AS_IT_IS)
        if each.name not in only and (only or differs.is_left_out):
            continue
        default = each.default if differs.default is ... else differs.default
        shown: dict[str, Any] = {"metavar": option.metavar, "min": option.at_least}
        shown |= {"help": differs.help or option.help, "rich_help_panel": panel or option.panel}
        if default is True:
            default = False
            shown |= {"flag": f"--no-{each.name.replace('_', '-')}", "callback": _inverted}
        elif option.flag:
            shown["flag"] = option.flag
        yield _parameter(each, default, types, **shown)


def _parameter(of: Field[Any], default: Any, types: dict[str, Any], flag: str = "", **shown: Any) -> inspect.Parameter:
    """A field as a parameter that Typer makes an option of. The type may tell it all, as that of `--mine` does."""
    its_type = types[of.name]
    if shown:
        declared = typer.Option(flag or f"--{of.name.replace('_', '-')}", **shown)
        its_type = Annotated[its_type | None if default is None else its_type, declared]
    return inspect.Parameter(of.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=its_type)


def _inverted(is_off: bool) -> bool:
    return not is_off


@contextmanager
def usage_errors() -> Iterator[None]:
    """An error that the options lead to is reported as one of usage, in one line."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
