"""A request on its way through a simulated fleet. Given, not built. Pure standard library.

What is asked of another replica when one dies is phase 11's `FailoverStream`. Most requests meet no death and need
none: a stream is made when a replica dies, and told what its client has received until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minicache.errors import InvariantError
from minicache.fleet import FailoverStream, ReplicaView, RoutedRequest
from minicache.fleet.failover import Attempt
from minicache.fleet.views import ReplicaId
from minicache.request import Request


@dataclass(slots=True)
class Job:
    """A request on its way through the fleet.

    Attributes:
        asked: what its client asked for.
        request: what its replica serves: the same, or what is left of it, after a crash or a prefill elsewhere.
        num_received: tokens that its client has from earlier requests.
        first_token: when the client got its first token; None: not yet.
        number: of the attempt, as `Membership` counts; 0 while it waits for a replica.
        prefill: the same of its prompt, from when it is sent to a prefill replica until it is moved; else 0.
        num_to_move: tokens of the prompt whose keys and values the prefill replica's link is to send: those that its
            replica did not have when the prompt was sent there. 0 when they are on their way.
        routed: what the router sees of the attempt, once it was looked at.
        stream: says what is asked after a death; None: there was none.
        attempt: the stream's, since the last death and until the next.
    """

    asked: Request
    request: Request
    num_received: int = 0
    first_token: float | None = None
    number: int = 0
    prefill: int = 0
    num_to_move: int = 0
    routed: RoutedRequest | None = None
    stream: FailoverStream | None = None
    attempt: Attempt | None = None

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """What the next replica is to continue."""
        return self.asked.prompt_token_ids + [0] * self.num_received

    def candidates(self, views: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """Those of the replicas among which the router chooses."""
        return views if self.stream is None else self.stream.candidates(views)

    def begin(self, replica_id: ReplicaId) -> None:
        """The router has chosen: after a death, what is left is asked of the replica."""
        if self.stream is not None:
            self.attempt = self.stream.begin(replica_id)
            self.request = part_of(self.asked, list(self.attempt.prompt_token_ids), self.attempt.max_tokens)

    def has_prefilled(self) -> None:
        """The client has the first token, from a prefill replica: the rest is asked of the one that decodes."""
        self.num_received += 1
        request = self.request
        self.request = part_of(self.asked, [*request.prompt_token_ids, 0], request.max_tokens - 1)

    def fail(self, replica_id: ReplicaId, num_tokens: int, max_attempts: int) -> bool:
        """The attempt on a replica has failed.

        Args:
            replica_id: which the router had chosen.
            num_tokens: of `request`, received by the client.
            max_attempts: of the stream.

        Returns:
            Whether there is to be another attempt. If not, the request is given up.
        """
        asked = self.asked
        if self.stream is None:
            self.stream = FailoverStream(
                asked.request_id,
                asked.prompt_token_ids,
                asked.max_tokens,
                stop_token_ids=() if asked.ignore_eos else tuple(asked.stop_token_ids),
                max_attempts=max_attempts,
            )
            self.attempt = self.stream.begin(replica_id)
        self._receive(num_tokens)
        assert self.attempt is not None
        goes_on = self.stream.fail(self.attempt)
        self.num_received = len(self.stream.token_ids)
        self.routed, self.attempt, self.number = None, None, 0
        return goes_on

    def finish(self, num_tokens: int) -> int:
        """The replica has generated the last of `request`'s tokens, `num_tokens` in all.

        Returns:
            How many tokens the client has received.

        Raises:
            InvariantError: after a death, those are not what the replicas have generated, or too few.
        """
        stream, attempt = self.stream, self.attempt
        if stream is None or attempt is None:
            return self.num_received + num_tokens
        num_of_attempt = self._receive(num_tokens)
        length = self.asked.num_prompt_tokens + len(stream.token_ids)
        if length != self.request.num_prompt_tokens + num_tokens or not stream.is_complete:
            raise InvariantError(
                f"request {self.asked.request_id!r} went on wrongly after a crash: it ends with {length} tokens at the "
                f"client and {self.request.num_prompt_tokens + num_tokens} at the replica, prompt included, and asked "
                f"for at most {self.asked.num_prompt_tokens + self.asked.max_tokens}"
            )
        stream.finish(attempt, self.request.finish_reason or "length", num_of_attempt)
        return len(stream.token_ids)

    def _receive(self, num_tokens: int) -> int:
        """The client gets tokens of `request`. Returns how many there are of the attempt."""
        assert self.stream is not None
        assert self.attempt is not None
        num_of_attempt = self.num_received - self.attempt.num_received + num_tokens
        self.stream.receive(self.attempt, 0, [0] * num_of_attempt)
        return num_of_attempt


def part_of(request: Request, prompt_token_ids: list[int], max_tokens: int) -> Request:
    """A new request, for another part of the same answer."""
    return Request(
        request.request_id,
        prompt_token_ids,
        max_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        arrival_time=request.arrival_time,
        group=request.group,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
    )
