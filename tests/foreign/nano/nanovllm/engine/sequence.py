"""A small engine of our own, written for these tests, with the names that nano-vllm's classes have."""

from itertools import count

from nanovllm.sampling_params import SamplingParams
from transformers import AutoConfig  # noqa: F401  not there, and not needed


class Sequence:
    block_size = 256
    numbers = count()

    def __init__(self, token_ids: list[int], parameters: SamplingParams | None = None) -> None:
        self.seq_id = next(Sequence.numbers)
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.max_tokens = (parameters or SamplingParams()).max_tokens
        self.num_cached_tokens = self.num_scheduled_tokens = 0
        self.block_table: list[int] = []
        self.is_finished = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
