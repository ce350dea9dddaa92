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
        self._class = type(scheduler)
        attributes = vars(scheduler)
        self._constants = {name: each for name, each in attributes.items() if type(each) in _ATOMS or name == "_stats"}
        self._has_cache = "_cache" in attributes
        self._clients: list[Request] = []  # of each client, a request with the parameters
        self._client_of: dict[int, int] = {}  # by the identity of its prompt's list
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
        """A copy of a world that was saved."""
        if saved[:1] == _PICKLED:
            world: World = pickle.loads(saved)
            return world
        return self._built(*marshal.loads(saved))

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

        def heap(of: LazyHeap) -> tuple[Any, ...]:
            is_by_arrival = of.key is arrival_key
            if not is_by_arrival and of.key != scheduler.priority_key:
                raise _UnknownError
            return is_by_arrival, [(key, number(each)) for key, each in of.members.values()], of._heap

        queue, output = scheduler.waiting, scheduler.outstanding
        flat_queue = (
            [number(each) for each in queue._requests.values()],
            heap(queue._by_arrival),
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

    def _built(
        self,
        here: tuple[int, int, tuple[Any, ...]],
        flat_requests: list[tuple[Any, ...]],
        everyone: list[int],
        running: list[int],
        flat_queue: tuple[Any, ...],
        flat_output: tuple[Any, ...] | None,
        pools: tuple[Any, Any],
        own: list[tuple[str, Any]],
    ) -> World:
        requests = [self._request(*each) for each in flat_requests]
        scheduler = _new(self._class)
        scheduler.__dict__.update(self._constants)
        by_priority = scheduler.priority_key

        def heap(is_by_arrival: bool, members: list[tuple[Any, int]], pairs: list[Any]) -> LazyHeap:
            built: LazyHeap = _new(LazyHeap)
            built.key = arrival_key if is_by_arrival else by_priority
            built.members = {requests[place].request_id: (key, requests[place]) for key, place in members}
            built._heap = pairs
            return built

        queue: RequestQueue = _new(RequestQueue)
        waiting, by_arrival, by_group = flat_queue
        queue._key = by_priority
        queue._requests = {requests[place].request_id: requests[place] for place in waiting}
        queue._by_arrival = heap(*by_arrival)
        queue._by_group = {group: heap(*each) for group, each in by_group}
        scheduler.waiting = queue
        scheduler.running = [requests[place] for place in running]
        scheduler._requests = {requests[place].request_id: requests[place] for place in everyone}
        scheduler.outstanding = None
        if flat_output is not None:
            tokens, scheduled, *rest = flat_output
            scheduler.outstanding = SchedulerOutput(tokens, [requests[place] for place in scheduled], *rest)
        scheduler.pool = pool = _built_pool(*pools[0])
        if self._has_cache:
            scheduler._cache = pool if isinstance(pool, CachingBlockPool) else None
        scheduler.host_pool = None if pools[1] is None else _built_pool(*pools[1])
        for name, value in own:
            setattr(scheduler, name, _rich(value, requests))
        world: World = _new(World)
        world.scheduler = scheduler
        world.num_left, world.num_bypasses = here[:2]
        world.memory = Memory(*here[2])
        return world

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

    def _request(
        self,
        client: int,
        request_id: Any,
        status: int,
        output_token_ids: list[int],
        arrival_index: int,
        num_computed_tokens: int,
        num_preemptions: int,
        num_outputs_at_admission: int,
        block_ids: list[int],
        host_block_ids: list[int],
        block_hashes: list[bytes],
        fork_index: int,
    ) -> Request:
        like = self._clients[client]
        request: Request = _new(Request)
        request.prompt_token_ids = like.prompt_token_ids
        request.num_prompt_tokens = like.num_prompt_tokens
        request.max_tokens = like.max_tokens
        request.stop_token_ids = like.stop_token_ids
        request.ignore_eos = False
        request.priority = like.priority
        request.arrival_time = like.arrival_time
        request.group = like.group
        request.cache_salt = None
        request.adapter = None
        request.request_id = request_id
        request.status = _STATUSES[status]
        request.output_token_ids = output_token_ids
        request.arrival_index = arrival_index
        request.num_computed_tokens = num_computed_tokens
        request.num_cached_tokens = 0  # a statistic
        request.num_preemptions = num_preemptions
        request.num_outputs_at_admission = num_outputs_at_admission
        request.block_ids = block_ids
        request.other_block_ids = ()
        request.host_block_ids = host_block_ids
        request.block_hashes = block_hashes
        request.fork_index = fork_index
        request.num_placeholders = 0
        request.draft_token_ids = []
        return request


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
    evictable: Any = LeastRecentlyUsed.fromkeys(cached or ())
    pool.free_list = TwoEndedFreeList((), evictable)
    pool.free_list.plain = free
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
