"""`minicache serve`: the engine behind OpenAI's HTTP API, with a page to watch it."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from minicache.engine.options import BATCH, MODEL, PROCESSES, ReplicaOptions
from minicache.errors import MinicacheError, MissingExtraError
from minicache_cli.advice import advice
from minicache_cli.labs import Mine, use_labs
from minicache_cli.options import engine_options

if TYPE_CHECKING:
    from minicache.serving.replica.messages import EngineInfo

app = typer.Typer()

GAVE_UP = 4
"""The exit status if answers were not complete when the server ended. (0: all were. uvicorn has 3.)"""

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]

NETWORK, LOGS, TLS_FILES = "Network", "Logs", "TLS"

logger = logging.getLogger("minicache.server")


@app.command()
@engine_options(ReplicaOptions, "serve")
def serve(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="MINICACHE_API_KEY",
            help="The API key for clients and for the page.",
            show_default=False,
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file of keys with names and limits; SIGHUP reloads it.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help='Allow web pages of this origin (CORS); "*": all. May be repeated.',
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    mine: Mine = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model name in the API; default: the model's.", rich_help_panel=MODEL),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Capacity of the waiting queue; above it, 429.", rich_help_panel=BATCH),
    ] = 256,
    replicas: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of engine processes; requests go to the least loaded.",
            rich_help_panel=PROCESSES,
        ),
    ] = 1,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Run the engine in a thread of the server, as in phase 10.",
            rich_help_panel=PROCESSES,
        ),
    ] = False,
    drain_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="How long SIGTERM waits for answers in progress.",
            rich_help_panel=PROCESSES,
        ),
    ] = 30.0,
    root_path: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help='Path prefix that a proxy strips, such as "/minicache".',
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = "",
    forwarded_allow_ips: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES",
            help="Trusted proxies for X-Forwarded-For, comma-separated; default: this machine.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificate; enables HTTPS.", rich_help_panel=TLS_FILES)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Private key; default: in the certificate's file.", rich_help_panel=TLS_FILES
        ),
    ] = None,
    ssl_keyfile_password: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            envvar="MINICACHE_SSL_KEYFILE_PASSWORD",
            show_envvar=False,
            help="Password of an encrypted key; or in $MINICACHE_SSL_KEYFILE_PASSWORD.",
            rich_help_panel=TLS_FILES,
        ),
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Require client certificates signed by one of these.", rich_help_panel=TLS_FILES
        ),
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            metavar="LEVEL",
            help="Lowest level: critical, error, warning, info, debug or trace.",
            rich_help_panel=LOGS,
        ),
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(metavar="FORMAT", help="text, or json: one object per line.", rich_help_panel=LOGS),
    ] = "text",
    **engine: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a page that shows the engine at work.

    The engine runs in a child process, which is restarted if it dies. With
    --mine, your engine runs in a thread of the server (--in-process).
    """
    options = ReplicaOptions(**engine)
    num_ranks = options.tensor_parallel_size
    if api_keys is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, lambda *_: None)  # until the application takes it, it must not end the process
    has_json = log_format == "json"
    if has_json:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they are drawn on stderr
    console = Console(highlight=False, quiet=has_json)  # the log has it all then
    if mine:
        use_labs(console)
        in_process = True
    if in_process and replicas > 1:
        raise typer.BadParameter("several --replicas need processes: leave out --in-process and --mine")
    if in_process and num_ranks > 1:
        raise typer.BadParameter("--tensor-parallel needs an engine process: leave out --in-process and --mine")
    try:
        from minicache.engine.async_engine import AsyncEngine
        from minicache.engine.loading import find_model, load_tokenizer
        from minicache.scheduler import require_scheduler
        from minicache.serving.http.app import check_origin, create_app
        from minicache.serving.http.keys import ApiKeys
        from minicache.serving.http.logs import logging_to_stderr
        from minicache.serving.http.running import TLS, Server
        from minicache.serving.replica.client import EngineClient
        from minicache.serving.replica.llm import make_llm
        from minicache.serving.replica.process import starter
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"serving needs {error.name}: pip install 'minicache[serve]'") from error
    name = served_model_name or options.model
    with logging_to_stderr(log_level, log_format), refusals(has_json):
        require_scheduler(options.scheduler)
        tls = None
        if ssl_certfile is not None:
            tls = TLS(certfile=ssl_certfile, keyfile=ssl_keyfile, password=ssl_keyfile_password, ca_certs=ssl_ca_certs)
            tls.check()
        elif ssl_keyfile is not None or ssl_ca_certs is not None:
            raise ValueError("HTTPS needs a certificate: --ssl-certfile")
        if api_key is not None and api_keys is not None:
            raise ValueError("--api-key (or MINICACHE_API_KEY) and --api-keys exclude each other: leave out one")
        keys = None if api_keys is None else ApiKeys.of_file(api_keys)
        if api_key is not None:
            keys = ApiKeys.of_single(api_key)
        for origin in allow_origin or ():
            check_origin(origin)
        listener = bind(host.removeprefix("[").removesuffix("]"), port)
        if keys is None and not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            logger.warning(
                "anyone who can reach %s can use the model: set --api-key, MINICACHE_API_KEY or --api-keys", host
            )
        with nullcontext() if has_json else Console(stderr=True).status(f"Starting {name}") as status:

            def on_progress(doing: str) -> None:
                if status is not None:
                    status.update(f"Starting {name}: {doing}")

            def on_listening(at: int) -> None:
                if status is not None:
                    status.stop()
                gc.collect()
                gc.freeze()  # what lives as long as the process is not looked at again by each collection
                info = api.state.served.info
                url = _url(listener, at, is_encrypted=tls is not None)
                told = {"url": url, "model": name, "scheduler": options.scheduler, "num_blocks": info.cache.num_blocks}
                told |= {"block_size": info.cache.block_size, "max_num_seqs": info.max_num_seqs, "engines": replicas}
                logger.info("listening", extra={"fields": told})
                for sentence in advice(info, options, replicas=replicas, drain_seconds=drain_seconds):
                    logger.warning(sentence)
                what = name + (f", {replicas} engines" if replicas > 1 else "")
                what += f", {num_ranks} processes per engine" if num_ranks > 1 else ""
                _say(console, info, what, url, keys is not None)

            tokenizer = load_tokenizer(find_model(options.model))
            client: AsyncEngine | EngineClient
            if in_process:
                client = AsyncEngine(make_llm(options, tokenizer), max_waiting=max_waiting)
            else:
                client = EngineClient(starter(options), tokenizer, num_replicas=replicas, max_waiting=max_waiting)
                client.on_progress = on_progress
            api = create_app(
                client,
                served_model_name=name,
                api_keys=keys,
                allow_origins=allow_origin or (),
            )
            server = Server(
                api,
                drain_seconds=drain_seconds,
                on_listening=on_listening,
                tls=tls,
                root_path=root_path,
                forwarded_allow_ips=forwarded_allow_ips,
            )
            try:
                server.run(sockets=[listener])
            finally:
                gc.unfreeze()  # at exit, libraries look for objects that were not freed
            if server.start_error is not None:
                raise server.start_error
            if server.num_given_up:
                raise typer.Exit(GAVE_UP)


@contextmanager
def refusals(has_json: bool) -> Iterator[None]:
    """Say why it does not serve: as a command does, or in a log that programs read."""
    try:
        yield
    except (MinicacheError, ValueError) as error:
        if has_json:
            logger.critical("%s", error)
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
        if isinstance(error, ValueError):
            raise typer.BadParameter(str(error)) from error
        raise


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded: that it is not to be had is better known at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}. Try another {option}") from error
    return listener


def _url(listener: socket.socket, port: int, *, is_encrypted: bool) -> str:
    """Where the server is, for a browser: an IPv6 address stands in brackets."""
    host = listener.getsockname()[0]
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
    table.add_row("API", f"{url}/v1" + (" (requires the API key)" if has_key else ""))
    table.add_row("metrics", f"{url}/metrics")
    table.add_row("stop", "Ctrl-C; requests in progress finish first")
    console.print(table)
