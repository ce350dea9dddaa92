"""The ranks' all-reduce, and how they stay in step when one of them fails.

All ranks make the same all-reduces in the same order: two a layer. A rank that raises an error in the middle of a step
would leave the others waiting, and its next all-reduce would meet their last. So it makes what is left of the step's
with zeros (`finish`): the sums are worthless, which is known by then, and all ranks are ready for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from minicache.errors import InvariantError

dist: Any = torch.distributed  # its types leave out what is used here


class Group:
    """One rank's end of the group: gloo between processes on a CPU, NCCL between GPUs.

    Not PyTorch's default group, of which a process has one: an application may have it already.

    Args:
        store: the path of a file that all ranks share, and that is new.
        rank: 0 … size − 1.
        size: the number of ranks.
        like: a tensor of the dtype and on the device of what is summed, whose last axis is as long.
        timeout_seconds: how long a rank waits for the others.

    Attributes:
        is_lost: an all-reduce has not ended well: a rank has ended or does not answer. Nobody can know which of them
            others have made, so the group is of no use any more.

    Raises:
        RuntimeError: not all ranks have come in time.
    """

    def __init__(self, store: str, rank: int, size: int, like: Tensor, timeout_seconds: float) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self._like = like
        self._num_rows: list[int] = []
        self._num_done = self._num_asked = 0  # of the step's all-reduces; one more asked for than done: it is under way
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
            ]  # no other machine's business
            self._group = dist.ProcessGroupGloo(file, rank, size, options)
        self.begin([1])
        self.finish()  # NCCL connects at the first all-reduce; after it the file is not needed

    def begin(self, num_rows: Sequence[int]) -> None:
        """A step begins that will make these all-reduces, of so many rows each.

        Raises:
            InvariantError: the step before has not made all of its own.
        """
        if self._num_done < len(self._num_rows):
            raise InvariantError(f"a step begins before all-reduce {self._num_done + 1} of the one before is made")
        self._num_done = self._num_asked = 0
        self._num_rows = list(num_rows)

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Replace each number of `rows` by its sum over all ranks; return `rows`.

        An interrupt may come while it waits. The all-reduce is under way then, and `finish` waits for it.

        Raises:
            InvariantError: the step makes no all-reduce of this size now. None was begun.
            RuntimeError: a rank has ended or does not answer; `is_lost`.
        """
        left = self._num_rows[self._num_done :]
        if not left or rows.numel() != left[0] * self._like.shape[-1]:
            raise InvariantError(f"an all-reduce of {list(rows.shape)} is not the step's next: {left} rows")
        self.is_lost = True  # should an interrupt come just here, nobody knows whether it is under way
        self._work = self._group.allreduce([rows])
        self._num_asked = self._num_done + 1
        self.is_lost = False
        self._wait()
        return rows

    def finish(self) -> None:
        """Make the all-reduces that are left of the step, with zeros. None is, after a step that went well.

        Raises:
            RuntimeError: as `all_reduce`.
        """
        self._wait()
        for num_rows in self._num_rows[self._num_done :]:
            shape = num_rows, self._like.shape[-1]
            self.all_reduce(torch.zeros(shape, dtype=self._like.dtype, device=self._like.device))

    def _wait(self) -> None:
        """Until the all-reduce that is under way, if one is, has ended."""
        if self._num_asked > self._num_done:
            try:
                self._work.wait()
            except RuntimeError:
                self.is_lost = True
                raise
            self._num_done = self._num_asked
