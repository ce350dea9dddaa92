"""A counterexample as text in a link: the playground reads it and does the same. Pure standard library.

Parts, with commas between them:

| part | what |
|---|---|
| `o:watermark.0.5` | an option of the scheduler, as JSON, or a word |
| `a003.2.1` | a request arrives: its prompt's tokens, a digit each, max_tokens, priority |
| `a003.2.1.image.b.-1.0` | the same, with its group, cache_salt and arrival_time, where these are not the usual ones |
| `s`, `y` | a step is scheduled; the same, and the one before has failed |
| `c`, `c0-1` | the step is computed, and requests 0 and 1 generate a stop token |
| `r` | the step fails, and `recover()` is called |
| `x`, `e`, `f`, `b` | with an id: that request is aborted, fails alone, is forked, is forked with another last token |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from minicache.scheduler import SCHEDULERS, has_option
from minicache.verifier.explore import Case
from minicache.verifier.world import Action, Kind, Shape

_STAGES: Final = ("static", "continuous", "paged", "fair", "chunked")
_SLIDERS: Final = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
_LETTERS: Final[dict[Kind, str]] = {
    "schedule": "s",
    "retry": "y",
    "fail": "r",
    "abort": "x",
    "error": "e",
    "fork": "f",
    "branch": "b",
}
_KINDS: Final = {letter: kind for kind, letter in _LETTERS.items()}


def fragment(case: Case, actions: Iterable[Action]) -> str:
    """What follows "#" in the playground's address: a reference scheduler, its options, and what happens to it.

    Args:
        case: of `minicache.verifier.cases`. Of a scheduler that is not the reference's, the stage that it is built on.
        actions: as of a `Violation`.
    """
    scheduler = case.make()
    stages = (name for name in reversed(_STAGES) if issubclass(type(scheduler), SCHEDULERS[name][0]))
    stage = next(stages, "paged")
    sliders = {
        "blocks": scheduler.pool.num_blocks,
        "block_size": scheduler.pool.block_size,
        "slots": scheduler.max_num_seqs,
        "budget": scheduler.max_num_batched_tokens,
    }
    given: dict[str, Any] = getattr(case.make, "keywords", {})
    options = {name: value for name, value in given.items() if name not in _SLIDERS and has_option(stage, name)}
    said = {"workload": "replay", "a": stage, "b": "none"} | sliders | {"do": written(options, case.shapes, actions)}
    return "&".join(f"{name}={value}" for name, value in said.items())


def written(options: Mapping[str, Any], shapes: Sequence[Shape], actions: Iterable[Action]) -> str:
    """A scheduler's options and what happens to it, as text for `read`.

    Args:
        options: of the scheduler; numbers, booleans and words.
        shapes: of the requests that arrive.
        actions: what happens, of requests whose ids are numbers.
    """
    parts = [f"o:{name}.{value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]
    for action in actions:
        if action.kind == "arrive":
            shape = shapes[action.subject]
            fields: list[Any] = ["".join(map(str, shape.prompt_token_ids)), shape.max_tokens, shape.priority]
            if shape[3:] != Shape([], 0)[3:]:
                fields += [shape.group, shape.cache_salt or "", shape.arrival_time]
            parts.append("a" + ".".join(map(str, fields)))
        elif action.kind == "commit":
            parts.append("c" + "-".join(map(str, action.stops)))
        else:
            parts.append(_LETTERS[action.kind] + ("" if action.subject is None else str(action.subject)))
    return ",".join(parts)


def read(text: str) -> tuple[dict[str, Any], list[Shape], list[Action]]:
    """What `written` was given; each arrival has a shape of its own.

    Raises:
        ValueError: it is no such text. The message has the part that is wrong.
    """
    options: dict[str, Any] = {}
    shapes: list[Shape] = []
    actions: list[Action] = []
    prompts: dict[str, list[int]] = {}
    for part in filter(None, text.split(",")):
        kind, rest = part[0], part[1:]
        try:
            if kind == "o":
                name, value = rest.removeprefix(":").split(".", 1)
                options[name] = value if value.isalpha() and value not in ("true", "false") else json.loads(value)
            elif kind == "a":
                prompt, max_tokens, priority, *more = rest.split(".", 5)
                tokens = prompts.setdefault(prompt, [int(digit) for digit in prompt])
                shape = Shape(tokens, int(max_tokens), int(priority))
                if more:
                    group, salt, time = more
                    shape = shape._replace(group=group, cache_salt=salt or None, arrival_time=float(time))
                actions.append(Action("arrive", len(shapes)))
                shapes.append(shape)
            elif kind == "c":
                actions.append(Action("commit", None, tuple(map(int, filter(None, rest.split("-"))))))
            else:
                actions.append(Action(_KINDS[kind], int(rest) if rest else None))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{part!r} in the link is none of its actions: {error}") from error
    return options, shapes, actions
