"""An engine's process: `python -m minicache.serving.replica ADDRESS OPTIONS`, started by the server's process.

It exits on a shutdown message, or when its parent process exits. It ignores signals: Ctrl-C in a terminal
goes to both processes, and so does the SIGTERM of a service manager; the server then drains, for which it needs this.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import msgspec
import zmq

from minicache.engine.options import ReplicaOptions
from minicache.errors import RankDiedError
from minicache.serving.replica.logs import logging_to_server
from minicache.serving.replica.messages import Progress, Ready, StartFailed, encode


def main(address: str, options: ReplicaOptions) -> int:
    """Make the engine, and run it until `Shutdown`; the exit status."""
    logging_to_server()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set(zmq.SNDHWM, 0)  # a step never waits for a reader
        socket.connect(address)
        try:
            socket.send(encode(Progress("importing PyTorch")))
            from minicache.serving.replica.core import EngineCore
            from minicache.serving.replica.llm import info_of, make_llm

            socket.send(encode(Progress(f"loading {options.model}")))
            llm = make_llm(options)
            core = EngineCore(llm, socket)
        except Exception as error:
            socket.send(encode(StartFailed(type(error).__name__, str(error))))
            return 1
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked at again by each collection
        socket.send(encode(Ready(info_of(llm))))
        try:
            core.run()
        except RankDiedError:  # which it has logged
            return 1
        finally:
            gc.unfreeze()  # at exit, libraries look for objects that were not freed
    return 0


def _end_with_parent() -> None:
    """Wait until the other end of the pipe is closed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=ReplicaOptions)))
