"""Run a scheduler without a model: every token is made up, and what matters is counted.

For tests, incidents and figures: which requests ran when, and what it cost. The simulator adds time to this, the engine
adds a model. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from minicache.request import Request, RequestId
from minicache.scheduler.base import Scheduler
from minicache.scheduler.speculative import SpeculativeScheduler


@dataclass(slots=True)
class Tally:
    """What a run has cost so far.

    Attributes:
        num_steps: steps in which a token was computed, or a request was finished.
        num_prefill_tokens: tokens computed for requests of which nothing was in the cache: prompts, and what was
            computed again after a preemption.
        num_recomputed_tokens: of those, the ones that had been computed before.
        num_preemptions: how often a request lost its batch slot.
        num_swapped_blocks: blocks copied to CPU swap space and back.
        batch_sizes: of each step, the requests that computed something.
        order: of each step, the ids in batch order.
        first_token: id → when its first token was generated. Time is counted in steps from 0, including those without a
            request, which `batch_sizes` and `order` leave out.
        finished: id → when it finished, in this order.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    first_token: dict[RequestId, int] = field(default_factory=dict)
    finished: dict[RequestId, int] = field(default_factory=dict)
    order: list[list[RequestId]] = field(default_factory=list)

    @property
    def mean_batch_size(self) -> float:
        """Requests that computed something, on average over the steps; 0 without a step."""
        return sum(self.batch_sizes) / len(self.batch_sizes) if self.batch_sizes else 0.0


def drive(
    scheduler: Scheduler,
    requests: Iterable[Request] = (),
    *,
    arrivals: Iterable[tuple[int, Request]] = (),
    token: Callable[[Request], int] = lambda request: 0,
    num_accepted: Callable[[Request, int], int] = lambda request, num_drafts: 0,
    max_steps: int = 10_000,
) -> Tally:
    """Serve requests until all have finished.

    Args:
        scheduler: any stage, or a broken one.
        requests: added before the first step, in this order.
        arrivals: (step, request), added before that step; in the order of the steps.
        token: what the model generates for a request.
        num_accepted: how many of so many draft tokens are accepted, for a `SpeculativeScheduler`.
        max_steps: stop there, whatever is left: a broken scheduler may never finish. Idle steps count.

    Returns:
        The tally. Requests that did not finish in time are not in `finished`.

    Raises:
        RequestTooLargeError: a request is refused.
    """
    for request in requests:
        scheduler.add_request(request)
    coming = sorted(arrivals, key=lambda arrival: arrival[0])[::-1]
    tally = Tally()
    most_computed: dict[RequestId, int] = {}
    for step in range(max_steps):
        while coming and coming[-1][0] <= step:
            scheduler.add_request(coming.pop()[1])
        if not scheduler.has_unfinished:
            if not coming:
                break
            continue
        output = scheduler.schedule()
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            computed = request.num_computed_tokens
            num_new -= len(output.draft_token_ids.get(request.request_id, ()))
            if not computed:
                tally.num_prefill_tokens += num_new
                tally.num_recomputed_tokens += min(num_new, most_computed.get(request.request_id, 0))
            most_computed[request.request_id] = max(computed + num_new, most_computed.get(request.request_id, 0))
            if not request.output_token_ids and computed + num_new == request.num_tokens:
                tally.first_token[request.request_id] = step
        tally.num_steps += bool(output.scheduled or output.finished)
        tally.num_preemptions += len(output.preempted)
        tally.num_swapped_blocks += sum(map(len, (*output.swapped_out.values(), *output.swapped_in.values())))
        tally.batch_sizes.append(len(output.scheduled))
        tally.order.append(list(output.num_scheduled_tokens))
        tokens = {request.request_id: token(request) for request in output.scheduled}
        if output.draft_token_ids:
            drafted = {request.request_id: request for request in output.scheduled}
            given = {
                request_id: [tokens[request_id]] * (1 + num_accepted(drafted[request_id], len(drafts)))
                for request_id, drafts in output.draft_token_ids.items()
            }
            tokens |= cast(SpeculativeScheduler, scheduler).accept(output, given)
        finished = scheduler.update_from_output(output, tokens)
        tally.finished |= dict.fromkeys(output.finished, step)
        tally.finished |= {request.request_id: step for request in finished}
    return tally
