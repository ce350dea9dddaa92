"""The serving engine: a scheduler decides what to compute, a model computes it, and many requests get their tokens.

Phase 5 builds its loop. A step is: `schedule()`, move the blocks that it names, one forward pass over the new tokens of
all requests, a token picked for each, `update_from_output()`. The scheduler decides what runs, and in what order; the
memory (`minicache.engine.runner`) holds keys and values. A request gets the tokens that it would get alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from minicache.cache.paged import PagedStorage
from minicache.engine.answers import Answer, AnswerId, Chunk, Completion, Prompt, new_answers, request_of
from minicache.engine.gpu_memory import cache_nbytes
from minicache.engine.model_runner import find_runner, make_memory
from minicache.engine.parallel_runner import parallelize, require_combination
from minicache.engine.runner import (
    Memory,
    Model,
    check_kv_cache_dtype,
    default_num_blocks,
    find_model,
    load_model,
    load_tokenizer,
    logits_at,
)
from minicache.engine.sampling import SamplingParams, TokenSampler, pick_tokens
from minicache.engine.speculation import (
    EagerRunner,
    Speculative,
    SpeculativeRunner,
    load_speculative,
    require_own_loop,
    share_of_target,
    speculate,
)
from minicache.engine.stopping import Tokenizer
from minicache.errors import InvariantError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.paged import Preemption
from minicache.scheduler.sharing import SharingScheduler
from minicache.scheduler.speculative import SpeculativeScheduler

__all__ = ["LLM", "Chunk", "Completion"]

MAX_IDLE_STEPS = 100
"""After so many steps in a row without work, `generate` gives up."""

logger = logging.getLogger("minicache")


class LLM:
    """Serves many requests at once, step by step.

    **When a step fails**, `step()` raises the error, and every unfinished request is back in the waiting queue with
    nothing computed (`recover`). Its generated tokens stay, and a failed copy or forward pass has moved no random
    generator, so the steps that follow give the same tokens as without the failure. If a step fails again, abort the
    requests that cause it (`abort_request`) and go on with the others.

    **When one request fails**, because its logits are not finite or its tokens cannot be decoded, it alone is finished,
    as FINISHED_ERROR: its last chunk has the finish_reason "error".

    Args:
        model: "minigpt", the path of a checkpoint of `minicache train`, the path of a Hugging Face folder, a hub name
            ("org/name"), or a model (`minicache.engine.runner.Model`).
        scheduler: "static", "continuous", "paged", "fair" or "chunked"; or a `Scheduler`, whose pool and limits then
            replace the options from num_blocks to reserve_full_prompt.
        cache: "paged": blocks; "dense": a `KVCache` for each request.
        num_blocks: blocks of the cache. None: as many as 64 MiB hold, on a GPU as gpu_memory_utilization says; but at
            least for one request of max_model_len tokens and at most for max_num_seqs such.
        block_size: tokens of a block. This and the other options up to reserve_full_prompt are passed on to
            `minicache.scheduler.create_scheduler`, which documents them. A dense cache neither swaps nor shares.
        max_model_len: the most tokens of a request, prompt and answer. None: what the model can.
        kv_cache_dtype: "int8" or "fp8_e4m3": keys and values in one byte a number, with a scale for each token and head
            (`minicache.cache.quantized`), so that the same memory holds two to four times as many tokens. Such a cache
            is paged. None: in the dtype of the weights.
        dtype: of the weights; None: float32 for a checkpoint, what config.json says for a
            folder, but 16 bits on a GPU (`minicache.engine.runner.load_model`). A model that is given has its own.
        device: of the weights; None: the CPU. A model that is given has its own.
        gpu_memory_utilization: what part of a GPU's free memory the cache takes, once weights and the largest step
            have theirs (`minicache.engine.gpu_memory`). It counts if num_blocks is None.
        enforce_eager: on a GPU, decode without CUDA graphs (`minicache.engine.gpu_runner`): slower, and nothing has to
            be captured.
        tensor_parallel_size: over how many processes the model is divided (`minicache.parallel`), this one included; on
            GPUs each takes one. What is counted in bytes is of each of them.
        speculative: where draft tokens come from: "ngram", a draft model ("minigpt-draft", or as `model`), or a
            `SpeculativeConfig`, which says how many; None: there are none. With scheduler "chunked", or a
            `SpeculativeScheduler`, and a paged cache. Answers do not change, and come in fewer steps
            (`minicache.engine.speculation`).
        tokenizer: turns text into tokens and back; its end tokens finish answers. None: MiniGPT's for a checkpoint, the
            folder's for a folder. A folder may have none, and a model that is given has none: then prompts are token
            ids, and answers have no text.
        observers: notified of what the scheduler does (`minicache.scheduler.observe`).

    Attributes:
        model: what is run.
        device: of its weights.
        tokenizer: as above, or None.
        max_model_len: the most tokens of a request: the scheduler's limit or the model's, the lower.
        scheduler: decides what runs; observed, if there are observers.
        forks: whether further answers to a prompt are forks of the first (phase 8).
        memory: where the requests' keys and values are.
        runner: runs the model's steps in a way of their own (`minicache.engine.model_runner`); None: `run_model` does.
        speculation: that runner, if the engine speculates; else None. What was accepted is in `scheduler.draft_stats`.
        answers: request id → `Answer`, for all unfinished answers. If a request asks for several, the first has its id,
            and the others have an `AnswerId`.

    Raises:
        CheckpointError: checkpoint or folder cannot be read.
        UnsupportedModelError: the folder's model is of an architecture that is not supported.
        HubError: a hub name, and the model is neither here already nor can it be downloaded.
        MissingExtraError: what the model needs is not installed.
        RankFailedError, RankDiedError: a process of the model could not be started.
        TypeError: an option has the wrong type.
        ValueError: an option is out of its bounds, or two do not go together.
    """

    def __init__(
        self,
        model: str | Path | Model = "minigpt",
        *,
        scheduler: str | Scheduler = "chunked",
        cache: str = "paged",
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        preemption: Preemption = "recompute",
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        prefix_caching: bool = False,
        long_prefill_threshold: int = 0,
        reserve_full_prompt: bool = True,
        kv_cache_dtype: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        tensor_parallel_size: int = 1,
        speculative: Speculative = None,
        tokenizer: Tokenizer | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        check_kv_cache_dtype(kv_cache_dtype, cache)
        require_combination(tensor_parallel_size, cache)
        model = find_model(model)
        self.model = load_model(model, dtype, device if tensor_parallel_size == 1 else None)
        if tensor_parallel_size != 1:
            self.model = parallelize(self.model, tensor_parallel_size, dtype, device)
        self.tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        longest = self.model.config.max_seq_len
        config = load_speculative(speculative, self.model)
        if not isinstance(scheduler, Scheduler):
            if isinstance(max_model_len, int) and max_model_len > longest:
                raise ValueError(f"max_model_len {max_model_len}: the model takes {longest} tokens at most")
            max_model_len = longest if max_model_len is None else max_model_len
            if num_blocks is None:
                limits = max_num_batched_tokens, max_num_seqs, max_model_len
                nbytes = cache_nbytes(self.model, *limits, gpu_memory_utilization, kv_cache_dtype)
                nbytes = int(nbytes * share_of_target(config, self.model, kv_cache_dtype))
                num_blocks = default_num_blocks(
                    self.model, block_size, max_num_seqs, max_model_len, nbytes, kv_cache_dtype
                )
            scheduler = create_scheduler(
                scheduler,
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                preemption=preemption,
                num_host_blocks=num_host_blocks,
                watermark=watermark,
                prefix_caching=prefix_caching,
                long_prefill_threshold=long_prefill_threshold,
                reserve_full_prompt=reserve_full_prompt,
                num_speculative_tokens=0 if config is None else config.num_speculative_tokens,
            )
        if scheduler.has_unfinished:
            raise ValueError("the scheduler has requests already, which this engine does not know: give it a new one")
        if cache not in ("paged", "dense"):
            raise ValueError(f'cache must be "paged" or "dense"; got {cache!r}')
        self.max_model_len = min(longest, scheduler.max_model_len or longest)
        self.scheduler = observe(scheduler, *observers)
        self.forks = isinstance(scheduler, SharingScheduler) and cache == "paged"
        self.memory: Memory = make_memory(self.model, scheduler, cache, kv_cache_dtype)
        self.answers: dict[RequestId, Answer] = {}
        self.device: torch.device = next(iter(self.model.parameters())).device
        self.runner = find_runner(self.model, self.memory, scheduler.max_num_seqs, enforce_eager=enforce_eager)
        self.speculation: SpeculativeRunner | None = None
        if config is not None or isinstance(scheduler, SpeculativeScheduler):
            require_own_loop(__file__)
            runner = self.runner or EagerRunner(self.model, self.memory)
            self.runner = self.speculation = speculate(
                config,
                runner,
                self.memory,
                scheduler,
                self._sampler_of,
                self.max_model_len,
                enforce_eager=enforce_eager,
            )
        self._chunks: list[Chunk] = []  # of requests of add_request, for step() to return
        self._waiting_to_fork: list[Answer] = []  # of `answers`, those that the scheduler does not know yet
        self._most_answers = 1  # that one request has asked for so far
        self._names = count()

    # What callers use

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Answer all prompts, and return when the last answer is finished.

        Args:
            prompts: texts, or lists of token ids; mixed if need be.
            params: one for all, or one for each.

        Returns:
            An answer for each prompt, in their order; with `params.n` > 1, n answers, one after the other.

        Raises:
            TypeError: `prompts` is no list of prompts, or `params` are no SamplingParams.
            ValueError: an empty prompt, a text or a stop string without a tokenizer, or not one of `params` for each.
            IndexError: a token id is outside the model's vocabulary.
            UnknownWordError: the tokenizer does not know a word.
            RequestTooLargeError: a request could never be served. In all these cases none was begun.
            InvariantError: the scheduler has stopped scheduling, and requests are unfinished.
            Exception: what a step raises. The requests of this call are aborted; others go on.
        """
        answers = self._prepare(prompts, params)
        for _ in self._serve(answers):
            pass
        return [answer.completion() for answer in answers]

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> Iterator[Chunk]:
        """Answer all prompts, and yield each token as soon as there is one.

        The chunks of a prompt have its `index`, and the texts of all its chunks are its text. Nothing runs before the
        first chunk is asked for. When the iterator is closed or dropped early, unfinished answers are aborted.

        Args:
            prompts: as for `generate`.
            params: as for `generate`.

        Yields:
            Chunks, step by step, within a step in batch order. The last of a prompt has its finish_reason; one that was
            aborted has none.

        Raises:
            Exception: as `generate`: for wrong prompts and params at once, for the rest while it runs.
        """
        return self._serve(self._prepare(prompts, params))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: RequestId | None = None,
        priority: int = 0,
        group: str = "text",
        cache_salt: str | None = None,
        arrival_time: float = 0.0,
    ) -> RequestId:
        """Have a request served by the steps to come.

        The chunks of all its n answers (`params.n`) have its id; their `index` says which answer they belong to. With a
        scheduler that forks, the other answers begin once the first one has a token (`collect`).

        Args:
            prompt: a text, or token ids.
            params: what to generate.
            request_id: its id, of no other unfinished request. None: a number.
            priority: lower runs first, if the scheduler has priorities.
            group: its compatibility class: only requests of one may share a batch, if the scheduler has such classes.
            cache_salt: requests with different salts share no block, whatever their prompts.
            arrival_time: in seconds on the caller's clock, for a scheduler with priorities.

        Returns:
            Its id.

        Raises:
            TypeError, ValueError, IndexError, UnknownWordError, RequestTooLargeError: as `generate`; also for an id
                that is in use. Nothing was added.
        """
        name = self._free_name() if request_id is None else request_id
        keys: dict[str, Any] = {"priority": priority, "group": group, "cache_salt": cache_salt}
        keys["arrival_time"] = arrival_time
        answers = new_answers(
            prompt, params, name, self._chunks, self.model.config, self.max_model_len, self.tokenizer, **keys
        )
        self._begin(answers)
        return name

    def abort_request(self, request_id: RequestId) -> bool:
        """End all answers of a request whose client has left, and free their memory. It gets no further chunk.

        Returns:
            False if no unfinished request has this id.
        """
        ended = False
        for name in dict.fromkeys((request_id, *self.answers_of(request_id))):
            answer = self.answers.pop(name, None)
            self.memory.forget(name)
            if answer in self._waiting_to_fork:
                self._waiting_to_fork.remove(answer)
                answer.request.status = RequestStatus.FINISHED_ABORTED
                ended = True
            ended = self.scheduler.abort_request(name) or ended
        if ended:
            self._chunks[:] = [chunk for chunk in self._chunks if request_of(chunk.request_id) != request_id]
        return ended

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything to compute, or to return."""
        return self.scheduler.has_unfinished or bool(self._chunks or self._waiting_to_fork)

    @property
    def storage(self) -> PagedStorage | None:
        """The blocks' memory; None for a dense cache."""
        return self.memory.storage

    # The loop

    def step(self) -> list[Chunk]:
        """Run one step: schedule, move blocks, run the model, pick tokens, commit them, emit chunks.

        If nothing is scheduled, the model is not run. A request whose logits give no token (None) is finished as
        FINISHED_ERROR before the tokens of the others are committed (`update_from_output`). Then chunks are emitted:
        first for the requests that `schedule()` has finished without a token (`output.finished`, capacity), then for
        those of the step, in batch order.

        If anything raises before the commit, `recover` is called, and the error is raised again.

        Returns:
            As `collect`: the chunks of requests of `add_request`, of this step and of earlier ones that failed. Chunks
            of a `stream` or `generate` go to that call.

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

        They form one row, request after request in batch order, each request's from the first uncomputed one on.
        `memory.make_step(output)` is the cache that keeps the requests apart, and `logits_at` runs the model.

        Args:
            output: of `schedule()`, with at least one request.

        Returns:
            `[B, vocab]`, for each request in batch order the logits of its last token in this step.
        """
        if self.runner is not None:
            return self.runner.run_model(output)
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

        Each with its own sampler, all in one call of `pick_tokens`. Nothing is picked for a request that is still in
        its prompt: its random generator must not advance.

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
        if self.runner is not None:
            return dict(zip(ids, self.runner.pick_tokens(logits, rows, samplers), strict=True))
        if len(rows) < len(logits):
            logits = logits[rows]
        return dict(zip(ids, pick_tokens(logits, samplers), strict=True))

    def emit(self, request_id: RequestId, token_id: int | None) -> None:
        """Make the next chunk of an answer, and finish the answer if its text ends there.

        If the engine speculates, accepted draft tokens get their chunks first (`_emit_accepted`). If the answer is
        finished by one of them, that is all.

        The token goes through the answer's `TextStream`, if it has one. If that finds a stop string, the request is
        finished as FINISHED_STOPPED. Otherwise, if the request is finished, the text that was held back is added. If
        the tokenizer raises, the error is logged and the request is FINISHED_ERROR (`_fail`). A finished answer is
        dropped from `answers`, and the memory forgets its request.

        Args:
            request_id: of `answers`; the scheduler has recorded the token.
            token_id: its new token; None if it was finished without one.
        """
        answer = self.answers[request_id]
        if self.speculation is not None and self._emit_accepted(answer, token_id):
            return
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
            self._fail(answer.request, error)
        reason = answer.finish_reason
        answer.chunks.append(Chunk(answer.index, token_id, text, reason, request_id))
        answer.num_chunks += 1
        if reason:
            del self.answers[request_id]
            self.memory.forget(request_id)

    def collect(self) -> list[Chunk]:
        """Begin the answers that can be forked now, and return the chunks of requests of `add_request`.

        Every step ends with this: its tokens are committed, so a first answer that has one can be forked.

        Returns:
            The chunks that were not returned yet. All chunks of a request have its id, whichever answer they belong to.
        """
        for answer in self._waiting_to_fork.copy():
            if self._fork(answer):
                self._waiting_to_fork.remove(answer)
        chunks = [_named(chunk) for chunk in self._chunks]
        self._chunks.clear()  # the same list: the answers go on adding to it
        return chunks

    def _emit_accepted(self, answer: Answer, token_id: int | None) -> bool:
        """Make the chunks of an answer's accepted draft tokens, which come before `token_id`.

        If the text ends with one of them, the request keeps no token behind it.

        Returns:
            Whether the answer is finished by them.
        """
        request = answer.request
        outputs = request.output_token_ids
        pending = outputs[answer.num_chunks : len(outputs) - (token_id is not None)]
        for num_chunks, accepted in enumerate(pending, answer.num_chunks + 1):
            text, reason = "", None
            try:
                if answer.text is not None:
                    text = answer.text.push(accepted)
                    if answer.text.is_stopped:
                        self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_STOPPED)
                        reason = "stop"
            except Exception as error:
                self._fail(request, error)
                reason = "error"
            answer.chunks.append(Chunk(answer.index, accepted, text, reason, request.request_id))
            answer.num_chunks = num_chunks
            if reason:
                del outputs[num_chunks:]
                del self.answers[request.request_id]
                self.memory.forget(request.request_id)
                return True
        return False

    def _sampler_of(self, request_id: RequestId) -> TokenSampler | None:
        """The sampler of an answer's request; None for the request of a beam."""
        answer = self.answers.get(request_id)
        return None if answer is None else answer.sampler

    def _fail(self, request: Request, error: Exception) -> None:
        """Finish a request whose tokens cannot be decoded, even if the scheduler has finished it already."""
        logger.error("the tokens of request %r cannot be decoded", request_of(request.request_id), exc_info=error)
        self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
        request.status = RequestStatus.FINISHED_ERROR

    # From prompts to requests

    def _prepare(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Answer]:
        """The answers that a list of prompts asks for, if all of them can be served; nothing is added yet."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts must be a list of texts or of token id lists; got {prompts!r}")
        if not isinstance(params, SamplingParams | Sequence):
            raise TypeError(f"params must be SamplingParams, or a list of them; got {params!r}")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} params: give one for all, or one for each")
        chunks: list[Chunk] = []
        answers: list[Answer] = []
        for prompt, its in zip(prompts, each, strict=True):
            name, config, index = self._free_name(), self.model.config, len(answers)
            answers += new_answers(prompt, its, name, chunks, config, self.max_model_len, self.tokenizer, index=index)
        for answer in answers:
            self.scheduler.check_size(answer.request)
        return answers

    def _serve(self, answers: list[Answer]) -> Iterator[Chunk]:
        """Add the requests, step until all are finished, and yield their chunks."""
        if not answers:
            return
        chunks, unfinished, num_idle = answers[0].chunks, answers[::-1], 0
        try:
            self._begin(answers)
            while unfinished:
                num_steps = self.memory.num_steps
                self._chunks += self.step()  # chunks of other callers' requests go back: their step() returns them
                num_idle = 0 if chunks or self.memory.num_steps > num_steps else num_idle + 1
                if num_idle > MAX_IDLE_STEPS:
                    left = [answer.request for answer in answers if not answer.finish_reason]
                    raise InvariantError(f"the scheduler schedules nothing any more; unfinished: {left[:3]} …")
                yield from map(_named, chunks)
                chunks.clear()
                while unfinished and unfinished[-1].finish_reason:
                    unfinished.pop()
        finally:
            for answer in answers:
                if self.answers.get(answer.request.request_id) is answer:
                    self.abort_request(answer.request.request_id)

    def _begin(self, answers: list[Answer]) -> None:
        """Add all answers, or none: the scheduler gets the requests of all but those that are forked later."""
        for answer in answers:
            name = answer.request.request_id
            if name in self.answers or (answer.first is None and self.answers_of(name)):
                raise ValueError(f"request {name!r} is here already: give every request an id of its own")
        for answer in answers:
            if answer.first is None or not self.forks:
                self.scheduler.add_request(answer.request)
            else:
                self._waiting_to_fork.append(answer)
            name = answer.request.request_id
            self.answers[name] = answer
            if isinstance(name, AnswerId):
                self._most_answers = max(self._most_answers, name.turn + 1)

    def _fork(self, answer: Answer) -> bool:
        """Begin another answer to a prompt, if the first has a token and there is a batch slot. Whether it has begun.

        The fork has no output: the prompt's last token is computed again for it, and its first token sampled from that.
        If the first answer is not in the batch, this one begins like any request.
        """
        first = answer.first
        assert first is not None
        if not first.output_token_ids and not first.status.is_finished:
            return False
        if first.status is not RequestStatus.RUNNING:
            self.scheduler.add_request(answer.request)
        elif self.scheduler.num_running < self.scheduler.max_num_seqs:
            scheduler = cast(SharingScheduler, self.scheduler)
            answer.request = scheduler.fork_request(first.request_id, answer.request.request_id, [])
        else:
            return False
        return True

    def answers_of(self, name: RequestId) -> list[RequestId]:
        """The scheduler's ids for the unfinished answers of a request. Does not search `answers`."""
        names = (name, *(AnswerId(name, turn) for turn in range(1, self._most_answers)))
        return [each for each in names if each in self.answers]

    def _free_name(self) -> RequestId:
        """An id for a request that came without one: a number that no unfinished request has."""
        return next(name for name in self._names if not self.answers_of(name))


def _named(chunk: Chunk) -> Chunk:
    """A chunk as its client sees it: with the id of its request instead of its answer's."""
    name = request_of(chunk.request_id)
    return chunk if name is chunk.request_id else replace(chunk, request_id=name)
