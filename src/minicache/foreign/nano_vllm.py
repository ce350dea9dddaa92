"""nano-vllm's scheduler and block manager (https://github.com/GeeeekExplorer/nano-vllm), from a checkout.

Commits before and after chunked prefill are known: where they differ, the code below says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from minicache.foreign.adapter import Adapter, RequestState, State, Work
from minicache.foreign.checkout import load
from minicache.foreign.workload import Limits


class _Hash:
    """What `xxhash.xxh64` does, by another hash: the scheduler needs any of 64 bits."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._hash.digest(), "little")


class _Config(SimpleNamespace):
    """The engine's configuration, with what a scheduler reads of it; options that a fork has besides are None."""

    def __getattr__(self, name: str) -> None:
        return None


class NanoVllm(Adapter):
    """`nanovllm.engine.scheduler.Scheduler`, with its block manager and sequences."""

    name = "nano-vllm"
    marker = "nanovllm/engine/scheduler.py"

    def __init__(self, checkout: Path) -> None:
        xxhash = ModuleType("xxhash")
        xxhash.__dict__["xxh64"] = _Hash
        self._scheduling, self._sequences, self._sampling = load(
            checkout,
            ("nanovllm.engine.scheduler", "nanovllm.engine.sequence", "nanovllm.sampling_params"),
            bare=("nanovllm", "nanovllm.engine"),
            instead={"xxhash": xxhash, "torch": None, "transformers": None},
        )
        self.chunked_prefill = hasattr(self._sequences.Sequence([0]), "num_scheduled_tokens")

    def start(self, limits: Limits) -> None:
        """As `Adapter.start`."""
        self._sequences.Sequence.block_size = limits.block_size
        config = _Config(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_kvcache_blocks=limits.num_blocks,
            kvcache_block_size=limits.block_size,
            eos=-1,
        )
        self._scheduler = self._scheduling.Scheduler(config)
        self._ids: dict[int, int] = {}

    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int) -> None:
        """As `Adapter.add`."""
        parameters = self._sampling.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sequence = self._sequences.Sequence(list(prompt), parameters)
        self._ids[sequence.seq_id] = request_id
        self._scheduler.add(sequence)

    def schedule(self) -> list[Work]:
        """As `Adapter.schedule`."""
        self._step, self._is_prefill = self._scheduler.schedule()
        return [self._work(sequence) for sequence in self._step]

    def _work(self, sequence: Any) -> Work:
        """What the model runner, which prepares prefill and decode, makes of a sequence."""
        last, start = len(sequence) - 1, sequence.num_cached_tokens
        if not self._is_prefill:
            return Work(self._ids[sequence.seq_id], last, 1)
        if not self.chunked_prefill:
            return Work(self._ids[sequence.seq_id], start, len(sequence) - start)
        count = sequence.num_scheduled_tokens
        # The first commits with chunks compute the last token again where a whole prompt is cached.
        return Work(self._ids[sequence.seq_id], min(start, last) if count else start, count)

    def commit(self, token_ids: Sequence[int]) -> dict[int, list[int]]:
        """As `Adapter.commit`."""
        arguments = [self._step, list(token_ids)] + [self._is_prefill] * self.chunked_prefill
        self._scheduler.postprocess(*arguments)
        return {self._ids[each.seq_id]: each.completion_token_ids for each in self._step if each.is_finished}

    def state(self) -> State:
        """As `Adapter.state`."""
        scheduler, manager = self._scheduler, self._scheduler.block_manager
        places = [(each, True) for each in scheduler.running] + [(each, False) for each in scheduler.waiting]
        return State(
            [
                RequestState(self._ids[each.seq_id], tuple(each.token_ids), tuple(each.block_table), running)
                for each, running in places
            ],
            free_block_ids=tuple(manager.free_block_ids),
            references={each.block_id: each.ref_count for each in manager.blocks if each.ref_count},
        )
