"""Log probabilities with the tokens: what a client of a served model may ask for. No phase builds this module.

`ServedLLM` is an `LLM` whose chunks have the log probability of each token, and of the likeliest others. It changes
nothing in the engine's loop, which may be a learner's: it reads the logits from which a step picks its tokens, and adds
what it finds to the step's chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minicache.engine.answers import AnswerId, Chunk, Prompt, TokenLogprobs
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import require_count
from minicache.request import RequestId, RequestStatus
from minicache.scheduler import SchedulerOutput

__all__ = ["MAX_LOGPROBS", "ServedLLM", "TokenLogprobs"]

MAX_LOGPROBS = 20
"""The most tokens whose log probabilities a request can have for each token that it gets."""


class ServedLLM(LLM):
    """An `LLM` that gives log probabilities to those requests of `add_request` that ask for them.

    They are the model's own: log_softmax of the logits in float32, before temperature, top-k and top-p. A step computes
    them for the rows of requests that have asked, for no others.

    Args:
        arguments: `LLM`'s.
        options: `LLM`'s.

    Raises:
        Exception: as `LLM`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asking: set[RequestId] = set()  # answers whose chunks are to have log probabilities
        self._picked: dict[RequestId, list[TokenLogprobs]] = {}  # of the step under way, for its chunks
        self._num_before = 0  # chunks that were there before this step's

    def add_request(
        self, prompt: Prompt, params: SamplingParams, *, num_logprobs: int | None = None, **options: Any
    ) -> RequestId:
        """As `LLM.add_request`; and every chunk with a token has `logprobs`, if `num_logprobs` says so.

        Args:
            prompt: as for `LLM.add_request`.
            params: as for `LLM.add_request`. All n answers have log probabilities.
            num_logprobs: how many of the likeliest tokens each chunk has, 0 … MAX_LOGPROBS; 0: only the token that was
                picked. None: no log probabilities at all.
            options: more of what `LLM.add_request` takes.

        Raises:
            TypeError, ValueError: num_logprobs is no such number.
            Exception: as `LLM.add_request`. In all these cases nothing was added.
        """
        if num_logprobs is not None:
            require_count("num_logprobs", num_logprobs, at_least=0)
            if num_logprobs > MAX_LOGPROBS:
                raise ValueError(f"num_logprobs must be at most {MAX_LOGPROBS}; got {num_logprobs}")
        request_id = super().add_request(prompt, params, **options)
        if num_logprobs is not None:
            for each in self.answers_of(request_id):
                self.answers[each].num_logprobs = num_logprobs
                self._asking.add(each)
        return request_id

    def stop_answer(self, request_id: RequestId, index: int) -> None:
        """End one answer of a request, as a stop string in its text does: for callers that keep the texts themselves.

        It gets no further chunk. The request's other answers go on. One that is finished already stays as it is.

        Args:
            request_id: of `add_request`.
            index: which of its answers.
        """
        name = AnswerId(request_id, index) if index else request_id
        if self.answers.pop(name, None) is not None:
            self.scheduler.finish_request(name, RequestStatus.FINISHED_STOPPED)
            self.memory.forget(name)

    def pick(self, output: SchedulerOutput, logits: Tensor) -> dict[RequestId, int | None]:
        """As `LLM.pick`; and the log probabilities of what was picked are kept for `collect`."""
        picked = super().pick(output, logits)
        self._asking &= self.answers.keys()
        asked = self._asking and [
            (row, request.request_id, token_id, num_logprobs)
            for row, request in enumerate(output.scheduled)
            if (num_logprobs := self.answers[request.request_id].num_logprobs) is not None
            and (token_id := picked.get(request.request_id)) is not None
        ]
        self._picked, self._num_before = {}, len(self._chunks)
        if asked:
            rows, ids, token_ids, counts = zip(*asked, strict=True)
            found = token_logprobs(logits[list(rows)], list(token_ids), counts)
            self._picked = {request_id: [each] for request_id, each in zip(ids, found, strict=True)}
            if self.speculation is not None:
                for request_id, num_logprobs in zip(ids, counts, strict=True):
                    if request_id in self.speculation.accepted:
                        accepted, its_logits = self.speculation.accepted[request_id]
                        before = token_logprobs(its_logits, accepted, (num_logprobs,) * len(accepted))
                        self._picked[request_id][:0] = before
        return picked

    def collect(self) -> list[Chunk]:
        """As `LLM.collect`; the step's chunks have their log probabilities."""
        if self._picked:
            for index in range(self._num_before, len(self._chunks)):
                chunk = self._chunks[index]
                if its_logprobs := self._picked.get(chunk.request_id):
                    self._chunks[index] = replace(chunk, logprobs=its_logprobs.pop(0))
            self._picked = {}
        return super().collect()


def token_logprobs(logits: Tensor, token_ids: list[int], counts: tuple[int, ...]) -> list[TokenLogprobs]:
    """The log probability of each row's token, and of the likeliest tokens.

    Args:
        logits: `[B, vocab]`, as the model gave them.
        token_ids: B tokens, one of each row.
        counts: how many of the likeliest tokens to name for each row, ≥ 0; all of them if there are fewer.

    Returns:
        B of them. Among equally likely tokens the lower id is first.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(counts), logprobs.shape[-1]), dim=-1)
    found = []
    for token_id, logprob, values, ids, count in zip(
        token_ids, chosen, best.values.tolist(), best.indices.tolist(), counts, strict=True
    ):
        top = sorted(zip(ids, values, strict=True), key=lambda each: (-each[1], each[0]))
        found.append(TokenLogprobs(token_id, logprob, tuple(top[:count])))
    return found
