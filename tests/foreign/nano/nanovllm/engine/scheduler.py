from collections import deque
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


class Scheduler:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> tuple[list[Sequence], bool]:
        scheduled: list[Sequence] = []
        budget = self.config.max_num_batched_tokens
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if not sequence.block_table and not self.block_manager.admit(sequence):
                break
            sequence.num_scheduled_tokens = min(budget, len(sequence) - sequence.num_cached_tokens)
            budget -= sequence.num_scheduled_tokens
            scheduled.append(sequence)
            if sequence.num_cached_tokens + sequence.num_scheduled_tokens < len(sequence):
                break
            self.running.append(self.waiting.popleft())
        if scheduled:
            return scheduled, True
        for sequence in list(self.running):
            while sequence in self.running and not self.block_manager.grow(sequence):
                self.preempt(self.running[-1])
            if sequence in self.running:
                sequence.num_scheduled_tokens = 1
                scheduled.append(sequence)
        return scheduled, False

    def preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.block_manager.release(sequence)
        self.waiting.appendleft(sequence)

    def postprocess(self, sequences: list[Sequence], token_ids: list[int], is_prefill: bool) -> None:
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.num_cached_tokens += sequence.num_scheduled_tokens
            self.block_manager.publish(sequence)
            if sequence.num_cached_tokens < len(sequence):
                continue
            sequence.token_ids.append(token_id)
            if len(sequence.completion_token_ids) == sequence.max_tokens:
                sequence.is_finished = True
                self.running.remove(sequence)
                self.block_manager.release(sequence)
