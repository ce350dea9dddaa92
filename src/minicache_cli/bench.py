"""`minicache bench serve`: a load for any server that speaks OpenAI's API, and what its users felt."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from minicache_cli.folders import make_folder
from minicache_cli.help import Group
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

PREDICTION = "Prediction"
"""The heading in --help of the options that only --predict looks at."""


@app.callback()
def bench() -> None:
    """Put a server under load."""


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; default: the first in /v1/models.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 100,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, Poisson; inf: all at once, the default without a workload."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same load.")] = 0,
    workload: Annotated[
        WorkloadName | None,
        typer.Option(
            metavar="WORKLOAD",
            help="Lengths and bursts of a published workload, scaled down to the model's context: sharegpt, alpaca, "
            "azure-code or azure-conversation.",
        ),
    ] = None,
    num_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens per prompt; default: {NUM_PROMPT_TOKENS}. Not with a workload.")
    ] = None,
    num_output_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens per answer; default: {NUM_OUTPUT_TOKENS}. Not with a workload.")
    ] = None,
    num_shared_tokens: Annotated[
        int, typer.Option(min=0, help="Length of a prefix that all prompts share, for a server with a prefix cache.")
    ] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=2, help="Send random token ids below this; default: random words of MiniGPT's vocabulary, as text."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of a request; default: from /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Timeout of a request in seconds.")] = 600.0,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Maximum concurrent requests; default: no limit (open loop).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and the plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
    with_prediction: Annotated[
        bool,
        typer.Option(
            "--predict", help="Compare with a simulation of the same load, for `minicache serve` with MiniGPT."
        ),
    ] = False,
    calibration: Annotated[
        Path, typer.Option(help="File written by `minicache calibrate`.", rich_help_panel=PREDICTION)
    ] = Path("out/calibration.json"),
    scheduler: Annotated[
        str,
        typer.Option(
            metavar="STAGE",
            help="The server's scheduler: static, continuous, paged, fair or chunked.",
            rich_help_panel=PREDICTION,
        ),
    ] = "chunked",
    num_blocks: Annotated[
        int | None, typer.Option(help="Number of cache blocks; default: the engine's.", rich_help_panel=PREDICTION)
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block.", rich_help_panel=PREDICTION)] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(help="Batch slots: maximum running requests.", rich_help_panel=PREDICTION)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Token budget of a step.", rich_help_panel=PREDICTION)
    ] = 8192,
    no_prefix_caching: Annotated[
        bool,
        typer.Option("--no-prefix-caching", help="The server has no prefix cache.", rich_help_panel=PREDICTION),
    ] = False,
) -> None:
    """Send requests in an open loop, and report latencies and throughput.

    Each request streams its answer from POST /v1/completions, on a separate
    connection, with temperature 0 and ignore_eos. Latencies are measured
    from when it was sent; the delay of sending is reported too. Ctrl-C ends
    the run and reports the answers so far.
    """
    from minicache.scheduler import has_option
    from minicache.serving.load import Endpoint, LoadReport, LoadRun, fetch_model, make_requests, predict, reach
    from minicache.simulator.costs import HostCost

    console = Console(highlight=False, stderr=as_json)
    with _usage_errors():
        endpoint = Endpoint.parse(url, api_key)
        if workload is not None and (num_prompt_tokens or num_output_tokens):
            raise ValueError("a workload has its own lengths: leave out --num-prompt-tokens and --num-output-tokens")
        cost = HostCost.load(calibration) if with_prediction else None
        if out is not None:
            make_folder(out)
    endpoint = asyncio.run(reach(endpoint))
    if model is None or (max_model_len is None and (workload is not None or with_prediction)):
        first, longest = asyncio.run(fetch_model(endpoint))
        model, max_model_len = model or first, max_model_len or longest
    with _usage_errors():
        if workload is None:
            load = _fixed(num_requests, rate, num_prompt_tokens, num_output_tokens, seed, num_shared_tokens)
        else:
            load = _published(workload, max_model_len, num_requests, rate, seed, num_shared_tokens)
        requests = make_requests(
            load.arrivals, model=model, vocab_size=vocab_size, num_shared=num_shared_tokens, seed=seed
        )
        if cost is not None:
            chosen = _scheduler(
                scheduler,
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                prefix_caching=not no_prefix_caching and has_option(scheduler, "prefix_caching"),
            )
        run = LoadRun(endpoint, requests, timeout=timeout, max_in_flight=max_in_flight)
    title = f"{num_requests:,} × {load.name} · {model} · {url}"
    was_stopped = _run(run, num_requests, console)
    report = LoadReport.of(run, num_requests)
    report.notes.extend(load.notes)
    predicted = None
    if was_stopped:
        report.notes.append("The run was stopped: all numbers lack the requests that would have taken longest.")
    elif cost is not None:
        predicted = predict(requests, chosen, cost)
        report.notes.extend(_differences(report, predicted, max_in_flight))
    told = _told(report, predicted, {"url": url, "model": model, "load": load.name, "seed": seed})
    if as_json:
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        _show(report, predicted, title, console)
    if out is not None:
        from minicache.serving.load.plots import save_plots

        file = out / "report.json"
        file.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for saved in (file, *save_plots(report, predicted, title, out)):
            console.print(f"[bold]{escape(str(saved))}[/]", soft_wrap=True)
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


def _fixed(
    count: int, rate: float | None, num_prompt: int | None, num_output: int | None, seed: int, num_shared: int
) -> Load:
    """Requests of one length; a prompt that is not asked for is as long as the default behind what is shared."""
    from minicache.serving.load import fixed_arrivals

    rate = math.inf if rate is None else rate
    num_prompt = num_prompt or num_shared + NUM_PROMPT_TOKENS
    num_output = num_output or NUM_OUTPUT_TOKENS
    arrivals = fixed_arrivals(count, rate, num_prompt, num_output, seed)
    return Load(f"{num_prompt} + {num_output} tokens {_pace(rate)}", arrivals, [])


def _published(
    name: WorkloadName, max_model_len: int | None, count: int, rate: float | None, seed: int, num_shared: int
) -> Load:
    """Requests of a published workload, made to fit the model; what had to be cut is noted."""
    from minicache.serving.load import fit_workload, workload_arrivals
    from minicache.simulator import workload

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
    arrivals = workload_arrivals(replace(fitting, max_model_len=limit), count, rate, seed, num_shared)
    uncut = workload_arrivals(replace(fitting, max_model_len=UNCUT), count, rate, seed, num_shared)
    if num_cut := sum(cut != whole for cut, whole in zip(arrivals, uncut, strict=True)):
        notes.append(f"{num_cut:,} requests were cut to {limit:,} tokens.")
    return Load(f"{published.name} {_pace(published.rate if rate is None else rate)}", arrivals, notes)


def _pace(rate: float) -> str:
    return "at once" if rate == math.inf else f"at {rate:g}/s"


def _scheduler(name: str, *, num_blocks: int | None, max_model_len: int | None, **options: Any) -> Scheduler:
    """The server's scheduler, with as many blocks as `minicache serve` gives MiniGPT by default."""
    from minicache.scheduler import create_scheduler

    if num_blocks is None:
        from minicache.engine.kv import default_num_blocks
        from minicache.model import load_minigpt

        model = load_minigpt()
        longest = max_model_len or model.config.max_seq_len
        num_blocks = default_num_blocks(model, options["block_size"], options["max_num_seqs"], longest)
    return create_scheduler(name, num_blocks=num_blocks, max_model_len=max_model_len, **options)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report errors caused by the options as usage errors, in one line."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


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


