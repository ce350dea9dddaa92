"""Prefill and decode on separate replicas (phase 11): when does moving the KV cache pay? Pure standard library.

Requests that decode on a replica wait while a long prompt is computed there. The prompt can be computed elsewhere, and
its keys and values moved (DistServe: Zhong et al. 2024; Splitwise: Patel et al. 2024), which takes time on a link. This
module computes the cost of both, and chooses prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minicache.arithmetic.arithmetic import cache_bytes_per_token
from minicache.arithmetic.specs import Transformer
from minicache.errors import require_count, require_positive
from minicache.fleet.views import ReplicaId


@dataclass(frozen=True, slots=True)
class Place:
    """A replica that could compute a prompt.

    Attributes:
        replica_id: its name.
        wait_seconds: until it can begin with the prompt.
        num_cached_tokens: of the prompt, the tokens from its beginning on that its prefix cache has.
        num_decoding: requests that decode there, and wait while it computes the prompt.
        link_wait_seconds: until its link has sent all earlier prompts, including those that it has yet to compute.
    """

    replica_id: ReplicaId
    wait_seconds: float
    num_cached_tokens: int
    num_decoding: int
    link_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MovingCosts:
    """The cost of a prompt's token where it is computed, and on the link.

    Attributes:
        model: the model; its cache has `cache_bytes_per_token(model, dtype)` bytes a token.
        seconds_per_token: to compute a token of a prompt, > 0.
        bandwidth: of the link between two replicas, bytes/s, > 0.
        latency: seconds from the first byte sent to the first received, ≥ 0.
        dtype: of the cache.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds, or the dtype is unknown.
    """

    model: Transformer
    seconds_per_token: float
    bandwidth: float
    latency: float = 0.0
    dtype: str = "float16"

    def __post_init__(self) -> None:
        require_positive("seconds_per_token", self.seconds_per_token)
        require_positive("bandwidth", self.bandwidth)
        if self.latency:
            require_positive("latency", self.latency)
        cache_bytes_per_token(self.model, self.dtype)

    def prefill_seconds(self, num_tokens: int) -> float:
        """How long it takes to compute `num_tokens` tokens of a prompt, ≥ 0."""
        return num_tokens * self.seconds_per_token

    def link_seconds(self, num_tokens: int) -> float:
        """How long the link is busy with the keys and values of `num_tokens` tokens, ≥ 0: without the latency."""
        return num_tokens * cache_bytes_per_token(self.model, self.dtype) / self.bandwidth

    def break_even_bandwidth(self) -> float:
        """The bandwidth, in bytes/s, at which the link is busy with a prompt for as long as a replica computes it."""
        return cache_bytes_per_token(self.model, self.dtype) / self.seconds_per_token

    def remote_seconds(self, num_computed: int, num_moved: int) -> float:
        """From the beginning of a prefill elsewhere until all of its keys and values are here.

        Each layer is sent as soon as it is computed, while the next one is computed. Every layer takes the same time to
        compute, and the same time to send; cached tokens are sent with their layer. The link sends one layer at a time.
        With nothing to move, it is the prefill's time.

        Args:
            num_computed: tokens that are computed there, ≥ 0.
            num_moved: tokens whose keys and values are sent here, ≥ 0.
        """
        computing, sending = self.prefill_seconds(num_computed), self.link_seconds(num_moved)
        if not num_moved:
            return computing
        num_layers = self.model.num_layers
        # The slower of the two never waits; one layer of the faster precedes it, or follows it.
        return max(computing + sending / num_layers, computing / num_layers + sending) + self.latency

    def choose(self, num_prompt_tokens: int, here: Place, others: Sequence[Place]) -> ReplicaId:
        """Where to compute a prompt that will be decoded on `here`.

        The cost of a place is in request-seconds. The request itself waits until its prompt's keys and values are
        `here`: the place's `wait_seconds`, and the time to compute what the place has not cached, and, elsewhere, to
        move what `here` has not cached (`remote_seconds`). Elsewhere it may take longer: the link carries one prompt at
        a time, so the earlier ones come first (`link_wait_seconds`, from now), then this one (`link_seconds`, and the
        latency), while the replica computes. Each of the place's `num_decoding` requests waits for as long as the
        prompt is computed there. The last token of a prompt is always computed, even if all are cached.

        Args:
            num_prompt_tokens: tokens of the prompt, ≥ 1.
            here: the replica that will decode.
            others: those that could compute the prompt for it.

        Returns:
            The name of the place with the lowest cost; of equals, `here` first, then the others in order.

        Raises:
            TypeError: `num_prompt_tokens` is not an int.
            ValueError: it is below 1.
        """
        require_count("num_prompt_tokens", num_prompt_tokens)
        num_missing = num_prompt_tokens - min(here.num_cached_tokens, num_prompt_tokens - 1)

        def cost(place: Place) -> float:
            num_computed = num_prompt_tokens - min(place.num_cached_tokens, num_prompt_tokens - 1)
            prefill = self.prefill_seconds(num_computed)
            own = place.wait_seconds + prefill
            if place is not here:
                computed = place.wait_seconds + self.remote_seconds(num_computed, num_missing)
                own = max(computed, place.link_wait_seconds + self.link_seconds(num_missing) + self.latency)
            return own + place.num_decoding * prefill

        return min((here, *others), key=cost).replica_id
