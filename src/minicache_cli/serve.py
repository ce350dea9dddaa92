"""`minicache serve`: the engine behind OpenAI's HTTP API, with a page to watch it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from minicache.engine.options import BATCH, MODEL, PROCESSES, ReplicaOptions
from minicache_cli.advice import advice, capacity
from minicache_cli.labs import Mine, loaded_files, use_labs
from minicache_cli.listening import Host, Logs, Port, bind, collect_rarely, logged, needing_extra, run, url_of
from minicache_cli.options import asked, with_options
from minicache_cli.show import facts

if TYPE_CHECKING:
    from minicache.serving.http.keys import ApiKeys
    from minicache.serving.http.running import TLS
    from minicache.serving.replica.messages import EngineInfo

app = typer.Typer()

NETWORK, TLS_FILES = "Network", "TLS"

LONG_PREFILL_THRESHOLD = 512
"""Prompt tokens of one request in a step: of a long prompt so many at a time, and the budget's rest is for others."""

logger = logging.getLogger("minicache.server")


@dataclass(frozen=True)
class Http:
    """The HTTP server around the engines."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    api_key: str | None = asked(None, "The API key for clients and for the page.", "KEY", envvar="MINICACHE_API_KEY")
    api_keys: Path | None = asked(
        None, "TOML file of keys with names and limits; SIGHUP reloads it.", "FILE", panel=NETWORK
    )
    share_prefix_cache: bool = asked(
        False, "Share cached prefixes among --api-keys; keys can then tell what others have sent.", panel=NETWORK
    )
    metrics_key: str | None = asked(
        None, "Key that /metrics requires.", "KEY", envvar="MINICACHE_METRICS_KEY", panel=NETWORK
    )
    allow_origin: list[str] | None = asked(
        None, 'Allow web pages of this origin (CORS); "*": all. May be repeated.', "ORIGIN", panel=NETWORK
    )
    allow_host: list[str] | None = asked(
        None, "Without a key on this machine: answer to this host name too. May be repeated.", "NAME", panel=NETWORK
    )
    unread_seconds: float = asked(
        30.0, "Disconnect a client that reads nothing of its answer for so long.", "SECONDS", panel=NETWORK
    )
    served_model_name: str | None = asked(None, "Model name in the API; default: the model's.", "NAME", panel=MODEL)
    max_waiting: int = asked(256, "Capacity of the waiting queue; above it, 429.", "N", panel=BATCH, min=0)
    replicas: int = asked(
        1, "Number of engine processes; requests go to the least loaded.", "N", panel=PROCESSES, min=1
    )
    in_process: bool = asked(False, "Run the engine in a thread of the server, as in phase 10.", panel=PROCESSES)
    drain_seconds: float = asked(
        30.0, "How long SIGTERM waits for answers in progress.", "SECONDS", panel=PROCESSES, min=0.0
    )
    root_path: str = asked("", 'Path prefix that a proxy strips, such as "/minicache".', "PATH", panel=NETWORK)
    forwarded_allow_ips: str | None = asked(
        None,
        "Trusted proxies for X-Forwarded-For, comma-separated; default: this machine.",
        "ADDRESSES",
        panel=NETWORK,
    )
    ssl_certfile: Path | None = asked(None, "PEM certificate; enables HTTPS.", "FILE", panel=TLS_FILES)
    ssl_keyfile: Path | None = asked(None, "Private key; default: in the certificate's file.", "FILE", panel=TLS_FILES)
    ssl_keyfile_password: str | None = asked(
        None,
        "Password of an encrypted key; or in $MINICACHE_SSL_KEYFILE_PASSWORD.",
        "TEXT",
        panel=TLS_FILES,
        envvar="MINICACHE_SSL_KEYFILE_PASSWORD",
        show_envvar=False,
    )
    ssl_ca_certs: Path | None = asked(
        None, "Require client certificates signed by one of these.", "FILE", panel=TLS_FILES
    )


@app.command()
@with_options(ReplicaOptions, "serve")
def serve(http: Http, logs: Logs, mine: Mine = False, **engine: Any) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a page that shows the engine at work.

    The engine runs in a child process, which is restarted if it dies. With
    --mine, your engine runs in a thread of the server (--in-process).
    """
    if http.api_keys is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it must not end the process before or after its time
    if logs.has_json:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they are drawn on stderr
    console = Console(highlight=False, quiet=logs.has_json)  # the log has it all then
    labs = use_labs(console) if mine else []
    options = _options(engine)  # imports what labs may build
    in_process = http.in_process or mine
    if in_process and http.replicas > 1:
        raise typer.BadParameter("several --replicas need processes: leave out --in-process and --mine")
    if in_process and options.tensor_parallel_size > 1:
        raise typer.BadParameter("--tensor-parallel needs an engine process: leave out --in-process and --mine")
    with needing_extra("serving"):
        from minicache.engine.async_engine import AsyncEngine
        from minicache.engine.loading import find_model, load_tokenizer
        from minicache.scheduler import require_scheduler
        from minicache.serving.http.app import check_origin, create_app
        from minicache.serving.http.running import Server
        from minicache.serving.replica.client import EngineClient
        from minicache.serving.replica.llm import make_llm
        from minicache.serving.replica.process import starter
    name = http.served_model_name or options.model
    with logged(logs, logger):
        require_scheduler(options.scheduler)
        tls, keys = _tls(http), _keys(http)
        for origin in http.allow_origin or ():
            check_origin(origin)
        listener = bind(http.host, http.port)
        is_local = ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
        if keys is None and not is_local:
            warning = "anyone who can reach %s can use the model: set --api-key, MINICACHE_API_KEY or --api-keys"
            logger.warning(warning, http.host)
        with nullcontext() if logs.has_json else Console(stderr=True).status(f"Starting {name}") as status:

            def on_progress(doing: str) -> None:
                if status is not None:
                    status.update(f"Starting {name}: {doing}")

            def on_listening(at: int) -> None:
                if status is not None:
                    status.stop()
                collect_rarely()
                info, url = api.state.served.info, url_of(listener, at, "https" if tls else "http")
                _log(info, options, http, name, url)
                _say(console, info, options, http, name, url)

            tokenizer = load_tokenizer(find_model(options.model))
            client: AsyncEngine | EngineClient
            if in_process:
                client = AsyncEngine(make_llm(options, tokenizer), max_waiting=http.max_waiting)
            else:
                client = EngineClient(
                    starter(options), tokenizer, num_replicas=http.replicas, max_waiting=http.max_waiting
                )
                client.on_progress = on_progress
            api = create_app(
                client,
                served_model_name=name,
                api_keys=keys,
                metrics_key=http.metrics_key,
                allow_origins=http.allow_origin or (),
                lab_files=loaded_files(labs),
            )
            server = Server(
                api,
                drain_seconds=http.drain_seconds,
                on_listening=on_listening,
                tls=tls,
                root_path=http.root_path,
                forwarded_allow_ips=http.forwarded_allow_ips,
                unread_seconds=http.unread_seconds,
                allow_hosts=(http.allow_host or ()) if keys is None and is_local else None,
            )
            run(server, listener)


