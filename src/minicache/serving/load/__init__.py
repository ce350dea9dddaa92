"""The load client: requests that come whether or not the server keeps up, and what their senders felt.

`plan` settles beforehand who comes when and with what prompt. `client` sends it over HTTP and notes when each token
came; `wire` reads what comes back, byte by byte. `report` makes numbers of the notes, `predict` asks the simulator for
the same load, and `plots` draws both. Phase 10 measures its server with it (`minicache bench serve`). It knows OpenAI's
API only: nothing here imports the server or the engine.
"""

from minicache.serving.load.client import Endpoint, LoadRun, Outcome, fetch_model, reach
from minicache.serving.load.plan import PlannedRequest, fit_workload, fixed_arrivals, make_requests, workload_arrivals
from minicache.serving.load.predict import predict
from minicache.serving.load.report import LoadReport, compare

__all__ = [
    "Endpoint",
    "LoadReport",
    "LoadRun",
    "Outcome",
    "PlannedRequest",
    "compare",
    "fetch_model",
    "fit_workload",
    "fixed_arrivals",
    "make_requests",
    "predict",
    "reach",
    "workload_arrivals",
]
