"""Worlds as bytes: a state waits in a kilobyte, and comes back as often as something can happen to it.

Copying is what an exploration costs. So of what every scheduler has, only what changes is saved, by position, with
requests by number: a fifth of the time that pickling takes. What is not known here, such as a learner's own queue, is
pickled. Pure standard library.
"""

from __future__ import annotations

import marshal
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from minicache.memory.blocks import BlockPool
from minicache.memory.eviction import LeastRecentlyUsed, TwoEndedFreeList
from minicache.memory.prefix import CachingBlockPool
from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.queue import LazyHeap, RequestQueue, arrival_key
from minicache.verifier.contents import Memory
from minicache.verifier.world import World

_STATUSES: Final = tuple(RequestStatus)
_NUMBER_OF: Final = {id(status): number for number, status in enumerate(_STATUSES)}
_ATOMS: Final = frozenset((int, bool, str, bytes, float, type(None)))
_NAMES: Final[dict[type, frozenset[str]]] = {
    RequestQueue: frozenset(("_key", "_requests", "_by_arrival", "_by_group")),
    LazyHeap: frozenset(("key", "members", "_heap")),
    BlockPool: frozenset(("num_blocks", "block_size", "free_list", "ref_counts")),
    CachingBlockPool: frozenset(
        ("num_blocks", "block_size", "free_list", "ref_counts", "num_evicted", "_hash_of", "_blocks_of")
    ),
}
"""The attributes of what is saved by position, as the reference has them."""
_BY_POSITION: Final = frozenset(("pool", "_cache", "host_pool", "waiting", "running", "outstanding", "_requests"))
_PICKLED: Final = pickle.dumps(None, 5)[:1]
_new: Final[Callable[[type], Any]] = object.__new__


def _is_known(part: object) -> bool:
    """Whether a part of a scheduler has the attributes of the reference's."""
    return vars(part).keys() == _NAMES.get(type(part))


class _UnknownError(Exception):
    """Something that is only pickled."""


