"""`minicache simulate`: a server in simulated time, from a published workload, model and accelerator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from minicache.cli.folders import make_folder
from minicache.cli.labs import Mine, use_labs
from minicache.palette import color
from minicache.plots import save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.scheduler import Scheduler
    from minicache.simulator.costs import StepCost
    from minicache.simulator.report import ServingReport
    from minicache.simulator.workload import Workload
    from minicache.trace import TraceStep

app = typer.Typer()

WorkloadName = Literal["sharegpt", "alpaca", "azure-code", "azure-conversation"]
SchedulerName = Literal["static", "continuous", "paged", "fair", "orca-max", "orca-pow2", "orca-oracle"]
ModelName = Literal["opt-13b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "qwen3-32b"]
AcceleratorName = Literal["a100-40gb", "a100-80gb", "h100", "h200", "l4", "laptop-cpu"]
PreemptionName = Literal["recompute", "swap"]
KVCacheDType = Literal["int8", "fp8_e4m3"]

MEMORY_SHARE = 0.9
"""The part of an accelerator's memory that weights and cache may take, vLLM's default: the rest is for activations."""
HOST_BLOCKS = 1024
"""Blocks of the cache on a calibrated host, if not given."""
NUM_POINTS = 5000
"""The most requests that a plot shows one by one."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What serves: its speed, its memory, and how it is called.

    Attributes:
        name: for people.
        cost: how long a step takes.
        num_blocks: blocks of its cache.
    """

    name: str
    cost: StepCost
    num_blocks: int


@app.command()
def simulate(
    workload: Annotated[WorkloadName, typer.Option(help="The requests: lengths, and how they arrive.")] = "sharegpt",
    rate: Annotated[float | None, typer.Option(help="Requests per second; default: the workload's own.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    scheduler: Annotated[SchedulerName, typer.Option(help="The stage; orca-… reserve contiguous memory.")] = "fair",
    model: Annotated[ModelName | None, typer.Option(help="A published model; default: opt-13b.")] = None,
    accelerator: Annotated[AcceleratorName | None, typer.Option(help="What runs it; default: a100-40gb.")] = None,
    host: Annotated[
        Path | None, typer.Option(help="A file of `minicache calibrate`: MiniGPT on that machine instead.")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the cache; default: what the weights leave of the accelerator.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    kv_cache_dtype: Annotated[
        KVCacheDType | None,
        typer.Option(help="Keys and values in one byte a number; default: 16 bits, as the weights."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Batch slots: the most requests in a batch.")] = 256,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of a step; default: 8192, or the longest prompt.")
    ] = None,
    preemption: Annotated[PreemptionName, typer.Option(help="What happens to a victim's blocks.")] = "recompute",
    num_host_blocks: Annotated[
        int | None, typer.Option(help="Blocks of CPU swap space; default: as many as on the device.")
    ] = None,
    watermark: Annotated[float, typer.Option(help="The part of the blocks that an admission must leave free.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="A folder for report.json and the plots.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A file for the trace, JSON lines, a step a line.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Check the scheduler's invariants after every step.")] = False,
    mine: Mine = False,
) -> None:
    """Serve a workload in simulated time: latencies, throughput, batch and memory of a server that you do not have."""
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    with _usage_errors():
        requests = _workload(workload, rate)
        machine = _machine(model, accelerator, host, num_blocks, block_size, kv_cache_dtype)
        longest_step = max(8192, requests.max_model_len) if max_num_batched_tokens is None else max_num_batched_tokens
        if num_host_blocks is None:
            num_host_blocks = machine.num_blocks if preemption == "swap" else 0
        chosen = _scheduler(
            scheduler,
            num_blocks=machine.num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=longest_step,
            max_model_len=requests.max_model_len,
            preemption=preemption,
            num_host_blocks=num_host_blocks,
            watermark=watermark,
        )
        if out is not None:
            make_folder(out)
        report = _run(chosen, machine, requests, count, seed, trace, audit, mine, console)
        if report.num_refused == count:
            raise ValueError(f"all {count:,} requests were refused. The first: {report.refusal}")
    title = f"{count:,} × {requests.name} at {requests.rate:g}/s · {scheduler} · {machine.name}"
    console.print(_latencies(report, title))
    console.print(_totals(report))
    if report.num_refused:
        console.print(f"{report.num_refused:,} requests were refused. The first: {report.refusal}", soft_wrap=True)
    if out is not None:
        settings = {
            "workload": workload,
            "rate": requests.rate,
            "count": count,
            "seed": seed,
            "scheduler": scheduler,
            "machine": machine.name,
            "num_blocks": machine.num_blocks,
            "block_size": block_size,
            "kv_cache_dtype": kv_cache_dtype,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": longest_step,
            "preemption": preemption,
            "watermark": watermark,
        }
        for file in _save(report, settings, title, out):
            console.print(f"[bold]{file}[/]", soft_wrap=True)


# --- what was asked for ---------------------------------------------------------------------------------------------


@contextmanager
def _usage_errors() -> Iterator[None]:
    """An error that the options lead to is reported as one of usage, in one line."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _workload(name: WorkloadName, rate: float | None) -> Workload:
    from minicache.simulator import workload

    published = {
        "sharegpt": workload.SHAREGPT,
        "alpaca": workload.ALPACA,
        "azure-code": workload.AZURE_CODE,
        "azure-conversation": workload.AZURE_CONVERSATION,
    }[name]
    return published if rate is None else replace(published, rate=rate)


