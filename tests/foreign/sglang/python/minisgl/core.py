"""A small engine of our own, written for these tests, with the names that Mini-SGLang's classes have."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool = False


@dataclass
class Context:
    page_size: int


@dataclass(eq=False)
class Req:
    uid: int
    input_ids: torch.Tensor
    max_tokens: int
    chunked_req: Any = None
    table_idx: int = -1
    cached_len: int = 0
    device_len: int = 0

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    def complete_one(self) -> None:
        self.cached_len = self.device_len
        self.device_len += 1


_GLOBAL_CTX = None


def set_global_ctx(context: Context) -> None:
    global _GLOBAL_CTX
    assert _GLOBAL_CTX is None
    _GLOBAL_CTX = context
