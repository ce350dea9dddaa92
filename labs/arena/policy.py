"""Your policy for the arena: which requests compute in the next step.

    minicache arena run

scores it. The rules, the score and its bound: docs/en/arena.md.
`arena` has the machine's options, the time, and the limits of every
request. How long an answer will be is not known.
"""

from minicache.scheduler import ChunkedPrefillScheduler


class Policy(ChunkedPrefillScheduler):
    """Begin with any stage, or with `minicache.scheduler.base.Scheduler`."""


def create(arena):
    return Policy(**arena.options, prefix_caching=True)
