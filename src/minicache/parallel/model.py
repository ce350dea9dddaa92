"""A model on several ranks, seen from rank 0, which starts the others, sends them each step, and stops them."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn

from minicache.cache.packed import Places, StepSize
from minicache.cache.paged import PagedStorage
from minicache.cache.swap import Pairs
from minicache.errors import InvariantError, RankDiedError, RankFailedError, require_count
from minicache.kernels import cpu
from minicache.kernels.backends import is_plain_replaced
from minicache.model.decoder import Decoder
from minicache.model.linear import pack
from minicache.model.minigpt import MiniGPT
from minicache.parallel.group import Group
from minicache.parallel.messages import Begin, Failed, FromRank, Move, Start, Step, ToRank
from minicache.parallel.rank import Rank
from minicache.parallel.sharding import Config, empty_shard, require_shardable, shard_config, shard_of

logger = logging.getLogger("minicache")

TIMEOUT_SECONDS: Final = 120.0
"""How long the ranks wait for each other, at start-up and in an all-reduce."""

END_SECONDS: Final = 5.0
"""How long a rank may take to exit before it is killed."""

LOST: Final = 3
"""The exit status of a rank that lost another rank: it is not the cause of the failure."""


class ParallelModel:
    """A model whose heads and columns are divided among processes. An `LLM` runs it like any other model.

    It serves one engine at a time: the last one that called `begin`.

    When a rank raises an error, the step fails in rank 0 with that error, the ranks are synchronised again, and the
    engine continues. When a rank's process exits or hangs, nothing more can be computed: every call raises
    RankDiedError, and the other processes are stopped. They also stop when this object is dropped, and when this
    process exits for any reason.

    All ranks share the processor: in each of them, this one included, PyTorch uses 1 / size of the cores
    (`set_num_threads`), or fewer if it had fewer.

    Args:
        model: the whole model. Rank 0 slices it and sends each rank its part, one parameter at a time. It is not
            changed, and not needed afterwards.
        size: the number of ranks, this process included, ≥ 2.
        device: "cpu", or "cuda": rank r takes the r-th GPU. None: the model's device.
        dtype: of the weights; None: the model's.
        timeout_seconds: how long a rank waits for another.

    Attributes:
        config: of rank 0's shard.
        size: as given.
        shard: rank 0's part of the model.
        pids: the process ids of the other ranks, by rank.

    Raises:
        TypeError: the model cannot be sharded, or size is not an int.
        ValueError: it cannot be divided among `size` ranks, there are fewer GPUs than ranks, or size is below 2.
        RankFailedError: a rank raised an error at start-up.
        RankDiedError: a rank exited at start-up, or does not answer.
    """

    def __init__(
        self,
        model: object,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        require_count("tensor_parallel_size", size, at_least=2)
        require_shardable(model, size)
        model = cast(MiniGPT | Decoder, model)
        weights = next(iter(model.parameters()))
        place, dtype = weights.device if device is None else torch.device(device), dtype or weights.dtype
        if place.type == "cuda" and torch.cuda.device_count() < size:
            raise ValueError(
                f"tensor_parallel_size {size} needs {size} GPUs; this machine has {torch.cuda.device_count()}"
            )
        places = [torch.device("cuda", rank) if place.type == "cuda" else place for rank in range(size)]
        # This process is a rank too: all ranks share the processor's cores.
        num_threads = min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // size))
        torch.set_num_threads(num_threads)
        self.size = size
        self._timeout_seconds = timeout_seconds
        self.shard = _shard(model, 0, size, places[0], dtype)
        self.config: Config = self.shard.config
        self._is_fused = _fuse(self.shard)
        self._ranks: list[_OtherRank] = []
        self._poll = select.poll()
        self._end = weakref.finalize(self, _end, self._ranks)
        self._why_dead: str | None = None
        try:
            self._rank = self._start(model, places, dtype, num_threads)
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the other ranks."""
        return {each.rank: each.process.pid for each in self._ranks}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of rank 0."""
        return self.shard.parameters()

    def __call__(self, token_ids: Tensor, cache: Any, /) -> Tensor:
        """Not supported: the ranks run together, in an engine's steps.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(
            "a model on several ranks runs in the steps of an engine only, by its runner (LLM.runner): a run_model of "
            "your own must ask it, as the reference does, or take tensor_parallel_size=1"
        )

    def begin(self, storage: PagedStorage, num_host_blocks: int, kv_cache_dtype: str | None, places: Places) -> None:
        """Make all ranks allocate their storages for a new engine.

        Args:
            storage: rank 0's.
            num_host_blocks: of the CPU swap space; 0: none.
            kv_cache_dtype: of the storage, if it is quantized.
            places: of the model's layers in it.

        Raises:
            RankFailedError: a rank has not enough memory.
            RankDiedError: a rank has exited.
        """
        self._require_alive()
        self._send(Begin(storage.pool.num_blocks, storage.pool.block_size, num_host_blocks, kv_cache_dtype, places))
        self._wait_for_ready()
        self._rank.begin(storage, places)

    def move(self, storage: PagedStorage, swapped_out: Sequence[Pairs], swapped_in: Pairs, copied: Pairs) -> None:
        """Make the other ranks move blocks before the next step; the caller moves rank 0's.

        Raises:
            ValueError: another engine has since begun with these ranks.
            RankDiedError: a rank has exited.
        """
        self._require_begun(storage)
        self._send(Move(swapped_out, swapped_in, copied))

    def run(self, storage: PagedStorage, size: StepSize, numbers: Tensor) -> Tensor:
        """Run a step on all ranks.

        Args:
            storage: of the calling engine.
            size: of the step; without padding.
            numbers: its integers, on the CPU.

        Returns:
            Logits `[R, vocab_size]` of each sequence's last token, and of its draft tokens.

        Raises:
            RankFailedError: another rank raised an error, in this step or when it moved blocks for it.
            RankDiedError: a rank has exited, or does not answer.
            ValueError: another engine has since begun with these ranks.
            Exception: what the model raises in rank 0. Except after RankDiedError, the ranks are synchronised again.
        """
        self._require_begun(storage)
        group = self._rank.group
        self._rank.expect(size)
        self._send(Step(size, numbers.numpy()))
        try:
            hidden = self._rank.run(size, numbers)
        except BaseException as error:
            try:
                if not group.is_lost:
                    group.finish()
                    self._reports()  # discarded: the step has failed already
            except RuntimeError as lost:
                self._die(str(lost), lost)
            if group.is_lost:
                self._die(str(error), error)
            raise
        if failures := self._reports():
            raise RankFailedError("; ".join(failures))
        with torch.inference_mode():
            return self._logits(hidden)

    def close(self) -> None:
        """Stop the other ranks. The model cannot run afterwards."""
        self._why_dead = self._why_dead or "its ranks were stopped"
        self._end()

    def _start(
        self,
        model: MiniGPT | Decoder,
        places: Sequence[torch.device],
        dtype: torch.dtype,
        num_threads: int,
    ) -> Rank:
        """Start the other ranks, send them their shards, and connect to them."""
        with tempfile.TemporaryDirectory(prefix="minicache-") as folder:
            store, kind, size = str(Path(folder, "store")), type(model).__name__, self.size
            for rank in range(1, size):  # all of them import PyTorch at the same time
                self._ranks.append(_OtherRank(rank))
            for other in self._ranks:
                self._poll.register(other.connection, select.POLLIN)
                rank = other.rank
                config = shard_config(model.config, rank, size)
                how = (dtype, places[rank], self._is_fused, num_threads, store, self._timeout_seconds)
                self._send_to(other, Start(rank, size, kind, config, *how), shard_weights(model, rank, size, dtype))
            self._wait_for_ready()
            try:
                group = Group(store, 0, size, next(self.shard.parameters()), self._timeout_seconds)
            except RuntimeError as error:
                self._die(str(error), error)
        return Rank(self.shard, group, self._is_fused)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._is_fused:
            from minicache.model.fused import logits_of  # imports numba

            return logits_of(self.shard, hidden)
        return self.shard.logits(hidden)

    def _require_alive(self) -> None:
        if self._why_dead is not None:
            raise RankDiedError(self._why_dead)

    def _require_begun(self, storage: PagedStorage) -> None:
        self._require_alive()
        if self._rank.storage is not storage:
            raise ValueError(
                "another engine has begun with this model's ranks: they serve one engine at a time, the last"
            )

    def _send(self, message: ToRank) -> None:
        for each in self._ranks:
            self._send_to(each, message)

    def _send_to(self, other: _OtherRank, message: ToRank | Start, weights: Iterable[Tensor] = ()) -> None:
        try:
            other.connection.send(message)
            for weight in weights:
                other.connection.send_bytes(as_bytes(weight))
        except BaseException as error:  # of an interrupted message, a part may have been sent
            self._die(str(error), error)

    def _wait_for_ready(self) -> None:
        """Wait until each rank has answered."""
        failures = []
        for each in self._ranks:
            try:
                if not each.connection.poll(self._timeout_seconds):
                    raise TimeoutError(f"no answer in {self._timeout_seconds:.0f} seconds")
                answer: FromRank = each.connection.recv()
            except (EOFError, OSError) as error:
                self._die(str(error), error)
            if isinstance(answer, Failed):
                failures.append(f"rank {each.rank}: {answer.message}")
        if failures:
            raise RankFailedError("; ".join(failures))

    def _reports(self) -> list[str]:
        """The errors that other ranks have sent."""
        failures = []
        while self._poll.poll(0):
            for each in self._ranks:
                try:
                    while each.connection.poll(0):
                        answer = each.connection.recv()
                        failures.append(f"rank {each.rank}: {answer.message}")
                except (EOFError, OSError) as error:
                    self._die(str(error), error)
        return failures

    def _die(self, what: str, error: BaseException) -> NoReturn:
        """Stop all ranks and raise: a rank has exited, or does not answer."""
        reasons = _reasons(self._ranks)
        if not reasons:
            reasons = [f"a rank does not answer ({what})" if isinstance(error, Exception) else "rank 0 was interrupted"]
        self._why_dead = f"{'; '.join(reasons)}: the model cannot run without it. Make a new engine"
        logger.error("tensor parallelism: %s", self._why_dead)
        self._end()
        if not isinstance(error, Exception):
            raise error  # an interrupt, which must propagate
        raise RankDiedError(self._why_dead) from error


