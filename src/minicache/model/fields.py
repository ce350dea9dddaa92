"""A model's description, field by field: of a config.json, or of the header of a GGUF file.

No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minicache.errors import CheckpointError, UnsupportedModelError


class Fields:
    """Fields by their names, looked up with what they must be.

    Args:
        values: what there is.
        where: what a message names a field after, "config.json: " for instance.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def get(self, name: str, default: Any = None) -> Any:
        """The value; the default if there is none, or null."""
        value = self._values.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether there is a value, be it null."""
        return name in self._values

    def count(self, name: str, default: int | None = None, most: int | None = None) -> int:
        """An int of at least 1; and at most `most`, which is what the model's tensors can have."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self._where}{name} must be a positive whole number; it is {value!r}")
        if most is not None and value > most:
            raise CheckpointError(f"{self._where}{name} is {value}, and by its tensors at most {most}")
        return value

    def sequence(self, name: str, kind: type) -> list[Any]:
        """A list of values of one type."""
        values = self.get(name)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise CheckpointError(f"{self._where}{name} must be a list of {kind.__name__}")
        return values

    def number(self, name: str, default: float | None = None) -> float:
        """A number over 0."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self._where}{name} must be a positive number; it is {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or False."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise CheckpointError(f"{self._where}{name} must be true or false; it is {value!r}")
        return value

    def require(self, name: str, only: Any, default: Any = None) -> None:
        """Refuse any value but one."""
        if self.get(name, default) != only:
            raise self.unsupported(name, self.get(name), repr(only))

    def unsupported(self, name: str, value: Any, instead: str) -> UnsupportedModelError:
        """What to raise where a field asks for something else than is computed here."""
        return UnsupportedModelError(f"{self._where}{name} is {value!r}, which is not supported; supported: {instead}")


def one_of(names: Iterable[str]) -> str:
    """Names as a list in a message."""
    return ", ".join(names)
