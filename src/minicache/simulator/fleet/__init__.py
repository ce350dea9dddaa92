"""A fleet in simulated time: several servers, each with a clock of its own, behind one router.

Each replica is a `ServingSimulation`: a real scheduler, and a cost model in the place of the model. The router, the
account of who is in the fleet and the autoscaler are those of `minicache.fleet`, the same objects that decide in front
of real engines. Given, not built; used from phase 11 on. Pure standard library.

| module | owns |
|---|---|
| `simulation` | `FleetSimulation`: what happens, in the order of time |
| `job` | a request on its way: `FailoverStream` says how it goes on after a crash |
| `options` | what may happen to a fleet: `Crash`, `Scaling`, `Disaggregation` |
| `replica` | a server that is sent requests while it runs |
| `report` | what came of a run |
"""

from __future__ import annotations

from minicache.simulator.fleet.options import Crash, Disaggregation, Scaling
from minicache.simulator.fleet.report import FleetReport, FleetSeries, ReplicaReport
from minicache.simulator.fleet.simulation import FleetSimulation

__all__ = ["Crash", "Disaggregation", "FleetReport", "FleetSeries", "FleetSimulation", "ReplicaReport", "Scaling"]
