"""Workloads by their names: what `minicache simulate` and `minicache sweep` are asked for. Given, not built.

Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from minicache.errors import require_count, require_positive
from minicache.request import Request
from minicache.simulator.prompts import ChatWorkload, behind_system_prompt, chats
from minicache.simulator.workload import ALPACA, AZURE_CODE, AZURE_CONVERSATION, SHAREGPT, Arrival, Workload, stream

CHATS: Final = ChatWorkload(
    message=SHAREGPT.prompt,
    answer=SHAREGPT.output,
    rate=0.4,
    mean_turns=5.0,
    pause=20.0,
    seconds_per_token=0.03,
    max_model_len=4096,
)
"""Chats with messages and answers as long as ShareGPT's. How many turns and how long people think is assumed."""

MESSAGES: Final = CHATS.mean_turns * (1 - (1 - 1 / CHATS.mean_turns) ** 8)
"""Of a chat, on average: a turn adds 500 tokens, so after eight of them there is no room for another."""

SYSTEM_PROMPT: Final = 512
"""Tokens that all prompts of "system-prompt" begin with."""

WORKLOADS: Final[dict[str, Workload]] = {
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "azure-code": AZURE_CODE,
    "azure-conversation": AZURE_CONVERSATION,
}
"""Of lengths alone, without tokens."""

TRAFFIC: Final = (*WORKLOADS, "chats", "system-prompt")
"""All names."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a named workload. Can be iterated again and again: each time the same.

    Args:
        name: one of `TRAFFIC`. The prompts of "chats" and "system-prompt" have tokens, and begin as others do.
        rate: requests a second on average, > 0. "chats": messages, once as many chats end as begin.
        count: requests, ≥ 0.
        seed: the same seed gives the same requests, at another rate at other times.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: there is no such workload, or a number is out of its bounds.
    """

    name: str
    rate: float
    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in TRAFFIC:
            raise ValueError(f"no workload {self.name!r}: there are {', '.join(TRAFFIC)}")
        require_positive("rate", self.rate)
        require_count("count", self.count, at_least=0)

    @property
    def has_tokens(self) -> bool:
        """Whether prompts have tokens, in which a prefix cache may find shared beginnings."""
        return self.name not in WORKLOADS

    @property
    def max_model_len(self) -> int:
        """The most tokens of one request."""
        if self.name == "chats":
            return CHATS.max_model_len
        return SYSTEM_PROMPT + SHAREGPT.max_model_len if self.has_tokens else WORKLOADS[self.name].max_model_len

    @property
    def title(self) -> str:
        """For people."""
        named = {"chats": "chats", "system-prompt": f"ShareGPT behind {SYSTEM_PROMPT} shared tokens"}
        return named[self.name] if self.has_tokens else WORKLOADS[self.name].name

    def __iter__(self) -> Iterator[Arrival | Request]:
        if self.name == "chats":
            workload = replace(CHATS, rate=self.rate / MESSAGES)
            return islice(chats(workload, self.count, self.seed), self.count)
        if self.name == "system-prompt":
            behind = replace(SHAREGPT, rate=self.rate, max_model_len=self.max_model_len)
            return behind_system_prompt(behind, SYSTEM_PROMPT, self.count, self.seed)
        return stream(replace(WORKLOADS[self.name], rate=self.rate), self.count, self.seed)


def usual_rate(name: str) -> float:
    """The rate of a workload that is asked for without one, in requests a second."""
    return WORKLOADS.get(name, SHAREGPT).rate
