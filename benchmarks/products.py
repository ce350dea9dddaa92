"""What the products of a SmolLM2 step take: PyTorch's `mm`, oneDNN over weights that it packed, and ours.

The four products of 30 layers and the output layer, in float32, on 1 to 100 rows. The weights are random. CPU time of
one thread, ms, the least of REPEATS; the three take turns. oneDNN's packed products are private operators of PyTorch.

    python -m benchmarks.products
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
from rich.progress import track
from torch import Tensor

from benchmarks._record import record
from minicache.model.panels import Panels

LAYERS: Final = 30
SHAPES: Final = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD: Final = (49_152, 576)
ROWS: Final = (1, 2, 4, 8, 16, 32, 100)
REPEATS: Final = 7


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in [*SHAPES * LAYERS, HEAD]]
    with torch.inference_mode():
        products = {"mm": by_mm(weights), "onednn": by_onednn(weights), "ours": by_ours(weights)}
        found: dict[str, Any] = {}
        for count in track(ROWS, description="Multiplying"):
            inputs = {width: torch.randn(count, width) for width in {weight.shape[1] for weight in weights}}
            least = dict.fromkeys(products, float("inf"))
            for _ in range(REPEATS):
                for name, multiply in products.items():
                    start = time.thread_time()
                    multiply(inputs)
                    least[name] = min(least[name], time.thread_time() - start)
            found[str(count)] = {name: round(1e3 * seconds, 1) for name, seconds in least.items()}
    record("products", {"ms_by_rows": found})


Multiply = Callable[[dict[int, Tensor]], object]


def by_mm(weights: list[Tensor]) -> Multiply:
    columns = [weight.t().contiguous() for weight in weights[:-1]] + [weights[-1].t()]
    return lambda inputs: [inputs[len(each)] @ each for each in columns]


def by_onednn(weights: list[Tensor]) -> Multiply:
    ops: Any = torch.ops.mkldnn
    packed = [(weight.shape[1], ops._reorder_linear_weight(weight, 32)) for weight in weights]
    return lambda inputs: [ops._linear_pointwise(inputs[width], each, None, "none", [], "") for width, each in packed]


def by_ours(weights: list[Tensor]) -> Multiply:
    panels = [Panels.of(weight) for weight in weights]
    return lambda inputs: [each.linear(inputs[each.shape[1]]) for each in panels]


if __name__ == "__main__":
    main()
