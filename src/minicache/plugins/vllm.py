"""Any scheduler of minicache inside vLLM, as its `scheduler_cls`. No phase builds this.

    LLM(model, scheduler_cls="minicache.plugins.vllm.MinicacheScheduler", async_scheduling=False,
        additional_config={"minicache": {"scheduler": "fair"}})

With `async_scheduling=True`, vLLM schedules a step while its workers compute the one before, and passes on the tokens
of that one afterwards: this requires a stage that overlaps, "async".

vLLM requires more of a scheduler than `transformers` does: it allocates blocks (vLLM's workers have the memory and no
allocator), sends the workers only what has changed since the last step, and makes the clients' outputs. This module
does that; our scheduler decides which requests compute how many tokens in which blocks.

`"minicache"` holds `create_scheduler`'s "scheduler" (by default "async" or "chunked", as vLLM is configured) and the
options of the stage: "watermark", "reserve_full_prompt". Sizes, prefix caching and long_prefill_token_threshold are
vLLM's own options. Written for vLLM 0.32, whose interface of schedulers is not stable.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from minicache.errors import MissingExtraError, PluginError, RequestTooLargeError
from minicache.request import Request
from minicache.scheduler import create_scheduler, has_option
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.output import SchedulerOutput

try:
    from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
    from vllm.v1.core.sched.output import SchedulerOutput as Step
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import RequestStatus
except ImportError as missing:
    raise MissingExtraError(
        "this plug-in runs inside vLLM, in vLLM's own environment: see docs/en/reference/plugins.md"
    ) from missing

logger = logging.getLogger("vllm.minicache")

_STATUS = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "capacity": RequestStatus.FINISHED_LENGTH_CAPPED,
}


class MinicacheScheduler(SchedulerInterface):  # type: ignore[misc]  # vLLM is no dependency, so its types are unknown
    """vLLM's interface of a scheduler, answered by one of ours.

    Attributes:
        scheduler: ours.
        observers: its observers; for a subclass to set.

    Raises:
        PluginError: vLLM is configured for a feature that no scheduler of ours has; the message names the option.
    """

    observers: tuple[Observer, ...] = ()
    connector = ec_connector = None  # vLLM's core reads both, though its interface does not name them

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        given = dict((vllm_config.additional_config or {}).get("minicache", {}))
        limits = vllm_config.scheduler_config
        name = given.pop("scheduler", "async" if limits.async_scheduling else "chunked")
        if has_option(name, "long_prefill_threshold") and limits.long_prefill_token_threshold:
            given.setdefault("long_prefill_threshold", limits.long_prefill_token_threshold)
        scheduler = create_scheduler(
            name,
            num_blocks=kv_cache_config.num_blocks - 1,  # block 0 is vLLM's null block
            block_size=block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            **given,
        )
        _check(vllm_config, kv_cache_config, scheduler, include_finished_set)
        self.scheduler = observe(scheduler, *self.observers)
        self.log_stats = log_stats
        self._steps: deque[SchedulerOutput | None] = deque()  # outstanding, the oldest first; None: nothing to commit
        self._requests: dict[str, tuple[Any, Request]] = {}  # vLLM's record and ours, of each unfinished request
        self._num_sent: dict[str, int] = {}  # blocks of each request that the workers know; 0: they must forget
        self._last_batch: set[str] = set()
        self._finished: set[str] = set()  # the workers must forget these
        self._refused: list[Any] = []  # their clients get an error
        self._preempted: set[str] = set()  # since the last step
        self._pause_state = PauseState.UNPAUSED
        self._held: list[Any] = []  # arrived while paused

    def add_request(self, request: Any) -> None:
        """Add a request. One that cannot be served ends with an error in the next step's outputs."""
        if self._pause_state is not PauseState.UNPAUSED:
            self._held.append(request)
            return
        params = request.sampling_params
        try:
            _check_request(request)
            stops = {*(params.stop_token_ids or ()), *([] if params.eos_token_id is None else [params.eos_token_id])}
            ours = Request(
                request.request_id,
                request.prompt_token_ids,
                request.max_tokens,
                stop_token_ids=stops,
                priority=request.priority,
                arrival_time=request.arrival_time,
                cache_salt=request.cache_salt,
            )
            self.scheduler.add_request(ours)
        except (PluginError, RequestTooLargeError) as error:
            logger.error("%s", error)
            self._refused.append(request)
            return
        self._requests[request.request_id] = request, ours
        self._record(request, EngineCoreEventType.QUEUED)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Schedule the next step. The result has the changes for the workers since the last one."""
        paused = self._pause_state is PauseState.PAUSED_ALL
        output = SchedulerOutput() if paused else self.scheduler.schedule()
        self._steps.append(None if paused else output)
        for request_id in map(str, output.preempted):
            self._forget_blocks(request_id)
        new, cached = [], CachedRequestData.make_empty()
        for ours in output.scheduled:
            request_id = str(ours.request_id)
            request = self._requests[request_id][0]
            request.num_computed_tokens = ours.num_computed_tokens
            blocks = [block_id + 1 for block_id in ours.block_ids]
            num_sent = self._num_sent.get(request_id)
            if num_sent is None:
                request.prefill_stats.set(ours.num_tokens, ours.num_computed_tokens, 0)
                new.append(NewRequestData.from_request(request, (blocks,)))
            else:
                if num_sent == 0:
                    cached.resumed_req_ids.add(request_id)
                fresh = blocks[num_sent:]
                cached.req_ids.append(request_id)
                cached.num_computed_tokens.append(ours.num_computed_tokens)
                cached.num_output_tokens.append(len(ours.output_token_ids) + ours.num_placeholders)
                cached.new_block_ids.append((fresh,) if fresh else None)
                if request_id not in self._last_batch:
                    cached.all_token_ids[request_id] = ours.token_ids(0, ours.num_tokens)
            if not num_sent:
                self._record(request, EngineCoreEventType.SCHEDULED)
            self._num_sent[request_id] = len(blocks)
        self._last_batch = {str(ours.request_id) for ours in output.scheduled}
        finished, self._finished = self._finished, set()
        preempted, self._preempted = self._preempted, set()
        return Step(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(output.num_scheduled_tokens),
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
            num_common_prefix_blocks=[0],
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Commit the oldest outstanding step, and make its outputs: index of a client → its outputs."""
        outputs: dict[int, list[Any]] = defaultdict(list)
        for request in self._refused:
            request.status = RequestStatus.FINISHED_ERROR
            outputs[request.client_index].append(self._make_output(request, []))
        self._refused.clear()
        if (output := self._steps.popleft()) is not None:
            sampled = dict(zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids or (), strict=False))
            # One that has finished since gets nothing, and neither does a new one that has its id.
            present = {str(each.request_id) for each in output.scheduled if not each.status.is_finished}
            tokens = {i: int(token_ids[0]) for i, token_ids in sampled.items() if token_ids and i in present}
            self.scheduler.update_from_output(output, tokens)
            for request_id in [*tokens, *(i for i in map(str, output.finished) if i in self._requests)]:
                request, ours = self._requests[request_id]
                new_tokens = [tokens[request_id]] if request_id in tokens else []
                request.append_output_token_ids(new_tokens)
                if ours.finish_reason is not None:
                    request.status = _STATUS[ours.finish_reason]
                    self._forget(request_id)
                logprobs = model_runner_output.logprobs
                if logprobs and new_tokens and request.sampling_params.num_logprobs is not None:
                    logprobs = logprobs.slice_request(model_runner_output.req_id_to_index[request_id], 1)
                else:
                    logprobs = None
                made = self._make_output(request, new_tokens, logprobs)
                outputs[request.client_index].append(made)
        made_for = {client: EngineCoreOutputs(outputs=each) for client, each in outputs.items()}
        if (stats := self.make_stats()) is not None:
            first = next(iter(made_for.values()), None) or made_for.setdefault(0, EngineCoreOutputs())
            first.scheduler_stats = stats
        return made_for

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Finish requests from outside: their clients have disconnected, or their text contains a stop string."""
        if request_ids is None:
            request_ids = [*self._requests, *(each.request_id for each in self._held)]
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        finished = [each for each in self._held if each.request_id in ids]
        self._held = [each for each in self._held if each.request_id not in ids]
        for request_id in ids:
            if request_id in self._requests:
                finished.append(self._requests[request_id][0])
                self.scheduler.abort_request(request_id)
                self._forget(request_id)
        for request in finished:
            request.status = finished_status
        return finished

    def get_num_unfinished_requests(self) -> int:
        """Requests whose clients still expect output. While all is paused, none of them can make progress."""
        waiting = 0 if self._pause_state is PauseState.PAUSED_ALL else len(self._requests)
        return waiting + len(self._refused)

    def has_finished_requests(self) -> bool:
        """Whether there are finished requests that the workers do not know of yet."""
        return bool(self._finished)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests in the batch, and requests waiting."""
        return self.scheduler.num_running, self.scheduler.num_waiting + len(self._held)

    def get_kv_cache_usage(self) -> float:
        """The part of the pool that is in use, 0 … 1."""
        return self.scheduler.pool.num_used / self.scheduler.pool.num_blocks

    def make_stats(self) -> Any:
        """The statistics that vLLM logs and exports for each step; None if it does not."""
        if not self.log_stats:
            return None
        num_running, num_waiting = self.get_request_counts()
        return SchedulerStats(
            num_running_reqs=num_running, num_waiting_reqs=num_waiting, kv_cache_usage=self.get_kv_cache_usage()
        )

    @property
    def pause_state(self) -> Any:
        """Whether requests are held back."""
        return self._pause_state

    def set_pause_state(self, pause_state: Any) -> None:
        """Hold new requests back, or (PAUSED_ALL) stop scheduling, or resume. Waiting requests are not held back."""
        self._pause_state = pause_state
        if pause_state is PauseState.UNPAUSED:
            held, self._held = self._held, []
            for request in held:
                self.add_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache, if requested by preempting the batch. Returns whether it was cleared."""
        if self.scheduler.num_running and not reset_running_requests:
            return False
        for ours in self.scheduler.running:
            self._forget_blocks(str(ours.request_id))
        self.scheduler.recover()
        self._steps = deque([None] * len(self._steps))  # given up: their tokens are computed again
        return True

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        """No request has a grammar."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Never called: no draft tokens are scheduled."""
        raise PluginError("draft tokens: no speculation is scheduled")

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Never called: no draft tokens are scheduled."""
        raise PluginError("draft tokens: no speculation is scheduled")

    def shutdown(self) -> None:
        """Nothing to release."""

    def _forget(self, request_id: str) -> None:
        """A request is finished: the next step tells the workers."""
        del self._requests[request_id]
        if self._num_sent.pop(request_id, None) is not None:
            self._finished.add(request_id)

    def _forget_blocks(self, request_id: str) -> None:
        """A request is preempted: its next blocks replace those that the workers know."""
        self._num_sent[request_id] = 0
        self._preempted.add(request_id)
        self._last_batch.discard(request_id)  # also if it is scheduled again at once, as after reset_prefix_cache
        request = self._requests[request_id][0]
        request.num_preemptions += 1
        self._record(request, EngineCoreEventType.PREEMPTED)

    def _make_output(self, request: Any, new_tokens: list[int], logprobs: Any = None) -> Any:
        """A step's output for the client of a request."""
        reason = request.get_finished_reason()
        params = request.sampling_params
        if new_tokens and request.status is RequestStatus.FINISHED_STOPPED and new_tokens[-1] != params.eos_token_id:
            request.stop_reason = new_tokens[-1]
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_tokens,
            new_logprobs=logprobs,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=request.take_prefill_stats(),
            trace_headers=request.trace_headers,
        )

    def _record(self, request: Any, event: Any) -> None:
        """Note when something happened to a request, for vLLM's metrics."""
        if self.log_stats:
            request.record_event(event)


