"""The inputs of the fleet's decisions. Given, not built. Pure standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from minicache.errors import require_count
from minicache.memory.prefix import BlockHash, block_hash, root_hash
from minicache.request import RequestId

ReplicaId = str
"""A replica's name: its address, or what an orchestrator calls it."""

_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router sees of a request.

    Attributes:
        request_id: its name.
        block_hashes: of the prompt's full blocks, in order. Each covers all tokens before it, so two requests have the
            first n in common if their first n blocks hold the same tokens.
        num_prompt_tokens: tokens of the prompt.
    """

    request_id: RequestId
    block_hashes: tuple[BlockHash, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a router sees of a replica.

    Attributes:
        replica_id: its name.
        num_unfinished: requests that were sent to it and are not finished, as far as is known here: this router's,
            which is exact, and other routers' by the replica's last report.
        max_unfinished: the most that it takes.
        stats: the replica's last report, by name. It may be old.
    """

    replica_id: ReplicaId
    num_unfinished: int
    max_unfinished: int
    stats: Mapping[str, float] = field(default_factory=lambda: _NOTHING)  # Python 3.11 takes no unhashable default

    @property
    def is_full(self) -> bool:
        """Whether it would refuse one more."""
        return self.num_unfinished >= self.max_unfinished


@dataclass(frozen=True, slots=True)
class FleetView:
    """What an autoscaler sees.

    Attributes:
        now: the time in seconds, from an arbitrary origin.
        num_ready: replicas that take requests.
        num_starting: replicas that were requested and do not take requests yet.
        num_unfinished: unfinished requests that replicas have.
        num_waiting: requests that no replica has yet, as all are full.
    """

    now: float
    num_ready: int
    num_starting: int
    num_unfinished: int
    num_waiting: int = 0


def route_tokens(
    request_id: RequestId, token_ids: Sequence[int], *, block_size: int = 16, cache_salt: str | None = None
) -> RoutedRequest:
    """What a router sees of a prompt.

    Args:
        request_id: its name.
        token_ids: the prompt.
        block_size: tokens of a block of the replicas' prefix caches, ≥ 1.
        cache_salt: requests with different salts have no block in common.

    Returns:
        The request, with the hashes under which a minicache replica caches these blocks (without a LoRA adapter).

    Raises:
        TypeError: `block_size` is not an int.
        ValueError: `block_size` is below 1.
    """
    require_count("block_size", block_size)
    hashes, parent = [], root_hash(cache_salt, None)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return RoutedRequest(request_id, tuple(hashes), len(token_ids))
