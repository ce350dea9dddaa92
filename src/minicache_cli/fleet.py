"""`minicache fleet`: several engines on Ray Serve behind OpenAI's HTTP API, with phase 11's decisions."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from minicache.engine.options import ReplicaOptions
from minicache_cli.labs import Mine, labs_on_ray, use_labs
from minicache_cli.options import engine_options

if TYPE_CHECKING:
    from minicache.serving.replica.fleet import FleetClient

app = typer.Typer()

Policy = Literal["round_robin", "power_of_two", "prefix_affinity"]


@app.command()
@engine_options(ReplicaOptions, "fleet", ("model", "num_blocks", "max_num_seqs"))
def fleet(
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Number of engine processes (the minimum).")] = 2,
    policy: Annotated[
        Policy,
        typer.Option(metavar="POLICY", help="Router: round_robin, power_of_two or prefix_affinity."),
    ] = "prefix_affinity",
    max_replicas: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of replicas; default: no scaling."),
    ] = None,
    target_unfinished: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Target number of unfinished requests per replica, for scaling.")
    ] = 8.0,
    downscale_delay: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, help="How long fewer replicas must have been enough before scaling down."
        ),
    ] = 60.0,
    mine: Mine = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65535)] = 8000,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", min=0, help="Capacity of the waiting queue; above it, 429.")
    ] = 256,
    drain_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long a stopping replica waits for its answers.")
    ] = 30.0,
    **engine: Any,
) -> None:
    """Serve a model by several engines on Ray Serve (extra scale), with the router of phase 11.

    A replica that dies is replaced, and its answers go on elsewhere. With
    --mine, routers, membership, failover and engines are your finished
    lab files, in all processes.
    """
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    from minicache.plugins.ray_serve import FleetOptions, fleet_running, ray_started

    try:
        options = FleetOptions(
            ReplicaOptions(**engine, prefix_caching=True),
            policy=policy,
            num_replicas=replicas,
            max_replicas=max_replicas,
            target_unfinished=target_unfinished,
            downscale_delay=downscale_delay,
            max_waiting=max_waiting,
            drain_seconds=drain_seconds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    runtime_env = labs_on_ray() if mine else None
    told_to_stop = threading.Event()
    with (
        Console(stderr=True).status("Starting Ray") as status,
        ray_started(host=host, port=port, runtime_env=runtime_env),
    ):
        status.update(f"Starting {replicas} replicas")
        with fleet_running(options, make_api):
            status.stop()
            for number in (signal.SIGINT, signal.SIGTERM):  # Ray has put its own in their place
                signal.signal(number, lambda *_: told_to_stop.set())
            _say(console, options.policy, replicas, f"http://{host}:{port}")
            told_to_stop.wait()
            console.print("Stopping", style="dim")


def make_api(client: FleetClient) -> Any:
    """The API of a fleet, made in the ingress."""
    from minicache.serving.http.app import create_app

    return create_app(client)


def _say(console: Console, policy: str, replicas: int, url: str) -> None:
    """What is served, and how to get at it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_row("fleet", f"{replicas} replicas on Ray Serve, routed by {policy}")
    table.add_row("API", f"{url}/v1")
    table.add_row("metrics", f"{url}/metrics")
    table.add_row("stop", "Ctrl-C")
    console.print(table)
