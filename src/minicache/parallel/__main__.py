"""The process of a rank: `python -m minicache.parallel DESCRIPTOR`, started by rank 0 with one end of a socket pair.

It exits when the other end is closed, which also happens when rank 0's process exits. It ignores signals: Ctrl-C in a
terminal goes to all processes, and rank 0 may still have requests to finish.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from minicache.cache.paged import PagedStorage
from minicache.cache.quantized import KV_CACHE_DTYPES, QuantizedStorage
from minicache.cache.swap import HostStorage, copy_blocks
from minicache.memory.blocks import BlockPool
from minicache.parallel.group import Group
from minicache.parallel.messages import Begin, Failed, Move, Ready, Start, Step
from minicache.parallel.model import LOST, as_bytes, load_shard
from minicache.parallel.rank import Rank
from minicache.parallel.sharding import empty_shard


def main(connection: Connection) -> int:
    """Load the shard, and execute rank 0's messages until it closes its end; return the exit status."""
    start: Start = connection.recv()
    try:
        rank = load(start, connection)
    except Exception as error:
        connection.send(_failed(error))
        return 1
    server = Server(rank)
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return 0
        try:
            match message:
                case Begin():
                    server.begin(message)
                    connection.send(Ready())
                case Move():
                    server.move(message)
                case Step():
                    rank.expect(message.size)
                    rank.run(message.size, torch.from_numpy(message.numbers))
        except Exception as error:
            if rank.group.is_lost:
                return LOST
            try:
                connection.send(_failed(error))  # before the all-reduces: rank 0 checks for it after them
                rank.group.finish()
            except (OSError, RuntimeError):
                return LOST


def load(start: Start, connection: Connection) -> Rank:
    """The rank's shard, from the bytes that rank 0 sends, and its group."""
    torch.set_num_threads(start.num_threads)
    if start.device.type == "cuda":
        torch.cuda.set_device(start.device)

    def weights() -> Iterator[Tensor]:
        for each in empty_shard(start.kind, start.config, start.dtype).state_dict().values():
            weight = torch.empty(each.shape, dtype=start.dtype)
            connection.recv_bytes_into(as_bytes(weight))
            yield weight

    shard = load_shard(start.kind, start.config, start.dtype, start.device, weights())
    if start.is_fused:
        from minicache.kernels.cpu.warming import warm_up
        from minicache.model.fused import fuse
        from minicache.model.linear import pack

        pack(shard)
        if fuse(shard) is None:
            raise ValueError("rank 0 computes with the numba kernels, and this rank cannot")
        warm_up()
    connection.send(Ready())
    group = Group(start.store, start.rank, start.size, next(shard.parameters()), start.timeout_seconds)
    return Rank(shard, group, start.is_fused)


class Server:
    """A rank's storages for an engine.

    Args:
        rank: the shard, and the group.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._storages: list[tuple[PagedStorage, HostStorage | None]] = []

    def begin(self, begin: Begin) -> None:
        """Make the storages of a new engine."""
        config, weights = self._rank.model.config, next(self._rank.model.parameters())
        pool = BlockPool(begin.num_blocks, begin.block_size)
        num_layers = config.num_layers if begin.places is None else 1 + max(at for _, at in begin.places)
        sizes = (num_layers, config.num_kv_heads, config.head_dim)
        if begin.kv_cache_dtype is None:
            storage = PagedStorage(pool, *sizes, dtype=weights.dtype, device=weights.device)
        else:
            dtype = KV_CACHE_DTYPES[begin.kv_cache_dtype]
            storage = QuantizedStorage(pool, *sizes, dtype=dtype, device=weights.device)
        storages = [storage, storage.scales] if isinstance(storage, QuantizedStorage) else [storage]
        count = begin.num_host_blocks
        self._storages = [(each, HostStorage(each, count) if count else None) for each in storages]
        self._rank.begin(storage, begin.places)

    def move(self, move: Move) -> None:
        """Move blocks, in the order of `minicache.engine.kv.PagedMemory.move_blocks`."""
        for storage, host_storage in self._storages:
            if host_storage is not None:
                for pairs in move.swapped_out:
                    host_storage.swap_out(pairs)
                host_storage.swap_in(move.swapped_in)
            copy_blocks(storage, move.copied)


def _failed(error: Exception) -> Failed:
    return Failed(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    status = main(Connection(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(status)  # Python's cleanup takes seconds, and rank 0 waits for the exit
