"""Failover (phase 11): a stream continues elsewhere when its replica dies. Pure standard library.

A replica that dies takes the KV cache of its requests with it, but not their tokens, which went through the router. So
another replica continues the prompt *and the tokens received*, for the rest of `max_tokens`. It recomputes the KV cache
of both in one prefill. With greedy sampling it then generates the same tokens as the first one would have.

One `FailoverStream` belongs to one stream. It has no connection and no clock: its caller reports events to it
and acts on its answers: `minicache route`, the fleet on Ray Serve, or the simulated fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from minicache.errors import BrokenStreamError, require_count
from minicache.fleet.views import ReplicaId, ReplicaView
from minicache.request import RequestId

MAX_SEED: Final = 2**63
"""Seeds are below it, as all servers require."""


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One try at a stream, or at what is left of it, on one replica. Each is equal to itself only.

    Attributes:
        number: 1 for the first of the stream.
        replica_id: the replica of the attempt.
        prompt_token_ids: its prompt: the stream's prompt and all tokens received before this attempt.
        max_tokens: how many tokens it may generate, ≥ 1: the stream's, less those received before.
        num_received: tokens of the stream that were received before this attempt.
        seed: the seed to sample with; None if the stream has none.
    """

    number: int
    replica_id: ReplicaId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    num_received: int
    seed: int | None


