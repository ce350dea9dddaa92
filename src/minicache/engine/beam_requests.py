"""Beam search on an engine: each beam is a separate request, and `BeamSearch` decides which of them continue.

A beam with two continuations is forked, one with none is finished, and common blocks are stored once
(Kwon et al. 2023, §4.4). No phase builds this module; the decisions are phase 8's (`minicache.engine.beam`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from minicache.engine.answers import Prompt, all_end_token_ids, prompt_token_ids
from minicache.engine.beam import Beam, BeamSearch, BeamSearchParams, Step
from minicache.engine.llm import LLM, MAX_IDLE_STEPS
from minicache.engine.stopping import TextStream
from minicache.errors import InvariantError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import SchedulerOutput, SharingScheduler


@dataclass(slots=True, eq=False)
class _Search:
    """One prompt's search, and the requests that compute its beams.

    Attributes:
        prompt: its tokens.
        requests: one for each of `search.beams`.
        candidates: of each beam, once its logits are available. While a preempted beam has none, the others run ahead
            by tokens that may be discarded.
    """

    prompt: list[int]
    search: BeamSearch
    requests: list[Request]
    candidates: list[list[tuple[int, float]] | None] = field(default_factory=list)


def beam_search(llm: LLM, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
    """Search for the likeliest answers to each prompt, all prompts at once.

    Args:
        llm: an engine without requests. With a scheduler that forks ("chunked", or `prefix_caching=True` with "paged"
            or "fair") beams share their common blocks; with another, each computes all of its tokens.
        prompts: texts, or lists of token ids.
        params: how to search.

    Returns:
        For each prompt its answers, the best first: beam_width of them, fewer only if there are no more hypotheses.

    Raises:
        TypeError, ValueError, IndexError, UnknownWordError: as `LLM.generate`; also if the engine has requests.
        RequestTooLargeError: a prompt could never be served, and nothing was begun. Or, with another scheduler than
            "chunked", a beam had to begin anew and is longer than a step (max_num_batched_tokens). Then all requests of
            this call are aborted.
        InvariantError: the scheduler schedules nothing any more.
        Exception: what the model raises. All requests of this call are aborted.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams; got {params!r}")
    if llm.has_unfinished:
        raise ValueError("beam search needs an engine without requests: this one has unfinished requests")
    run = _Run(llm, params, prompts)
    try:
        run.finish()
    except BaseException:
        llm.recover()
        raise
    finally:
        run.abort()
    return [[run.shown(search, beam) for beam in search.search.answers] for search in run.searches]


