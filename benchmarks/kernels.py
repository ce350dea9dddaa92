"""The Triton kernels on a GPU: bytes moved, time, and the share of the bandwidth that copying reaches in the same run.

Decode attention at batch 64, context 4,096, 8 query heads over 1 key/value head and 32 over 8, bf16 (fp16 on a GPU that
has no bf16): ours through block tables in random order and in order, against torch's scaled_dot_product_attention,
compiled flex_attention, and FlashAttention if it is installed, over the same rows in contiguous memory. Then the ladder
(`benchmarks/ladder.py`), store, gather and prefill. What each kernel should take is printed before it is measured: the
bytes that it asks for, over the bandwidth.

A time is that of a CUDA graph between two events, so launching from Python is not in it. Before each, 512 MB are
read, so nothing is in L2 (and nothing in it waits to be written back). The contestants take turns; minimum and
median over the rounds. Shares are of medians.

Without a GPU the contestants are checked in the interpreter, on a small workload, and the predictions are recorded
without measurements, for the bandwidth on an H200's data sheet.

    python -m benchmarks.kernels              measure, on a GPU; else check and predict
    python -m benchmarks.kernels --check      check only, and record nothing
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks._record import record
from minicache import kernels
from minicache.arithmetic import specs
from minicache.engine.runners.gpu import CUDACapture
from minicache.kernels import runtime

if TYPE_CHECKING:
    from benchmarks.ladder import Workload

BATCH_SIZE, CONTEXT_LEN, HEAD_DIM, BLOCK_SIZE = 64, 4096, 128, 16
HEADS = ((8, 1), (32, 8))
"""Query and key/value heads. The goals are for the first; the ladder climbs there."""

STORED_TOKENS, GATHERED_TOKENS, PREFILL_TOKENS, PREFILL_HEADS, KV_HEADS = 16_384, 32_768, 4096, 32, 8
REPEATS = 100
H200_PROCESSORS = 132
FLUSHED_BYTES = 512 * 2**20
SHARE_GOAL, RATIO_GOAL = 0.85, 1.10
NOT_MEASURED = "not measured"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}

Contestants = dict[str, Callable[[], Any]]
console = Console()


@dataclass(frozen=True, slots=True)
class Time:
    """What the rounds of one contestant took, in microseconds."""

    minimum: float
    median: float


def main(
    check: Annotated[bool, typer.Option(help="Check the contestants on a small workload; record nothing.")] = False,
) -> None:
    """Measure the Triton kernels on a GPU, or check and predict without one."""
    runtime.interpret_without_gpu()  # before the ladder brings Triton in
    torch.manual_seed(0)
    if (check or not runtime.has_gpu()) and not check_contestants():
        raise typer.Exit(1)
    if check:
        return
    if runtime.has_gpu():
        record("kernels", measured())
    else:
        console.print("No GPU here: predictions only.")
        record("kernels", predicted())


# Without a GPU: are they right, and what should they take?


def check_contestants() -> bool:
    """Every contestant and every rung against fp64 on a small workload; a line each."""
    from benchmarks.ladder import RUNGS, make_workload

    device = str(runtime.usual_device())
    dtype = half() if device == "cuda" else torch.float32
    work = make_workload([48, 48], 4, 2, 16, dtype=dtype, device=device, num_processors=4)
    k, v = dense(work)
    expected = F.scaled_dot_product_attention(work.q[:, :, None].double(), k.double(), v.double(), enable_gqa=True)
    runs = decode_contestants(work) | {f"rung: {rung.name}": partial(rung.run, work) for rung in RUNGS}
    right = True
    for name, run in runs.items():
        error = (run().double().reshape(expected.shape) - expected).abs().max().item()
        right &= error <= TOLERANCE[dtype]
        console.print(f"{'right' if error <= TOLERANCE[dtype] else 'WRONG'}  {name}, largest error {error:.1e}")
    return right


def predicted() -> dict[str, Any]:
    """What can be said without a GPU: bytes, and the time that an H200's data sheet allows for them."""
    from benchmarks.ladder import RUNGS

    bandwidth = specs.H200.bandwidth
    work = goal_workload("meta", H200_PROCESSORS)
    print_predictions(work, bandwidth)
    return {
        "measured": False,
        "gpu": NOT_MEASURED,
        "copy_bandwidth": NOT_MEASURED,
        "prediction_for": f"{specs.H200.name}, {bandwidth / 1e12:.1f} TB/s by its data sheet",
        "shape": shape(work),
        "rungs": [rung_result(rung, work, bandwidth, None) for rung in RUNGS],
        "decode": [decode_rows(goal_workload("meta", H200_PROCESSORS, heads), bandwidth, {}) for heads in HEADS],
        "others": other_rows(bandwidth, {}),
        "goals": goals(None, None),
    }


