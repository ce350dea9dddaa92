"""`minicache serve`: the engine behind OpenAI's HTTP API, with a page to watch it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from minicache.cli.labs import Mine, use_labs
from minicache.errors import MissingExtraError

if TYPE_CHECKING:
    import torch

    from minicache.engine.logprobs import ServedLLM

app = typer.Typer()

Stage = Literal["static", "continuous", "paged", "fair", "chunked"]
DType = Literal["float32", "float16", "bfloat16"]

MAX_SMALL = 50_000_000  # parameters up to which a second thread makes a step slower


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help='"minigpt", a checkpoint, a Hugging Face folder, or a hub name ("org/name").')
    ] = "minigpt",
    host: Annotated[
        str, typer.Option(help="The address to listen on. 0.0.0.0 lets other machines in: set an API key then.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it; default: the model's.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MINICACHE_API_KEY", help="What clients of /v1 have to show.", show_default=False),
    ] = None,
    scheduler: Annotated[Stage, typer.Option(help="The stage of the course that schedules.")] = "chunked",
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the cache; default: 64 MiB.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The most requests in a batch.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a step.")] = 8192,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="The most tokens of a request.")] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Answers that may wait; beyond, 429.")] = 256,
    prefix_caching: Annotated[bool, typer.Option(help="Find beginnings of prompts again.")] = True,
    preemption: Annotated[Literal["recompute", "swap"], typer.Option(help="When blocks run out.")] = "recompute",
    num_host_blocks: Annotated[int, typer.Option(min=0, help="Blocks of the host pool, for swap.")] = 0,
    dtype: Annotated[DType | None, typer.Option(help="Of the weights; default: the model's, 16 bits on a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help='"cpu", "cuda"; default: cpu.')] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="What part of a GPU's free memory the cache takes.")
    ] = 0.9,
    enforce_eager: Annotated[bool, typer.Option(help="On a GPU: decode without CUDA graphs.")] = False,
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Of the CPU; default: 1 for a small model, else all.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="How long SIGTERM waits for answers.")] = 30.0,
    mine: Mine = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a page that shows the engine at work."""
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    try:
        from minicache.server.app import create_app
        from minicache.server.running import Server
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"serving needs {error.name}: pip install 'minicache[serve]'") from error
    listener = _bind(host, port)
    import torch

    from minicache.engine.logprobs import ServedLLM

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        llm = ServedLLM(
            model,
            scheduler=scheduler,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            preemption=preemption,
            num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching and scheduler in ("paged", "fair", "chunked"),
            dtype=None if dtype is None else getattr(torch, dtype),
            device=device,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
        )
        name = served_model_name or model
        server = Server(
            create_app(llm, served_model_name=name, max_waiting=max_waiting, api_key=api_key),
            host,
            port,
            drain_seconds=drain_seconds,
            on_listening=lambda at: _say(console, llm, name, f"http://{host}:{at}", api_key is not None),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if num_threads is None and _num_parameters(llm) <= MAX_SMALL:
        torch.set_num_threads(1)
    server.run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded: that it is not to be had is better known at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise typer.BadParameter(
            f"cannot listen on {host}, port {port}: {error.strerror}. Try another --port"
        ) from error
    return listener


def _num_parameters(llm: ServedLLM) -> int:
    parameters: list[torch.Tensor] = list(llm.model.parameters())
    return sum(each.numel() for each in parameters)


def _say(console: Console, llm: ServedLLM, name: str, url: str, has_key: bool) -> None:
    """What is served, and how to get at it."""
    scheduler = llm.scheduler
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_row("model", name)
    blocks = f"{scheduler.pool.num_blocks} blocks of {scheduler.pool.block_size} tokens"
    table.add_row("cache", f"{blocks}, up to {scheduler.max_num_seqs} requests in a batch")
    table.add_row("page", f"{url}/")
    table.add_row("API", f"{url}/v1" + (" (asks for the API key)" if has_key else ""))
    table.add_row("metrics", f"{url}/metrics")
    table.add_row("stop", "Ctrl-C; what is under way is finished first")
    console.print(table)
