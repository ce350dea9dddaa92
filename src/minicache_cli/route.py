"""`minicache route`: one address in front of several OpenAI-compatible servers."""

from __future__ import annotations

import logging
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from minicache.errors import MissingExtraError
from minicache_cli.labs import Mine, use_labs
from minicache_cli.serve import GAVE_UP, LogLevel, bind, refusals

app = typer.Typer()

Policy = Literal["round_robin", "power_of_two", "prefix_affinity"]

logger = logging.getLogger("minicache.route")


@app.command()
def route(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="More workers.", show_default=False)
    ] = None,
    workers: Annotated[
        list[str] | None,
        typer.Option("--workers", metavar="URL", help="URLs of the servers to route to.", show_default=False),
    ] = None,
    policy: Annotated[
        Policy,
        typer.Option(metavar="POLICY", help="round_robin, power_of_two or prefix_affinity."),
    ] = "prefix_affinity",
    mine: Mine = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any free port.")] = 8100,
    max_unfinished: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum unfinished requests per worker.")
    ] = 512,
    block_size: Annotated[int, typer.Option(metavar="N", min=1, help="Block size of the workers' prefix caches.")] = 16,
    capacity_blocks: Annotated[
        int, typer.Option(metavar="N", min=1, help="Blocks per worker that affinity remembers.")
    ] = 4096,
    max_imbalance: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many more requests than the least loaded a worker may have.")
    ] = 8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of random choices.")] = 0,
    drain_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long SIGTERM waits for answers in progress.")
    ] = 30.0,
    log_level: Annotated[
        LogLevel,
        typer.Option(metavar="LEVEL", help="Lowest level: critical, error, warning, info, debug or trace."),
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(metavar="FORMAT", help="text, or json: one object per line.")
    ] = "text",
) -> None:
    """Route requests to several servers: OpenAI's API in front, the same API behind.

    Workers are servers such as `minicache serve` or vLLM, all with the same
    model. A stream whose worker dies continues on another, if the workers
    send token ids. --mine uses your router, membership and failover.
    """
    has_json = log_format == "json"
    console = Console(highlight=False, quiet=has_json)
    if mine:
        use_labs(console)
    try:
        from minicache.fleet import create_router
        from minicache.serving.http.logs import logging_to_stderr
        from minicache.serving.http.running import Server
        from minicache.serving.proxy.app import create_app
        from minicache.serving.proxy.metrics import Metrics
        from minicache.serving.proxy.workers import Workers
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"routing needs {error.name}: pip install 'minicache[serve]'") from error
    with logging_to_stderr(log_level, log_format), refusals(has_json):
        urls = [_checked(url) for url in (*(workers or ()), *(more or ()))]
        if not urls:
            raise ValueError("--workers: name at least one server")
        if len(set(urls)) < len(urls):
            raise ValueError("--workers: a URL is repeated")
        router = create_router(policy, seed=seed, max_imbalance=max_imbalance, capacity_blocks=capacity_blocks)
        listener = bind(host.removeprefix("[").removesuffix("]"), port)
        fleet = Workers(urls, router, Metrics(urls), max_unfinished=max_unfinished)
        api = create_app(fleet, policy=policy, block_size=block_size)

        def on_listening(at: int) -> None:
            url = f"http://[{host}]:{at}" if ":" in host else f"http://{host}:{at}"
            logger.info("listening", extra={"fields": {"url": url, "policy": policy, "workers": len(urls)}})
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(style="dim")
            for worker in urls:
                is_there = fleet.membership.members[worker].is_healthy
                table.add_row("worker", worker + ("" if is_there else ", no answer yet"))
            table.add_row("policy", policy)
            table.add_row("page", f"{url}/")
            table.add_row("API", f"{url}/v1")
            table.add_row("metrics", f"{url}/metrics")
            console.print(table)

        server = Server(api, drain_seconds=drain_seconds, on_listening=on_listening)
        server.run(sockets=[listener])
        if server.start_error is not None:
            raise server.start_error
        if server.num_given_up:
            raise typer.Exit(GAVE_UP)


def _checked(url: str) -> str:
    """A worker's URL without "/" and "/v1" at its end.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is none
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise ValueError(f'--workers: expected a URL such as "http://127.0.0.1:8000", got {url!r}')
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
