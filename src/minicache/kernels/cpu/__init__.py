"""The kernels for a CPU, in numba: what Triton is on a GPU.

`vectors` has eight numbers at a time and Triton's vocabulary for them, `attention` the paged decode kernel, `rows` the
small kernels of a transformer layer, `steps` what a step's metadata becomes before they run. The kernels have no bounds
checks: `steps` has them, once a step. Modules here import numba, this one does not: it is asked first.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def is_available() -> bool:
    """Whether numba is installed: the extra `cpu`."""
    return find_spec("numba") is not None