# With a GPU


def measured() -> dict[str, Any]:
    """Everything, on the GPU."""
    from benchmarks.ladder import RUNGS

    properties = torch.cuda.get_device_properties(0)
    processors = properties.multi_processor_count
    console.print(f"{properties.name}, {processors} multiprocessors")
    bandwidth = copy_bandwidth()
    console.print(f"copying reaches {bandwidth / 1e9:,.0f} GB/s, read and written\n")
    decode = [decode_result(heads, processors, bandwidth) for heads in HEADS]

    work = goal_workload("cuda", processors)
    print_predictions(work, bandwidth)
    times = measure({rung.name: partial(rung.run, work) for rung in RUNGS})
    rungs = [rung_result(rung, work, bandwidth, times.get(rung.name)) for rung in RUNGS]
    print_rows("The ladder", ["name", "prediction", "measurement", "share"], rungs)

    others = other_rows(bandwidth, {})
    print_rows("Other kernels, predicted", ["name", "prediction"], others)
    others = other_rows(bandwidth, measure(other_contestants()))
    print_rows("Other kernels", ["name", "measurement", "share"], others)

    shares = {row["name"]: row["share_of_copy"] for row in decode[0]["contestants"]}
    reached = goals(shares.get("paged"), decode[0]["paged_over_contiguous"])
    for goal in reached:
        console.print(f"{goal['verdict']}: {goal['goal']}; reached {goal['reached']}")
    return {
        "measured": True,
        "gpu": properties.name,
        "triton": version("triton"),
        "copy_bandwidth": bandwidth,
        "prediction_for": f"the {bandwidth / 1e12:.2f} TB/s that copying reached in the same run",
        "shape": shape(work),
        "repeats": REPEATS,
        "rungs": rungs,
        "decode": decode,
        "others": others,
        "goals": reached,
    }


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 1 GiB, read and written: the yardstick."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time = measure({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * source.nbytes / (time.median * 1e-6)


def decode_result(heads: tuple[int, int], processors: int, bandwidth: float) -> dict[str, Any]:
    """All contestants at one shape, measured."""
    work = goal_workload("cuda", processors, heads)
    nbytes = least_bytes(work)
    console.print(f"Decode, {shape(work)}: {nbytes / 1e6:.0f} MB, predicted {nbytes / bandwidth * 1e6:.1f} µs")
    found = decode_rows(work, bandwidth, measure(decode_contestants(work)))
    print_rows("Decode", ["name", "measurement", "share"], found["contestants"])
    return found


def decode_rows(work: Workload, bandwidth: float, times: dict[str, Time]) -> dict[str, Any]:
    """A row for each contestant, and ours over the fastest of torch's on contiguous memory."""
    nbytes = least_bytes(work)
    names = list(decode_contestants(work))
    contiguous = [times[name].median for name in names if name in times and not name.startswith("paged")]
    ratio = times["paged"].median / min(contiguous) if contiguous and "paged" in times else None
    return {
        "shape": shape(work),
        "bytes": nbytes,
        "prediction": f"{nbytes / bandwidth * 1e6:.1f} µs",
        "contestants": [result_row(name, times.get(name), nbytes, bandwidth) for name in names],
        "paged_over_contiguous": ratio,
        "ratio": NOT_MEASURED if ratio is None else f"{ratio:.2f}",
    }


def least_bytes(work: Workload) -> int:
    """What no one can do without: each key, value, query and output once."""
    return work.k_cache.nbytes + work.v_cache.nbytes + 2 * work.q.nbytes


def decode_contestants(work: Workload) -> Contestants:
    """Who attends, by name. Ours begin with "paged"; the others read the same rows from contiguous memory."""
    batch_size, _, head_dim = work.q.shape
    block_size, num_kv_heads = work.k_cache.shape[1:3]
    k, v = dense(work)
    num_blocks = work.k_cache.shape[0]
    in_order = replace(
        work,
        k_cache=k.transpose(1, 2).reshape(num_blocks, block_size, num_kv_heads, head_dim),
        v_cache=v.transpose(1, 2).reshape(num_blocks, block_size, num_kv_heads, head_dim),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=k.device).view(batch_size, -1),
    )
    one_row = work.q[:, :, None]
    group_rows = work.q.view(batch_size, num_kv_heads, -1, head_dim)
    flex = torch.compile(flex_attention, dynamic=False) if k.is_cuda else flex_attention
    found: Contestants = {
        "paged": lambda: kernels.paged_decode_attention(*work.paged, backend="triton"),
        "paged, blocks in order": lambda: kernels.paged_decode_attention(*in_order.paged, backend="triton"),
        "SDPA": lambda: F.scaled_dot_product_attention(one_row, k, v, enable_gqa=True),
        "SDPA, the group as query rows": lambda: F.scaled_dot_product_attention(group_rows, k, v),
        "flex_attention, compiled": lambda: flex(one_row, k, v, enable_gqa=True),
    }
    if flash := flash_attention(k):
        k_rows, v_rows = (rows.transpose(1, 2).contiguous() for rows in (k, v))
        found["FlashAttention"] = lambda: flash.flash_attn_with_kvcache(
            work.q[:, None], k_rows, v_rows, cache_seqlens=work.context_lens
        )
    return found