class _OtherRank:
    """The process of another rank, and the socket to it.

    No other process holds this end of the pair: when this process exits for any reason, the rank reads end of file.
    """

    def __init__(self, rank: int) -> None:
        here, there = socket.socketpair()
        with there:
            arguments = [sys.executable, "-m", "minicache.parallel", str(there.fileno())]
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
        self.connection = Connection(here.detach())
        self.rank = rank


def _reasons(ranks: Sequence[_OtherRank]) -> list[str]:
    """How ranks have exited, without those that exited because of another."""
    reasons = []
    for each in ranks:
        try:
            status = each.process.wait(1.0)  # connections close slightly before the process exits
        except subprocess.TimeoutExpired:
            continue
        if status != LOST:
            how = f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
            reasons.append(f"rank {each.rank} (process {each.process.pid}) {how}")
    return reasons


def _end(ranks: Sequence[_OtherRank]) -> None:
    """Stop processes, and wait for them."""
    for each in ranks:
        each.connection.close()
    for each in ranks:
        try:
            each.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()


def shard_weights(model: MiniGPT | Decoder, rank: int, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The parameters of a rank's shard, in the order of its `state_dict`, contiguous and on the CPU."""
    shard = empty_shard(type(model).__name__, shard_config(model.config, rank, size), dtype)
    whole = model.state_dict()
    for name in shard.state_dict():
        part = shard_of(name, whole[name].detach(), model.config, rank, size)
        yield part.to(device="cpu", dtype=dtype, memory_format=torch.contiguous_format, copy=True)


def load_shard(
    kind: str, config: Config, dtype: torch.dtype, device: torch.device, weights: Iterator[Tensor]
) -> MiniGPT | Decoder:
    """A shard with its weights, on its device."""
    with torch.inference_mode(False):
        shard = empty_shard(kind, config, dtype)
        names = list(shard.state_dict())
        shard.load_state_dict({name: next(weights).to(device) for name in names}, assign=True)
        return shard.to(device)


def _shard(
    model: MiniGPT | Decoder, rank: int, size: int, device: torch.device, dtype: torch.dtype
) -> MiniGPT | Decoder:
    weights = shard_weights(model, rank, size, dtype)
    return load_shard(type(model).__name__, shard_config(model.config, rank, size), dtype, device, weights)


def _fuse(shard: MiniGPT | Decoder) -> bool:
    """Join a shard's weights if it can run fused; return whether it can."""
    weights = next(shard.parameters())
    if weights.device.type != "cpu" or weights.dtype != torch.float32 or not cpu.is_available() or is_plain_replaced():
        return False
    from minicache.model.fused import fuse  # imports numba

    pack(shard)
    return fuse(shard) is not None


def as_bytes(weight: Tensor) -> memoryview:
    """A contiguous tensor's memory on the CPU."""
    return weight.flatten().view(torch.uint8).numpy().data