def _machine(
    model: ModelName | None,
    accelerator: AcceleratorName | None,
    host: Path | None,
    num_blocks: int | None,
    block_size: int,
    kv_cache_dtype: KVCacheDType | None,
) -> Machine:
    """What serves: a published model on a published accelerator, or this course's engine on a calibrated host.

    Raises:
        ValueError: both were asked for, or a quantized cache on a calibrated host; or the weights leave no room for a
            cache.
    """
    from minicache.arithmetic import cache_capacity_tokens, specs, weight_bytes
    from minicache.errors import require_count
    from minicache.simulator.costs import HostCost, RooflineCost, kv_token_bytes

    if host is not None:
        if model or accelerator:
            raise ValueError("--host is a machine and a model already: leave out --model and --accelerator")
        if kv_cache_dtype is not None:
            raise ValueError("--host was measured with a cache that is not quantized: leave out --kv-cache-dtype")
        calibrated = HostCost.load(host)
        num_blocks = HOST_BLOCKS if num_blocks is None else num_blocks
        return Machine(f"{calibrated.model} on {calibrated.machine}", calibrated, num_blocks)
    model, accelerator = model or "opt-13b", accelerator or "a100-40gb"
    transformer: specs.Transformer = getattr(specs, model.upper().replace("-", "_"))
    device: specs.Accelerator = getattr(specs, accelerator.upper().replace("-", "_"))
    if num_blocks is None:
        require_count("block_size", block_size)
        tokens = cache_capacity_tokens(
            int(device.memory_bytes * MEMORY_SHARE),
            weight_bytes(transformer.num_parameters),
            kv_token_bytes(transformer, kv_cache_dtype=kv_cache_dtype),
        )
        num_blocks = tokens // block_size
    name = f"{model} on {device.name}" + (f", {kv_cache_dtype} KV cache" if kv_cache_dtype else "")
    return Machine(name, RooflineCost(transformer, device, kv_cache_dtype=kv_cache_dtype), num_blocks)


