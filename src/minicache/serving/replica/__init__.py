"""The engine in a process of its own, several of them if need be, and what the server's process calls.

| module | owns | runs in |
|---|---|---|
| `client` | `EngineClient`: the least-loaded engine, its process, restarts | the server's process |
| `fleet` | `FleetClient`: the same, where others carry requests to engines; failover | the server's process |
| `remote` | `RemoteEngine`, which both are: admission, draining, a request's stream | the server's process |
| `process` | `starter`: one engine's process, from outside | the server's process |
| `messages` | what goes between the two | both |
| `core` | `EngineCore`: the loop: messages, a step, a message | the engine's process |
| `llm` | `make_llm`: an engine from its options | the engine's process |
| `stats`, `view` | what it tells of itself: numbers for Prometheus, pictures for the live page | the engine's process |

No phase builds this package; phase 10 builds the same with a thread (`minicache.engine.async_engine`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.serving.replica.client import EngineClient as EngineClient
    from minicache.serving.replica.core import EngineCore as EngineCore

__getattr__, __dir__ = lazily(__name__, client="EngineClient", core="EngineCore")
