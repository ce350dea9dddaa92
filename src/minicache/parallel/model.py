"""A model on several ranks, as the process of rank 0 sees it: it starts the others, tells them each step, ends them."""

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

from minicache.cache.packed import StepSize
from minicache.cache.paged import PagedStorage
from minicache.cache.swap import Pairs
from minicache.errors import InvariantError, RankDiedError, RankFailedError, require_count
from minicache.kernels import cpu, is_plain_replaced
from minicache.model.decoder import Decoder
from minicache.model.minigpt import MiniGPT
from minicache.parallel.group import Group
from minicache.parallel.messages import Begin, Failed, FromRank, Move, Start, Step, ToRank
from minicache.parallel.rank import Rank
from minicache.parallel.sharding import Config, empty_shard, require_shardable, shard_config, shard_of

logger = logging.getLogger("minicache")

TIMEOUT_SECONDS: Final = 120.0
"""How long the ranks wait for each other, when they start and in an all-reduce."""

END_SECONDS: Final = 5.0
"""How long a rank that was told to end may take."""

LOST: Final = 3
"""The exit status of a rank that has lost another: it is not the one to blame."""


class ParallelModel:
    """A model whose heads and columns are divided among processes. An `LLM` runs it like any other model.

    It serves one engine at a time: the one that has begun last.

    When a rank raises an error, the step fails in rank 0 with that error, the ranks are in step again, and the engine
    goes on. When a rank's process ends or hangs, nothing can be computed any more; every call raises RankDiedError, and
    the other processes are ended. They end too when this object is dropped, and when this process ends, however.

    All ranks share the processor, this one too: PyTorch gets 1 / size of the cores here and there (`set_num_threads`),
    or fewer, if it had fewer.

    Args:
        model: the whole model. Rank 0 slices it and sends each rank its part, a parameter at a time. It is not changed,
            and not needed any more then.
        size: the number of ranks, this process included, ≥ 2.
        device: "cpu", or "cuda": rank r takes the r-th GPU. None: where the model is.
        dtype: of the weights; None: the model's.
        timeout_seconds: how long a rank waits for another.

    Attributes:
        config: of rank 0's shard.
        size: as given.
        shard: rank 0's part of the model.
        pids: the numbers of the other ranks' processes, by rank.

    Raises:
        TypeError: the model is not one that can be divided, or size is not an int.
        ValueError: it cannot be divided among so many, there are fewer GPUs than ranks, or size is below 2.
        RankFailedError: a rank has raised an error when it started.
        RankDiedError: a rank has ended when it started, or does not answer.
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
        weights = model.embed_tokens.weight
        place, dtype = weights.device if device is None else torch.device(device), dtype or weights.dtype
        if place.type == "cuda" and torch.cuda.device_count() < size:
            raise ValueError(
                f"tensor_parallel_size {size} takes a GPU for each rank, and here are {torch.cuda.device_count()}"
            )
        places = [torch.device("cuda", rank) if place.type == "cuda" else place for rank in range(size)]
        # This process is a rank too: all of them share the processor's cores.
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
        """The processes of the other ranks."""
        return {each.rank: each.process.pid for each in self._ranks}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of rank 0."""
        return self.shard.parameters()

    def __call__(self, token_ids: Tensor, cache: Any, /) -> Tensor:
        """Refused: the ranks run together, in an engine's steps.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(
            "a model on several ranks runs in the steps of an engine only, by its runner (LLM.runner): a run_model of "
            "your own must ask it, as the reference does, or take tensor_parallel_size=1"
        )

    def begin(self, storage: PagedStorage, num_host_blocks: int, kv_cache_dtype: str | None) -> None:
        """Have all ranks make their storages for a new engine.

        Args:
            storage: rank 0's.
            num_host_blocks: of the CPU swap space; 0: none.
            kv_cache_dtype: of the storage, if it is quantized.

        Raises:
            RankFailedError: a rank has no memory for it.
            RankDiedError: a rank has ended.
        """
        self._require_alive()
        self._send(Begin(storage.pool.num_blocks, storage.pool.block_size, num_host_blocks, kv_cache_dtype))
        self._wait_for_ready()
        self._rank.begin(storage)

    def move(self, storage: PagedStorage, swapped_out: Sequence[Pairs], swapped_in: Pairs, copied: Pairs) -> None:
        """Have the other ranks move blocks, before the next step; rank 0's are moved by whoever calls this.

        Raises:
            ValueError: another engine has begun since with these ranks.
            RankDiedError: a rank has ended.
        """
        self._require_begun(storage)
        self._send(Move(swapped_out, swapped_in, copied))

    def run(self, storage: PagedStorage, size: StepSize, numbers: Tensor) -> Tensor:
        """Run a step on all ranks.

        Args:
            storage: of the engine that asks.
            size: of the step; without padding.
            numbers: its integers, on the CPU.

        Returns:
            Logits `[R, vocab_size]` of each sequence's last token, and of its draft tokens.

        Raises:
            RankFailedError: another rank has raised an error, in this step or when it moved blocks for it.
            RankDiedError: a rank has ended, or does not answer.
            ValueError: another engine has begun since with these ranks.
            Exception: what the model raises in rank 0. But for RankDiedError, the ranks are in step again.
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
                    self._reports()  # the step has failed anyhow
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
        """End the other ranks. The model cannot be run any more."""
        self._why_dead = self._why_dead or "its ranks were ended"
        self._end()

    def _start(
        self,
        model: MiniGPT | Decoder,
        places: Sequence[torch.device],
        dtype: torch.dtype,
        num_threads: int,
    ) -> Rank:
        """Start the other ranks, send them their shards, and meet them."""
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
                group = Group(store, 0, size, self.shard.embed_tokens.weight, self._timeout_seconds)
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
            raise ValueError("another engine has begun with this model's ranks: they serve one at a time, the last")

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
        """Until each rank has answered."""
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
        """What other ranks say went wrong."""
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
        """Give up: a rank has ended, or does not answer."""
        reasons = _reasons(self._ranks)
        if not reasons:
            reasons = [f"a rank does not answer ({what})" if isinstance(error, Exception) else "rank 0 was interrupted"]
        self._why_dead = f"{'; '.join(reasons)}: the model cannot run without it. Make a new engine"
        logger.error("tensor parallelism: %s", self._why_dead)
        self._end()
        if not isinstance(error, Exception):
            raise error  # an interrupt, which is nobody's to handle
        raise RankDiedError(self._why_dead) from error


