"""What every launch of the Triton kernels takes of a GPU: registers, shared memory, and registers spilled to memory.

Triton's compiler and NVIDIA's assembler say so, and need no GPU. A launcher is called with CPU tensors, as if they were
on a GPU of each architecture, and its kernel is replaced by something that compiles instead of running. So what is
compiled is what is launched, whatever `minicache.kernels.configs` says. Attention is compiled without options and with
all of them, over one byte a number also with a scale for each token, and of these the larger numbers count.

    python -m benchmarks.compiled              all launches, a quarter of an hour; → benchmarks/results/compiled.json
    python -m benchmarks.compiled --corners    a selection, in about a minute: lines of JSON, and nothing is recorded
    python -m benchmarks.compiled --corners store gather    only these launchers
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Annotated, Any

if os.environ.get("TRITON_INTERPRET") == "1":
    raise SystemExit("TRITON_INTERPRET=1 is set, and the interpreter compiles nothing: set TRITON_INTERPRET=0")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does anyway, without its warning

import torch
import triton
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import ladder
from benchmarks._record import record
from minicache.errors import KernelUnavailableError
from minicache.kernels import configs, decode, gather, prefill, quantized_linear, quantized_store, split_kv, store
from minicache.kernels.group_quantize import quantize_groups

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
INT4 = torch.uint8  # of weights: two numbers in a byte
DTYPES = ((BF16, BF16), (FP16, FP16), (FP32, FP32), (FP16, INT8), (BF16, FP8))
"""Of queries and cache."""

HEAD_DIMS = (32, 64, 80, 96, 128, 256, 512, 576)
THOROUGH = (80, 90, 100)
"""Architectures that are compiled for all of these; the others for heads of 64 and 128, in bf16, fp32 and over int8."""

NUM_ROWS = (1, 40, 100)
"""Of a linear layer: a launch of each configuration."""

GROUP = 8
LAUNCH_OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    FP32: "*fp32",
    FP16: "*fp16",
    BF16: "*bf16",
    INT8: "*i8",
    FP8: "*fp8e4nv",
    INT4: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
EVERY_OPTION: dict[str, Any] = {
    "alibi_slopes": torch.ones(GROUP),
    "k_scale": 0.5,
    "v_scale": torch.ones(1),
    "sliding_window": 100,
    "softcap": 30.0,
}
NUM_BLOCKS, BLOCK_SIZE = 8, 16
TOKEN_SCALES = {name: torch.ones(NUM_BLOCKS, BLOCK_SIZE, 1) for name in ("k_scale", "v_scale")}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a launcher.

    Attributes:
        launcher: "store", "quantized_store", "gather", "decode", "split_kv", "prefill", "quantized_linear", or the name
            of a rung of the ladder.
        architecture: such as 90.
        queries: the queries' dtype; of quantized_store and quantized_linear, that of the rows; of store and gather, the
            cache's.
        cache: the cache's dtype; of quantized_linear, the weight's.
        head_dim: d; of quantized_linear, how many rows there are.
    """

    launcher: str
    architecture: int
    queries: torch.dtype
    cache: torch.dtype
    head_dim: int


