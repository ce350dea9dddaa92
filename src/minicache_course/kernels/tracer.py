"""The tracer: which rows each program of a kernel loads and stores, under Triton's interpreter.

    with trace(k_cache=k_cache, block_tables=block_tables) as log:
        paged_decode_attention(q, k_cache, …, backend="triton")
    print(log.draw("k_cache"))

An access outside the tensor of its pointer raises `MemoryAccessError`, which names kernel, program, tensor, index and
statement. On a GPU it would read another tensor's numbers; in the plain interpreter it may kill the process. A masked
load without `other` gives NaN (−1 in integers) in the masked lanes, which are undefined on a GPU. What a GPU or
Triton's compiler refuses is refused here too: an empty grid with `ValueError`, a kernel that reads a module-level
variable with `NameError`. No phase builds this module; it is phase 4's debugger, and the source of its figures.

How it works: a kernel gets a made-up address for each tensor. These lie 2**52 bytes apart, so after any pointer
arithmetic the address still identifies the tensor and the offset.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minicache.errors import KernelUnavailableError, MemoryAccessError
from minicache.kernels import runtime

Program = tuple[int, int, int]
"""A program's index in the grid: `tl.program_id(0)`, `(1)`, `(2)`."""

Row = tuple[int, ...]
"""A row's index in its tensor: without the last two dimensions (heads and numbers) if there are more than two."""

Offsets = npt.NDArray[np.int64]
Lanes = npt.NDArray[np.bool_]

_SPACING = 52  # log2 of the bytes between two made-up addresses
_NAN_BITS = {"bf16": 0x7FC0, "fp8e4nv": 0x7F, "fp8e5": 0x7F}  # of the dtypes that NumPy lacks
_WIDTH = 100  # characters of a drawn line
_NO_KERNEL = re.compile(rf"triton(\.|$)|{re.escape(__name__)}$")  # modules between a kernel and the tracer
_PYTHONS = (bool, int, float, str, tuple, list, dict, Tensor)  # module-level values that a compiled kernel cannot read
_LOCK = threading.Lock()  # the interpreter is one object for the whole process


@dataclass(frozen=True)
class Access:
    """One `tl.load` or `tl.store`, by one program.

    Attributes:
        kernel: the kernel's name.
        program: which program of the grid.
        kind: "load", "store" or "atomic".
        tensor: the name that `trace` was given, else the kernel's argument without `_ptr`.
        indices: `[lanes, ndim]` int64, the element that each lane points to; −1 if outside the tensor.
        masked: `[lanes]` bool, the masked lanes, which access nothing.
        line: the line in the kernel's file.
    """

    kernel: str
    program: Program
    kind: str
    tensor: str
    indices: npt.NDArray[np.int64]
    masked: npt.NDArray[np.bool_]
    line: int


@dataclass(frozen=True)
class Forbidden:
    """Elements of a tensor that a kernel must not access.

    Attributes:
        where: bool, over the tensor's first dimensions: True is forbidden.
        because: what they are: "a slot that no sequence uses".
    """

    where: Tensor
    because: str


