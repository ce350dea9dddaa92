"""Worlds as bytes: a state waits in a kilobyte or two, and comes back as often as something can happen to it.

Copying is what an exploration costs. So what never changes in a request is saved as one number. Pure standard library.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, Final

from minicache.request import Request, RequestStatus

_STATUSES: Final = tuple(RequestStatus)
_NUMBERS: Final = {status: number for number, status in enumerate(_STATUSES)}

_clients: list[Request] = []
"""Of each client that this process has saved a request of: a request with the parameters."""
_number_of: dict[int, int] = {}
"""By the identity of the list of its prompt, which is in `_clients` and so never goes away."""


def save(world: object) -> bytes:
    """The world as bytes, for `load` in the same process.

    All requests whose prompt is one list must have the same parameters.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(world)
    return stream.getvalue()


load: Final = pickle.loads
"""A copy of a world that was saved."""


def _saved(request: Request) -> tuple[Callable[..., Request], tuple[Any, ...]]:
    number = _number_of.get(id(request.prompt_token_ids))
    if number is None:
        number = _number_of[id(request.prompt_token_ids)] = len(_clients)
        _clients.append(request)
    return _loaded, (
        number,
        request.request_id,
        _NUMBERS[request.status],
        request.output_token_ids,
        request.arrival_index,
        request.num_computed_tokens,
        request.num_cached_tokens,
        request.num_preemptions,
        request.num_outputs_at_admission,
        request.block_ids,
        request.host_block_ids,
        request.block_hashes,
        request.fork_index,
        request.num_placeholders,
    )


def _loaded(
    number: int,
    request_id: Any,
    status: int,
    output_token_ids: list[int],
    arrival_index: int,
    num_computed_tokens: int,
    num_cached_tokens: int,
    num_preemptions: int,
    num_outputs_at_admission: int,
    block_ids: list[int],
    host_block_ids: list[int],
    block_hashes: list[bytes],
    fork_index: int,
    num_placeholders: int,
) -> Request:
    client, request = _clients[number], _new(Request)
    request.prompt_token_ids = client.prompt_token_ids
    request.num_prompt_tokens = client.num_prompt_tokens
    request.max_tokens = client.max_tokens
    request.stop_token_ids = client.stop_token_ids
    request.ignore_eos = client.ignore_eos
    request.priority = client.priority
    request.arrival_time = client.arrival_time
    request.group = client.group
    request.cache_salt = client.cache_salt
    request.adapter = client.adapter
    request.request_id = request_id
    request.status = _STATUSES[status]
    request.output_token_ids = output_token_ids
    request.arrival_index = arrival_index
    request.num_computed_tokens = num_computed_tokens
    request.num_cached_tokens = num_cached_tokens
    request.num_preemptions = num_preemptions
    request.num_outputs_at_admission = num_outputs_at_admission
    request.block_ids = block_ids
    request.other_block_ids = ()
    request.host_block_ids = host_block_ids
    request.block_hashes = block_hashes
    request.fork_index = fork_index
    request.num_placeholders = num_placeholders
    request.draft_token_ids = []
    return request


_new: Final[Callable[[type[Request]], Request]] = object.__new__
_REDUCERS: Final[dict[type, Callable[[Any], tuple[Callable[..., Request], tuple[Any, ...]]]]] = {Request: _saved}
