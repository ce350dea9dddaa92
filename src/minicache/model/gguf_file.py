"""The format of GGUF files (ggml's, versions 2 and 3): a header of fields and tensors' places, then the tensors.

The header is read here: the library's reader makes an array of each string of a vocabulary, which takes a second and
a half, and never ends on some broken files. Numbers are dequantised by the library (`gguf.quants`). No phase builds
this module.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from minicache.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from minicache.model.fields import one_of

MAGIC: Final = b"GGUF"
TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""The kinds of tensors that are read, as ggml calls them."""

CHUNK_NBYTES: Final = 2**17
"""How many bytes of a tensor are dequantised at a time, as float32. Little: PyTorch copies 32,768 numbers with one
thread, and waking others for each part costs more; and once large memory was freed, glibc takes the next from its heap,
where what is freed among the weights is not given back."""

MAX_LENGTH: Final = 2**22
"""The most values of a list of the header. A vocabulary has a sixteenth of them; as Python's objects, a list takes ten
times the bytes that it takes in a file."""

_SCALARS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # a value's type, as struct has it
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: in the file.
        shape: as PyTorch has it: `[out, in]`.
        kind: one of TYPES.
        offset: where it begins, in bytes.
        row_nbytes: bytes of a row, along the last axis.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    row_nbytes: int

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return prod(self.shape[:-1])


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its ending."""
    return path.suffix.lower() == ".gguf"


class GGUFFile:
    """What a GGUF file says; its tensors are read one at a time.

    Args:
        path: of the file.

    Attributes:
        path: as given.
        fields: its fields, by name: numbers, strings, flags, and lists of them. A float32 is the shortest decimal
            number that rounds to it: 1e-05, and not 9.999999747378752e-06.
        tensors: by name.

    Raises:
        MissingExtraError: `gguf` is not installed.
        UnsupportedModelError: it is of another version, or has tensors of other kinds than TYPES.
        CheckpointError: it is no GGUF file, or is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # to open a pipe would wait for someone who writes
            raise CheckpointError(f"{path} is no file")
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                self.fields, self.tensors = _Header(content, path).read()
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error

    def read(
        self, tensor: StoredTensor, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A tensor of the file, dequantised: `tensor.shape`. Nothing of it stays in memory twice.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        from gguf import GGMLQuantizationType, quants

        out = torch.empty((tensor.num_rows, tensor.shape[-1]), dtype=dtype)
        num_rows = max(1, CHUNK_NBYTES // (4 * tensor.shape[-1]))
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.offset)
                for first in range(0, tensor.num_rows, num_rows):
                    rows = out[first : first + num_rows]
                    stored = bytearray(len(rows) * tensor.row_nbytes)
                    if file.readinto(stored) != len(stored):
                        raise OSError("it has become shorter")
                    numbers = np.frombuffer(stored, dtype=np.uint8).reshape(len(rows), -1)
                    rows.copy_(torch.from_numpy(quants.dequantize(numbers, GGMLQuantizationType[tensor.kind])))
        except OSError as error:
            raise CheckpointError(f"{self.path}: {tensor.name} cannot be read: {error}") from error
        return out.view(tensor.shape).to(device)


class _Header:
    """The header of a file, read from its beginning to its end.

    Args:
        content: the whole file.
        path: what messages call it.
    """

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content = content
        self._size = len(content)
        self._path = path
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """The fields, and where the tensors are."""
        if self._content[:4] != MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file: it begins with {self._content[:4]!r}, not {MAGIC!r}")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self._path} is GGUF version {version}; supported: 2, 3 (little-endian)")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in fields:
                raise CheckpointError(f"{self._path} has the field {name!r} twice")
            fields[name] = self._value(self._number("I"))
        places = self._places(num_tensors)
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(
                f"{self._path}: general.alignment must be a positive whole number; it is {alignment!r}"
            )
        start = -(-self._at // alignment) * alignment
        return fields, {name: self._tensor(name, *place, start) for name, place in places.items()}

    def _places(self, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Of each tensor the shape, the number of its kind, and its offset from where the tensors begin."""
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            num_axes = self._number("I")
            if name in places or not 1 <= num_axes <= 4:
                raise CheckpointError(f"{self._path} has the tensor {name!r} twice, or with {num_axes} axes")
            shape = self._numbers("Q", num_axes)[::-1]  # ggml names the axis first along which numbers lie
            if 0 in shape:
                raise CheckpointError(f"{self._path} has the tensor {name!r} with the shape {list(shape)}")
            places[name] = shape, self._number("I"), self._number("Q")
        return places

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> StoredTensor:
        """A tensor, if it is of a kind that is read, and the file has all of it."""
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise MissingExtraError(f"{self._path} needs gguf: pip install 'minicache-course[hf]'") from error
        try:
            kind_name = GGMLQuantizationType(kind).name
        except ValueError:
            kind_name = str(kind)
        if kind_name not in TYPES:
            raise UnsupportedModelError(
                f"{self._path}: {name} is of type {kind_name}, which is not supported; supported: {one_of(TYPES)}"
            )
        block_size, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape[-1] % block_size:
            raise CheckpointError(
                f"{self._path}: {name} is {list(shape)}, and {kind_name} has blocks of {block_size} numbers"
            )
        stored = StoredTensor(name, shape, kind_name, start + offset, shape[-1] // block_size * block_nbytes)
        end = stored.offset + stored.num_rows * stored.row_nbytes
        if end > self._size:
            raise CheckpointError(
                f"{self._path} has {self._size} bytes, and {name} ends at {end}: was it downloaded to its end?"
            )
        return stored

    def _value(self, kind: int) -> Any:
        """A value of a kind, which stands here."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if count > MAX_LENGTH:
                raise CheckpointError(f"{self._path} is broken: at byte {self._at} there is a list of {count} values")
            if kind == _STRING:
                return self._strings(count)
            return [_rounded(self._kind(kind), value) for value in self._numbers(self._kind(kind), count)]
        return _rounded(self._kind(kind), self._number(self._kind(kind)))

    def _kind(self, kind: int) -> str:
        """A number's kind as `struct` has it."""
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path} is broken: at byte {self._at} there is a value of type {kind}")
        return _SCALARS[kind]

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        """Numbers of one kind, one after the other."""
        start = self._advance(count * struct.calcsize(kind))
        return struct.unpack_from(f"<{count}{kind}", self._content, start)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Strings, one after the other."""
        strings, length_of, content = [], struct.Struct("<Q").unpack_from, self._content
        for _ in range(count):  # 100,000 of them in a vocabulary
            start = self._advance(8) + 8
            (length,) = length_of(content, start - 8)
            self._advance(length)
            try:
                strings.append(content[start : start + length].decode())
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._path} is broken: the string at byte {start}: {error}") from error
        return strings

    def _advance(self, nbytes: int) -> int:
        """Where the next bytes begin; what is read next follows them."""
        if nbytes > self._size - self._at:
            raise CheckpointError(
                f"{self._path} is broken: its header goes on for {nbytes} bytes at byte {self._at}, and it has "
                f"{self._size}. Was it downloaded to its end?"
            )
        start, self._at = self._at, self._at + nbytes
        return start


def _rounded(kind: str, value: Any) -> Any:
    """A float32 as the shortest decimal number that rounds to it; any other value as it is."""
    return float(str(np.float32(value))) if kind == "f" else value