def _told(report: LoadReport, predicted: ServingReport | None, settings: dict[str, Any]) -> dict[str, Any]:
    """All that is known, for JSON."""
    from minicache.serving.load import compare

    told: dict[str, Any] = {"settings": settings, "report": report.to_json()}
    if predicted is not None:
        told["prediction"] = predicted.to_json()
        told["comparison"] = [
            each._asdict() | {"error": each.error if each.measured else None} for each in compare(report, predicted)
        ]
    return told


def _show(report: LoadReport, predicted: ServingReport | None, title: str, console: Console) -> None:
    """The tables."""
    console.print(_latencies(report, title))
    console.print(_totals(report))
    if predicted is not None:
        console.print(_comparison(report, predicted))
    for said, count in list(report.errors.items())[:MOST_ERRORS]:
        console.print(f"[red]{count:,} ×[/] {escape(said)}", soft_wrap=True)
    for note in report.notes:
        console.print(f"[yellow]Note:[/] {escape(note)}", soft_wrap=True)


def _latencies(report: LoadReport, title: str) -> Table:
    """What the senders felt."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for heading in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, summary in (
        ("time to first token, ms", report.ttft),
        ("time per output token, ms", report.tpot),
        ("inter-token latency, ms", report.itl),
        ("end-to-end latency, ms", report.latency),
        ("sent later than planned, ms", report.lag),
    ):
        told = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
        table.add_row(name, *[_digits(1e3 * value) for value in told])
    return table


def _digits(value: float) -> str:
    """Three digits, and never a power of ten: 0.0412, 41.2, 8,990."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.0f}"


def _totals(report: LoadReport) -> Table:
    """What was sent, and what came back."""
    table = Table(box=None, show_header=False)
    refused = f"{report.num_refused:,}"
    if report.retry_after.max:
        refused += f" (Retry-After {report.retry_after.p50:g} s median)"
    sent = f"{report.num_sent:,} of {report.num_requests:,}" + (
        f", {report.num_unfinished:,} cut off" if report.num_unfinished else ""
    )
    for name, value in (
        ("sent", sent),
        ("answered", f"{report.num_ok:,}"),
        ("refused", refused),
        ("failed / timed out", f"{report.num_failed:,} / {report.num_timed_out:,}"),
        ("throughput", f"{report.requests_per_second:.3g} requests/s, {report.tokens_per_second:,.0f} tokens/s"),
        (
            "tokens",
            f"{report.num_prompt_tokens:,} in, {report.num_output_tokens:,} out, in {report.num_events:,} events",
        ),
        ("time", f"{report.seconds:,.1f} s, {report.cpu_share:.0%} of a core for this client"),
    ):
        table.add_row(name, value)
    return table


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
    table = Table(title="The simulator's prediction", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for heading in ("", " ", "measured", "predicted", "prediction error"):
        table.add_column(heading, justify="right" if heading.strip() else "left")
    for each in compare(report, predicted):
        name, scale = names[each.metric]
        off = f"{each.error:+.1%}" if each.measured else "–"
        shown = name if each.statistic in ("mean", "") else ""
        table.add_row(shown, each.statistic, _digits(scale * each.measured), _digits(scale * each.predicted), off)
    return table
