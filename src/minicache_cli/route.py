"""`minicache route`: one address in front of several OpenAI-compatible servers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from minicache_cli.labs import Mine, use_labs
from minicache_cli.listening import Host, Logs, Port, bind, collect_rarely, logged, needing_extra, run, url_of
from minicache_cli.options import asked, with_options
from minicache_cli.show import facts
from minicache_cli.simulate import PolicyName

app = typer.Typer()

logger = logging.getLogger("minicache.route")


@dataclass(frozen=True)
class Routing:
    """The workers, which of them gets a request, and where one asks."""

    workers: list[str] | None = asked(None, "URLs of the servers to route to.", "URL")
    policy: PolicyName = asked("prefix_affinity", "round_robin, power_of_two or prefix_affinity.", "POLICY")
    mine: Mine = False
    host: Host = "127.0.0.1"
    port: Port = 8100
    max_unfinished: int = asked(512, "Maximum unfinished requests per worker.", "N", min=1)
    block_size: int = asked(16, "Block size of the workers' prefix caches.", "N", min=1)
    capacity_blocks: int = asked(4096, "Blocks per worker that affinity remembers.", "N", min=1)
    max_imbalance: int = asked(8, "How many more requests than the least loaded a worker may have.", "N", min=0)
    metrics_key: str | None = asked(
        None, "Key that the workers' /metrics require.", "KEY", envvar="MINICACHE_METRICS_KEY"
    )
    seed: int = asked(0, "Seed of random choices.", "N", min=0)
    drain_seconds: float = asked(30.0, "How long SIGTERM waits for answers in progress.", "SECONDS", min=0.0)


@app.command()
@with_options()
def route(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="More workers.", show_default=False)
    ] = None,
    *,
    to: Routing,
    logs: Logs,
) -> None:
    """Route requests to several servers: OpenAI's API in front, the same API behind.

    Workers are servers such as `minicache serve` or vLLM, all with the same
    model. A stream whose worker dies continues on another, if the workers
    send token ids. --mine uses your router, membership and failover.
    """
    console = Console(highlight=False, quiet=logs.has_json)
    if to.mine:
        use_labs(console)
    with needing_extra("routing"):
        from minicache.fleet import create_router
        from minicache.serving.http.running import Server
        from minicache.serving.proxy.app import create_app
        from minicache.serving.proxy.metrics import Metrics
        from minicache.serving.proxy.workers import Workers
    with logged(logs, logger):
        urls = [_checked(url) for url in (*(to.workers or ()), *(more or ()))]
        if not urls:
            raise ValueError("--workers: name at least one server")
        if len(set(urls)) < len(urls):
            raise ValueError("--workers: a URL is repeated")
        limits = {"max_imbalance": to.max_imbalance, "capacity_blocks": to.capacity_blocks}
        router = create_router(to.policy, seed=to.seed, **limits)
        listener = bind(to.host, to.port)
        fleet = Workers(urls, router, Metrics(urls), max_unfinished=to.max_unfinished, metrics_key=to.metrics_key)
        api = create_app(fleet, policy=to.policy, block_size=to.block_size)

        def on_listening(at: int) -> None:
            collect_rarely()
            url = url_of(listener, at)
            logger.info("listening", extra={"fields": {"url": url, "policy": to.policy, "workers": len(urls)}})
            members = fleet.membership.members
            rows = [("worker", each + ("" if members[each].is_healthy else ", no answer yet")) for each in urls]
            rows += [("policy", to.policy), ("page", f"{url}/"), ("API", f"{url}/v1"), ("metrics", f"{url}/metrics")]
            console.print(facts(rows, dim=True))

        run(Server(api, drain_seconds=to.drain_seconds, on_listening=on_listening), listener)


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
