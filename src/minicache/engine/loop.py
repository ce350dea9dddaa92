"""The engine's loop, which phase 5 builds: schedule, run the model, pick tokens, commit them, emit chunks.

The scheduler decides what runs, and in what order; the memory (`minicache.engine.kv`) holds keys and values. A
request gets the tokens that it would get alone. `minicache.engine.llm.LLM` is this loop with prompts and answers around
it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minicache.engine.answers import Answer, Chunk
from minicache.engine.kv import Memory, Model, logits_at
from minicache.engine.sampling import TokenSampler, pick_tokens
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger("minicache")


class EngineLoop:
    """Serves the requests of `answers`, step by step.

    **When a step fails**, `step()` raises the error, and every unfinished request is back in the waiting queue with
    nothing computed (`recover`). Its generated tokens stay, and a failed copy or forward pass has moved no random
    generator, so the steps that follow give the same tokens as without the failure.

    **When one request fails**, because its logits are not finite or its tokens cannot be decoded, it alone is finished,
    as FINISHED_ERROR: its last chunk has the finish_reason "error".

    Args:
        model: what is run.
        scheduler: decides what runs.
        memory: where the requests' keys and values are.

    Attributes:
        model: as above.
        device: of its weights.
        scheduler: as above.
        memory: as above.
        answers: request id → `Answer`, for all unfinished requests. `LLM` puts them there.
    """

    def __init__(self, model: Model, scheduler: Scheduler, memory: Memory) -> None:
        self.model = model
        self.device: torch.device = next(iter(model.parameters())).device
        self.scheduler = scheduler
        self.memory = memory
        self.answers: dict[RequestId, Answer] = {}
        self._chunks: list[Chunk] = []  # for step() to return

    def step(self) -> list[Chunk]:
        """Run one step: schedule, move blocks, run the model, pick tokens, commit them, emit chunks.

        If nothing is scheduled, the model is not run; blocks are moved and the step is committed: it may have swapped a
        request out. A request whose logits give no token (None) is finished as FINISHED_ERROR before the tokens of the
        others are committed (`update_from_output`). Then chunks are emitted: first for the requests that `schedule()`
        has finished without a token, for capacity (`output.finished` has their ids), then for those of the step, in
        batch order.

        If anything raises before the commit, Ctrl-C included, `recover` is called, and the error is raised again.

        Returns:
            As `collect`: the chunks of requests of `LLM.add_request`, of this step and of earlier ones that failed.
            Chunks of a `stream` or `generate` go to that call.

        Raises:
            Exception: what the model, or anything else in the step, raises; see the class.
        """
        try:
            output = self.scheduler.schedule()
            self.memory.move_blocks(output)
            picked = self.pick(output, self.run_model(output)) if output.scheduled else {}
            token_ids = {}
            for request_id, token_id in picked.items():
                if token_id is None:
                    self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ERROR)
                else:
                    token_ids[request_id] = token_id
            self.scheduler.update_from_output(output, token_ids)
        except BaseException:  # KeyboardInterrupt too: the next step must find everything in order
            self.recover()
            raise
        for request_id in output.finished:
            self.emit(request_id, None)
        for request_id, token_id in picked.items():
            self.emit(request_id, token_id)
        return self.collect()

    def recover(self) -> None:
        """Give up what is computed: a step failed, and which KV entries it has written is unknown.

        Every unfinished request is back in the waiting queue (`Scheduler.recover`), and the memory holds nothing.
        Tokens that were committed before the failure are emitted, and so are requests that finished; `collect` returns
        these chunks after the next step.
        """
        self.scheduler.recover()
        self.memory.clear()
        for request_id, answer in list(self.answers.items()):
            if len(answer.request.output_token_ids) > answer.num_chunks:
                self.emit(request_id, answer.request.output_token_ids[-1])
            elif answer.request.status.is_finished:
                self.emit(request_id, None)

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """One forward pass over all tokens that a step has to compute.

        They form one row, request after request in batch order. A request's tokens begin at its first uncomputed one.
        `memory.make_step(output)` is the cache that keeps the requests apart, and `logits_at` runs the model, without
        gradients.

        Args:
            output: of `schedule()`, with at least one request.

        Returns:
            `[B, vocab]`, for each request in batch order the logits of its last token in this step.
        """
        counts = output.num_scheduled_tokens.values()
        tokens: list[int] = []
        for request, num_new in zip(output.scheduled, counts, strict=True):
            start = request.num_computed_tokens
            tokens += request.token_ids(start, start + num_new)
        last = torch.tensor([end - 1 for end in accumulate(counts)], device=self.device)
        token_ids = torch.tensor([tokens], device=self.device)
        with torch.inference_mode():
            return logits_at(self.model, token_ids, self.memory.make_step(output), last)

    def pick(self, output: SchedulerOutput, logits: Tensor) -> dict[RequestId, int | None]:
        """Pick the next token of every request whose tokens are all computed with this step.

        Each request has its own sampler, and one call of `sample` picks for all. Nothing is picked for a request that
        is still in its prompt: its random generator must not advance.

        Args:
            output: of `schedule()`.
            logits: `[B, vocab]`, as `run_model` gives them.

        Returns:
            request id → token, in batch order; None where the logits give none.
        """
        rows, samplers, ids = [], [], []
        for row, (request, num_new) in enumerate(
            zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True)
        ):
            if request.num_computed_tokens + num_new == request.num_tokens:
                rows.append(row)
                samplers.append(self.answers[request.request_id].sampler)
                ids.append(request.request_id)
        return dict(zip(ids, self.sample(logits, rows, samplers), strict=True))

    def sample(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """A token of each of some rows of logits, by its sampler; None where a row gives none.

        On a GPU `LLM` has them picked there instead.

        Args:
            logits: `[B, vocab]`.
            rows: of `logits`, in ascending order.
            samplers: one for each of `rows`.
        """
        return pick_tokens(logits if len(rows) == len(logits) else logits[list(rows)], samplers)

    def emit(self, request_id: RequestId, token_id: int | None) -> None:
        """Make the next chunk of an answer, and finish the answer if its text ends there.

        The token goes through the answer's `TextStream`, if it has one. If that finds a stop string, the request is
        finished as FINISHED_STOPPED. Otherwise, if the request is finished, the text that was held back is added. If
        the tokenizer raises, the error is logged and the request is FINISHED_ERROR (`fail`). The chunk goes into
        `answer.chunks` and is counted in `answer.num_chunks`. A finished answer is dropped from `answers`, and the
        memory forgets its request.

        Args:
            request_id: of `answers`; the scheduler has recorded the token.
            token_id: its new token; None if it was finished without one.
        """
        answer = self.answers[request_id]
        text = ""
        try:
            if answer.text is not None:
                if token_id is not None:
                    text = answer.text.push(token_id)
                if answer.text.is_stopped:
                    self.scheduler.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
                elif answer.finish_reason:
                    text += answer.text.finish()
        except Exception as error:
            self.fail(answer.request, error)
        reason = answer.finish_reason
        answer.chunks.append(Chunk(answer.index, token_id, text, reason, request_id))
        answer.num_chunks += 1
        if reason:
            del self.answers[request_id]
            self.memory.forget(request_id)

    def fail(self, request: Request, error: Exception) -> None:
        """Finish a request whose tokens cannot be decoded, even if the scheduler has finished it already.

        Args:
            request: whose tokens they are; it becomes FINISHED_ERROR.
            error: what the tokenizer raised, for the log.
        """
        logger.error("the tokens of request %r cannot be decoded", request.request_id, exc_info=error)
        self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
        request.status = RequestStatus.FINISHED_ERROR

    def collect(self) -> list[Chunk]:
        """The chunks of requests of `LLM.add_request` that were not returned yet. Every step ends with this."""
        chunks = self._chunks.copy()
        self._chunks.clear()  # the same list: the answers go on adding to it
        return chunks
