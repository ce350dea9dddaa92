"""Four replicas: all for everything, or some for prompts only, by the bandwidth of the link. All **modelled**.

Llama-3-8B on A100-40GBs, chunked prefill with a prefix cache; time is the roofline's (`minicache.simulator.costs`).
Chats as long as Azure's of 2023, which have nothing in common, RATE of them a second. Where there are prefill replicas,
`MovingCosts.choose` says for each prompt whether it is computed on one of them. `Blind`: two of them, and `choose`
takes every link for free.

The first token comes from where the prompt is computed, so the link is in the time per token, and not in the TTFT.

    python -m benchmarks.disaggregation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rich.progress import track

from benchmarks._record import record
from benchmarks.prefix_cache import CHAT_BLOCKS
from minicache.arithmetic.specs import A100_40GB, LLAMA_3_8B
from minicache.fleet import MovingCosts, Place, create_router
from minicache.fleet.views import ReplicaId
from minicache.scheduler import Scheduler, create_scheduler
from minicache.simulator.costs import FLOPS_EFFICIENCY, RooflineCost
from minicache.simulator.fleet import Disaggregation, FleetSimulation
from minicache.simulator.prompts import behind_system_prompt
from minicache.simulator.workload import AZURE_CONVERSATION

NUM_REPLICAS: Final = 4
NUM_PREFILL: Final = (1, 2)
"""Of these, for prompts only."""
GBITS: Final = (1, 2, 5, 10, 25, 100)
"""Gbit/s of the link of a prefill replica."""
LATENCY: Final = 1e-4
RATE, NUM_REQUESTS, MAX_MODEL_LEN = 8.0, 1000, 8192
SECONDS_PER_TOKEN: Final = 2 * LLAMA_3_8B.num_parameters / (FLOPS_EFFICIENCY * A100_40GB.peak_flops)
COST: Final = RooflineCost(LLAMA_3_8B, A100_40GB)


def make_scheduler() -> Scheduler:
    """A replica's."""
    return create_scheduler(
        "chunked",
        num_blocks=CHAT_BLOCKS,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=True,
    )


class Blind(MovingCosts):
    """Does not see what waits for a link."""

    def choose(self, num_prompt_tokens: int, here: Place, others: Sequence[Place]) -> ReplicaId:
        """As if every link were free."""
        return super().choose(num_prompt_tokens, here, [replace(each, link_wait_seconds=0.0) for each in others])


def run(num_prefill: int = 0, gbits: float = 1.0, kind: type[MovingCosts] = MovingCosts) -> dict[str, Any]:
    """NUM_REPLICAS, `num_prefill` of them for prompts only, with links of so many Gbit/s."""
    costs = kind(LLAMA_3_8B, SECONDS_PER_TOKEN, gbits * 1e9 / 8, LATENCY)
    workload = replace(AZURE_CONVERSATION, rate=RATE, max_model_len=MAX_MODEL_LEN)
    report = FleetSimulation(
        create_router("power_of_two"),
        make_scheduler,
        COST,
        behind_system_prompt(workload, 1, NUM_REQUESTS, seed=0),  # one token in common: no block
        num_replicas=NUM_REPLICAS - num_prefill,
        disaggregation=Disaggregation(costs, num_prefill) if num_prefill else None,
    ).run()
    return {
        "num_requests": report.num_requests,
        "num_finished": report.num_finished,
        "num_moved": report.num_moved,
        "ttft_p50": report.ttft.p50,
        "ttft_p99": report.ttft.p99,
        "tpot_p50": report.tpot.p50,
        "tpot_p99": report.tpot.p99,
        "latency_p50": report.latency.p50,
        "latency_p99": report.latency.p99,
    }


def main() -> None:
    """Run all, and write `benchmarks/results/disaggregation.json`."""
    found: dict[str, Any] = {"rate": RATE, "together": run()}
    runs = [("prefill", MovingCosts, number, gbits) for number in NUM_PREFILL for gbits in GBITS]
    runs += [("blind", Blind, 2, gbits) for gbits in GBITS]
    for name, kind, number, gbits in track(runs):
        found.setdefault(f"{name}_{number}", {})[str(gbits)] = run(number, gbits, kind)
    record("disaggregation", found)


if __name__ == "__main__":
    main()
