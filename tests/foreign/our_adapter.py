"""An adapter for a scheduler of this course: `minicache audit . --engine tests/foreign/our_adapter.py`."""

from collections.abc import Sequence
from pathlib import Path

from minicache.foreign import Adapter, Limits, RequestState, State, Work
from minicache.request import Request
from minicache.scheduler import create_scheduler


class Ours(Adapter):
    name = "minicache"
    marker = "src/minicache/scheduler/base.py"
    can_abort = True

    def __init__(self, checkout: Path) -> None:
        pass  # another engine's modules would be imported here, with `minicache.foreign.load(checkout, …)`

    def start(self, limits: Limits) -> None:
        self.scheduler = create_scheduler(
            "chunked",
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prefix_caching=True,
        )

    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.scheduler.add_request(Request(request_id, list(prompt), max_tokens, ignore_eos=True))

    def abort(self, request_id: int) -> None:
        self.scheduler.abort_request(request_id)

    def schedule(self) -> list[Work]:
        self.output = self.scheduler.schedule()
        numbers = self.output.num_scheduled_tokens
        return [
            Work(each.request_id, each.num_computed_tokens, numbers[each.request_id]) for each in self.output.scheduled
        ]

    def commit(self, token_ids: Sequence[int]) -> dict[int, list[int]]:
        tokens = dict(zip(self.output.num_scheduled_tokens, token_ids, strict=True))
        return {
            each.request_id: each.output_token_ids for each in self.scheduler.update_from_output(self.output, tokens)
        }

    def state(self) -> State:
        pool, batch = self.scheduler.pool, self.scheduler.running
        references = {block_id: pool.ref_count(block_id) for block_id in range(pool.num_blocks)}
        return State(
            [
                RequestState(each.request_id, [*each.prompt_token_ids, *each.output_token_ids], each.block_ids, running)
                for requests, running in ((batch, True), (self.scheduler.waiting.values(), False))
                for each in requests
            ],
            free_block_ids=[block_id for block_id, count in references.items() if not count],
            references={block_id: count for block_id, count in references.items() if count},
        )
