"""The numbers of docs/en/reference/one-iteration.md."""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler import AllocStatus, ChunkedPrefillScheduler


def run(num_blocks: int = 8) -> tuple[ChunkedPrefillScheduler, list[Request], list[dict[str, int]], list[list[str]]]:
    """Three iterations of the page's example; what they schedule and preempt."""
    scheduler = ChunkedPrefillScheduler(
        num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16, prefix_caching=True
    )
    a, b = Request("A", [1, 2, 3, 4], 8), Request("B", list(range(10, 30)), 8)
    c = Request("C", [1, 2, 3, 4, 5, 6], 8)
    scheduled, preempted = [], []
    for iteration in range(3):
        for request in {0: [a, b], 1: [c]}.get(iteration, []):
            scheduler.add_request(request)
        output = scheduler.schedule()
        scheduled.append(dict(output.num_scheduled_tokens))
        preempted.append(output.preempted)
        if iteration == 1:
            break
        scheduler.update_from_output(output, {request.request_id: 7 for request in output.scheduled})
    return scheduler, [a, b, c], scheduled, preempted


def test_iteration_1() -> None:
    scheduler, (a, b, c), scheduled, preempted = run()
    assert scheduled == [{"A": 4, "B": 12}, {"A": 1, "B": 8, "C": 2}]
    assert preempted == [[], []]
    assert (a.block_ids, b.block_ids, c.block_ids) == ([0, 4], [1, 2, 3, 5, 6], [0, 7])
    assert (c.num_computed_tokens, c.num_cached_tokens) == (4, 4)
    assert (scheduler.pool.num_free, scheduler.token_budget) == (0, 5)
    assert (scheduler.pool.ref_count(0), scheduler.pool.ref_count(7)) == (2, 1)


def test_iteration_2_preempts_c() -> None:
    scheduler, (_, b, _), _, _ = run()
    assert scheduler.outstanding is not None
    scheduler.update_from_output(scheduler.outstanding, {"A": 7, "B": 7, "C": 7})
    output = scheduler.schedule()
    assert output.preempted == ["C"]
    assert output.num_scheduled_tokens == {"A": 1, "B": 1}
    assert b.block_ids == [1, 2, 3, 5, 6, 7]  # C's one block of its own
    assert scheduler.pool.ref_count(0) == 1


def test_with_seven_blocks_c_waits() -> None:
    scheduler, (_, _, c), scheduled, _ = run(num_blocks=7)
    assert scheduled[1] == {"A": 1, "B": 8}
    assert scheduler.can_allocate(c, scheduler.find_prefix(c)) is AllocStatus.LATER
