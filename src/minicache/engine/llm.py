"""The serving engine: prompts in, answers out. No phase builds this module.

Its steps are those of `minicache.engine.loop.EngineLoop`, which phase 5 builds. Here is what stands around them: what
an engine is made of, how a prompt becomes requests and their tokens an answer; several answers to a prompt (phase 8);
and the runners that compute a step as each device does it best.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from minicache.cache.paged import PagedStorage
from minicache.engine.answers import Answer, AnswerId, Chunk, Completion, Prompt, new_answers, request_of
from minicache.engine.constraints import Constraint, Grammars, StepMasks
from minicache.engine.drafting import SpeculativeConfig, load_speculative, share_of_target, speculate
from minicache.engine.kv import Model, check_kv_cache_dtype, default_num_blocks, request_nbytes
from minicache.engine.loading import find_model, load_model, load_tokenizer
from minicache.engine.logprobs import MAX_LOGPROBS, token_logprobs
from minicache.engine.loop import EngineLoop
from minicache.engine.options import EngineOptions, with_options
from minicache.engine.overlap import Overlap, require_overlap
from minicache.engine.runners.find import cache_nbytes, find_runner, make_memory
from minicache.engine.runners.parallel import parallelize, require_combination
from minicache.engine.runners.verify import SpeculativeRunner
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.engine.stopping import Tokenizer
from minicache.engine.tiered import IDLE_SECONDS, TieredMemory, make_tiers
from minicache.errors import InvariantError, require_count
from minicache.model.groups import LayerGroups, layer_groups
from minicache.request import RequestId, RequestStatus
from minicache.scheduler import GroupedScheduler, Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.restore import restore
from minicache.scheduler.sharing import SharingScheduler
from minicache.scheduler.speculative import SpeculativeScheduler
from minicache.scheduler.tiered import TieredScheduler
from minicache.tiers.stack import TierStack

__all__ = ["LLM", "Chunk", "Completion"]

MAX_IDLE_STEPS = 100
"""After so many steps in a row without work, `generate` gives up."""


class LLM(EngineLoop):
    """Serves many requests at once, step by step.

    **When a step fails**, `step()` raises the error, and the steps that follow give the same tokens as without the
    failure (`EngineLoop`). If a step fails again, abort the requests that cause it (`abort_request`) and go on with the
    others.

    **When one request fails**, it alone is finished: its last chunk has the finish_reason "error".

    Args:
        options: those of `EngineOptions`, as keywords; the model may come first without one. A model, a `Scheduler`, a
            `torch.dtype` and a `SpeculativeConfig` may stand where a name does there.
        tokenizer: turns text into tokens and back; its end tokens finish answers. None: MiniGPT's for a checkpoint, the
            folder's or the GGUF file's for those. They may have none, and a model that is given has none: then prompts
            are token ids, and answers have no text.
        observers: notified of what the scheduler does (`minicache.scheduler.observe`).

    Attributes:
        model: what is run.
        device: of its weights.
        tokenizer: as above, or None.
        max_model_len: the most tokens of a request: the scheduler's limit or the model's, the lower.
        scheduler: decides what runs; observed, if there are observers.
        forks: whether further answers to a prompt are forks of the first (phase 8).
        memory: where the requests' keys and values are.
        runner: runs the model's steps in a way of their own (`minicache.engine.runners.find`); None: `run_model` does.
        tiers: where blocks outlive the prefix cache (`minicache.tiers`), or None.
        speculation: that runner, if the engine speculates; else None. What was accepted is in `scheduler.draft_stats`.
        grammars: compiles the constraints of answers. Before a server adds a constrained request, it has another thread
            call `grammars.compile`: steps go on meanwhile.
        answers: request id → `Answer`, for all unfinished answers. If a request asks for several, the first has its id,
            and the others have an `AnswerId`.
        overlap: schedules a step while the model runs the one before; None without `async_scheduling`.

    Raises:
        CheckpointError: checkpoint, file or folder cannot be read.
        UnsupportedModelError: the model asks for what is not supported.
        HubError: a hub name, and the model is neither here already nor can it be downloaded.
        MissingExtraError: what the model needs is not installed.
        RankFailedError, RankDiedError: a process of the model could not be started.
        TypeError: an option has the wrong type.
        ValueError: an option is out of its bounds, or two do not go together.
    """

    def __init__(
        self,
        model: str | Path | Model = EngineOptions.model,
        *,
        tokenizer: Tokenizer | None = None,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        given = EngineOptions(model=cast(str, model), **options)
        size, held, eager = given.tensor_parallel_size, given.kv_cache_dtype, given.enforce_eager
        check_kv_cache_dtype(held, given.cache)
        if size != 1:
            require_combination(size, given.cache)
        if given.async_scheduling:
            require_overlap(given)
        found = find_model(model)
        dtype = cast("torch.dtype | None", given.dtype)
        model = load_model(found, dtype, given.device, weight_dtype=given.weight_dtype, tensor_parallel_size=size)
        if size != 1:
            model = parallelize(model, size, dtype, given.device)
        self.tokenizer = load_tokenizer(found) if tokenizer is None else tokenizer
        config = None if given.speculative is None else load_speculative(given.speculative, model)
        self.tiers = make_tiers(given, model)
        scheduler = make_scheduler(given, model, config, self.tiers)
        if scheduler.has_unfinished:
            raise ValueError("the scheduler has requests already, which this engine does not know: give it a new one")
        if given.cache not in ("paged", "dense"):
            raise ValueError(f'cache must be "paged" or "dense"; got {given.cache!r}')
        observed = observe(scheduler, *observers) if observers else scheduler
        if self.tiers is None:
            memory = make_memory(model, scheduler, given.cache, held)
        else:
            memory = TieredMemory(model, scheduler, held, self.tiers)
        super().__init__(model, observed, memory)
        longest = model.config.max_seq_len
        self.max_model_len = min(longest, scheduler.max_model_len or longest)
        can_fork = isinstance(scheduler, SharingScheduler) and not isinstance(scheduler, GroupedScheduler)
        self.forks = can_fork and given.cache == "paged"
        self.runner = find_runner(model, self.memory, scheduler.max_num_seqs, enforce_eager=eager)
        self.speculation: SpeculativeRunner | None = None
        if config is not None or isinstance(scheduler, SpeculativeScheduler):
            self.runner = self.speculation = speculate(
                config,
                model,
                self.runner,
                self.memory,
                scheduler,
                self._sampler_of,
                self.max_model_len,
                enforce_eager=eager,
            )
        self.overlap = Overlap(self) if given.async_scheduling else None
        named_ends: tuple[int, ...] = getattr(model.config, "end_token_ids", ())
        here = ref(
            self
        )  # else an engine that is dropped would wait for a garbage collection, and its processes with it
        self.grammars = Grammars(lambda: cast(LLM, here()).tokenizer, model.config.vocab_size, named_ends)
        self._masks: StepMasks | None = None  # once a request has asked for a constraint
        self._has_logprobs = False  # whether a request has ever asked for log probabilities
        self._waiting_to_fork: list[Answer] = []  # of `answers`, those that the scheduler does not know yet
        self._most_answers = 1  # that one request has asked for so far
        self._names = count()

    __init__.__signature__ = with_options(__init__)  # type: ignore[attr-defined]

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
            RequestTooLargeError: a request could never be served.
            ConstraintError: a constraint cannot be followed; MissingExtraError: llguidance is not installed. In all
                these cases none was begun.
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
        num_logprobs: int | None = None,
        num_answer_tokens: int = 0,
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
            num_logprobs: how many of the likeliest tokens each chunk has with their log probabilities
                (`minicache.engine.logprobs`), 0 … MAX_LOGPROBS; 0: only the token that was picked. None: no log
                probabilities at all.
            num_answer_tokens: so many of the prompt's last tokens are the answer's first: another engine has generated
                them, and a constraint counts them in.

        Returns:
            Its id.

        Raises:
            Exception: as `generate`; ValueError also for an id that is in use, or if num_logprobs is no such number.
                Nothing was added.
        """
        if num_logprobs is not None:
            require_count("num_logprobs", num_logprobs, at_least=0)
            if num_logprobs > MAX_LOGPROBS:
                raise ValueError(f"num_logprobs must be at most {MAX_LOGPROBS}; got {num_logprobs}")
        name = self._free_name() if request_id is None else request_id
        keys: dict[str, Any] = {"priority": priority, "group": group, "cache_salt": cache_salt}
        keys["arrival_time"] = arrival_time
        answers = self._new_answers(prompt, params, name, self._chunks, num_answer_tokens, **keys)
        self._begin(answers)
        if num_logprobs is not None:
            self._has_logprobs = True
            for answer in answers:
                answer.num_logprobs = num_logprobs
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

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything to compute, or to return."""
        in_flight = self.overlap is not None and self.overlap.flights
        return self.scheduler.has_unfinished or bool(self._chunks or self._waiting_to_fork or in_flight)

    @property
    def num_loading(self) -> int:
        """Requests that wait for blocks from the tiers; 0 without tiers."""
        return 0 if self.tiers is None else cast(TieredScheduler, self.scheduler).num_loading

    @property
    def storage(self) -> PagedStorage | None:
        """The blocks' memory; None for a dense cache."""
        return self.memory.storage

    # The loop: `EngineLoop`, and what later phases add to it

    def step(self) -> list[Chunk]:
        """As `EngineLoop.step`; with `async_scheduling`, as `Overlap.step`, which leaves a step in flight."""
        if self.overlap is None:
            return super().step()
        return self.overlap.step(drain=any(map(self._can_be_forked, self._waiting_to_fork)))

    def recover(self) -> None:
        """As `EngineLoop.recover`. After an interrupt, such as Ctrl-C, the step is given up as a whole.

        It may have come in the middle of the scheduler's own code (`restore`). Requests that the step has finished stay
        finished; of the others, tokens that were committed, and not emitted, are computed again.
        """
        error = sys.exception()
        if self.overlap is not None:
            self.overlap.give_up()
        if error is not None and not isinstance(error, Exception):
            restore(self.scheduler)
            self.scheduler.recover()
            for answer in self.answers.values():
                if not answer.request.status.is_finished:
                    del answer.request.output_token_ids[answer.num_chunks :]
        super().recover()

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `EngineLoop.run_model`; by the runner, if there is one. Tokens that a constraint rules out have −inf."""
        run = super().run_model if self.runner is None else self.runner.run_model
        if self._masks is None or self.speculation is not None:  # which masks what it verifies
            return run(output)
        return self._masks.run(output, run)

    def sample(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """As `EngineLoop.sample`; by the runner, if there is one."""
        if self.runner is None:
            return super().sample(logits, rows, samplers)
        return self.runner.pick_tokens(logits, rows, samplers)

    def pick(self, output: SchedulerOutput, logits: Tensor) -> dict[RequestId, int | None]:
        """As `EngineLoop.pick`. Log probabilities that were asked for are kept for `emit`."""
        picked = super().pick(output, logits)
        if self._has_logprobs:
            self._note_logprobs(output, logits, picked)
        return picked

    def emit(self, request_id: RequestId, token_id: int | None) -> None:
        """As `EngineLoop.emit`, which makes the chunks of accepted draft tokens first; each with its log probabilities.

        Args:
            request_id: of `answers`; the scheduler has recorded the token.
            token_id: its new token; None if it was finished without one.
        """
        answer = self.answers[request_id]
        if self.speculation is not None:
            outputs = answer.request.output_token_ids
            for accepted in outputs[answer.num_chunks : len(outputs) - (token_id is not None)]:
                self._emit_accepted(answer, accepted)
                if request_id not in self.answers:
                    del outputs[answer.num_chunks :]  # the text has ended before them
                    return
        super().emit(request_id, token_id)
        _add_logprobs(answer)

    def _emit_accepted(self, answer: Answer, token_id: int) -> None:
        """Make the chunk of a token that others follow: whatever finished the request, it was not this one."""
        request, status = answer.request, answer.request.status
        if status.is_finished:
            request.status = RequestStatus.RUNNING
        super().emit(request.request_id, token_id)
        if status.is_finished and request.status is RequestStatus.RUNNING:
            request.status = status
        _add_logprobs(answer)

    def _note_logprobs(self, output: SchedulerOutput, logits: Tensor, picked: dict[RequestId, int | None]) -> None:
        """Keep the log probabilities of a step's tokens with their answers, as far as they were asked for."""
        accepted = {} if self.speculation is None else self.speculation.accepted
        asked: list[tuple[int, Answer, int, int]] = []  # row of the logits, answer, token, how many
        for row, request in enumerate(output.scheduled):
            if (token_id := picked.get(request.request_id)) is not None:
                answer = self.answers[request.request_id]
                if answer.num_logprobs is not None:
                    asked.append((row, answer, token_id, answer.num_logprobs))
        if not asked:
            return
        rows, answers, tokens, numbers = zip(*asked, strict=True)
        found = token_logprobs(logits[list(rows)], list(tokens), numbers)
        for row, answer, number, its_own in zip(rows, answers, numbers, found, strict=True):
            before, its_logits = accepted.get(row, ([], logits[:0]))
            earlier = token_logprobs(its_logits, before, (number,) * len(before)) if before else []
            answer.logprobs = [*earlier, its_own]

    def collect(self) -> list[Chunk]:
        """Begin the answers that can be forked now, and return the chunks of requests of `add_request`.

        A step's tokens are committed now, so a first answer that has one can be forked.

        Returns:
            The chunks that were not returned yet. All chunks of a request have its id, whichever answer they belong to.
        """
        for answer in self._waiting_to_fork.copy():
            if self._fork(answer):
                self._waiting_to_fork.remove(answer)
        if self.tiers is not None:
            self._tend_tiers(self.tiers)
        return [_named(chunk) for chunk in super().collect()]

    def _tend_tiers(self, tiers: TierStack) -> None:
        """With no step in flight: store what is full before a pause; or wait for a load, if nothing else is to do."""
        if self.overlap is not None and self.overlap.flights:
            return
        if not self.scheduler.has_unfinished:
            scheduler = cast(TieredScheduler, self.scheduler)
            cast(TieredMemory, self.memory).store(scheduler.take_filled())
        elif self.num_loading and not self.scheduler.running and not self._chunks:
            tiers.wait(IDLE_SECONDS)

    def _constraint_of(self, request_id: RequestId) -> Constraint | None:
        """The constraint of an answer's request."""
        answer = (self.answers if self.overlap is None else self.overlap.answers).get(request_id)
        return None if answer is None else answer.constraint

    def _sampler_of(self, request_id: RequestId) -> TokenSampler | None:
        """The sampler of an answer's request; None for the request of a beam."""
        answer = self.answers.get(request_id)
        return None if answer is None else answer.sampler

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
            answers += self._new_answers(prompt, its, self._free_name(), chunks, index=len(answers))
        for answer in answers:
            self.scheduler.check_size(answer.request)
        return answers

    def _new_answers(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: RequestId,
        chunks: list[Chunk],
        num_answer_tokens: int = 0,
        **keys: Any,
    ) -> list[Answer]:
        """As `new_answers`, with their constraints."""
        config, longest = self.model.config, self.max_model_len
        answers = new_answers(prompt, params, name, chunks, config, longest, self.tokenizer, **keys)
        if params.is_constrained:
            for answer in answers:
                token_ids = answer.request.prompt_token_ids
                read = token_ids[len(token_ids) - num_answer_tokens :]
                answer.constraint = self.grammars.constraint(params, read)
            if self._masks is None:
                self._masks = StepMasks(config.vocab_size, self._constraint_of)
                if self.speculation is not None:
                    self.speculation.masks = self._masks
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
                is_idle = not chunks and self.memory.num_steps == num_steps and not self.num_loading
                num_idle = num_idle + 1 if is_idle else 0
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
            if self.overlap is not None and not self.scheduler.has_unfinished:
                with suppress(Exception):  # of a last step, whose tokens no request waits for
                    self._chunks += self.step()

    def _begin(self, answers: list[Answer]) -> None:
        """Add all answers, or none: the scheduler gets the requests of all but those that are forked later."""
        for answer in answers:
            name = answer.request.request_id
            if name in self.answers or (answer.first is None and self.answers_of(name)):
                raise ValueError(f"request {name!r} is already here: give every request a unique id")
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
        elif self._can_be_forked(answer) and self.scheduler.outstanding is None:
            scheduler = cast(SharingScheduler, self.scheduler)
            answer.request = scheduler.fork_request(first.request_id, answer.request.request_id, [])
        else:
            return False
        return True

    def _can_be_forked(self, answer: Answer) -> bool:
        """Whether an answer that waits for its fork can have it, as soon as no step is outstanding."""
        first = answer.first
        assert first is not None
        has_slot = self.scheduler.num_running < self.scheduler.max_num_seqs
        return first.status is RequestStatus.RUNNING and bool(first.output_token_ids) and has_slot

    def answers_of(self, name: RequestId) -> list[RequestId]:
        """The scheduler's ids for the unfinished answers of a request. Does not search `answers`."""
        names = (name, *(AnswerId(name, turn) for turn in range(1, self._most_answers)))
        return [each for each in names if each in self.answers]

    def _free_name(self) -> RequestId:
        """An id for a request that came without one: a number that no unfinished request has."""
        return next(name for name in self._names if not self.answers_of(name))