def _scheduler(name: SchedulerName, **options: Any) -> Scheduler:
    """The scheduler by its name; Orca's get as many slots as the others have in blocks, and the limits that apply."""
    from minicache.scheduler import create_scheduler
    from minicache.scheduler.paged import require_paged_options
    from minicache.simulator.orca import OrcaScheduler

    if not name.startswith("orca-"):
        return create_scheduler(name, **options)
    require_paged_options(options["preemption"], options["num_host_blocks"], options["watermark"])
    return OrcaScheduler(
        name.removeprefix("orca-"),
        num_slots=options["num_blocks"] * options["block_size"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
    )


# --- the run --------------------------------------------------------------------------------------------------------


def _run(
    scheduler: Scheduler,
    machine: Machine,
    workload: Workload,
    count: int,
    seed: int,
    trace: Path | None,
    audit: bool,
    mine: bool,
    console: Console,
) -> ServingReport:
    """Serve all requests, with a progress bar; the trace is written as it grows."""
    from minicache.scheduler.audit import Auditor
    from minicache.simulator.serving import ServingSimulation
    from minicache.simulator.workload import stream
    from minicache.trace import to_json

    with ExitStack() as stack:
        sink: Callable[[TraceStep], object] | None = None
        if trace is not None:
            lines = stack.enter_context(trace.open("w", encoding="utf-8"))

            def sink(step: TraceStep) -> object:
                return lines.write(to_json(step) + "\n")

        columns = (TextColumn("Serving"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = bar.add_task("Serving", total=count)
        simulation = ServingSimulation(
            scheduler,
            machine.cost,
            stream(workload, count, seed),
            observers=[Auditor()] if audit else [],
            trace=sink,
            skip_quiet=not mine,  # a learner's scheduler is called at every step
        )
        return simulation.run(lambda num_done: bar.update(task, completed=num_done))


def _latencies(report: ServingReport, title: str) -> Table:
    """The latencies of the requests."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for heading in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, summary, scale in (
        ("time to first token, s", report.ttft, 1.0),
        ("time per output token, ms", report.tpot, 1e3),
        ("normalised latency, ms/token", report.normalized_latency, 1e3),
        ("end-to-end latency, s", report.latency, 1.0),
    ):
        told = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
        table.add_row(name, *[_digits(value * scale) for value in told])
    return table


def _digits(value: float) -> str:
    """Three digits, and never a power of ten: 0.0412, 41.2, 8,990."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _totals(report: ServingReport) -> Table:
    """What the server did."""
    table = Table(box=None, show_header=False)
    done = f"{report.num_finished:,} / {report.num_refused:,} / {report.num_outgrown:,}"
    throughput = f"{report.requests_per_second:.3g} requests/s, {report.tokens_per_second:,.0f} tokens/s"
    for name, value in (
        ("finished / refused / outgrown", done),
        ("throughput", throughput),
        ("batch size, mean / most", f"{report.mean_batch_size:.1f} / {report.max_batch_size}"),
        ("memory in use, mean / most", f"{report.mean_memory:.1%} / {report.max_memory:.1%}"),
        ("preemptions", f"{report.num_preemptions:,}"),
        ("tokens computed again", f"{report.num_recomputed_tokens:,}"),
        ("blocks swapped", f"{report.num_swapped_blocks:,}"),
        ("makespan", f"{report.makespan:,.1f} s in {report.num_steps:,} steps"),
    ):
        table.add_row(name, value)
    return table


# --- files ----------------------------------------------------------------------------------------------------------


def _save(report: ServingReport, settings: dict[str, Any], title: str, out: Path) -> list[Path]:
    """Write the report and its plots into `out`.

    Returns:
        The files.
    """
    files = [out / "report.json"]
    told = {"settings": settings, "report": report.to_json()}
    files[0].write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, paint in (("latency", _latency), ("distributions", _distributions), ("batch-and-memory", _over_time)):
        files.append(out / f"{name}.png")
        save_plot(partial(paint, report=report), title, files[-1])
    return files


def _latency(figure: Figure, report: ServingReport) -> None:
    """Of each request its normalised latency, against its arrival."""
    axes = figure.subplots()
    every = len(report.times) // NUM_POINTS + 1
    arrivals, latencies = list(report.times.arrival)[::every], list(report.times.normalized())[::every]
    axes.scatter(arrivals, latencies, s=6, color=color("generated"), linewidths=0)
    axes.set(xlabel="arrival in s", ylabel="latency per output token in s", ylim=(0, None))


def _distributions(figure: Figure, report: ServingReport) -> None:
    """The share of the requests that waited no longer, for the first token and for each one after it."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, values, label in (
        (left, sorted(report.times.first_token), "time to first token in s"),
        (right, sorted(1e3 * value for value in report.times.per_output_token()), "time per output token in ms"),
    ):
        every = len(values) // NUM_POINTS + 1
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(values[::every] + values[-1:], shares[::every] + shares[-1:], color=color("generated"), where="post")
        axes.set(xlabel=label, ylim=(0, 1.02))
    left.set_ylabel("share of the requests")


def _over_time(figure: Figure, report: ServingReport) -> None:
    """The batch, the waiting queue, and the memory in use."""
    above, below = figure.subplots(2, 1, sharex=True)
    series = report.series
    above.plot(series.time, series.num_running, color=color("generated"), label="in the batch")
    above.plot(series.time, series.num_waiting, color=color("end"), label="waiting")
    above.set(ylabel="requests", ylim=(0, None))
    above.legend(loc="upper right")
    below.plot(series.time, [100 * share for share in series.memory], color=color("shared"))
    below.set(xlabel="time in s", ylabel="memory in use in %", ylim=(0, 102))
