"""Two options, read as vLLM reads them: the threshold for long prompts, and the watermark. No phase builds this module.

`create_scheduler("chunked", …)` makes this stage if one of them is given. Pure standard library.
"""

from __future__ import annotations

import sys
from typing import Unpack

from minicache.scheduler.chunked import ChunkedOptions, ChunkedPrefillScheduler
from minicache.scheduler.output import SchedulerOutput


class VllmOptionsScheduler(ChunkedPrefillScheduler):
    """`ChunkedPrefillScheduler`, equal to vLLM 0.33 with these options too, step for step.

    Arguments and errors are `ChunkedPrefillScheduler`'s, but

    - `long_prefill_threshold` does not hold in a step before which one request is unfinished, running or waiting. No
      other is delayed by its prompt.
    - `watermark` is a part of num_blocks + 1 blocks, rounded down: vLLM's pool has one block more, its null block.
    """

    def __init__(self, **options: Unpack[ChunkedOptions]) -> None:
        super().__init__(**options)
        self._num_watermark_blocks = int(options.get("watermark", 0.0) * (self.pool.num_blocks + 1))

    def schedule(self) -> SchedulerOutput:
        """As `ChunkedPrefillScheduler.schedule`, without a threshold for a request that is alone."""
        threshold = 0 if len(self._requests) == 1 else self.long_prefill_threshold
        self._max_chunk = threshold or sys.maxsize
        return super().schedule()