def _check(vllm_config: Any, kv_cache_config: Any, scheduler: Any, include_finished_set: bool) -> None:
    """Raise a PluginError unless the scheduler can serve what vLLM is configured for."""
    limits = vllm_config.scheduler_config
    num_batched, max_model_len = limits.max_num_batched_tokens, vllm_config.model_config.max_model_len
    refused = {
        'async scheduling with this stage: take "async", or give --no-async-scheduling': limits.async_scheduling
        and not scheduler.overlaps,
        "speculative decoding": vllm_config.speculative_config is not None,
        "KV transfer between engines": vllm_config.kv_transfer_config is not None,
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "data parallelism": include_finished_set,
        "layers that do not all keep the whole context": len(kv_cache_config.kv_cache_groups) != 1,
        "model runner V2: set VLLM_USE_V2_MODEL_RUNNER=0": vllm_config.use_v2_model_runner,
        f"max_num_batched_tokens {num_batched} below max_model_len {max_model_len}, as this stage computes a prompt in "
        "one step": not scheduler.chunks_prompts and num_batched < max_model_len,
    }
    if reasons := [reason for reason, is_there in refused.items() if is_there]:
        raise PluginError(f"a scheduler of minicache cannot serve {'; nor '.join(reasons)}")


def _check_request(request: Any) -> None:
    """Raise a PluginError unless the request is for text, from tokens, of one model, without a grammar."""
    refused = {
        "a pooling model": request.pooling_params is not None,
        "structured output": request.use_structured_output,
        "a LoRA adapter": request.lora_request is not None,
        "images or audio": bool(request.mm_features),
        "a prompt of embeddings": request.prompt_token_ids is None or request.prompt_embeds is not None,
        "streamed input": request.resumable,
    }
    params = request.sampling_params
    if params is not None:
        refused["logprobs of the prompt"] = params.prompt_logprobs is not None
        refused["repetition detection"] = params.repetition_detection is not None
    if reasons := [reason for reason, is_there in refused.items() if is_there]:
        raise PluginError(f"request {request.request_id!r} asks for {', '.join(reasons)}, which is not scheduled here")
