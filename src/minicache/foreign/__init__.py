"""Other people's schedulers, driven without a model and audited at every step: `minicache audit`.

| module | owns |
|---|---|
| `adapter` | `Adapter`: what an engine must answer to be audited, and the values that it answers with |
| `checkout` | a checkout's modules, imported next to this package; the adapter that knows a checkout |
| `workload` | `Workload`: requests and limits by seed, and smaller ones of the same kind |
| `rules` | the rules, over one workload |
| `search` | many workloads; the smallest that breaks a rule |
| `nano_vllm`, `mini_sglang` | adapters: they import the engine's own classes from a checkout |

Nothing of another engine is in this package. Pure standard library, but for what a checkout imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.foreign.adapter import Adapter as Adapter
    from minicache.foreign.adapter import RequestState as RequestState
    from minicache.foreign.adapter import State as State
    from minicache.foreign.adapter import Work as Work
    from minicache.foreign.checkout import find_adapter as find_adapter
    from minicache.foreign.checkout import load as load
    from minicache.foreign.rules import replay as replay
    from minicache.foreign.search import audit as audit
    from minicache.foreign.workload import Limits as Limits
    from minicache.foreign.workload import Workload as Workload

__getattr__, __dir__ = lazily(
    __name__,
    adapter="Adapter RequestState State Work",
    checkout="find_adapter load",
    rules="replay",
    search="audit",
    workload="Limits Workload",
)