class _OtherRank:
    """The process of another rank, and the socket to it.

    Its end of the pair is the only one: when this process ends, however that comes, the rank reads the end of the file.
    """

    def __init__(self, rank: int) -> None:
        here, there = socket.socketpair()
        with there:
            arguments = [sys.executable, "-m", "minicache.parallel", str(there.fileno())]
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
        self.connection = Connection(here.detach())
        self.rank = rank


def _reasons(ranks: Sequence[_OtherRank]) -> list[str]:
    """How ranks have ended, those that were the first to."""
    reasons = []
    for each in ranks:
        try:
            status = each.process.wait(1.0)  # its connections are closed a little earlier
        except subprocess.TimeoutExpired:
            continue
        if status != LOST:
            how = f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
            reasons.append(f"rank {each.rank} (process {each.process.pid}) {how}")
    return reasons


def _end(ranks: Sequence[_OtherRank]) -> None:
    """End processes, and wait until they have."""
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
    """Join a shard's weights if it can be run that way; whether it can."""
    if shard.embed_tokens.weight.device.type != "cpu" or not cpu.is_available() or is_plain_replaced():
        return False
    from minicache.model.fused import fuse  # imports numba

    return fuse(shard, in_place=True) is not None


def as_bytes(weight: Tensor) -> memoryview:
    """A contiguous tensor's memory on the CPU."""
    return weight.flatten().view(torch.uint8).numpy().data