class FailoverStream:
    """One client's stream, on one replica after the other.

    Args:
        request_id: its name.
        prompt_token_ids: the client's prompt; empty if the caller keeps it and prepends it to every attempt's prompt.
        max_tokens: the most tokens that the client gets, ≥ 1.
        stop_token_ids: each ends the stream, as its last token.
        seed: the client's seed, 0 … 2⁶³ − 1; None: not given, or greedy sampling.
        max_attempts: the most replicas to try, one after the other, ≥ 1. A request that crashes its replica must not
            crash the whole fleet.

    Attributes:
        token_ids: the tokens passed on to the client, in order. Read it, do not change it.
        attempt: the one in progress, or None.
        num_attempts: how many have begun, not counting refused ones.
        failed: the replicas on which an attempt has failed.
        finish_reason: "stop", "length" or another reason that a replica reported; "error": no attempts left; "abort":
            the client disconnected. None while it is not finished.

    Raises:
        TypeError: a count or the seed is not an int.
        ValueError: a count or the seed is out of its bounds.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        max_attempts: int = 3,
    ) -> None:
        require_count("max_tokens", max_tokens)
        require_count("max_attempts", max_attempts)
        if seed is not None:
            require_count("seed", seed, at_least=0)
            if seed >= MAX_SEED:
                raise ValueError(f"seed must be below 2 ** 63, got {seed}")
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.max_tokens, self.max_attempts = max_tokens, max_attempts
        self.stop_token_ids = frozenset(stop_token_ids)
        self.seed = seed
        self.token_ids: list[int] = []
        self.attempt: Attempt | None = None
        self.num_attempts = 0
        self.failed: set[ReplicaId] = set()
        self.finish_reason: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it is over, for whatever reason: no more attempts, and no more tokens for the client."""
        return self.finish_reason is not None

    @property
    def is_complete(self) -> bool:
        """Whether the client has all tokens: `max_tokens` of them, or a stop token. It may not be finished yet."""
        return len(self.token_ids) >= self.max_tokens or self._has_stopped

    @property
    def _has_stopped(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.stop_token_ids

    def candidates(self, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
        """Those of `replicas` among which a router should choose for the next attempt, in the same order.

        They are the replicas on which no attempt has failed, as long as one of them is not full; else all: one that
        has failed may have been restarted, and is better than none.
        """
        others = [each for each in replicas if each.replica_id not in self.failed]
        return others if any(not each.is_full for each in others) else list(replicas)

    def begin(self, replica_id: ReplicaId) -> Attempt:
        """Begin an attempt on a replica: the prompt and all tokens received are continued, up to `max_tokens` in all.

        It samples with the stream's seed plus the number of tokens received before it, modulo 2⁶³ (`MAX_SEED`). The
        same seed again would draw the same random numbers for other positions.

        Returns:
            The attempt: what to request from the replica. It is also `attempt` from now on.

        Raises:
            ValueError: the stream is finished or complete, another attempt is in progress, or all `max_attempts` have
                begun. Nothing has changed.
        """
        if self.is_finished or self.is_complete or self.attempt is not None or self.num_attempts >= self.max_attempts:
            raise ValueError(f"stream {self.request_id!r} can begin no attempt now")
        self.num_attempts += 1
        num_received = len(self.token_ids)
        self.attempt = Attempt(
            number=self.num_attempts,
            replica_id=replica_id,
            prompt_token_ids=(*self.prompt_token_ids, *self.token_ids),
            max_tokens=self.max_tokens - num_received,
            num_received=num_received,
            seed=None if self.seed is None else (self.seed + num_received) % MAX_SEED,
        )
        return self.attempt

    def receive(self, attempt: Attempt, start: int, token_ids: Sequence[int]) -> list[int]:
        """Take a piece of an attempt, and return the tokens in it that the client does not have yet.

        A piece of an attempt that is no longer in progress is dropped: it may come late, from a replica that was only
        slow. Of a piece that repeats tokens of its attempt, the rest is new. Tokens after the one that makes the stream
        complete are dropped, as is any piece that arrives when the stream is complete. New tokens are added to
        `token_ids`.

        Args:
            attempt: the attempt that the piece belongs to.
            start: how many tokens of this attempt, not of the stream, come before the piece, ≥ 0.
            token_ids: the piece.

        Returns:
            The tokens to pass on to the client, in order; [] if none are new.

        Raises:
            BrokenStreamError: the stream is not complete, and tokens between the last received and the piece are
                missing, or a repeated token differs from the one received. Nothing has changed; the attempt cannot
                continue, so call `fail`.
            TypeError: `start` is not an int, whichever attempt's the piece is: the caller has made a mistake.
            ValueError: `start` is below 0; likewise.
        """
        require_count("start", start, at_least=0)
        if attempt is not self.attempt:
            return []
        start += attempt.num_received
        num_known = len(self.token_ids) - start
        if not self.is_complete:
            if num_known < 0:
                raise BrokenStreamError(f"{-num_known} tokens are missing before token {start} of the stream")
            if list(token_ids[:num_known]) != self.token_ids[start : start + len(token_ids)]:
                raise BrokenStreamError(f"tokens from {start} on are not those that were received before")
        num_before = len(self.token_ids)
        for token_id in token_ids[max(num_known, 0) :]:
            if self.is_complete:
                break
            self.token_ids.append(token_id)
        return self.token_ids[num_before:]

    def finish(self, attempt: Attempt, reason: str, num_tokens: int) -> None:
        """The replica reports that its attempt is over. If it is the one in progress, the stream is finished.

        The end of an attempt that is no longer in progress is ignored.

        Args:
            attempt: the attempt that is over.
            reason: the replica's reason; `finish_reason` from now on.
            num_tokens: how many tokens this attempt has generated, by the replica's count.

        Raises:
            BrokenStreamError: that is more than were received of it, and the stream is not complete: tokens are
                missing. Nothing has changed; call `fail`.
            TypeError: `num_tokens` is not an int, whichever attempt's end it is.
            ValueError: `num_tokens` is below 0; likewise.
        """
        require_count("num_tokens", num_tokens, at_least=0)
        if attempt is not self.attempt:
            return
        num_received = len(self.token_ids) - attempt.num_received
        if num_tokens > num_received and not self.is_complete:
            raise BrokenStreamError(f"{num_tokens} tokens were generated, and {num_received} received")
        self.attempt, self.finish_reason = None, reason

    def refuse(self, attempt: Attempt) -> None:
        """The replica has not taken the attempt, as it is full or stopping: it does not count. Given."""
        if attempt is self.attempt:
            self.attempt = None
            self.num_attempts -= 1

    def fail(self, attempt: Attempt) -> bool:
        """An attempt has failed: its replica died, cannot be reached, or sends inconsistent pieces.

        If the client has all tokens already, only the end was lost: the stream is finished, with "stop" if the last is
        a stop token, else with "length". If no attempt is left, it is finished with "error". Failures of attempts that
        are no longer in progress are ignored.

        Returns:
            Whether another attempt should begin, on one of the `candidates`.
        """
        if attempt is not self.attempt:
            return False
        self.attempt = None
        self.failed.add(attempt.replica_id)
        if self.is_complete:
            self.finish_reason = "stop" if self._has_stopped else "length"
        elif self.num_attempts >= self.max_attempts:
            self.finish_reason = "error"
        return not self.is_finished

    def abort(self) -> Attempt | None:
        """The client has disconnected. An unfinished stream is finished with "abort"; a finished one is unchanged.

        Returns:
            The attempt that was in progress, to be cancelled at its replica; None if there was none.
        """
        attempt, self.attempt = self.attempt, None
        if not self.is_finished:
            self.finish_reason = "abort"
        return attempt