def main(
    launchers: Annotated[list[str] | None, typer.Argument(help="With --corners: only these, such as decode.")] = None,
    corners: Annotated[bool, typer.Option(help="Compile a selection, print it, and record nothing.")] = False,
) -> None:
    """Compile what the launchers launch."""
    if corners:
        known = {launch.launcher for launch in selection()}
        if unknown := sorted(set(launchers or ()) - known):
            raise typer.BadParameter(f"no launcher {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        for launch in selection():
            if not launchers or launch.launcher in launchers:
                print_rows(launch)
        return
    every = track(list(launches()), description="Compiling", console=Console(stderr=True))
    found = [each for launch in every for each in rows(launch)]
    record(
        "compiled",
        {
            "triton": version("triton"),
            "example": rows(Launch("decode", 90, BF16, BF16, 128))[0],
            "launches": by_architecture(each for each in found if "refused" not in each),
            "refused": by_architecture(each for each in found if "refused" in each),
        },
    )


def print_rows(launch: Launch) -> None:
    """A line of JSON for each kernel, or one with the error."""
    try:
        found = rows(launch)
    except Exception as error:  # the next launch may tell more
        found = [{"launcher": launch.launcher, "architecture": f"sm_{launch.architecture}", "error": reason(error)}]
    for each in found:
        print(json.dumps(each), flush=True)


def reason(error: BaseException) -> str:
    """What went wrong first, in a line: Triton's own message quotes the whole kernel above it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(node := getattr(error, "node", None), ast.Raise):  # of a function of the kernel that is not written
        return ast.unparse(node)
    return f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"


def by_architecture(found: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows under the name of their architecture."""
    tables: dict[str, list[Row]] = {}
    for each in found:
        tables.setdefault(each["architecture"], []).append(each)
    return tables


def launches() -> Iterator[Launch]:
    """All of them."""
    for arch in configs.SHARED_KB:
        dtypes = DTYPES if arch in THOROUGH else ((BF16, BF16), (FP32, FP32), (FP16, INT8))
        for launcher, dtype in product(("decode", "split_kv", "prefill"), dtypes):
            for head_dim in HEAD_DIMS if arch in THOROUGH else (64, 128):
                yield Launch(launcher, arch, *dtype, head_dim)
        yield Launch("decode", arch, FP32, INT8, 128)
        for launcher, stored in product(("store", "gather"), (BF16, INT8, FP8)):
            yield Launch(launcher, arch, stored, stored, 128)
        yield from (Launch("quantized_store", arch, BF16, stored, 128) for stored in (INT8, FP8))
        half = BF16 if arch >= 80 else FP16
        for queries, stored, num_rows in product((half, FP32), (INT8, INT4), NUM_ROWS):
            yield Launch("quantized_linear", arch, queries, stored, num_rows)


def selection() -> Iterator[Launch]:
    """Corners: each kernel, and of attention the dtypes that take most registers, at a head size of 128."""
    for arch in THOROUGH:
        byte = (BF16, FP8) if arch >= configs.FP8_FROM else (FP16, INT8)
        yield from (Launch("prefill", arch, *dtype, 128) for dtype in ((BF16, BF16), byte, (FP32, FP32)))
        yield from (Launch("decode", arch, *dtype, 128) for dtype in ((BF16, BF16), byte))
        yield Launch("split_kv", arch, BF16, BF16, 128)
        yield from (Launch(launcher, arch, byte[1], byte[1], 128) for launcher in ("store", "gather"))
        yield Launch("quantized_store", arch, BF16, byte[1], 128)
        for stored, num_rows in ((INT8, 1), (INT4, 100)):
            yield Launch("quantized_linear", arch, BF16, stored, num_rows)
    yield from (Launch(rung.name, 90, BF16, BF16, 128) for rung in ladder.RUNGS[:2])  # the others are of the package


def rows(launch: Launch) -> list[Row]:
    """A line of the table for each kernel that the call launches; or one that says why it is refused."""
    facts = {
        "architecture": f"sm_{launch.architecture}",
        "queries": short(launch.queries),
        "cache": short(launch.cache),
        "head_dim": "" if launch.launcher == "quantized_linear" else launch.head_dim,
    }
    options: list[dict[str, Any]] = [{}]
    if launch.launcher in ("decode", "split_kv", "prefill"):
        options = [{}, EVERY_OPTION]
        if launch.cache.itemsize == 1:
            options += [TOKEN_SCALES, EVERY_OPTION | TOKEN_SCALES]
    try:
        configs.require_storable(launch.architecture, launch.cache)
        variants = [compiled(launch, each) for each in options]
    except KernelUnavailableError as error:
        return [{"launcher": launch.launcher} | facts | {"refused": str(error)}]
    found = []
    for same in zip(*variants, strict=True):
        largest = {name: max(each[name] for each in same) for name in ("registers", "shared", "spilled")}
        found.append({"kernel": same[0]["kernel"]} | facts | same[0] | largest)
    return found


def compiled(launch: Launch, options: dict[str, Any]) -> list[Row]:
    """The kernels of one call with these options."""
    found: list[Row] = []
    modules = (store, quantized_store, quantized_linear, gather, decode, split_kv, prefill, ladder)
    kernels = {
        (module, name): kernel for module in modules for name, kernel in vars(module).items() if "_kernel" in name
    }
    architecture = configs.architecture
    try:
        configs.architecture = lambda device: launch.architecture
        for (module, name), kernel in kernels.items():
            setattr(module, name, Compiles(kernel, launch.architecture, found))
        call(launch, options)
    finally:
        configs.architecture = architecture
        for (module, name), kernel in kernels.items():
            setattr(module, name, kernel)
    return found


def call(launch: Launch, options: dict[str, Any]) -> None:
    """Call the launcher, with one key/value head and GROUP query heads."""
    ints = torch.int64 if options else torch.int32
    q = torch.empty(4, GROUP, launch.head_dim, dtype=launch.queries)
    cache = torch.empty(NUM_BLOCKS, BLOCK_SIZE, 1, launch.head_dim, dtype=launch.cache)
    paged = (q, cache, cache, torch.zeros(2, 16, dtype=ints), torch.zeros(2, dtype=ints))
    scale = launch.head_dim**-0.5
    match launch.launcher:
        case "store":
            eight = torch.empty(NUM_BLOCKS, BLOCK_SIZE, 8, launch.head_dim, dtype=launch.cache)
            store.store_kv(eight[0], eight[0], eight, eight, torch.zeros(16, dtype=torch.int64))
        case "quantized_store":
            new = torch.empty(16, 8, launch.head_dim, dtype=launch.queries)
            eight = torch.empty(NUM_BLOCKS, BLOCK_SIZE, 8, launch.head_dim, dtype=launch.cache)
            scales = torch.empty(NUM_BLOCKS, BLOCK_SIZE, 8)
            slots = torch.zeros(16, dtype=torch.int64)
            quantized_store.store_kv(new, new, eight, eight, slots, k_scale=scales, v_scale=scales)
        case "gather":
            gather.gather_kv(cache, torch.zeros(4, dtype=torch.int32), 50)
        case "quantized_linear":
            weight = quantize_groups(torch.ones(128, 256), "int8" if launch.cache == INT8 else "int4")
            quantized_linear.linear(torch.empty(launch.head_dim, 256, dtype=launch.queries), weight)
        case "decode":
            decode.paged_decode_attention(*paged, scale=scale, **options)
        case "split_kv":
            split_kv.paged_decode_attention(*paged, scale=scale, num_splits=split_kv.MAX_SPLITS, **options)
        case "prefill":
            prefill.paged_prefill_attention(*paged, torch.zeros(3, dtype=ints), scale=scale, **options)
        case name:
            rung = next(each for each in ladder.RUNGS if each.name == name)
            rung.run(ladder.make_workload([40, 40], GROUP, 1, launch.head_dim, dtype=launch.queries, device="cpu"))


class Compiles:
    """Stands in for a kernel: `kernel[grid](…)` compiles it for these arguments, and notes what it takes."""

    def __init__(self, kernel: Any, arch: int, found: list[Row]) -> None:
        self.kernel, self.arch, self.found = kernel, arch, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as Triton's run-time would: None and 1 become constants, multiples of 16 are promised to be."""
        options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS if name in kwargs}
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        if missing := [name for name in self.kernel.arg_names if name not in given]:
            raise TypeError(f"{self.kernel.__name__} is launched without {', '.join(missing)}")
        values = {name: given[name] for name in self.kernel.arg_names}
        constants = {name for name, param in zip(values, self.kernel.params, strict=True) if param.is_constexpr}
        signature, constexprs, attributes = {}, {}, {}

        def specialised(path: tuple[int, ...], value: Any, is_constant: bool = False) -> Any:
            """The type of the argument at `path`, of a tuple one for each number."""
            if isinstance(value, tuple):
                return tuple(specialised((*path, i), each) for i, each in enumerate(value))
            if is_constant or value is None or (isinstance(value, int) and value == 1):
                constexprs[path] = value
                return "constexpr"
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[path] = [["tt.divisibility", 16]]
            return type_of(value)

        for index, (name, value) in enumerate(values.items()):
            signature[name] = specialised((index,), value, name in constants)
        source = ASTSource(self.kernel, signature, constexprs, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options)
        self.found.append(
            {
                "kernel": self.kernel.__name__,
                "rows": values.get("ROWS", ""),
                "tile": values.get("TILE", values.get("OUTPUTS", "")),
                "stages": options.get("num_stages", ""),
                "threads": 32 * made.metadata.num_warps,
                "shared": made.metadata.shared,
            }
            | resources(made.asm["cubin"])
        )


def type_of(value: Any) -> str:
    """The type that Triton gives an argument."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where spilled registers lie, as NVIDIA's own tool reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    fields = dict(field.split(":") for field in printed.stdout.split() if field.startswith(("REG:", "STACK:")))
    return {"registers": int(fields["REG"]), "spilled": int(fields["STACK"])}


def short(dtype: torch.dtype) -> str:
    """A dtype's name as tables have it."""
    names = {BF16: "bf16", FP16: "fp16", FP32: "fp32", INT8: "int8", FP8: "fp8 (e4m3)", INT4: "int4"}
    return names[dtype]


if __name__ == "__main__":
    typer.run(main)