class Saver:
    """Saves worlds of one scheduler.

    Args:
        world: the first one. Its scheduler's numbers and options that later ones still have are not saved with them;
            statistics, which only grow, are no part of a state.
    """

    def __init__(self, world: World) -> None:
        scheduler = world.scheduler
        attributes = vars(scheduler)
        self._constants = {name: each for name, each in attributes.items() if type(each) in _ATOMS or name == "_stats"}
        self._has_cache = "_cache" in attributes
        self._clients: list[Request] = []  # of each client, a request with the parameters
        self._client_of: dict[int, int] = {}  # by the identity of its prompt's list
        self._world: World = _new(World)
        self._world.scheduler = _new(type(scheduler))
        self._requests: list[Request] = []  # of the world that is loaded, by number
        self._queue = RequestQueue(self._world.scheduler.priority_key)
        self._heaps: dict[tuple[str | None, bool], LazyHeap] = {}
        queue, pools = scheduler.waiting, [scheduler.pool]
        pools += [] if scheduler.host_pool is None else [scheduler.host_pool]
        self._is_known = _is_known(queue) and _is_known(queue._by_arrival) and all(map(_is_known, pools))

    def save(self, world: World) -> bytes:
        """The world as bytes, for `load` of this saver."""
        if self._is_known:
            try:
                return marshal.dumps(self._flat(world))
            except _UnknownError:
                pass
        return pickle.dumps(world, 5)

    def load(self, saved: bytes) -> World:
        """A world that was saved. It takes the place of the one that was loaded before, in the same objects if it can.

        So what is noted of these objects before the first action of a state is right before each of its actions.
        """
        if saved[:1] == _PICKLED:
            world: World = pickle.loads(saved)
            return world
        self._fill(*marshal.loads(saved))
        return self._world

    def _flat(self, world: World) -> tuple[Any, ...]:
        scheduler: Any = world.scheduler
        requests: list[Request] = []
        numbers: dict[int, int] = {}

        def number(request: Request) -> int:
            found = numbers.get(id(request))
            if found is None:
                found = numbers[id(request)] = len(requests)
                requests.append(request)
            return found

        def heap(of: LazyHeap, is_by_arrival: bool = False) -> tuple[Any, ...]:
            if of.key != (arrival_key if is_by_arrival else scheduler.priority_key):
                raise _UnknownError
            return [(key, number(each)) for key, each in of.members.values()], of._heap

        queue, output = scheduler.waiting, scheduler.outstanding
        flat_queue = (
            [number(each) for each in queue._requests.values()],
            heap(queue._by_arrival, True),
            [(group, heap(each)) for group, each in queue._by_group.items()],
        )
        flat_output = None
        if output is not None:
            flat_output = (
                output.num_scheduled_tokens,
                [number(each) for each in output.scheduled],
                output.preempted,
                output.swapped_out,
                output.swapped_in,
                output.blocks_to_copy,
                output.finished,
            )
        constants, values = self._constants, vars(scheduler)
        own = [
            (name, _plain(value, number))
            for name, value in values.items()
            if name not in _BY_POSITION and constants.get(name, self) is not value
        ]
        everyone = [number(each) for each in scheduler._requests.values()]
        running = [number(each) for each in scheduler.running]
        pools = _flat_pool(scheduler.pool), None if scheduler.host_pool is None else _flat_pool(scheduler.host_pool)
        memory = world.memory.block_size, world.memory.blocks, world.memory.host_blocks
        here = world.num_left, world.num_bypasses, memory
        return here, list(map(self._flat_request, requests)), everyone, running, flat_queue, flat_output, pools, own

    def _fill(
        self,
        here: tuple[int, int, tuple[Any, ...]],
        flat_requests: list[tuple[Any, ...]],
        everyone: list[int],
        running: list[int],
        flat_queue: tuple[Any, ...],
        flat_output: tuple[Any, ...] | None,
        pools: tuple[Any, Any],
        own: list[tuple[str, Any]],
    ) -> None:
        """Give the one world that is loaded this state."""
        world, requests, clients = self._world, self._requests, self._clients
        while len(requests) < len(flat_requests):
            requests.append(_new(Request))
        for request, flat in zip(requests, flat_requests, strict=False):
            _fill_request(request, clients[flat[0]], flat)
        scheduler: Any = world.scheduler
        attributes = vars(scheduler)
        attributes.clear()
        attributes.update(self._constants)
        scheduler.waiting = queue = self._queue
        waiting, by_arrival, by_group = flat_queue
        queue._requests = {requests[place].request_id: requests[place] for place in waiting}
        queue._by_arrival = self._heap(None, True, by_arrival)
        queue._by_group = {group: self._heap(group, False, each) for group, each in by_group}
        scheduler.running = [requests[place] for place in running]
        scheduler._requests = {requests[place].request_id: requests[place] for place in everyone}
        if flat_output is None:
            scheduler.outstanding = None
        else:
            tokens, scheduled, *rest = flat_output
            scheduler.outstanding = SchedulerOutput(tokens, [requests[place] for place in scheduled], *rest)
        scheduler.pool = pool = _built_pool(*pools[0])
        if self._has_cache:
            scheduler._cache = pool if isinstance(pool, CachingBlockPool) else None
        scheduler.host_pool = None if pools[1] is None else _built_pool(*pools[1])
        for name, value in own:
            attributes[name] = value if type(value) is not tuple else _rich(value, requests)
        world.num_left, world.num_bypasses, memory = here
        world.memory = Memory(*memory)

    def _heap(self, group: str | None, is_by_arrival: bool, flat: tuple[list[tuple[Any, int]], list[Any]]) -> LazyHeap:
        """The heap of a group, or that of all by arrival, with these members."""
        heap = self._heaps.get((group, is_by_arrival))
        if heap is None:
            heap = LazyHeap(arrival_key if is_by_arrival else self._queue._key)
            self._heaps[group, is_by_arrival] = heap
        members, heap._heap = flat
        requests = self._requests
        heap.members = {requests[place].request_id: (key, requests[place]) for key, place in members}
        return heap

    def _flat_request(self, request: Request) -> tuple[Any, ...]:
        client = self._client_of.get(id(request.prompt_token_ids))
        if client is None:
            client = self._client_of[id(request.prompt_token_ids)] = len(self._clients)
            self._clients.append(request)
        return (
            client,
            request.request_id,
            _NUMBER_OF[id(request.status)],
            request.output_token_ids,
            request.arrival_index,
            request.num_computed_tokens,
            request.num_preemptions,
            request.num_outputs_at_admission,
            request.block_ids,
            request.host_block_ids,
            request.block_hashes,
            request.fork_index,
        )


