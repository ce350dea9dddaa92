"""Blocks that hold one byte a number: int8 or fp8, with a scale for each token and head. No phase builds this module.

A row is quantized when it is stored, and what is stored of a token depends on that token alone
(`minicache.kernels.quantize`). The scales are a storage of their own over the same pool, with heads of one number:
whatever moves or copies blocks, does the same to both.
"""

from __future__ import annotations

from typing import Final, TypedDict

import torch
from torch import Tensor

from minicache.cache.paged import PagedStorage
from minicache.cache.rows import check_layer, zeros
from minicache.errors import require_count
from minicache.memory.blocks import BlockPool

KV_CACHE_DTYPES: Final = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""What a quantized cache may hold, by the name that an engine is given."""

SCALE_DTYPE: Final = torch.float32


class Scales(TypedDict):
    """The scales of one layer, as `minicache.kernels` takes them: `[num_blocks, block_size, H_kv]`, or None."""

    k_scale: Tensor | None
    v_scale: Tensor | None


class QuantizedStorage(PagedStorage):
    """A `PagedStorage` in one byte a number, with the scales that make keys and values of it.

    It uses nothing of `PagedStorage` but the interface: that one stores floating-point numbers, and may be a learner's.

    Args:
        pool: as for `PagedStorage`.
        num_layers: likewise.
        num_kv_heads: likewise.
        head_dim: likewise.
        dtype: torch.int8 or torch.float8_e4m3fn.
        device: where to store it.

    Attributes:
        scales: the scales' storage: `scales.k(layer)` is `[num_blocks, block_size, H_kv, 1]`.

    Raises:
        TypeError: a size is not an int, or the dtype is neither of the two.
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.int8,
        device: torch.device | str = "cpu",
    ) -> None:
        require_count("head_dim", head_dim)
        if dtype not in KV_CACHE_DTYPES.values():
            raise TypeError(f"a quantized cache holds torch.int8 or torch.float8_e4m3fn; got {dtype!r}")
        self.scales = PagedStorage(pool, num_layers, num_kv_heads, 1, dtype=SCALE_DTYPE, device=device)
        self.pool = pool
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (2, num_layers, pool.num_blocks, pool.block_size, num_kv_heads, head_dim)
        self._numbers = zeros(shape, dtype=dtype, device=device)
        self.device = self._numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks: keys and values, all layers, numbers and scales."""
        return self._numbers.nbytes + self.scales.nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token: keys and values, all layers, numbers and scales."""
        return quantized_token_nbytes(self.num_layers, self.num_kv_heads, self.head_dim)

    def k(self, layer: int) -> Tensor:
        """The numbers of the keys of `layer`, `[num_blocks, block_size, H_kv, d]`, as `PagedStorage.k`.

        Raises:
            IndexError: there is no such layer (negative ones included).
        """
        check_layer(layer, self.num_layers)
        return self._numbers[0, layer]

    def v(self, layer: int) -> Tensor:
        """The numbers of the values of `layer`, as `k`."""
        check_layer(layer, self.num_layers)
        return self._numbers[1, layer]

    def k_scale(self, layer: int) -> Tensor:
        """What the keys of `layer` are multiplied by, `[num_blocks, block_size, H_kv]` float32: the storage itself."""
        return self.scales.k(layer).squeeze(-1)

    def v_scale(self, layer: int) -> Tensor:
        """What the values of `layer` are multiplied by, as `k_scale`."""
        return self.scales.v(layer).squeeze(-1)


def quantized_token_nbytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one token in a `QuantizedStorage`: keys and values, all layers, numbers and scales."""
    return 2 * num_layers * num_kv_heads * (head_dim + SCALE_DTYPE.itemsize)


def scales_of(storage: PagedStorage, layer: int) -> Scales:
    """The scales of a layer; None, twice, of a storage that is not quantized."""
    if isinstance(storage, QuantizedStorage):
        return {"k_scale": storage.k_scale(layer), "v_scale": storage.v_scale(layer)}
    return {"k_scale": None, "v_scale": None}
