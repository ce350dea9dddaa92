"""`minicache serve`: the engine behind OpenAI's HTTP API, with a page to watch it."""

from __future__ import annotations

import gc
import socket
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from minicache.cli.labs import Mine, use_labs
from minicache.errors import MissingExtraError

if TYPE_CHECKING:
    from minicache.replica.messages import EngineInfo

app = typer.Typer()

Stage = Literal["static", "continuous", "paged", "fair", "chunked"]
DType = Literal["float32", "float16", "bfloat16"]
KVCacheDType = Literal["int8", "fp8_e4m3"]


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
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of the cache; default: 64 MiB.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The most requests in a batch.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a step.")] = 8192,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="The most tokens of a request.")] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Answers that may wait; beyond, 429.")] = 256,
    prefix_caching: Annotated[bool, typer.Option(help="Find beginnings of prompts again.")] = True,
    preemption: Annotated[Literal["recompute", "swap"], typer.Option(help="When blocks run out.")] = "recompute",
    num_host_blocks: Annotated[int, typer.Option(min=0, help="Blocks of the host pool, for swap.")] = 0,
    kv_cache_dtype: Annotated[
        KVCacheDType | None, typer.Option(help="Keys and values in one byte a number; default: as the weights.")
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of the weights; default: the model's, 16 bits on a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help='"cpu", "cuda"; default: cpu.')] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="What part of a GPU's free memory the cache takes.")
    ] = 0.9,
    enforce_eager: Annotated[bool, typer.Option(help="On a GPU: decode without CUDA graphs.")] = False,
    speculative: Annotated[
        str | None,
        typer.Option(help='Draft tokens: "ngram", "minigpt-draft", or another draft model; default: none.'),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="The most draft tokens of a request in one step.")
    ] = 4,
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Of the CPU; default: 1 for a small model, else all.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="How long SIGTERM waits for answers.")] = 30.0,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines, each in a process of its own; requests go to the least loaded.")
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Processes over which each engine divides the model; on GPUs, one GPU each.")
    ] = 1,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="The engine in a thread of the server's process, as phase 10 builds it."),
    ] = False,
    mine: Mine = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a page that shows the engine at work.

    The engine runs in a process of its own, which is started again if it dies. With --mine it runs in a thread of the
    server's, --in-process: that thread is yours.
    """
    console = Console(highlight=False)
    if mine:
        use_labs(console)
        in_process = True
    if in_process and replicas > 1:
        raise typer.BadParameter("several --replicas are processes: leave out --in-process and --mine")
    if in_process and tensor_parallel > 1:
        raise typer.BadParameter(
            "an engine on several processes is started again if one dies: leave out --in-process and --mine"
        )
    try:
        from minicache.engine.async_engine import AsyncEngine
        from minicache.engine.runner import find_model, load_tokenizer
        from minicache.replica.client import EngineClient
        from minicache.replica.llm import make_llm
        from minicache.replica.messages import EngineOptions
        from minicache.replica.process import starter
        from minicache.server.app import create_app
        from minicache.server.running import Server
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"serving needs {error.name}: pip install 'minicache[serve]'") from error
    listener = _bind(host, port)
    options = EngineOptions(
        model=model,
        scheduler=scheduler,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        preemption=preemption,
        num_host_blocks=num_host_blocks,
        prefix_caching=prefix_caching,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        tensor_parallel_size=tensor_parallel,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        num_threads=num_threads,
    )
    name = served_model_name or model
    with console.status(f"Starting {name}") as status:

        def on_listening(at: int) -> None:
            status.stop()
            gc.collect()
            gc.freeze()  # what lives as long as the process is not looked at again by each collection
            what = name + (f", {replicas} engines" if replicas > 1 else "")
            what += f", {tensor_parallel} processes an engine" if tensor_parallel > 1 else ""
            _say(console, api.state.served.backend.info, what, f"http://{host}:{at}", api_key is not None)

        try:
            tokenizer = load_tokenizer(find_model(model))
            engine: AsyncEngine | EngineClient
            if in_process:
                engine = AsyncEngine(make_llm(options, tokenizer), max_waiting=max_waiting)
            else:
                engine = EngineClient(starter(options), tokenizer, num_replicas=replicas, max_waiting=max_waiting)
                engine.on_progress = lambda doing: status.update(f"Starting {name}: {doing}")
            api = create_app(engine, served_model_name=name, api_key=api_key)
            server = Server(api, host, port, drain_seconds=drain_seconds, on_listening=on_listening)
            try:
                server.run(sockets=[listener])
            finally:
                gc.unfreeze()  # libraries look at the end for objects that nobody has freed
            if server.start_error is not None:
                raise server.start_error
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


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


def _say(console: Console, info: EngineInfo, what: str, url: str, has_key: bool) -> None:
    """What is served, and how to get at it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_row("model", what)
    blocks = f"{info.cache.num_blocks} blocks of {info.cache.block_size} tokens"
    if info.cache.cache_dtype != "auto":
        blocks += f" in {info.cache.cache_dtype}"
    table.add_row("cache", f"{blocks}, up to {info.max_num_seqs} requests in a batch")
    table.add_row("page", f"{url}/")
    table.add_row("API", f"{url}/v1" + (" (asks for the API key)" if has_key else ""))
    table.add_row("metrics", f"{url}/metrics")
    table.add_row("stop", "Ctrl-C; what is under way is finished first")
    console.print(table)
