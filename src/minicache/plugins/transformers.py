"""Any scheduler of minicache inside the continuous batching of Hugging Face's `transformers`. No phase builds this.

    register("minicache", scheduler="fair")
    model.generate_batch(prompts, continuous_batching_config=ContinuousBatchingConfig(scheduler_type="minicache", …))

The model, the KV cache, sampling and the loop are the engine's. Our scheduler, or a learner's, decides which requests
compute how many tokens and which are preempted. `minicache.plugins.adapter` is built in phase 11.
"""

from __future__ import annotations

from typing import Any

from minicache.errors import MissingExtraError, PluginError
from minicache.plugins.adapter import Batch, SchedulerAdapter
from minicache.scheduler import create_scheduler
from minicache.scheduler.observe import Observer, observe

try:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler
except ImportError as missing:
    raise MissingExtraError(
        "this plug-in needs transformers 5.23 or newer: pip install 'minicache-course[hf]'"
    ) from missing


class MinicacheScheduler(Scheduler):
    """transformers' interface of a scheduler, answered by a `SchedulerAdapter`. `register` makes subclasses of it.

    Features that change requests or memory without the scheduler are refused: several answers of one prompt
    (num_return_sequences), sliding windows, scheduling ahead of the tokens.

    Raises:
        PluginError: the model's layers do not all keep the whole context.
    """

    scheduler_name = "chunked"
    scheduler_options: dict[str, Any] = {}  # noqa: RUF012 (a subclass has its own, and nothing changes it)
    observers: tuple[Observer, ...] = ()

    def __init__(self, cache: PagedAttentionCache, safety_margin: float | None, max_requests_per_batch: int) -> None:
        if (kinds := list(cache.cache_allocators)) != ["full_attention"]:
            raise PluginError(f"only full attention can be scheduled; this model has {', '.join(kinds)}")
        super().__init__(cache, safety_margin or 0.0, max_requests_per_batch)

    def reset(self) -> None:
        """Forget all requests, and make a new scheduler. The base class calls it in its constructor."""
        super().reset()
        pages = self.cache.cache_allocators["full_attention"]
        scheduler = create_scheduler(
            self.scheduler_name,
            num_blocks=pages.num_blocks,
            block_size=pages.tokens_per_page,
            max_num_seqs=self.max_requests_per_batch,
            max_num_batched_tokens=self.cache.max_batch_tokens,
            **self.scheduler_options,
        )
        cache: Any = self.cache  # for a type checker, its states are not the protocol's
        self.adapter = SchedulerAdapter(observe(scheduler, *self.observers), cache)
        self._finished: list[str] = []  # by the engine, since the last step was scheduled

    def add_waiting_request(self, state: RequestState) -> None:
        """Add a request. The engine delivers an exception as the request's error."""
        if state.num_children:
            raise PluginError("several answers of one prompt share its blocks: send the prompt several times instead")
        stops = state.eos_token_id if isinstance(state.eos_token_id, list) else [state.eos_token_id]
        self.adapter.add(state, [token for token in stops if token is not None and token >= 0])
        super().add_waiting_request(state)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState], bool, int, int]:
        """Commit the last step, and schedule the next; the budgets equal those of the scheduler's constructor."""
        finished = self.adapter.commit()
        if set(finished) != set(self._finished):
            raise PluginError(f"the engine has finished {self._finished}, and the scheduler {finished}")
        self._finished = []
        batch = self.adapter.schedule()
        self._file(batch)
        scheduled: list[tuple[Any, int]] = batch.scheduled
        # No block is offered for sharing: the scheduler would not know which requests have found one.
        steps = [
            FutureRequestState(state, not state.remaining_prefill_tokens, {}, num_tokens)
            for state, num_tokens in scheduled
        ]
        num_read = sum(state.position_offset for state, _ in scheduled)
        return steps, False, sum(num_tokens for _, num_tokens in scheduled), num_read

    def finish_request(self, request_id: str) -> None:
        """The engine has finished a request: by its tokens, which the next commit sees, or because it failed."""
        state = self.active_requests.get(request_id)
        if state is not None and state.status is RequestStatus.FINISHED:
            self._finished.append(request_id)
        else:
            self.adapter.abort(request_id)
        super().finish_request(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Forget the requests whose clients have disconnected."""
        cancelled = super().clear_cancelled_requests()
        for state in cancelled:
            self.adapter.abort(state.request_id)
        return cancelled

    def _file(self, batch: Batch) -> None:
        """Update the engine's records: waiting requests, the batch, and the status of each request."""
        state: Any  # a RequestState
        for state in batch.preempted:
            del self.active_requests[state.request_id]
            self.waiting_requests[state.request_id] = state
            self.waiting_requests_order.append(state.request_id)
            state.status = RequestStatus.PREFILLING
        admitted = set()
        for state, _ in batch.scheduled:
            if self.waiting_requests.pop(state.request_id, None) is not None:
                self.active_requests[state.request_id] = state
                admitted.add(state.request_id)
            prefilling = bool(state.remaining_prefill_tokens)
            state.status = RequestStatus.PREFILLING if prefilling else RequestStatus.DECODING
        self._cleanup_waiting_queue(admitted)


def register(
    name: str = "minicache", *, scheduler: str = "chunked", observers: tuple[Observer, ...] = (), **options: Any
) -> type[MinicacheScheduler]:
    """Register one of our schedulers with transformers, for `ContinuousBatchingConfig(scheduler_type=name)`.

    Sizes come from that configuration: page_size, num_blocks, max_batch_tokens and max_requests_per_batch.

    Args:
        name: of the scheduler in transformers. An existing one is replaced.
        scheduler: `minicache.scheduler.create_scheduler`'s name of a stage.
        observers: watch each scheduler that is made (`minicache.scheduler.observe`).
        options: other options of `create_scheduler`, of the stage: `watermark`, `long_prefill_threshold`, ….

    Returns:
        The class that transformers will make.

    Raises:
        PluginError: an option is about memory, and that is the engine's: its sizes, swap, the prefix cache.
    """
    sizes = {"num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"}
    memory = {"preemption", "num_host_blocks", "prefix_caching", "num_speculative_tokens"}
    if refused := sorted(options.keys() & (sizes | memory)):
        raise PluginError(f"inside transformers the engine decides {', '.join(refused)}: see ContinuousBatchingConfig")
    parts = {"scheduler_name": scheduler, "scheduler_options": options, "observers": observers}
    made: type[MinicacheScheduler] = type("MinicacheScheduler", (MinicacheScheduler,), parts)
    SCHEDULER_MAPPING.update({name: made})
    return made
