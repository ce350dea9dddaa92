"""`minicache bench serve`: a load for any server that speaks OpenAI's API, and what its users felt."""

from __future__ import annotations

import asyncio
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from minicache import __version__
from minicache.engine.options import ReplicaOptions
from minicache_cli.folders import make_folder
from minicache_cli.help import Group
from minicache_cli.options import asked, usage_errors, with_options
from minicache_cli.show import REPORT, digits, facts, figures, latencies, machine, save_json, show_files
from minicache_cli.simulate import WorkloadName

if TYPE_CHECKING:
    from minicache.scheduler import Scheduler
    from minicache.serving.load import LoadReport, LoadRun
    from minicache.simulator.report import ServingReport
    from minicache.simulator.workload import Arrival

app = typer.Typer(cls=Group, no_args_is_help=True)

NUM_PROMPT_TOKENS = 24
NUM_OUTPUT_TOKENS = 64
REFRESH_SECONDS = 0.5
"""Between two looks at the progress: drawing it takes a millisecond in which no token is read."""
MOST_ERRORS = 5
"""Kinds of errors that are shown; the JSON has all."""
FILES_BESIDE = 64
"""Open files of the process besides its connections."""
UNCUT = 10**9
"""Tokens: longer than any request."""

PREDICTION = "Prediction: how the server was started"
"""The heading in --help of the options that only --predict looks at: those of `minicache serve`."""
OF_THE_SERVER = ("scheduler", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")


@dataclass(frozen=True)
class Wanted:
    """What the server is sent, and what is kept of its answers."""

    url: str = asked("http://127.0.0.1:8000", "URL of the server.")
    model: str | None = asked(None, "Model name; default: the first in /v1/models.")
    num_requests: int = asked(100, "Requests.", min=1)
    rate: float | None = asked(None, "Requests per second, Poisson; inf: all at once, the default without a workload.")
    seed: int = asked(0, "The same seed makes the same load.")
    workload: WorkloadName | None = asked(
        None,
        "Lengths and bursts of a published workload, scaled down to the model's context: sharegpt, alpaca, azure-code "
        "or azure-conversation.",
        "WORKLOAD",
    )
    num_prompt_tokens: int | None = asked(
        None, f"Tokens per prompt; default: {NUM_PROMPT_TOKENS}. Not with a workload.", min=1
    )
    num_output_tokens: int | None = asked(
        None, f"Tokens per answer; default: {NUM_OUTPUT_TOKENS}. Not with a workload.", min=1
    )
    num_shared_tokens: int = asked(
        0, "Length of a prefix that all prompts share, for a server with a prefix cache.", min=0
    )
    vocab_size: int | None = asked(
        None, "Send random token ids below this; default: random words of MiniGPT's vocabulary, as text.", min=2
    )
    max_model_len: int | None = asked(None, "Maximum tokens of a request; default: from /v1/models.", min=2)
    api_key: str | None = asked(None, "API key, sent as a bearer token.", envvar="OPENAI_API_KEY")
    timeout: float = asked(600.0, "Timeout of a request in seconds.")
    max_in_flight: int | None = asked(None, "Maximum concurrent requests; default: no limit (open loop).", min=1)
    out: Path | None = asked(None, "Folder for report.json and the plots.")
    json: bool = asked(False, "Print the report as JSON instead of tables.")
    predict: bool = asked(False, "Compare with a simulation of the same load, for `minicache serve` with MiniGPT.")
    calibration: Path = asked(Path("out/calibration.json"), "File written by `minicache calibrate`.", panel=PREDICTION)


@app.callback()
def bench() -> None:
    """Put a server under load."""


@app.command()
@with_options(ReplicaOptions, "serve", OF_THE_SERVER, PREDICTION)
def serve(wanted: Wanted, **server: Any) -> None:
    """Send requests in an open loop, and report latencies and throughput.

    Each request streams its answer from POST /v1/completions, on a separate
    connection, with temperature 0 and ignore_eos. Latencies are measured
    from when it was sent; the delay of sending is reported too. Ctrl-C ends
    the run and reports the answers so far.
    """
    from minicache.serving.load import Endpoint, LoadReport, LoadRun, fetch_model, make_requests, predict, reach
    from minicache.simulator.costs import HostCost

    console = Console(highlight=False, stderr=wanted.json)
    with usage_errors():
        endpoint = Endpoint.parse(wanted.url, wanted.api_key)
        if wanted.workload is not None and (wanted.num_prompt_tokens or wanted.num_output_tokens):
            raise ValueError("a workload has its own lengths: leave out --num-prompt-tokens and --num-output-tokens")
        cost = HostCost.load(wanted.calibration) if wanted.predict else None
        if wanted.out is not None:
            make_folder(wanted.out)
    endpoint = asyncio.run(reach(endpoint))
    model, longest, server_says = wanted.model, wanted.max_model_len, {}
    if model is None or (longest is None and (wanted.workload is not None or wanted.predict)):
        first = asyncio.run(fetch_model(endpoint))
        model, longest = model or first.name, longest or first.max_model_len
        server_says = {"version": first.version, "lab_files": first.lab_files}
    with usage_errors():
        load = _fixed(wanted) if wanted.workload is None else _published(wanted, wanted.workload, longest)
        requests = make_requests(
            load.arrivals,
            model=model,
            vocab_size=wanted.vocab_size,
            num_shared=wanted.num_shared_tokens,
            seed=wanted.seed,
        )
        scheduler = None if cost is None else _scheduler(max_model_len=longest, **server)
        run = LoadRun(endpoint, requests, timeout=wanted.timeout, max_in_flight=wanted.max_in_flight)
    was_stopped = _run(run, wanted.num_requests, console)
    report = LoadReport.of(run, wanted.num_requests)
    report.notes.extend(load.notes)
    predicted = None
    if was_stopped:
        report.notes.append("The run was stopped: all numbers lack the requests that would have taken longest.")
    elif cost is not None and scheduler is not None:
        predicted = predict(requests, scheduler, cost)
        report.notes.extend(_differences(report, predicted, wanted.max_in_flight))
    title = f"{wanted.num_requests:,} × {load.name} · {model} · {wanted.url}"
    settings = {"url": wanted.url, "model": model, "load": load.name, "seed": wanted.seed}
    here = {"version": __version__, "machine": machine(), "cores": os.cpu_count()}
    found = _as_json(report, predicted, settings | {"server": server_says, "client": here})
    if wanted.json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _show(report, predicted, title, console)
    if wanted.out is not None:
        from minicache.serving.load.plots import save_plots

        file = wanted.out / "report.json"
        save_json(found, file)
        show_files(console, (file, *save_plots(report, predicted, title, wanted.out)))
    if not report.num_ok:
        raise typer.Exit(1)


# --- the load -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Who comes when.

    Attributes:
        name: for people: lengths and rate.
        arrivals: in the order of their times.
        notes: how they differ from what was asked for.
    """

    name: str
    arrivals: list[Arrival]
    notes: list[str]


def _fixed(wanted: Wanted) -> Load:
    """Requests of one length; a prompt that is not asked for is as long as the default behind what is shared."""
    from minicache.serving.load import fixed_arrivals

    rate = math.inf if wanted.rate is None else wanted.rate
    num_prompt = wanted.num_prompt_tokens or wanted.num_shared_tokens + NUM_PROMPT_TOKENS
    num_output = wanted.num_output_tokens or NUM_OUTPUT_TOKENS
    arrivals = fixed_arrivals(wanted.num_requests, rate, num_prompt, num_output, wanted.seed)
    return Load(f"{num_prompt} + {num_output} tokens {_pace(rate)}", arrivals, [])


def _published(wanted: Wanted, name: WorkloadName, max_model_len: int | None) -> Load:
    """Requests of a published workload, made to fit the model; what had to be cut is noted."""
    from minicache.serving.load import fit_workload, workload_arrivals
    from minicache.simulator import workload

    rate, num_shared = wanted.rate, wanted.num_shared_tokens
    if max_model_len is None:
        raise ValueError("the server does not report its model's context length: set --max-model-len")
    if num_shared + 2 > max_model_len:
        raise ValueError(f"{num_shared} shared tokens do not fit into a context of {max_model_len}")
    published: workload.Workload = getattr(workload, name.upper().replace("-", "_"))
    room = max_model_len - num_shared
    fitting = fit_workload(published, room)
    limit = fitting.max_model_len + num_shared
    notes = []
    if fitting is not published:
        notes.append(
            f"{published.name} is for {published.max_model_len:,} tokens: all lengths are multiplied by "
            f"{room / published.max_model_len:.3g}, to fit {room:,}."
        )
    arrivals, uncut = (
        workload_arrivals(replace(fitting, max_model_len=most), wanted.num_requests, rate, wanted.seed, num_shared)
        for most in (limit, UNCUT)
    )
    if num_cut := sum(cut != whole for cut, whole in zip(arrivals, uncut, strict=True)):
        notes.append(f"{num_cut:,} requests were cut to {limit:,} tokens.")
    return Load(f"{published.name} {_pace(published.rate if rate is None else rate)}", arrivals, notes)


def _pace(rate: float) -> str:
    return "at once" if rate == math.inf else f"at {rate:g}/s"


def _scheduler(*, max_model_len: int | None, **options: Any) -> Scheduler:
    """The server's scheduler, with as many blocks as `minicache serve` gives MiniGPT by default."""
    from minicache.scheduler import create_scheduler, has_option

    options["prefix_caching"] &= has_option(options["scheduler"], "prefix_caching")
    if options["num_blocks"] is None:
        from minicache.engine.kv import default_num_blocks
        from minicache.model import load_minigpt

        model = load_minigpt()
        longest = max_model_len or model.config.max_seq_len
        options["num_blocks"] = default_num_blocks(model, options["block_size"], options["max_num_seqs"], longest)
    return create_scheduler(options.pop("scheduler"), max_model_len=max_model_len, **options)


# --- the run --------------------------------------------------------------------------------------------------------


def _run(run: LoadRun, num_requests: int, console: Console) -> bool:
    """Send everything, with a progress bar.

    Returns:
        Whether Ctrl-C has ended it.
    """
    _allow_connections(num_requests)
    columns = (TextColumn("Answered"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    # Drawn by the loop that reads the tokens: a separate thread would delay it at arbitrary times.
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False) as bar:
        try:
            asyncio.run(_run_and_draw(run, bar, bar.add_task("", total=num_requests, now="")))
        except KeyboardInterrupt:
            return True
    return False


async def _run_and_draw(run: LoadRun, bar: Progress, task: TaskID) -> None:
    async def draw() -> None:
        while True:
            bar.update(task, completed=len(run.outcomes) - run.num_in_flight, now=f"{run.num_in_flight:,} in flight")
            bar.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    drawing = asyncio.create_task(draw())
    try:
        await run.run()
    finally:
        drawing.cancel()


def _allow_connections(count: int) -> None:
    """Raise the limit of open files, 1,024 in many shells, to what the load may need, where that is allowed."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + FILES_BESIDE
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# --- what came of it ------------------------------------------------------------------------------------------------


def _differences(report: LoadReport, predicted: ServingReport, max_in_flight: int | None) -> list[str]:
    """In what the simulated load was not the one that the server got."""
    notes = []
    if others := report.num_sent - report.num_ok:
        notes.append(f"{others:,} requests were not answered; the simulator serves them, so its load is higher.")
    if predicted.num_refused or predicted.num_outgrown:
        notes.append(f"The simulator refused {predicted.num_refused + predicted.num_outgrown:,}: {predicted.refusal}")
    if max_in_flight is not None:
        notes.append("The simulator ignores --max-in-flight: its requests arrive on schedule.")
    return notes


def _as_json(report: LoadReport, predicted: ServingReport | None, settings: dict[str, Any]) -> dict[str, Any]:
    """All that is known, for JSON."""
    from minicache.serving.load import compare

    found: dict[str, Any] = {"settings": settings, "report": report.to_json()}
    if predicted is not None:
        found["prediction"] = predicted.to_json()
        found["comparison"] = [
            each._asdict() | {"error": each.error if each.measured else None} for each in compare(report, predicted)
        ]
    return found


def _show(report: LoadReport, predicted: ServingReport | None, title: str, console: Console) -> None:
    """The tables."""
    felt = {
        "time to first token, ms": report.ttft,
        "time per output token, ms": report.tpot,
        "inter-token latency, ms": report.itl,
        "end-to-end latency, ms": report.latency,
        "sent later than planned, ms": report.lag,
    }
    console.print(latencies(title, [(name, summary, 1e3) for name, summary in felt.items()]))
    console.print(_totals(report))
    if predicted is not None:
        console.print(_comparison(report, predicted))
    for said, count in list(report.errors.items())[:MOST_ERRORS]:
        console.print(f"[red]{count:,} ×[/] {escape(said)}", soft_wrap=True)
    for note in report.notes:
        console.print(f"[yellow]Note:[/] {escape(note)}", soft_wrap=True)


def _totals(report: LoadReport) -> Table:
    """What was sent, and what came back."""
    refused = f"{report.num_refused:,}"
    if report.retry_after.max:
        refused += f" (Retry-After {report.retry_after.p50:g} s median)"
    sent = f"{report.num_sent:,} of {report.num_requests:,}" + (
        f", {report.num_unfinished:,} cut off" if report.num_unfinished else ""
    )
    tokens = f"{report.num_prompt_tokens:,} in, {report.num_output_tokens:,} out, in {report.num_events:,} events"
    return facts(
        [
            ("sent", sent),
            ("answered", f"{report.num_ok:,}"),
            ("refused", refused),
            ("failed / timed out", f"{report.num_failed:,} / {report.num_timed_out:,}"),
            ("throughput", f"{report.requests_per_second:.3g} requests/s, {report.tokens_per_second:,.0f} tokens/s"),
            ("tokens", tokens),
            ("time", f"{report.seconds:,.1f} s, {report.cpu_share:.0%} of a core for this client"),
        ]
    )


def _comparison(report: LoadReport, predicted: ServingReport) -> Table:
    """What was measured and what the simulator says, side by side."""
    from minicache.serving.load import compare

    names = {
        "ttft": ("time to first token, ms", 1e3),
        "tpot": ("time per output token, ms", 1e3),
        "latency": ("end-to-end latency, ms", 1e3),
        "requests_per_second": ("requests/s", 1.0),
        "tokens_per_second": ("tokens/s", 1.0),
    }
    headings = ("", " ", "measured", "predicted", "prediction error")
    table = figures(*headings, title="The simulator's prediction", **REPORT)
    for each in compare(report, predicted):
        name, scale = names[each.metric]
        off = f"{each.error:+.1%}" if each.measured else "–"
        shown = name if each.statistic in ("mean", "") else ""
        table.add_row(shown, each.statistic, digits(scale * each.measured), digits(scale * each.predicted), off)
    return table
