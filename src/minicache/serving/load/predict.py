"""What the simulator says of the same load: same arrivals, same lengths, same tokens, the server's own scheduler.

The server's steps cost what `minicache calibrate` measured on this machine. HTTP, the event loop and the client cost
nothing there, and no request is refused: this explains part of the difference to the measurement. Part
of phase 10's load client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minicache.request import Request
from minicache.scheduler import Scheduler
from minicache.serving.load.plan import PlannedRequest
from minicache.simulator.costs import StepCost
from minicache.simulator.report import ServingReport
from minicache.simulator.serving import ServingSimulation


def predict(requests: Sequence[PlannedRequest], scheduler: Scheduler, cost: StepCost) -> ServingReport:
    """Serve the planned requests in simulated time.

    Args:
        requests: the plan.
        scheduler: a new one, with the server's options.
        cost: how long the server's steps take.

    Raises:
        InvariantError: the scheduler would never end.
    """
    return ServingSimulation(scheduler, cost, _requests(requests), skip_quiet=True).run()


def _requests(planned: Sequence[PlannedRequest]) -> Iterator[Request]:
    for each in planned:
        yield Request(
            each.arrival.request_id,
            each.prompt_token_ids,
            each.arrival.num_output_tokens,
            ignore_eos=True,
            arrival_time=each.arrival.time,
        )