def _fill_request(request: Request, like: Request, flat: tuple[Any, ...]) -> None:
    """Give a request the parameters of another, and the progress that was saved."""
    request.prompt_token_ids = like.prompt_token_ids
    request.num_prompt_tokens = like.num_prompt_tokens
    request.max_tokens = like.max_tokens
    request.stop_token_ids = like.stop_token_ids
    request.ignore_eos = False
    request.priority = like.priority
    request.arrival_time = like.arrival_time
    request.group = like.group
    request.cache_salt = like.cache_salt
    request.adapter = None
    (
        _,
        request.request_id,
        status,
        request.output_token_ids,
        request.arrival_index,
        request.num_computed_tokens,
        request.num_preemptions,
        request.num_outputs_at_admission,
        request.block_ids,
        request.host_block_ids,
        request.block_hashes,
        request.fork_index,
    ) = flat
    request.status = _STATUSES[status]
    request.num_cached_tokens = 0  # a statistic
    request.other_block_ids = ()
    request.num_placeholders = 0
    request.draft_token_ids = []


def _flat_pool(pool: BlockPool) -> tuple[Any, ...]:
    free: Any = pool.free_list
    if not isinstance(pool, CachingBlockPool):
        return pool.num_blocks, pool.block_size, pool.ref_counts, list(free)
    found = [(its_hash, list(blocks)) for its_hash, blocks in pool._blocks_of.items()]
    return pool.num_blocks, pool.block_size, pool.ref_counts, free.plain, list(free.cached), pool._hash_of, found


def _built_pool(
    num_blocks: int,
    block_size: int,
    ref_counts: list[int],
    free: list[int],
    cached: list[int] | None = None,
    hash_of: dict[int, bytes] | None = None,
    found: Iterable[tuple[bytes, list[int]]] = (),
) -> BlockPool:
    pool: Any = _new(BlockPool if hash_of is None else CachingBlockPool)
    pool.num_blocks, pool.block_size, pool.ref_counts = num_blocks, block_size, ref_counts
    if hash_of is None:
        pool.free_list = deque(free)
        return pool  # type: ignore[no-any-return]
    pool.free_list = both = _new(TwoEndedFreeList)
    both.plain, both.cached = free, LeastRecentlyUsed.fromkeys(cached or ())
    pool.num_evicted = 0  # a statistic
    pool._hash_of = hash_of
    pool._blocks_of = {its_hash: dict.fromkeys(blocks) for its_hash, blocks in found}
    return pool  # type: ignore[no-any-return]


def _plain(value: Any, number: Callable[[Request], int]) -> Any:
    """A scheduler's own value as `marshal` takes it: an atom, or a pair of its kind and what is in it."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is Request:
        return "request", number(value)
    if kind is dict:
        return "dict", [(_plain(key, number), _plain(each, number)) for key, each in value.items()]
    if kind in _KINDS:
        return kind.__name__, [_plain(each, number) for each in value]
    raise _UnknownError


def _rich(value: Any, requests: list[Request]) -> Any:
    """What `_plain` was given."""
    if type(value) is not tuple:
        return value
    kind, content = value
    if kind == "request":
        return requests[content]
    if kind == "dict":
        return {_rich(key, requests): _rich(each, requests) for key, each in content}
    return _BY_NAME[kind](_rich(each, requests) for each in content)


_KINDS: Final[frozenset[type]] = frozenset((list, tuple, set, frozenset, deque))
_BY_NAME: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {kind.__name__: kind for kind in _KINDS}
