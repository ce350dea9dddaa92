"""`minicache simulate`: a server in simulated time, from a published workload, model and accelerator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from gettext import gettext as _
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from minicache.engine.options import EngineOptions, KVCacheDType, TierPolicy
from minicache.palette import color
from minicache.plots import save_plot
from minicache_cli.folders import make_folder
from minicache_cli.labs import Mine, use_labs
from minicache_cli.options import asked, usage_errors, with_options
from minicache_cli.show import facts, latencies, progress, save_json, show_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.fleet import Router
    from minicache.scheduler import Scheduler
    from minicache.simulator.fleet import FleetReport
    from minicache.simulator.machine import Machine
    from minicache.simulator.report import RequestTimes, ServingReport
    from minicache.simulator.tiers import SimulatedTiers
    from minicache.simulator.traffic import Traffic

app = typer.Typer()

WorkloadName = Literal["sharegpt", "alpaca", "azure-code", "azure-conversation", "chats", "system-prompt"]
ModelName = Literal["opt-13b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "qwen3-32b"]
AcceleratorName = Literal["a100-40gb", "a100-80gb", "h100", "h200", "l4", "laptop-cpu"]
PolicyName = Literal["round_robin", "power_of_two", "prefix_affinity"]

HOST_BLOCKS = 1024
"""Blocks of the cache on a calibrated host, if not given."""
NUM_POINTS = 5000
"""The most requests that a plot shows one by one."""


@dataclass(frozen=True)
class Run:
    """What is simulated, and what is kept of it."""

    workload: WorkloadName = asked(
        "sharegpt",
        "Lengths and arrivals: sharegpt, alpaca, azure-code or azure-conversation; or prompts with tokens: chats or "
        "system-prompt.",
        "WORKLOAD",
    )
    rate: float | None = asked(None, "Requests per second; default: the workload's own.")
    count: int = asked(1000, "Number of requests.", "N", min=1)
    seed: int = asked(0, "The same seed gives the same requests.")
    scheduler: str = asked(
        "fair",
        "Scheduler: static, continuous, paged, fair or chunked; or with contiguous memory: orca-max, orca-pow2 or "
        "orca-oracle.",
        "STAGE",
    )
    model: ModelName | None = asked(
        None, "A published model: opt-13b, llama-3-8b, llama-3-70b, qwen3-8b or qwen3-32b; default: opt-13b.", "MODEL"
    )
    accelerator: AcceleratorName | None = asked(
        None, "Accelerator: a100-40gb, a100-80gb, h100, h200, l4 or laptop-cpu; default: a100-40gb.", "NAME"
    )
    host: Path | None = asked(None, "File written by `minicache calibrate`: simulate MiniGPT on that machine instead.")
    replicas: int | None = asked(None, "Simulate a fleet of N such servers behind a router.", "N", min=1)
    policy: PolicyName | None = asked(
        None, "Router: round_robin, power_of_two or prefix_affinity (the default).", "POLICY"
    )
    out: Path | None = asked(None, "Folder for report.json and the plots.")
    trace: Path | None = asked(None, "File for the trace, JSON lines, one per step.")
    audit: bool = asked(False, "Check the scheduler's invariants after every step.")


@app.command()
@with_options(EngineOptions, "simulate")
def simulate(run: Run, mine: Mine = False, **engine: Any) -> None:
    """Serve a workload in simulated time: latencies, throughput, batch and memory use of a simulated server."""
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    from minicache.fleet import create_router
    from minicache.scheduler import has_option  # a learner's file may take its place until now
    from minicache.simulator.tiers import simulated_tiers
    from minicache.simulator.traffic import Traffic, usual_rate

    with usage_errors():
        rate = usual_rate(run.workload) if run.rate is None else run.rate
        traffic = Traffic(run.workload, rate, run.count, run.seed)
        kv_cache_dtype = engine.pop("kv_cache_dtype")
        kv_tiers, tier_policy = engine.pop("kv_tiers") or [], engine.pop("kv_tier_policy")
        machine = _machine(run, engine["num_blocks"], engine["block_size"], kv_cache_dtype)
        engine["num_blocks"], engine["max_model_len"] = machine.num_blocks, traffic.max_model_len
        if engine["max_num_batched_tokens"] is None:
            engine["max_num_batched_tokens"] = max(8192, traffic.max_model_len)
        if engine["num_host_blocks"] is None:
            engine["num_host_blocks"] = machine.num_blocks if engine["preemption"] == "swap" else 0
        engine["prefix_caching"] &= traffic.has_tokens and has_option(run.scheduler, "prefix_caching")
        if kv_tiers and not traffic.has_tokens:
            raise ValueError("--kv-tier needs prompts with tokens: take --workload chats or system-prompt")
        make_tiers = simulated_tiers(kv_tiers, machine.token_nbytes * engine["block_size"]) if kv_tiers else None
        make_scheduler = partial(_scheduler, run.scheduler, make_tiers, tier_policy, **engine)
        _require_one_kind(run)
        if run.out is not None:
            make_folder(run.out)
        report: ServingReport | FleetReport
        if run.replicas is None:
            policy = None
            report = _serve(run, make_scheduler(), machine, traffic, mine, console)
            refusal = f". The first: {report.refusal}"
        else:
            policy = run.policy or "prefix_affinity"
            own = 0 if make_tiers is None else sum(each.max_blocks for each in make_tiers().tiers if each.name == "cpu")
            router = create_router(policy, seed=run.seed, capacity_blocks=machine.num_blocks + own)
            report = _serve_by_fleet(run.replicas, router, make_scheduler, machine, traffic, console)
            refusal = ": they were too large for a replica"
        if report.num_refused == run.count:
            raise ValueError(f"all {run.count:,} requests were refused{refusal}")
    fleet = "" if policy is None else f" · {run.replicas} replicas, {policy}"
    title = f"{run.count:,} × {traffic.title} at {rate:g}/s · {run.scheduler} · {machine.name}{fleet}"
    _show(report, title, console)
    if report.num_refused:
        console.print(_("{count:,} requests were refused").format(count=report.num_refused) + refusal, soft_wrap=True)
    if run.out is not None:
        settings = {name: getattr(run, name) for name in ("workload", "count", "seed", "scheduler", "replicas")}
        settings |= {"rate": rate, "machine": machine.name, "kv_cache_dtype": kv_cache_dtype, "policy": policy}
        settings |= {"kv_tiers": kv_tiers, "kv_tier_policy": tier_policy}
        file = run.out / "report.json"
        save_json({"settings": settings | engine, "report": report.to_json()}, file)
        show_files(console, (file, *_save_plots(report, title, run.out)))


# --- what was asked for ---------------------------------------------------------------------------------------------


def _require_one_kind(run: Run) -> None:
    """Refuse options of a fleet for one server, and of one server for a fleet.

    Raises:
        ValueError: there is one.
    """
    if run.replicas is None and run.policy is not None:
        raise ValueError("--policy needs --replicas")
    if run.replicas is not None and (run.trace is not None or run.audit):
        raise ValueError("--trace and --audit need a single server: leave out --replicas")


def _machine(run: Run, num_blocks: int | None, block_size: int, kv_cache_dtype: KVCacheDType | None) -> Machine:
    """What serves: a published model on a published accelerator, or this course's engine on a calibrated host.

    Raises:
        ValueError: both were asked for, or a quantized cache on a calibrated host; or the weights leave no room for a
            cache.
    """
    from minicache.arithmetic.specs import MINIGPT
    from minicache.simulator.costs import HostCost, kv_token_bytes
    from minicache.simulator.machine import Machine, published_machine

    if run.host is None:
        return published_machine(
            run.model or "opt-13b",
            run.accelerator or "a100-40gb",
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
        )
    if run.model or run.accelerator:
        raise ValueError("--host sets machine and model: leave out --model and --accelerator")
    if kv_cache_dtype is not None:
        raise ValueError("--host was measured without quantization: leave out --kv-cache-dtype")
    calibrated = HostCost.load(run.host)
    num_blocks = HOST_BLOCKS if num_blocks is None else num_blocks
    token_nbytes = kv_token_bytes(MINIGPT, "float32")
    return Machine(f"{calibrated.model} on {calibrated.machine}", calibrated, num_blocks, token_nbytes)


def _scheduler(
    name: str, make_tiers: Callable[[], SimulatedTiers] | None, tier_policy: TierPolicy, **options: Any
) -> Scheduler:
    """The scheduler by its name; Orca's get as many slots as the others have in blocks, and the limits that apply.

    Raises:
        ValueError: it cannot have such options, or tiers.
    """
    from minicache.scheduler import create_scheduler
    from minicache.scheduler.paged import require_paged_options
    from minicache.simulator.orca import OrcaScheduler

    if not name.startswith("orca-"):
        tiers = None if make_tiers is None else make_tiers()
        return create_scheduler(name, tiers=tiers, tier_policy=tier_policy, **options)
    if make_tiers is not None:
        raise ValueError(f'--kv-tier: "{name}" has no blocks to keep; take --scheduler fair or chunked')
    require_paged_options(options["preemption"], options["num_host_blocks"], options["watermark"])
    limits = {limit: options[limit] for limit in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    num_slots = options["num_blocks"] * options["block_size"]
    return OrcaScheduler(name.removeprefix("orca-"), num_slots=num_slots, **limits)


# --- the run --------------------------------------------------------------------------------------------------------


def _serve(
    run: Run, scheduler: Scheduler, machine: Machine, traffic: Traffic, mine: bool, console: Console
) -> ServingReport:
    """Serve all requests, with a progress bar; the trace is written as it grows."""
    from minicache.scheduler.audit import Auditor
    from minicache.scheduler.audit_sharing import SharingAuditor
    from minicache.simulator.serving import ServingSimulation
    from minicache.trace import to_json

    auditor = SharingAuditor if scheduler.prefix_caching else Auditor
    with nullcontext() if run.trace is None else run.trace.open("w", encoding="utf-8") as lines:
        simulation = ServingSimulation(
            scheduler,
            machine.cost,
            traffic,
            observers=[auditor()] if run.audit else [],
            trace=None if lines is None else lambda step: lines.write(to_json(step) + "\n"),
            skip_quiet=not mine,  # a learner's scheduler is called at every step
        )
        with progress(console, _("Serving"), traffic.count) as tell:
            return simulation.run(tell)


def _serve_by_fleet(
    num_replicas: int,
    router: Router,
    make_scheduler: Callable[[], Scheduler],
    machine: Machine,
    traffic: Traffic,
    console: Console,
) -> FleetReport:
    """Serve all requests with a fleet, with a progress bar."""
    from minicache.simulator.fleet import FleetSimulation

    simulation = FleetSimulation(router, make_scheduler, machine.cost, traffic, num_replicas=num_replicas)
    with progress(console, _("Serving"), traffic.count) as tell:
        return simulation.run(tell)


# --- what came of it ------------------------------------------------------------------------------------------------


def _show(report: ServingReport | FleetReport, title: str, console: Console) -> None:
    """The latencies of the requests, and what the server, or the fleet, did."""
    from minicache.simulator.report import ServingReport

    felt = [
        (_("time to first token, s"), report.ttft, 1.0),
        (_("time per output token, ms"), report.tpot, 1e3),
        (_("end-to-end latency, s"), report.latency, 1.0),
    ]
    done = f"{report.num_finished:,} / {report.num_refused:,} / {report.num_outgrown:,}"
    computed = f"{report.num_computed_tokens:,}"
    loaded = " · ".join(f"{name} {number:,}" for name, number in report.tier_hit_tokens.items())
    rates = _("{requests:.3g} requests/s, {tokens:,.0f} tokens/s").format(
        requests=report.requests_per_second, tokens=report.tokens_per_second
    )
    rows = [(_("finished / refused / outgrown"), done), (_("throughput"), rates)]
    if isinstance(report, ServingReport):
        felt.insert(2, (_("normalised latency, ms/token"), report.normalized_latency, 1e3))
        rows += [
            (_("batch size, mean / max"), f"{report.mean_batch_size:.1f} / {report.max_batch_size}"),
            (_("memory in use, mean / max"), f"{report.mean_memory:.1%} / {report.max_memory:.1%}"),
            (_("preemptions"), f"{report.num_preemptions:,}"),
            (_("tokens computed / recomputed"), f"{computed} / {report.num_recomputed_tokens:,}"),
            (_("blocks swapped"), f"{report.num_swapped_blocks:,}"),
            (_("makespan"), _("{time:,.1f} s in {steps:,} steps").format(time=report.makespan, steps=report.num_steps)),
        ]
    else:
        sent = sorted(each.num_sent for each in report.replicas)
        busy = sum(each.busy_seconds for each in report.replicas) / (report.replica_seconds or 1.0)
        rows += [
            (_("prompt tokens found in a prefix cache"), f"{report.hit_rate:.1%}"),
            (_("tokens computed"), computed),
            (_("requests per replica, min / max"), f"{sent[0]:,} / {sent[-1]:,}"),
            (_("replicas busy, mean"), f"{busy:.1%}"),
            (
                _("makespan"),
                _("{time:,.1f} s, {hours:.3g} replica-hours").format(
                    time=report.makespan, hours=report.replica_seconds / 3600
                ),
            ),
        ]
    if loaded:
        rows.append((_("tokens loaded from tiers"), loaded))
    console.print(latencies(title, felt))
    console.print(facts(rows))


def _save_plots(report: ServingReport | FleetReport, title: str, out: Path) -> list[Path]:
    """Draw the report into `out`. The files."""
    from minicache.simulator.report import ServingReport

    plots: dict[str, Callable[[Figure], None]] = {
        "latency": partial(_latency, times=report.times),
        "distributions": partial(_distributions, times=report.times),
    }
    if isinstance(report, ServingReport):
        plots["batch-and-memory"] = partial(_over_time, report=report)
    else:
        plots["replicas"] = partial(_by_replica, report=report)
    for name, paint in plots.items():
        save_plot(paint, title, out / f"{name}.png")
    return [out / f"{name}.png" for name in plots]


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