def make_scheduler(
    options: EngineOptions, model: Model, speculative: SpeculativeConfig | None, tiers: TierStack | None
) -> Scheduler:
    """The scheduler that an engine's options name, with as many blocks as there is memory for; or the one given.

    Args:
        options: of the engine.
        model: what it runs; it is on its device.
        speculative: how it speculates.
        tiers: what is below its prefix cache.

    Raises:
        TypeError, ValueError: as `create_scheduler`; or max_model_len is more than the model takes.
    """
    if isinstance(options.scheduler, Scheduler):
        return options.scheduler
    longest, max_model_len = model.config.max_seq_len, options.max_model_len
    if isinstance(max_model_len, int) and max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len}: the model takes {longest} tokens at most")
    groups = groups_to_serve(options, model)
    windows = None if groups is None else groups.windows
    names = inspect.signature(create_scheduler).parameters.keys() & {each.name for each in fields(options)}
    given = {name: getattr(options, name) for name in names}
    given["max_model_len"] = max_model_len = longest if max_model_len is None else max_model_len
    if options.num_blocks is None:
        held, max_num_seqs = options.kv_cache_dtype, options.max_num_seqs
        max_num_tokens = options.max_num_batched_tokens
        limits = max_num_tokens, max_num_seqs, max_model_len
        needed = request_nbytes(model, options.block_size, max_model_len, max_num_tokens, held, groups)
        nbytes = cache_nbytes(model, *limits, options.gpu_memory_utilization, needed, held)
        if speculative is not None:
            nbytes = int(nbytes * share_of_target(speculative, model, held))
        given["num_blocks"] = default_num_blocks(
            model, options.block_size, max_num_seqs, max_model_len, nbytes, held, groups, max_num_tokens
        )
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    name = "async" if options.async_scheduling and options.scheduler == "chunked" else options.scheduler
    given |= {"num_speculative_tokens": num_drafts, "tiers": tiers, "tier_policy": options.kv_tier_policy}
    given["windows"] = windows
    return create_scheduler(name, **given)


def groups_to_serve(options: EngineOptions, model: Model) -> LayerGroups | None:
    """The groups of layers for which an engine's scheduler keeps blocks.

    Returns:
        None: there are no groups, and a running request keeps all its blocks. So it is for a model without sliding
        windows, and with options for which `minicache.scheduler.grouped` has no rule: the tokens are the same.
    """
    served = (options.scheduler, options.cache, options.preemption) == ("chunked", "paged", "recompute")
    if not served or options.async_scheduling or options.speculative is not None or options.kv_tiers:
        return None
    windows = getattr(model.config, "sliding_windows", ())
    return layer_groups(windows) if any(windows) else None


def _add_logprobs(answer: Answer) -> None:
    """Give an answer's newest chunk its log probabilities, if there are any left."""
    if answer.logprobs and answer.chunks[-1].token_id is not None:
        answer.chunks[-1].logprobs = answer.logprobs.pop(0)


def _named(chunk: Chunk) -> Chunk:
    """A chunk as its client sees it: with the id of its request instead of its answer's."""
    name = request_of(chunk.request_id)
    return chunk if name is chunk.request_id else replace(chunk, request_id=name)
