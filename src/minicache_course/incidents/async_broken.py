"""Three schedulers with bugs of 2026, rebuilt: each runs one step ahead of the tokens, and forgets that once.

Phase 12 comes with them. They follow public reports on vLLM and on its plug-in for Ascend, and rebuild the scheduler's
part only, at the size of this course. Each adds a few lines to an engine of `minicache_course.incidents.async_bases`.
Use none of these in a server.
"""

from __future__ import annotations

from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache_course.incidents.async_bases import AlternatingScheduler, FetchingScheduler, SlottedScheduler


class FreedInFlightScheduler(FetchingScheduler):
    """Incident 9: blocks are freed while a step that writes into them is in flight.

    **What it did.** A request that finishes gives its blocks back at once, though the step ahead has scheduled it again
    and writes one more token into them. While all writes come from steps, that is harmless: they run one after the
    other. But this engine gets the prompts of new requests from another machine. The network card writes them into the
    freed blocks, the step in flight writes there too, and which of the two is last is left to chance.

    **Public reports.** vllm-ascend issue 14055: blocks of requests that finish, are aborted or are preempted while a
    newer step is in flight, on a server that receives the keys and values of its prompts. vllm-ascend issue 13501: the
    same of blocks that leave a sliding window; now and then an answer had foreign text in its middle. vLLM's pull
    requests 45357 and 47728 hold blocks back until the step is over.

    **Smallest workload.** 2 blocks of 4, one batch slot. A request of 4 tokens whose first token is its stop token,
    then one of 8 tokens. **Counter:** blocks of an admitted request that a step in flight writes: 1 where 0 is right.
    """

    def release(self, request: Request) -> None:
        """Give back all that a request holds: it has left the batch."""
        super().release(request)


class StalePlaceholderScheduler(AlternatingScheduler):
    """Incident 10: a placeholder outlives its token, and is read as one.

    **What it did.** A placeholder is filled in by the step ahead, so the commit took it back from requests of that
    step. A request that the step ahead had passed over kept it, though its token had come. The next step that scheduled
    the request computed two tokens: the one that had come, and −1.

    **Public report.** vLLM's pull request 46899: with draft tokens, placeholders of −1 outlive a step that skips the
    request, for lack of budget for example, and reach the model as token ids. It names a production server on which
    that was rare, and ended in a crash. Here no draft tokens are needed.

    **Smallest workload.** A request in decode, and one that arrives while its step runs. **Counter:** tokens that a
    step computes and that are neither known nor on their way: 1 where 0 is right. That request never finishes.
    """

    def append_token(self, request: Request, token: int) -> bool:
        """Replace a placeholder by its token, or append it as a stale one; whether it finishes the request."""
        if self.ahead is None or request.request_id in self.ahead.num_scheduled_tokens:
            request.num_placeholders = 0
        request.output_token_ids.append(token)
        if token in request.stop_token_ids and not request.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
        elif len(request.output_token_ids) >= request.max_tokens or request.num_tokens == self.max_model_len:
            request.status = RequestStatus.FINISHED_LENGTH
        elif self.ahead is not None and request.num_tokens > self._capacity:
            request.status = RequestStatus.FINISHED_CAPACITY
        return request.status.is_finished


class WrongReceiverScheduler(SlottedScheduler):
    """Incident 11: a token goes to the request that took the batch slot of its own.

    **What it did.** The model returns tokens by slot. They were given to the requests that had the slots when the
    tokens came, and not to those that had them when the step was scheduled. If an urgent request has taken a slot in
    between, it gets the first word of an answer to another client's prompt, and goes on from there.

    **Public report.** The advisory GHSA-v97p-wpxp-px84 on vLLM: a token reaches another request after a preemption. The
    course knows no more of it than that; the mechanism here is one that has this effect.

    **Smallest workload.** One batch slot, a request in decode, and one with a lower priority number that arrives.
    **Counter:** tokens in an answer that were generated for another request: 1 where 0 is right.
    """

    def receiver(self, output: SchedulerOutput, slot: int) -> Request | None:
        """The request that gets the token which the model has returned for a slot."""
        return self.slots.get(slot)
