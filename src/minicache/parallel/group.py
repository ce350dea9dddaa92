"""The ranks' all-reduce, and their synchronisation when one of them fails.

All ranks perform the same all-reduces in the same order: two per layer. A rank that raises an error in the middle of a
step would leave the others waiting, and its next all-reduce would be matched with their pending one. So it performs the
step's remaining all-reduces with zeros (`finish`): the sums are discarded, and all ranks are ready for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from minicache.errors import InvariantError

dist: Any = torch.distributed  # its type stubs lack what is used here


class Group:
    """One rank's end of the group: gloo between processes on a CPU, NCCL between GPUs.

    Not PyTorch's default group: a process has only one, and an application may already use it.

    Args:
        store: the path of a new file that all ranks share.
        rank: 0 … size − 1.
        size: the number of ranks.
        like: a tensor with the dtype, device and last axis of the summed tensors.
        timeout_seconds: how long a rank waits for the others.

    Attributes:
        is_lost: an all-reduce failed: a rank has exited or does not answer. Which all-reduces the others completed is
            unknown, so the group cannot be used again.

    Raises:
        RuntimeError: not all ranks joined in time.
    """

    def __init__(self, store: str, rank: int, size: int, like: Tensor, timeout_seconds: float) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self._like = like
        self._num_rows: list[int] = []
        self._num_done = self._num_asked = 0  # of the step's all-reduces; one is in progress if they differ
        self._work: Any = None
        self.is_lost = False
        file = dist.FileStore(store, size)
        file.set_timeout(timeout)
        if like.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(file, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [
                dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            ]  # not reachable from other machines
            self._group = dist.ProcessGroupGloo(file, rank, size, options)
        self.begin([1])
        self.finish()  # NCCL connects at the first all-reduce; the file is not needed afterwards

    def begin(self, num_rows: Sequence[int]) -> None:
        """Begin a step with these all-reduces, given by their numbers of rows.

        Raises:
            InvariantError: the previous step has all-reduces left.
        """
        if self._num_done < len(self._num_rows):
            raise InvariantError(f"a step begins before all-reduce {self._num_done + 1} of the previous one is done")
        self._num_done = self._num_asked = 0
        self._num_rows = list(num_rows)

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Replace each number of `rows` by its sum over all ranks; return `rows`.

        An interrupt may arrive while it waits. The all-reduce is then in progress, and `finish` waits for it.

        Raises:
            InvariantError: this is not the step's next all-reduce. None was started.
            RuntimeError: a rank has exited or does not answer; `is_lost`.
        """
        left = self._num_rows[self._num_done :]
        if not left or rows.numel() != left[0] * self._like.shape[-1]:
            raise InvariantError(f"an all-reduce of {list(rows.shape)} is not the step's next: {left} rows")
        self.is_lost = True  # after an interrupt exactly here, it is unknown whether the all-reduce has started
        self._work = self._group.allreduce([rows])
        self._num_asked = self._num_done + 1
        self.is_lost = False
        self._wait()
        return rows

    def finish(self) -> None:
        """Perform the step's remaining all-reduces with zeros; none remain after a successful step.

        Raises:
            RuntimeError: as `all_reduce`.
        """
        self._wait()
        for num_rows in self._num_rows[self._num_done :]:
            shape = num_rows, self._like.shape[-1]
            self.all_reduce(torch.zeros(shape, dtype=self._like.dtype, device=self._like.device))

    def _wait(self) -> None:
        """Wait for the all-reduce in progress, if any."""
        if self._num_asked > self._num_done:
            try:
                self._work.wait()
            except RuntimeError:
                self.is_lost = True
                raise
            self._num_done = self._num_asked