def other_contestants() -> Contestants:
    """Store, gather and prefill; and torch's attention over a prompt in contiguous memory, and FlashAttention's."""
    there: dict[str, Any] = {"dtype": half(), "device": "cuda"}
    k_cache, v_cache = torch.randn(2, 2 * STORED_TOKENS // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **there)
    k_rows, v_rows = torch.randn(2, STORED_TOKENS, KV_HEADS, HEAD_DIM, **there)
    slots = torch.randperm(2 * STORED_TOKENS, device="cuda")[:STORED_TOKENS]
    table = torch.randperm(len(k_cache), dtype=torch.int32, device="cuda")
    q = torch.randn(2 * PREFILL_TOKENS, PREFILL_HEADS, HEAD_DIM, **there)
    starts = torch.tensor([0, PREFILL_TOKENS, 2 * PREFILL_TOKENS], dtype=torch.int32, device="cuda")
    tables = table[: 2 * PREFILL_TOKENS // BLOCK_SIZE].view(2, -1)
    q_dense = q.view(2, PREFILL_TOKENS, PREFILL_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    k, v = torch.randn(2, 2, KV_HEADS, PREFILL_TOKENS, HEAD_DIM, **there)
    lengths = starts.diff()
    found: Contestants = {
        "store": lambda: kernels.store_kv(k_rows, v_rows, k_cache, v_cache, slots),
        "gather": lambda: kernels.gather_kv(k_cache, table, GATHERED_TOKENS),
        "prefill": lambda: kernels.paged_prefill_attention(q, k_cache, v_cache, tables, lengths, starts),
        "prefill, SDPA": lambda: F.scaled_dot_product_attention(q_dense, k, v, is_causal=True, enable_gqa=True),
    }
    if flash := flash_attention(k):
        prompts = [rows.transpose(1, 2).contiguous() for rows in (q_dense, k, v)]
        found["prefill, FlashAttention"] = lambda: flash.flash_attn_func(*prompts, causal=True)
    return found


def half() -> torch.dtype:
    """What the workloads are in: bfloat16, but on a GPU that has none float16."""
    lacking = runtime.has_gpu() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if lacking else torch.bfloat16


def flash_attention(rows: Tensor) -> Any:
    """The package of FlashAttention, if it is installed and these rows are on a GPU; else None."""
    return import_module("flash_attn") if rows.is_cuda and find_spec("flash_attn") else None


def other_rows(bandwidth: float, times: dict[str, Time]) -> list[dict[str, Any]]:
    """Store and gather against the copy bandwidth; prefill in FLOP/s, since arithmetic is what bounds it."""
    row_bytes = KV_HEADS * HEAD_DIM * 2
    moved = {"store": 2 * 2 * STORED_TOKENS * row_bytes, "gather": 2 * GATHERED_TOKENS * row_bytes}
    rows = [
        result_row(name, times.get(name), nbytes, bandwidth) | {"prediction": f"{nbytes / bandwidth * 1e6:.1f} µs"}
        for name, nbytes in moved.items()
    ]
    # Two products of 2 · d FLOPs for each pair of a query and a key that it sees; two prompts.
    flops = 2 * 4 * HEAD_DIM * PREFILL_HEADS * PREFILL_TOKENS * (PREFILL_TOKENS + 1) // 2
    for name in ("prefill", "prefill, SDPA", *(["prefill, FlashAttention"] if find_spec("flash_attn") else [])):
        time = times.get(name)
        share = NOT_MEASURED if time is None else f"{flops / time.median / 1e6:.0f} TFLOP/s"
        prediction = f"{flops / specs.H200.peak_flops * 1e6:.0f} µs at the H200's peak"
        rows.append(
            {"name": name, "flops": flops, "prediction": prediction, "measurement": in_words(time), "share": share}
        )
    return rows


# Measuring


def measure(contestants: Contestants) -> dict[str, Time]:
    """The time of each, taking turns. One that cannot run here is named and left out."""
    capture, replays = CUDACapture(torch.device("cuda")), dict[str, Callable[[], Any]]()
    for name, run in contestants.items():
        try:
            replays[name] = capture(run)
        except Exception as error:  # another library's contestant must not cost us ours
            console.print(f"[red]{name} did not run: {type(error).__name__}: {error}")
    flushed = torch.zeros(FLUSHED_BYTES // 4, device="cuda")
    milliseconds: dict[str, list[float]] = {name: [] for name in replays}
    for _ in track(range(REPEATS), description="Measuring", console=console, transient=True):
        for name, replay in replays.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flushed.sum()
            start.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            milliseconds[name].append(start.elapsed_time(end))
    return {name: Time(min(each) * 1e3, statistics.median(each) * 1e3) for name, each in milliseconds.items()}


# Workloads and words


def goal_workload(device: str, num_processors: int, heads: tuple[int, int] = HEADS[0]) -> Workload:
    """Batch 64, context 4,096. On "meta" it has shapes and no memory."""
    from benchmarks.ladder import make_workload

    lengths = [CONTEXT_LEN] * BATCH_SIZE
    sizes = (*heads, HEAD_DIM, BLOCK_SIZE)
    return make_workload(lengths, *sizes, dtype=half(), device=device, num_processors=num_processors)


def dense(work: Workload) -> tuple[Tensor, Tensor]:
    """The keys and values of a workload of equal lengths in contiguous memory, `[B, H_kv, S, d]`."""
    k, v = (cache[work.block_tables.long()].flatten(1, 2) for cache in (work.k_cache, work.v_cache))
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def shape(work: Workload) -> str:
    """The workload in words."""
    batch_size, num_heads, head_dim = work.q.shape
    dtype = str(work.q.dtype).removeprefix("torch.")
    return (
        f"batch {batch_size}, context {work.num_tokens // batch_size:,}, {num_heads} query heads over "
        f"{work.k_cache.shape[2]}, d {head_dim}, block {work.k_cache.shape[1]}, {dtype}"
    )


def rung_result(rung: Any, work: Workload, bandwidth: float, time: Time | None) -> dict[str, Any]:
    """A rung's row: what was predicted and what was found, in numbers and as a page prints them."""
    nbytes = rung.nbytes(work)
    prediction = {"lesson": rung.lesson, "prediction": f"{nbytes / bandwidth * 1e6:.1f} µs"}
    return result_row(rung.name, time, nbytes, bandwidth) | prediction


def result_row(name: str, time: Time | None, nbytes: int, bandwidth: float) -> dict[str, Any]:
    """A contestant's row. `share_of_copy` counts the bytes that it asked for, also those that L2 gave."""
    share = nbytes / (time.median * 1e-6) / bandwidth if time else None
    return {
        "name": name,
        "bytes": nbytes,
        "microseconds": {"minimum": time.minimum, "median": time.median} if time else None,
        "share_of_copy": share,
        "measurement": in_words(time),
        "share": NOT_MEASURED if share is None else f"{share:.0%}",
    }


def in_words(time: Time | None) -> str:
    """As a page prints it."""
    return NOT_MEASURED if time is None else f"{time.median:.1f} µs (minimum {time.minimum:.1f})"


def goals(share: float | None, ratio: float | None) -> list[dict[str, Any]]:
    """The two goals, and whether they are met."""

    def verdict(met: bool | None) -> str:
        return NOT_MEASURED if met is None else "met" if met else "not met"

    return [
        {
            "goal": f"decode reaches {SHARE_GOAL:.0%} of the copy bandwidth",
            "reached": NOT_MEASURED if share is None else f"{share:.0%}",
            "verdict": verdict(None if share is None else share >= SHARE_GOAL),
        },
        {
            "goal": f"paged takes at most {RATIO_GOAL:.2f} times the fastest on contiguous memory",
            "reached": NOT_MEASURED if ratio is None else f"{ratio:.2f}",
            "verdict": verdict(None if ratio is None else ratio <= RATIO_GOAL),
        },
    ]


def print_predictions(work: Workload, bandwidth: float) -> None:
    """The ladder before it is measured."""
    from benchmarks.ladder import RUNGS

    console.print(f"The ladder, {shape(work)}, at {bandwidth / 1e12:.2f} TB/s")
    rows = [rung_result(rung, work, bandwidth, None) for rung in RUNGS]
    rows = [row | {"megabytes": f"{row['bytes'] / 1e6:,.0f} MB"} for row in rows]
    print_rows("Predictions", ["name", "megabytes", "prediction", "lesson"], rows)


def print_rows(title: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """A table of those columns."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
