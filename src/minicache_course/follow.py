"""Recording what a test does with its objects, for its failure message.

A phase's conftest follows the class that the phase builds, in a fixture that every test uses:

    @pytest.fixture(autouse=True)
    def _followed():
        with following(KVCache, "__init__", "append", "reset"):
            yield
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

from minicache_course import scenario
from minicache_course.checks import is_tensor, short
from minicache_course.language import joined

Teller = Callable[..., tuple[str, str]]
"""Takes a call's result and its arguments, and gives the note: what was done, and the item that it was done with."""

_inside = False  # a followed call: what it calls in turn is not the test's doing


@contextmanager
def following(cls: type, *names: str, **tellers: Teller) -> Iterator[None]:
    """Note the calls that a test makes of methods of `cls`, and the objects of it that it makes ("__init__").

    Args:
        cls: the class; objects of its subclasses are followed too, where these inherit or call its method.
        names: methods whose calls are shown with their arguments and result.
        tellers: method → what to tell of a call of it.
    """
    with ExitStack() as stack:
        for name in (*names, *tellers):
            if method := vars(cls).get(name):  # a learner's class may lack one
                stack.callback(setattr, cls, name, method)
                setattr(cls, name, _followed(method, tellers.get(name)))
        yield


@contextmanager
def following_schedulers(*stages: type) -> Iterator[None]:
    """Follow every `Scheduler` and `Request`: options, requests, and the steps so far with their tokens.

    Args:
        stages: those whose commit does not call their base class's.
    """
    from minicache.request import Request
    from minicache.scheduler.base import Scheduler

    steps: dict[str, Teller] = {
        "add_request": lambda result, request: ("add_request", repr(getattr(request, "request_id", request))),
        "schedule": _step,
        "update_from_output": _commit,
    }
    with (
        following(Request, __init__=_request),
        following(Scheduler, "__init__", "abort_request", "finish_request", "recover", **steps),
        ExitStack() as stack,
    ):
        for stage in stages:
            stack.enter_context(following(stage, "__init__", update_from_output=_commit))
        yield


def _followed(method: Callable[..., Any], teller: Teller | None) -> Callable[..., Any]:
    """`method`, which notes each outermost call of it."""
    name, is_new = method.__name__, method.__name__ == "__init__"

    @wraps(method)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _inside
        if _inside:
            return method(self, *args, **kwargs)
        arguments = "" if teller else _arguments(args, kwargs)  # before the call, which may change them
        _remember(method, name, args, kwargs)
        _inside = True
        try:
            result = method(self, *args, **kwargs)
        except Exception as error:
            if not is_new:
                scenario.done(f"{name}({arguments or _arguments(args, kwargs)}), which raised {type(error).__name__}")
            raise
        finally:
            _inside = False
        if is_new:
            scenario.given(*(teller(self, *args, **kwargs) if teller else (f"{type(self).__name__}({arguments})", "")))
        elif teller:
            scenario.done(*teller(result, *args, **kwargs))
        else:
            gave = "" if result is None or is_tensor(result) else f" → {short(result)}"
            scenario.done(f"{name}({arguments}){gave}")
        return result

    followed.is_followed = True  # type: ignore[attr-defined]
    return followed


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return ", ".join([*map(_brief, args), *(f"{name}={_brief(value)}" for name, value in kwargs.items())])


def _brief(value: Any) -> str:
    """A tensor by its shape: its numbers are shown where they turn up in the wrong place."""
    return f"tensor{list(value.shape)}" if is_tensor(value) else short(value)


def _remember(method: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the tensors among the arguments, by the parameters' names: "v of append(0, k, v)"."""
    if not any(map(is_tensor, (*args, *kwargs.values()))):
        return
    given = dict(zip(list(signature(method).parameters)[1:], args, strict=False)) | kwargs
    shown = ", ".join(parameter if is_tensor(value) else short(value) for parameter, value in given.items())
    for parameter, value in given.items():
        if is_tensor(value) and value.device.type != "meta":
            scenario.remember(f"{parameter} of {name}({shown})", value)


def _request(request: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    usual = type(request).__init__.__wrapped__.__kwdefaults__
    given = {name: value for name, value in kwargs.items() if name in usual and value != usual[name]}
    more = "".join(f", {name} {short(value)}" for name, value in given.items())
    tokens = f"{request.num_prompt_tokens} prompt tokens, max_tokens {request.max_tokens}"
    return f"requests of {tokens}{more}:", repr(request.request_id)


def _step(output: Any) -> tuple[str, str]:
    decisions = ("preempted", "swapped_out", "swapped_in", "blocks_to_copy", "finished", "draft_token_ids")
    more = [f"{name} {getattr(output, name)}" for name in decisions if getattr(output, name, None)]
    return joined("; ", [f"schedule() runs {getattr(output, 'num_scheduled_tokens', output)}", *more]), ""


def _commit(finished: Any, output: Any, token_ids: Any) -> tuple[str, str]:
    # What a learner's method returns may be anything.
    ids = [getattr(each, "request_id", each) for each in finished] if isinstance(finished, list) else finished
    told = f"update_from_output(…, {token_ids})"
    return f"{told} finishes {ids}" if ids else told, ""