def _options(given: dict[str, Any]) -> ReplicaOptions:
    """The engine's options. A server's long prompts are computed in pieces, if its scheduler can."""
    from minicache.scheduler import has_option

    if given["long_prefill_threshold"] is None:
        in_pieces = has_option(given["scheduler"], "long_prefill_threshold")
        given["long_prefill_threshold"] = LONG_PREFILL_THRESHOLD if in_pieces else 0
    return ReplicaOptions(**given)


def _tls(http: Http) -> TLS | None:
    """What HTTPS needs; None: plain HTTP.

    Raises:
        ValueError: a file is missing, or not what it should be.
    """
    from minicache.serving.http.running import TLS

    if http.ssl_certfile is None:
        if http.ssl_keyfile is not None or http.ssl_ca_certs is not None:
            raise ValueError("HTTPS needs a certificate: --ssl-certfile")
        return None
    tls = TLS(
        certfile=http.ssl_certfile,
        keyfile=http.ssl_keyfile,
        password=http.ssl_keyfile_password,
        ca_certs=http.ssl_ca_certs,
    )
    tls.check()
    return tls


def _keys(http: Http) -> ApiKeys | None:
    """The keys of clients; None: they need none."""
    from minicache.serving.http.keys import ApiKeys

    if http.api_key is not None and http.api_keys is not None:
        raise ValueError("--api-key (or MINICACHE_API_KEY) and --api-keys exclude each other: leave out one")
    if http.api_key is not None:
        return ApiKeys.of_single(http.api_key)
    if http.api_keys is None:
        return None
    return ApiKeys.of_file(http.api_keys, share_prefix_cache=http.share_prefix_cache)


def _log(info: EngineInfo, options: ReplicaOptions, http: Http, name: str, url: str) -> None:
    """What is served, and what of it will disappoint."""
    fields = {"url": url, "model": name, "scheduler": options.scheduler, "num_blocks": info.cache.num_blocks}
    fields |= {"block_size": info.cache.block_size, "max_num_seqs": info.max_num_seqs, "engines": http.replicas}
    logger.info("listening", extra={"fields": fields})
    for sentence in advice(info, options, replicas=http.replicas, drain_seconds=http.drain_seconds):
        logger.warning(sentence)


def _say(console: Console, info: EngineInfo, options: ReplicaOptions, http: Http, name: str, url: str) -> None:
    """What is served, and how to get at it."""
    num_ranks, has_key = options.tensor_parallel_size, http.api_key is not None or http.api_keys is not None
    what = name + (f", {http.replicas} engines" if http.replicas > 1 else "")
    what += f", {num_ranks} processes per engine" if num_ranks > 1 else ""
    blocks = f"{info.cache.num_blocks} blocks of {info.cache.block_size} tokens"
    if info.cache.cache_dtype != "auto":
        blocks += f" in {info.cache.cache_dtype}"
    rows = [
        ("model", what),
        ("cache", f"{blocks}: {capacity(info)}"),
        ("page", f"{url}/"),
        ("API", f"{url}/v1" + (" (requires the API key)" if has_key else "")),
        ("metrics", f"{url}/metrics"),
        ("stop", "Ctrl-C; requests in progress finish first"),
    ]
    console.print(facts(rows, dim=True))
