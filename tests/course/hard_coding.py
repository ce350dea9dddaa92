"""A submission that knows the answers to the cases of one run and no others, for the tests of secret seeds.

A table of what each function returns for each input of the tests is hard-coding. Here the table holds the inputs
alone: the reference answers those, and every other input is refused. Recorded without a seed, it passes there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from minicache_course.workspace import reference_file

_TABLE = """

def _write_down(names, file, recording):
    import functools, hashlib, os

    known = set() if recording or not os.path.exists(file) else set(open(file).read().split())

    def digest(value, seen):
        kind = type(value)
        if kind.__module__ == "torch" and hasattr(value, "untyped_storage"):
            inside = value.detach().clone().tolist() if value.device.type == "cpu" else value.device
            return f"{value.dtype} {tuple(value.shape)} {inside}"
        if value is None or kind in (bool, int, float, str, bytes, complex):
            return repr(value)
        if id(value) in seen:
            return f"again {seen[id(value)][0]}"
        seen[id(value)] = len(seen), value  # kept, or another object could get its id
        if isinstance(value, (list, tuple)) or kind.__name__ == "deque":
            return f"{kind.__name__}[{','.join(digest(each, seen) for each in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"set[{','.join(sorted(digest(each, seen) for each in value))}]"
        if isinstance(value, dict):
            return f"dict[{','.join(digest(k, seen) + ':' + digest(v, seen) for k, v in value.items())}]"
        if callable(value) and hasattr(value, "__qualname__"):
            return value.__qualname__
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        names = [*getattr(value, "__dict__", ()), *slots]
        inside = {name: getattr(value, name) for name in names if hasattr(value, name) and "time" not in name}
        return f"{kind.__qualname__}{digest(inside, seen)}"

    def wrapped(function):
        @functools.wraps(function)
        def answer(*args, **kwargs):
            text = digest([function.__qualname__, list(args), kwargs], {})
            key = hashlib.sha256(text.encode()).hexdigest()[:20]
            if recording:
                with open(file, "a") as table:
                    table.write(key + chr(10))
            elif key not in known:
                raise LookupError("this case is not in the table")
            return function(*args, **kwargs)

        return answer

    for name in names:
        owner, _, attribute = name.rpartition(".")
        holder = globals()[owner] if owner else None
        value = vars(holder)[attribute] if holder else globals()[attribute]
        new = property(wrapped(value.fget)) if isinstance(value, property) else wrapped(value)
        if holder:
            setattr(holder, attribute, new)
        else:
            globals()[attribute] = new

"""


def hard_coded(module: str, names: Iterable[str], table: Path, *, recording: bool) -> str:
    """A module whose functions `names` answer what is in the table and nothing else; `recording` fills it instead."""
    source = reference_file(module).read_text(encoding="utf-8")
    return f"{source}{_TABLE}\n_write_down({list(names)!r}, {str(table)!r}, {recording})\n"