def unused_rows(cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> Forbidden:
    """The slots of `cache` that no sequence uses: in no table, or at or after their sequence's `context_lens`.

    Args:
        cache: `[num_blocks, block_size, …]`, keys or values.
        block_tables: `[B, max_blocks]`.
        context_lens: `[B]`.
    """
    num_blocks, block_size = cache.shape[:2]
    where = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for table, length in zip(block_tables.tolist(), context_lens.tolist(), strict=True):
        for position in range(length):
            where[table[position // block_size], position % block_size] = False
    return Forbidden(where, "a slot that no sequence uses")


def unused_entries(block_tables: Tensor, context_lens: Tensor, block_size: int) -> Forbidden:
    """The entries of `block_tables` `[B, max_blocks]` after the last block that `context_lens` `[B]` tokens need."""
    num_used = -(-context_lens.cpu() // block_size)
    where = torch.arange(block_tables.shape[1]) >= num_used[:, None]
    return Forbidden(where, "after the last block in use")


@dataclass
class Log:
    """The accesses, in order.

    Attributes:
        accesses: every access, masked ones too.
        shapes: name → shape of every tensor that was passed to `trace` or to a kernel.
        in_place: those of the names passed to `trace` that some kernel was given itself, or a part of; not a copy.
    """

    accesses: list[Access] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)

    def rows(self, tensor: str, kind: str | None = None) -> dict[Program, list[Row]]:
        """Program → the rows of `tensor` that it touches, in the order of their first touch.

        Args:
            tensor: its name.
            kind: "load" or "store"; both by default.

        Raises:
            KeyError: no kernel had a tensor of that name.
        """
        return {program: rows for program, (rows, _) in self._by_program(tensor, kind).items()}

    def draw(self, tensor: str, kind: str | None = None) -> str:
        """The tensor's rows as characters, a line for each program: █ touched, ░ pointed to but masked, · neither.

        Where a row's index has two numbers, bars separate the blocks. A lane is masked because its token does not
        exist, and then points where `other` has put it; or because the tile is wider than the row, and then points into
        the next row.

        Args:
            tensor: its name.
            kind: "load" or "store"; both by default.

        Raises:
            KeyError: no kernel had a tensor of that name.
        """
        by_program = self._by_program(tensor, kind)
        shape = self.shapes[tensor]
        dims = _row_dims(len(shape))
        all_rows = list(np.ndindex(*shape[:dims]))
        labels = {program: f"program {program} " for program in by_program}
        margin = max(map(len, labels.values()), default=0)
        verb = {"load": "loaded", "store": "stored"}.get(kind or "", "touched")
        kernels = ", ".join(dict.fromkeys(access.kernel for access in self._of(tensor, kind)))
        lines = [f"{tensor} {list(shape)}, {verb} by {kernels or 'no kernel'}: █ {verb}  ░ masked  · neither"]
        for program, (touched, masked) in by_program.items():
            marks = dict.fromkeys(masked, "░") | dict.fromkeys(touched, "█")
            drawn = "".join(
                ("│" if dims == 2 and row[-1] == 0 and row != all_rows[0] else "") + marks.get(row, "·")
                for row in all_rows
            )
            for start in range(0, len(drawn), _WIDTH - margin):
                label = labels[program] if start == 0 else ""
                lines.append(f"{label:<{margin}}{drawn[start : start + _WIDTH - margin]}")
        return "\n".join(lines)

    def _of(self, tensor: str, kind: str | None) -> list[Access]:
        if tensor not in self.shapes:
            raise KeyError(f"no kernel had a tensor {tensor!r}: there are {', '.join(self.shapes) or 'none'}")
        return [access for access in self.accesses if access.tensor == tensor and kind in (None, access.kind)]

    def _by_program(self, tensor: str, kind: str | None) -> dict[Program, tuple[list[Row], list[Row]]]:
        """Program → rows touched, rows pointed to by masked lanes only."""
        dims = _row_dims(len(self.shapes.get(tensor, ())))
        found: dict[Program, tuple[dict[Row, None], dict[Row, None]]] = {}
        for access in self._of(tensor, kind):
            touched, masked = found.setdefault(access.program, ({}, {}))
            touched.update(dict.fromkeys(_rows(access.indices[~access.masked], dims)))
            masked.update(dict.fromkeys(row for row in _rows(access.indices[access.masked], dims) if min(row) >= 0))
        return {
            program: (list(touched), [row for row in masked if row not in touched])
            for program, (touched, masked) in found.items()
        }


@contextmanager
def trace(
    *, forbid: Mapping[str, Forbidden] | None = None, only: Sequence[Program] = (), **tensors: Tensor
) -> Iterator[Log]:
    """Trace every kernel that the interpreter runs inside the `with` block.

    Args:
        forbid: name → elements of that tensor that no program may access.
        only: the programs to run of a large grid, if the launch has them. All by default.
        tensors: name → CPU tensor; None and numbers are ignored. A kernel argument inside one of them is recorded under
            that name and its indices, any other under the argument's name. All arguments are traced.

    Inside, an empty grid raises `ValueError`, and a kernel that reads a module-level variable `NameError`.

    Raises:
        KernelUnavailableError: the interpreter is off, or computes wrongly.
        RuntimeError: another `trace` is active.
    """
    runtime.require_triton(torch.device("cpu"))
    if not runtime.interpreting():
        raise KernelUnavailableError("only the interpreter can be traced")
    if not _LOCK.acquire(blocking=False):
        raise RuntimeError("another trace is active: the interpreter is one object for the whole process")
    try:
        named = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        watch = _Watch(named, forbid or {}, only)
        with watch.installed():
            yield watch.log
    finally:
        _LOCK.release()


@dataclass(frozen=True)
class _Region:
    """The memory that one kernel argument points to.

    Attributes:
        name: as displayed.
        tensor: the tensor that indices refer to.
        start: bytes from the tensor's first element to the argument's.
        forbidden: elements that must not be accessed.
    """

    name: str
    tensor: Tensor
    start: int
    forbidden: Forbidden | None

    def locate(self, offsets: Offsets) -> tuple[Offsets, Lanes]:
        """Byte offsets from the argument's pointer → indices `[lanes, ndim]`, and which of them are no element."""
        elements, rest = np.divmod(offsets + self.start, self.tensor.element_size())
        shape, strides = self.tensor.shape, self.tensor.stride()
        indices = np.zeros((offsets.size, self.tensor.ndim), dtype=np.int64)
        # From the largest stride to the smallest; a dimension of size 1 may have any.
        for dim in sorted(range(self.tensor.ndim), key=lambda dim: (-strides[dim], shape[dim] == 1)):
            if strides[dim] > 0:
                indices[:, dim], elements = np.divmod(elements, strides[dim])
        outside = ((indices < 0) | (indices >= np.array(shape))).any(axis=1) | (elements != 0) | (rest != 0)
        return indices, outside

    def told(self, index: Offsets) -> str:
        """An index, which may be out of bounds, in Python's notation."""
        return f"{self.name}[{', '.join(map(str, index.tolist()))}]"


class _Watch:
    """One active trace: its state for the running kernel, and its hooks in the interpreter."""

    def __init__(self, named: Mapping[str, Tensor], forbid: Mapping[str, Forbidden], only: Sequence[Program]) -> None:
        if unknown := sorted(set(forbid) - set(named)):
            raise ValueError(f"forbid names {', '.join(unknown)}, which is not among the traced tensors")
        self.named, self.forbid, self.only = named, forbid, only
        self.log = Log(shapes={name: tuple(tensor.shape) for name, tensor in named.items()})
        self.kernel = ""
        self.names: dict[int, str] = {}  # id of an argument → its name
        self.regions: list[_Region] = []
        self.grid: Program = (1, 1, 1)  # of the launch, where `only` gives it a smaller one
        self.patched: set[int] = set()  # ids of the modules of Triton's language that this launch has made interpreted

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook into the interpreter, and out again."""
        from triton.runtime import interpreter

        launcher, builder = interpreter.GridExecutor, interpreter.interpreter_builder
        to_host, to_pointer, run = launcher._init_args_hst, interpreter._implicit_cvt, launcher.__call__
        set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
        patch_language, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)

        def init_args_hst(launch: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = to_host(launch, args, kwargs)
            self.kernel, self.regions = launch.fn.__name__, []
            self.names = {id(arg): name for name, arg in [*zip(launch.arg_names, args, strict=False), *kwargs.items()]}
            return args, kwargs

        def implicit_cvt(arg: Any) -> Any:
            converted = to_pointer(arg)
            if hasattr(arg, "data_ptr"):
                name = self.names.get(id(arg), "a tensor").removesuffix("_ptr")
                converted.handle.data = np.array([self.place(name, interpreter._unwrap_tensor(arg))], dtype=np.uint64)
            return converted

        def patch_once(function: Any) -> Any:
            _check_globals(function)
            # Otherwise each function that a kernel calls would patch the whole language again: a fifth of the time.
            used = {id(value) for value in function.__globals__.values() if any(value is each for each in language)}
            if not used <= self.patched:
                self.patched |= used
                return patch_language(function)
            return None

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.patched = set()
            if self.only:
                self.grid = (*executor.grid, 1, 1)[:3]
                executor.grid = (sum(map(self.has, self.only)),)
            try:
                return run(executor, *args, **kwargs)
            except interpreter.InterpreterError as error:
                raise _wrapped(error, interpreter.InterpreterError) from None

        def set_grid(*grid: int) -> None:
            if 0 in grid:
                told = f"{self.kernel} is launched with no programs, a grid of {grid}"
                raise ValueError(
                    f"{told}, which CUDA refuses. With nothing to compute, the launcher returns before the "
                    "launch; otherwise the grid is too small"
                )
            set_grid_dim(*(self.grid if self.only else grid))

        def set_program(*program: int) -> None:
            set_grid_idx(*(list(filter(self.has, self.only))[program[0]] if self.only else program))

        def access(method: str, kind: str, ptr: int, mask: int | None) -> Callable[..., Any]:
            """The builder's `method`, whose arguments number `ptr` and `mask` are what their names say."""
            original = getattr(builder, method)

            def accessing(*args: Any, **kwargs: Any) -> Any:
                handles = list(args)
                pointers = handles[ptr]
                off = np.zeros(pointers.data.shape, bool) if mask is None else ~handles[mask].data.astype(bool)
                handles[ptr] = interpreter.TensorHandle(self.visit(kind, pointers.data, off), pointers.dtype)
                # For a single element the interpreter itself drops an `other` of 0.
                if kind == "load" and handles[2] is None and pointers.data.size > 1:
                    handles[2] = poison(pointers)
                return original(*handles, **kwargs)

            return accessing

        def poison(pointers: Any) -> Any:
            """What a load without `other` gives in its masked lanes, which are undefined on a GPU."""
            element = pointers.get_element_ty()
            dtype = interpreter._get_np_dtype(element)
            worst = np.array(np.nan if dtype.kind == "f" else _NAN_BITS.get(element.name, -1)).astype(dtype)
            return interpreter.TensorHandle(np.full(pointers.data.shape, worst), element)

        patches = [
            (launcher, "_init_args_hst", init_args_hst),
            (launcher, "__call__", launch),
            (builder, "set_grid_dim", set_grid),
            (builder, "set_grid_idx", set_program),
            # Checked at each integer operation and never reported; visit() catches the resulting bad address.
            (builder, "options", replace(builder.options, sanitize_overflow=False)),
            (interpreter, "_implicit_cvt", implicit_cvt),
            (interpreter, "_patch_lang", patch_once),
            (builder, "create_masked_load", access("create_masked_load", "load", ptr=0, mask=1)),
            (builder, "create_masked_store", access("create_masked_store", "store", ptr=0, mask=2)),
            (builder, "create_atomic_rmw", access("create_atomic_rmw", "atomic", ptr=1, mask=3)),
            (builder, "create_atomic_cas", access("create_atomic_cas", "atomic", ptr=0, mask=None)),
        ]
        with ExitStack() as stack:
            for owner, name, hook in patches:
                stack.enter_context(patch.object(owner, name, hook))
            yield

    def has(self, program: Program) -> bool:
        """Whether the grid has that program."""
        return all(index < size for index, size in zip(program, self.grid, strict=True))

    def place(self, name: str, argument: Tensor) -> int:
        """Make up an address for an argument of the kernel that is being launched."""
        first, last = _span(argument)
        region = _Region(name, argument, 0, None)
        for known, tensor in self.named.items():
            start, end = _span(tensor)
            if start <= first and last <= end:
                region = _Region(known, tensor, first - start, self.forbid.get(known))
                self.log.in_place.add(known)
                break
        self.regions.append(region)
        self.log.shapes.setdefault(region.name, tuple(region.tensor.shape))
        return len(self.regions) << _SPACING

    def visit(self, kind: str, pointers: npt.NDArray[np.uint64], masked: Lanes) -> npt.NDArray[np.uint64]:
        """Record and check an access; the real addresses."""
        addresses, masked = pointers.reshape(-1), np.broadcast_to(masked, pointers.shape).reshape(-1)
        numbers = (addresses + np.uint64(1 << (_SPACING - 1))) >> np.uint64(_SPACING)
        number = int(numbers[np.argmin(masked)])  # the first lane that is on, or the first
        if not 1 <= number <= len(self.regions) or (numbers[~masked] != number).any():
            raise self._error(kind, "far outside every tensor that it was given")
        region = self.regions[number - 1]
        offsets = (addresses - np.uint64(number << _SPACING)).astype(np.int64)
        indices, outside = region.locate(offsets)
        recorded = np.where(outside[:, None], -1, indices)
        line = _lines_of_kernel()[0][1]
        self.log.accesses.append(Access(self.kernel, _program(), kind, region.name, recorded, masked, line))
        self._check(region, kind, indices, outside, masked)
        real = np.uint64(region.tensor.data_ptr() + region.start) + offsets.astype(np.uint64)
        return real.reshape(pointers.shape)

    def _check(self, region: _Region, kind: str, indices: Offsets, outside: Lanes, masked: Lanes) -> None:
        """Raise if an unmasked lane accesses what it must not."""
        if (wrong := outside & ~masked).any():
            where = region.told(indices[np.argmax(wrong)])
            lanes = f"{wrong.sum()} of {wrong.size} lanes are outside, and no lane is masked"
            if masked.any():
                lanes = f"{wrong.sum()} of the {(~masked).sum()} lanes that the mask leaves on are outside"
            raise self._error(kind, f"{where}, but {region.name} is {list(region.tensor.shape)}: {lanes}")
        if region.forbidden is not None:
            forbidden = region.forbidden.where.numpy(force=True)
            inside = np.flatnonzero(~masked)
            wrong = forbidden[tuple(indices[inside, : forbidden.ndim].T)]
            if wrong.any():
                where = region.told(indices[inside[np.argmax(wrong)]])
                raise self._error(kind, f"{where}, {region.forbidden.because}")

    def _error(self, kind: str, what: str) -> MemoryAccessError:
        verb = {"load": "loads", "store": "stores to", "atomic": "changes"}[kind]
        error = MemoryAccessError(f"{self.kernel}, program {_program()}, {verb} {what}")
        for number, (file, line) in enumerate(_lines_of_kernel()):
            error.add_note(f"{'called ' if number else ''}at {_shown(file)}:{line}: {_statement(file, line)}")
        return error


@functools.cache
def _check_globals(fn: Callable[..., Any]) -> None:
    """Raise if a kernel, or a function that it calls, reads a module-level Python variable."""
    for each in dis.get_instructions(fn):
        if each.opname == "LOAD_GLOBAL" and isinstance(fn.__globals__.get(each.argval), _PYTHONS):
            told = f"{fn.__name__} reads {each.argval}, a variable of its module"
            raise NameError(f"{told}: the interpreter can read it, a GPU's compiler cannot. Pass it as an argument")


def _row_dims(ndim: int) -> int:
    """The number of dimensions in a row's index."""
    return ndim if ndim <= 2 else ndim - 2


def _rows(indices: npt.NDArray[np.int64], dims: int) -> list[Row]:
    """The rows that elements lie in, each once, in order of appearance."""
    rows = indices[:, :dims]
    new = np.ones(len(rows), dtype=bool)  # most lanes are in the same row as the lane before
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return list(dict.fromkeys(map(tuple, rows[new].tolist())))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the first after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _wrapped(error: BaseException, wrapper: type[BaseException]) -> BaseException:
    """The original error, which the interpreter wraps once per function that it passes through."""
    while isinstance(error, wrapper) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _program() -> Program:
    """The index of the running program."""
    from triton.runtime.interpreter import interpreter_builder

    x, y, z = interpreter_builder.grid_idx
    return x, y, z


def _lines_of_kernel() -> list[tuple[str, int]]:
    """File and line of the frames between the launch and the tracer that are not Triton's, innermost first."""
    lines = []
    frame = sys._getframe()
    while frame.f_back and (frame.f_globals.get("__name__"), frame.f_code.co_name) != (__name__, "launch"):
        if not _NO_KERNEL.match(frame.f_globals.get("__name__", "")):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


def _statement(file: str, line: int) -> str:
    """The line's source; a statement over several lines is joined into one."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # the file has changed since
        return linecache.getline(file, line).strip()
    for each in ast.walk(tree):
        if not isinstance(each, ast.stmt) or hasattr(each, "body") or each.end_lineno is None:
            continue
        if each.lineno <= line <= each.end_lineno != each.lineno:
            return textwrap.shorten(ast.unparse(each), _WIDTH, placeholder=" …")
    return linecache.getline(file, line).strip()


def _shown(file: str) -> str:
    """A path relative to the working directory, if it is inside."""
    return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file