class _Run:
    """One call of `beam_search`."""

    def __init__(self, llm: LLM, params: BeamSearchParams, prompts: Sequence[Prompt]) -> None:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts must be a list of texts or of token id lists; got {prompts!r}")
        self.llm = llm
        self.numbers = count()  # of requests, which are named by them
        self.searches: list[_Search] = []
        self.unfinished: dict[RequestId, tuple[_Search, int]] = {}  # request → its search, and its beam's index
        end = () if params.ignore_eos else all_end_token_ids(llm.model.config, llm.tokenizer)
        for prompt in prompts:
            token_ids = prompt_token_ids(prompt, llm.model.config.vocab_size, llm.max_model_len, llm.tokenizer)
            room = llm.max_model_len - len(token_ids)
            search = BeamSearch(params, {*params.stop_token_ids, *end}, min(params.max_tokens, room))
            request = self.new_request(token_ids, search.max_tokens)
            llm.scheduler.check_size(request)
            self.searches.append(_Search(token_ids, search, [request], [None]))
        for each in self.searches:
            self.begin(each, 0, each.requests[0])

    def new_request(self, token_ids: list[int], max_tokens: int) -> Request:
        """A request that computes a beam. Only the search finishes it: no token does."""
        return Request(("beam", next(self.numbers)), token_ids, max_tokens, ignore_eos=True)

    def begin(self, each: _Search, index: int, request: Request) -> None:
        """Have a beam computed by a new request, from its first token on."""
        self.llm.scheduler.add_request(request)
        self.unfinished[request.request_id] = each, index

    def finish(self) -> None:
        """Step until all searches are over."""
        num_idle = 0
        while self.unfinished:
            num_steps = self.llm.memory.num_steps
            self.step()
            num_idle = 0 if self.llm.memory.num_steps > num_steps else num_idle + 1
            if num_idle > MAX_IDLE_STEPS:
                raise InvariantError(
                    f"the scheduler schedules nothing any more; {len(self.unfinished)} beams are unfinished"
                )

    def step(self) -> None:
        """One step of the engine, for beams: as `LLM.step`, but the searches choose the next tokens."""
        output = self.llm.scheduler.schedule()
        self.llm.memory.move_blocks(output)
        outgrown = [self.unfinished[request_id][0] for request_id in output.finished]
        token_ids: dict[RequestId, int] = {}
        failed: list[_Search] = []
        decided: list[tuple[_Search, list[Request], list[Step]]] = []
        if output.scheduled:
            failed = self.note_candidates(output, self.llm.run_model(output), token_ids)
            for each in self.searches:
                if each.requests and each not in outgrown and None not in each.candidates:
                    parents = each.requests
                    length = len(each.search.beams[0].token_ids)
                    steps = each.search.advance(cast("list[list[tuple[int, float]]]", each.candidates))
                    decided.append((each, parents, steps))
                    for step in reversed(steps):  # a parent's request continues as the first of its children
                        request = parents[step.parent]
                        # Not if it has run ahead while another beam was preempted.
                        if request.request_id in token_ids and request.num_tokens == len(each.prompt) + length:
                            token_ids[request.request_id] = step.token_id
        self.llm.scheduler.update_from_output(output, token_ids)
        for each in outgrown:
            each.search.give_up()
            self.end(each)
        for each in failed:
            for request in each.requests:
                self.llm.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
            each.search.give_up("error")
            self.end(each)
        for each, parents, steps in decided:
            self.go_on(each, parents, steps)

    def note_candidates(
        self, output: SchedulerOutput, logits: Tensor, token_ids: dict[RequestId, int]
    ) -> list[_Search]:
        """Note the candidates of each beam of the step, and give it its likeliest token for the time being.

        Returns:
            The searches with a beam whose logits are not finite: it has no candidates.
        """
        failed = []
        for row, (request, num_new) in enumerate(
            zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True)
        ):
            if request.request_id not in self.unfinished or request.num_computed_tokens + num_new < request.num_tokens:
                continue
            each, index = self.unfinished[request.request_id]
            log_probs = torch.log_softmax(logits[row].float(), dim=-1)
            best = log_probs.topk(min(each.search.num_candidates, len(log_probs)))
            candidates = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            token_ids[request.request_id] = candidates[0][0]
            if candidates[0][1] != candidates[0][1]:  # NaN: log_softmax makes it of infinities too
                failed.append(each)
            elif each.candidates[index] is None:
                each.candidates[index] = candidates
        return failed

    def go_on(self, each: _Search, parents: list[Request], steps: list[Step]) -> None:
        """Have the next beams computed: by their parents' requests, by forks of these, or by new requests."""
        wanted = [[*each.prompt, *beam.token_ids] for beam in each.search.beams]
        claimed: dict[int, Request] = {}  # beam → the parent's request, which continues as that beam
        for index, step in enumerate(steps):
            request = parents[step.parent]
            has_its_tokens = request.token_ids(0, request.num_tokens) == wanted[index]
            if has_its_tokens and not request.status.is_finished and request not in claimed.values():
                claimed[index] = request
        kept = {step.parent for step in steps}
        for parent, request in enumerate(parents):
            if parent not in kept:
                self.drop(request)  # before the forks, which need its batch slot
        each.requests = []
        for index, step in enumerate(steps):
            request = claimed.get(index) or self.child(parents[step.parent], wanted[index], each)
            each.requests.append(request)
            self.unfinished[request.request_id] = each, index
        for request in parents:
            if request not in each.requests:
                self.drop(request)
        each.candidates = [None] * len(each.requests)

    def child(self, parent: Request, token_ids: list[int], each: _Search) -> Request:
        """A request that has these tokens: a fork, if the parent can be forked, else a new one with a long prompt."""
        scheduler: Any = self.llm.scheduler
        has_slot = scheduler.num_running < scheduler.max_num_seqs
        if self.llm.forks and has_slot and parent.status is RequestStatus.RUNNING:
            child_id: RequestId = ("beam", next(self.numbers))
            return cast(SharingScheduler, scheduler).fork_request(
                parent.request_id, child_id, token_ids[parent.num_prompt_tokens :]
            )
        num_left = each.search.max_tokens - (len(token_ids) - len(each.prompt))
        request = self.new_request(token_ids, num_left)
        scheduler.add_request(request)
        return request

    def drop(self, request: Request) -> None:
        """Finish the request of a beam that does not continue."""
        self.unfinished.pop(request.request_id, None)
        self.llm.abort_request(request.request_id)

    def end(self, each: _Search) -> None:
        """Finish the requests of a search that is over."""
        for request in each.requests:
            self.drop(request)
        each.requests = []

    def abort(self) -> None:
        """Finish all requests that are unfinished."""
        for each in self.searches:
            self.end(each)

    def shown(self, each: _Search, beam: Beam) -> Beam:
        """An answer with its text."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            return beam
        stream = TextStream(tokenizer, each.prompt, ())
        text = "".join(map(stream.push, beam.token_ids)) + stream.finish()
        return Beam(beam.token_ids, beam.score, beam.finish_reason, text)
