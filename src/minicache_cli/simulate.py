"""`minicache simulate`: a server in simulated time, from a published workload, model and accelerator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from minicache.engine.options import EngineOptions, KVCacheDType
from minicache.palette import color
from minicache.plots import save_plot
from minicache_cli.folders import make_folder
from minicache_cli.labs import Mine, use_labs
from minicache_cli.options import engine_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.scheduler import Scheduler
    from minicache.simulator.fleet import FleetReport
    from minicache.simulator.machine import Machine
    from minicache.simulator.report import RequestTimes, ServingReport
    from minicache.simulator.traffic import Traffic
    from minicache.trace import TraceStep

app = typer.Typer()

WorkloadName = Literal["sharegpt", "alpaca", "azure-code", "azure-conversation", "chats", "system-prompt"]
ModelName = Literal["opt-13b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "qwen3-32b"]
AcceleratorName = Literal["a100-40gb", "a100-80gb", "h100", "h200", "l4", "laptop-cpu"]
PolicyName = Literal["round_robin", "power_of_two", "prefix_affinity"]

HOST_BLOCKS = 1024
"""Blocks of the cache on a calibrated host, if not given."""
NUM_POINTS = 5000
"""The most requests that a plot shows one by one."""


@app.command()
@engine_options(EngineOptions, "simulate")
def simulate(
    workload: Annotated[
        WorkloadName,
        typer.Option(
            metavar="WORKLOAD",
            help="Lengths and arrivals: sharegpt, alpaca, azure-code or azure-conversation; or prompts with "
            "tokens: chats or system-prompt.",
        ),
    ] = "sharegpt",
    rate: Annotated[float | None, typer.Option(help="Requests per second; default: the workload's own.")] = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of requests.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    scheduler: Annotated[
        str,
        typer.Option(
            metavar="STAGE",
            help="Scheduler: static, continuous, paged, fair or chunked; or with contiguous memory: "
            "orca-max, orca-pow2 or orca-oracle.",
        ),
    ] = "fair",
    model: Annotated[
        ModelName | None,
        typer.Option(
            metavar="MODEL",
            help="A published model: opt-13b, llama-3-8b, llama-3-70b, qwen3-8b or qwen3-32b; default: opt-13b.",
        ),
    ] = None,
    accelerator: Annotated[
        AcceleratorName | None,
        typer.Option(
            metavar="NAME",
            help="Accelerator: a100-40gb, a100-80gb, h100, h200, l4 or laptop-cpu; default: a100-40gb.",
        ),
    ] = None,
    host: Annotated[
        Path | None,
        typer.Option(help="File written by `minicache calibrate`: simulate MiniGPT on that machine instead."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Simulate a fleet of N such servers behind a router.")
    ] = None,
    policy: Annotated[
        PolicyName | None,
        typer.Option(metavar="POLICY", help="Router: round_robin, power_of_two or prefix_affinity (the default)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and the plots.")] = None,
    trace: Annotated[Path | None, typer.Option(help="File for the trace, JSON lines, one per step.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Check the scheduler's invariants after every step.")] = False,
    mine: Mine = False,
    **engine: Any,
) -> None:
    """Serve a workload in simulated time: latencies, throughput, batch and memory use of a simulated server."""
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    from minicache.scheduler import has_option  # a learner's file may take its place until now

    with _usage_errors():
        traffic = _traffic(workload, rate, count, seed)
        kv_cache_dtype = engine.pop("kv_cache_dtype")
        machine = _machine(model, accelerator, host, engine["num_blocks"], engine["block_size"], kv_cache_dtype)
        engine["num_blocks"], engine["max_model_len"] = machine.num_blocks, traffic.max_model_len
        if engine["max_num_batched_tokens"] is None:
            engine["max_num_batched_tokens"] = max(8192, traffic.max_model_len)
        if engine["num_host_blocks"] is None:
            engine["num_host_blocks"] = machine.num_blocks if engine["preemption"] == "swap" else 0
        engine["prefix_caching"] &= traffic.has_tokens and has_option(scheduler, "prefix_caching")
        make_scheduler = partial(_scheduler, scheduler, **engine)
        _require_one_kind(replicas, policy, trace, audit)
        if out is not None:
            make_folder(out)
        report: ServingReport | FleetReport
        if replicas is None:
            report = _run(make_scheduler(), machine, traffic, trace, audit, mine, console)
            refusal = f". The first: {report.refusal}"
        else:
            policy = policy or "prefix_affinity"
            report = _run_fleet(make_scheduler, machine, traffic, replicas, policy, console)
            refusal = ": they were too large for a replica"
        if report.num_refused == count:
            raise ValueError(f"all {count:,} requests were refused{refusal}")
    fleet = "" if replicas is None else f" · {replicas} replicas, {policy}"
    title = f"{count:,} × {traffic.title} at {traffic.rate:g}/s · {scheduler} · {machine.name}{fleet}"
    console.print(_latencies(report, title))
    console.print(_totals(report))
    if report.num_refused:
        console.print(f"{report.num_refused:,} requests were refused{refusal}", soft_wrap=True)
    if out is not None:
        settings = {
            "workload": workload,
            "rate": traffic.rate,
            "count": count,
            "seed": seed,
            "scheduler": scheduler,
            "machine": machine.name,
            "kv_cache_dtype": kv_cache_dtype,
            **engine,
            "replicas": replicas,
            "policy": policy,
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


def _traffic(name: WorkloadName, rate: float | None, count: int, seed: int) -> Traffic:
    from minicache.simulator.traffic import Traffic, usual_rate

    return Traffic(name, usual_rate(name) if rate is None else rate, count, seed)


def _require_one_kind(replicas: int | None, policy: str | None, trace: Path | None, audit: bool) -> None:
    """Refuse options of a fleet for one server, and of one server for a fleet.

    Raises:
        ValueError: there is one.
    """
    if replicas is None and policy is not None:
        raise ValueError("--policy needs --replicas")
    if replicas is not None and (trace is not None or audit):
        raise ValueError("--trace and --audit need a single server: leave out --replicas")


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
    from minicache.simulator.costs import HostCost
    from minicache.simulator.machine import Machine, published_machine

    if host is None:
        return published_machine(
            model or "opt-13b",
            accelerator or "a100-40gb",
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
        )
    if model or accelerator:
        raise ValueError("--host sets machine and model: leave out --model and --accelerator")
    if kv_cache_dtype is not None:
        raise ValueError("--host was measured without quantization: leave out --kv-cache-dtype")
    calibrated = HostCost.load(host)
    num_blocks = HOST_BLOCKS if num_blocks is None else num_blocks
    return Machine(f"{calibrated.model} on {calibrated.machine}", calibrated, num_blocks)


def _scheduler(name: str, **options: Any) -> Scheduler:
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
    traffic: Traffic,
    trace: Path | None,
    audit: bool,
    mine: bool,
    console: Console,
) -> ServingReport:
    """Serve all requests, with a progress bar; the trace is written as it grows."""
    from minicache.scheduler.audit import Auditor
    from minicache.simulator.serving import ServingSimulation
    from minicache.trace import to_json

    with ExitStack() as stack:
        sink: Callable[[TraceStep], object] | None = None
        if trace is not None:
            lines = stack.enter_context(trace.open("w", encoding="utf-8"))

            def sink(step: TraceStep) -> object:
                return lines.write(to_json(step) + "\n")

        tell = stack.enter_context(_progress(console, traffic.count))
        simulation = ServingSimulation(
            scheduler,
            machine.cost,
            traffic,
            observers=[Auditor()] if audit else [],
            trace=sink,
            skip_quiet=not mine,  # a learner's scheduler is called at every step
        )
        return simulation.run(tell)


def _run_fleet(
    make_scheduler: Callable[[], Scheduler],
    machine: Machine,
    traffic: Traffic,
    num_replicas: int,
    policy: PolicyName,
    console: Console,
) -> FleetReport:
    """Serve all requests with a fleet, with a progress bar."""
    from minicache.fleet import create_router
    from minicache.simulator.fleet import FleetSimulation

    router = create_router(policy, seed=traffic.seed, capacity_blocks=machine.num_blocks)
    simulation = FleetSimulation(router, make_scheduler, machine.cost, traffic, num_replicas=num_replicas)
    with _progress(console, traffic.count) as tell:
        return simulation.run(tell)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar, and what moves it."""
    columns = (TextColumn("Serving"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Serving", total=total)
        yield lambda num_done: bar.update(task, completed=num_done)


def _latencies(report: ServingReport | FleetReport, title: str) -> Table:
    """The latencies of the requests."""
    from minicache.simulator.report import ServingReport

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for heading in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = [
        ("time to first token, s", report.ttft, 1.0),
        ("time per output token, ms", report.tpot, 1e3),
        ("end-to-end latency, s", report.latency, 1.0),
    ]
    if isinstance(report, ServingReport):
        rows.insert(2, ("normalised latency, ms/token", report.normalized_latency, 1e3))
    for name, summary, scale in rows:
        told = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
        table.add_row(name, *[_digits(value * scale) for value in told])
    return table


def _digits(value: float) -> str:
    """Three digits, and never a power of ten: 0.0412, 41.2, 8,990."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _totals(report: ServingReport | FleetReport) -> Table:
    """What the server, or the fleet, did."""
    from minicache.simulator.report import ServingReport

    table = Table(box=None, show_header=False)
    done = f"{report.num_finished:,} / {report.num_refused:,} / {report.num_outgrown:,}"
    rows = _of_server(report) if isinstance(report, ServingReport) else _of_fleet(report)
    for name, value in (("finished / refused / outgrown", done), *rows):
        table.add_row(name, value)
    return table


def _of_server(report: ServingReport) -> tuple[tuple[str, str], ...]:
    throughput = f"{report.requests_per_second:.3g} requests/s, {report.tokens_per_second:,.0f} tokens/s"
    return (
        ("throughput", throughput),
        ("batch size, mean / max", f"{report.mean_batch_size:.1f} / {report.max_batch_size}"),
        ("memory in use, mean / max", f"{report.mean_memory:.1%} / {report.max_memory:.1%}"),
        ("preemptions", f"{report.num_preemptions:,}"),
        ("tokens recomputed", f"{report.num_recomputed_tokens:,}"),
        ("blocks swapped", f"{report.num_swapped_blocks:,}"),
        ("makespan", f"{report.makespan:,.1f} s in {report.num_steps:,} steps"),
    )


def _of_fleet(report: FleetReport) -> tuple[tuple[str, str], ...]:
    seconds = report.makespan or 1.0
    sent = sorted(each.num_sent for each in report.replicas)
    busy = sum(each.busy_seconds for each in report.replicas) / (report.replica_seconds or 1.0)
    rates = f"{report.num_finished / seconds:.3g} requests/s, {report.num_output_tokens / seconds:,.0f} tokens/s"
    return (
        ("throughput", rates),
        ("prompt tokens found in a prefix cache", f"{report.hit_rate:.1%}"),
        ("requests per replica, min / max", f"{sent[0]:,} / {sent[-1]:,}"),
        ("replicas busy, mean", f"{busy:.1%}"),
        ("makespan", f"{report.makespan:,.1f} s, {report.replica_seconds / 3600:.3g} replica-hours"),
    )


# --- files ----------------------------------------------------------------------------------------------------------


def _save(report: ServingReport | FleetReport, settings: dict[str, Any], title: str, out: Path) -> list[Path]:
    """Write the report and its plots into `out`.

    Returns:
        The files.
    """
    from minicache.simulator.report import ServingReport

    files = [out / "report.json"]
    told = {"settings": settings, "report": report.to_json()}
    files[0].write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    plots = {
        "latency": partial(_latency, times=report.times),
        "distributions": partial(_distributions, times=report.times),
    }
    if isinstance(report, ServingReport):
        plots["batch-and-memory"] = partial(_over_time, report=report)
    else:
        plots["replicas"] = partial(_by_replica, report=report)
    for name, paint in plots.items():
        files.append(out / f"{name}.png")
        save_plot(paint, title, files[-1])
    return files


def _latency(figure: Figure, times: RequestTimes) -> None:
    """Of each request its normalised latency, against its arrival."""
    axes = figure.subplots()
    every = len(times) // NUM_POINTS + 1
    arrivals, latencies = list(times.arrival)[::every], list(times.normalized())[::every]
    axes.scatter(arrivals, latencies, s=6, color=color("generated"), linewidths=0)
    axes.set(xlabel="arrival in s", ylabel="latency per output token in s", ylim=(0, None))


def _distributions(figure: Figure, times: RequestTimes) -> None:
    """The fraction of requests that waited no longer, for the first token and for each one after it."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, values, label in (
        (left, sorted(times.first_token), "time to first token in s"),
        (right, sorted(1e3 * value for value in times.per_output_token()), "time per output token in ms"),
    ):
        every = len(values) // NUM_POINTS + 1
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(values[::every] + values[-1:], shares[::every] + shares[-1:], color=color("generated"), where="post")
        axes.set(xlabel=label, ylim=(0, 1.02))
    left.set_ylabel("fraction of requests")


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


def _by_replica(figure: Figure, report: FleetReport) -> None:
    """The requests that the fleet has, and what each replica was sent."""
    above, below = figure.subplots(2, 1)
    above.plot(report.series.time, report.series.num_unfinished, color=color("generated"))
    above.set(xlabel="time in s", ylabel="unfinished requests", ylim=(0, None))
    sent = [each.num_sent for each in report.replicas]
    below.bar(range(len(sent)), sent, color=color("shared"))
    below.set(xlabel="replica", ylabel="requests sent to it", xlim=(-0.6, len(sent) - 0.4))
    below.xaxis.get_major_locator().set_params(integer=True)
