"""Compiles what the launchers launch for a Hopper GPU (sm_90), without one, and prints what each kernel takes.

A launcher is called with CPU tensors, and its kernel is replaced by something that compiles instead of running. Triton
brings its own assembler, so that a type error, an impossible shape or too much shared memory shows on any Linux
machine.

    python tests/kernels/hopper.py                 a line of JSON per case, as it is done
    python tests/kernels/hopper.py decode split_kv   only these modules
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MODULES = ("store", "gather", "decode", "split_kv", "prefill")
HOPPER = GPUTarget("cuda", 90, 32)
LAUNCH_OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiles:
    """Stands in for a kernel: `kernel[grid](…)` compiles it for these arguments."""

    def __init__(self, kernel: Any, found: list[dict[str, Any]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS if name in kwargs}
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        assert list(values) == self.kernel.arg_names, "arguments missing, or in the wrong order"
        constants = {name for name, param in zip(values, self.kernel.params, strict=True) if param.is_constexpr}
        signature, constexprs, attributes = {}, {}, {}
        for index, (name, value) in enumerate(values.items()):
            # As the run-time does: None and 1 become constants, and multiples of 16 are promised to be.
            if name in constants or value is None or (isinstance(value, int) and value == 1):
                signature[name], constexprs[name] = "constexpr", value
                continue
            signature[name] = type_of(value)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs, attributes)
        compiled = triton.compile(source, target=HOPPER, options=options)
        self.found.append(
            {"kernel": self.kernel.__name__, "shared": compiled.metadata.shared} | resources(compiled.asm["cubin"])
        )


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack (registers that were spilled), as NVIDIA's own tool reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    fields = dict(field.split(":") for field in printed.stdout.split() if field.startswith(("REG:", "STACK:")))
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"])}


def store(dtype: torch.dtype, num_kv_heads: int = 8, head_dim: int = 128) -> None:
    from minicache.kernels.store import store_kv

    rows = torch.empty(4, num_kv_heads, head_dim, dtype=dtype)
    cache = torch.empty(4, 16, num_kv_heads, head_dim, dtype=dtype)
    store_kv(rows, rows, cache, cache, torch.zeros(4, dtype=torch.int64))


def gather(dtype: torch.dtype, head_dim: int = 128) -> None:
    from minicache.kernels.gather import gather_kv

    gather_kv(torch.empty(4, 16, 8, head_dim, dtype=dtype), torch.zeros(4, dtype=torch.int32), 50)


def attention(
    module: str,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 1,
    head_dim: int = 128,
    block_size: int = 16,
    ints: torch.dtype = torch.int32,
    **options: Any,
) -> None:
    kernels = importlib.import_module(f"minicache.kernels.{module}")
    q = torch.empty(4, num_heads, head_dim, dtype=dtype)
    cache = torch.empty(8, block_size, num_kv_heads, head_dim, dtype=stored or dtype)
    paged = (q, cache, cache, torch.zeros(2, 16, dtype=ints), torch.zeros(2, dtype=ints))
    if module == "prefill":
        kernels.paged_prefill_attention(*paged, torch.zeros(3, dtype=ints), scale=0.125, **options)
    elif module == "split_kv":
        kernels.paged_decode_attention(*paged, scale=0.125, num_splits=4, **options)
    else:
        kernels.paged_decode_attention(*paged, scale=0.125, **options)


def climb(rung: Any) -> None:
    ladder = importlib.import_module("benchmarks.ladder")
    rung.run(ladder.make_workload([40, 40], 8, 1, device="cpu"))


BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
EVERY_OPTION: dict[str, Any] = {
    "alibi_slopes": torch.ones(8),
    "k_scale": 0.5,
    "v_scale": torch.ones(1),
    "sliding_window": 100,
    "softcap": 30.0,
}


def cases() -> dict[str, Callable[[], None]]:
    """Name → a launch. The plain path in each dtype and head size, and all options at once."""
    found: dict[str, Callable[[], None]] = {
        "store bf16": lambda: store(BF16),
        "store fp8, 3 heads of 80": lambda: store(FP8, 3, 80),
        "gather bf16": lambda: gather(BF16),
        "gather int8, 80": lambda: gather(INT8, 80),
    }
    for module in MODULES[2:]:
        variants: dict[str, dict[str, Any]] = {
            "bf16": {"dtype": BF16},
            "fp16, 256": {"dtype": FP16, "head_dim": 256},
            "fp32, 80, group 3, block 24": {"dtype": FP32, "head_dim": 80, "num_heads": 3, "block_size": 24},
            "bf16 over fp8": {"dtype": BF16, "stored": FP8, "k_scale": 0.5, "v_scale": 0.5},
            "fp16 over int8, every option, int64": {"dtype": FP16, "stored": INT8, "ints": torch.int64, **EVERY_OPTION},
        }
        for name, variant in variants.items():
            found[f"{module} {name}"] = lambda module=module, variant=variant: attention(module, **variant)  # type: ignore[misc]
    for rung in importlib.import_module("benchmarks.ladder").RUNGS[:5]:  # the last is split_kv, and has had its turn
        found[f"ladder {rung.name}"] = lambda rung=rung: climb(rung)  # type: ignore[misc]
    return found


def main(only: list[str]) -> None:
    found: list[dict[str, Any]] = []
    sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks/, which is no part of the package
    for name in (*(f"minicache.kernels.{name}" for name in MODULES), "benchmarks.ladder"):
        module = importlib.import_module(name)
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            setattr(module, kernel, Compiles(getattr(module, kernel), found))
    for case, launch in cases().items():
        if only and case.split()[0] not in only:
            continue
        found.clear()
        try:
            launch()
        except Exception as error:  # the next case may tell more
            print(json.dumps({"case": case, "error": f"{type(error).__name__}: {error}"}), flush=True)
        else:
            print(json.dumps({"case": case, "kernels": found}), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    main(sys.argv[1:])
