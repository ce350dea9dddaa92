"""`minicache fleet`: several engines on Ray Serve behind OpenAI's HTTP API, with phase 11's decisions."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from minicache.engine.options import ReplicaOptions
from minicache_cli.labs import Mine, labs_on_ray, use_labs
from minicache_cli.listening import Host
from minicache_cli.options import asked, usage_errors, with_options
from minicache_cli.show import facts
from minicache_cli.simulate import PolicyName

if TYPE_CHECKING:
    from minicache.serving.replica.fleet import FleetClient

app = typer.Typer()


@dataclass(frozen=True)
class Fleet:
    """How many engines there are, which gets a request, and where one asks."""

    replicas: int = asked(2, "Number of engine processes (the minimum).", "N", min=1)
    policy: PolicyName = asked("prefix_affinity", "Router: round_robin, power_of_two or prefix_affinity.", "POLICY")
    max_replicas: int | None = asked(None, "Maximum number of replicas; default: no scaling.", "N", min=1)
    target_unfinished: float = asked(
        8.0, "Target number of unfinished requests per replica, for scaling.", "X", min=0.0
    )
    downscale_delay: float = asked(
        60.0, "How long fewer replicas must have been enough before scaling down.", "SECONDS", min=0.0
    )
    mine: Mine = False
    host: Host = "127.0.0.1"
    port: int = asked(8000, "", "PORT", min=1, max=65535)
    max_waiting: int = asked(256, "Capacity of the waiting queue; above it, 429.", "N", min=0)
    drain_seconds: float = asked(30.0, "How long a stopping replica waits for its answers.", "SECONDS", min=0.0)


@app.command()
@with_options(ReplicaOptions, "fleet", ("model", "num_blocks", "max_num_seqs"))
def fleet(wanted: Fleet, **engine: Any) -> None:
    """Serve a model by several engines on Ray Serve (extra scale), with the router of phase 11.

    A replica that dies is replaced, and its answers go on elsewhere. With
    --mine, routers, membership, failover and engines are your finished
    lab files, in all processes.
    """
    console = Console(highlight=False)
    if wanted.mine:
        use_labs(console)
    from minicache.plugins.ray_serve import FleetOptions, fleet_running, ray_started

    with usage_errors():
        options = FleetOptions(
            ReplicaOptions(**engine, prefix_caching=True),
            policy=wanted.policy,
            num_replicas=wanted.replicas,
            max_replicas=wanted.max_replicas,
            target_unfinished=wanted.target_unfinished,
            downscale_delay=wanted.downscale_delay,
            max_waiting=wanted.max_waiting,
            drain_seconds=wanted.drain_seconds,
        )
    runtime_env = labs_on_ray() if wanted.mine else None
    told_to_stop = threading.Event()
    with (
        Console(stderr=True).status("Starting Ray") as status,
        ray_started(host=wanted.host, port=wanted.port, runtime_env=runtime_env),
    ):
        status.update(f"Starting {wanted.replicas} replicas")
        with fleet_running(options, make_api):
            status.stop()
            for number in (signal.SIGINT, signal.SIGTERM):  # Ray has put its own in their place
                signal.signal(number, lambda *_: told_to_stop.set())
            url = f"http://{wanted.host}:{wanted.port}"
            what = f"{wanted.replicas} replicas on Ray Serve, routed by {wanted.policy}"
            rows = [("fleet", what), ("API", f"{url}/v1"), ("metrics", f"{url}/metrics"), ("stop", "Ctrl-C")]
            console.print(facts(rows, dim=True))
            told_to_stop.wait()
            console.print("Stopping", style="dim")


def make_api(client: FleetClient) -> Any:
    """The API of a fleet, made in the ingress."""
    from minicache.serving.http.app import create_app

    return create_app(client)
