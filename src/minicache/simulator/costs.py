"""What a step costs, in seconds: the clock of a server in simulated time.

A step is a few sums over its batch (`StepLoad`), and a cost model makes seconds of them. `RooflineCost` has a
published model on a published accelerator; `HostCost` has the course's own engine on the machine where
`minicache calibrate` measured it. First used in phase 7; the roofline is phase 0's. Pure standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from minicache.arithmetic.arithmetic import cache_bytes_per_token, step_flops, weight_bytes
from minicache.arithmetic.specs import Accelerator, Transformer
from minicache.errors import require_positive

FLOPS_EFFICIENCY: Final = 0.6
"""The part of the peak that a long prefill reaches. Assumed: Pope et al. 2022 report 76 % for large prefills
that were tuned."""

BANDWIDTH_EFFICIENCY: Final = 0.8
"""The part of the data sheet's bandwidth at which weights and cache are read. Assumed; so is that PCIe reaches the same
part of its own."""

OVERHEAD_SECONDS: Final = 0.002
"""What a step takes besides the model: scheduling, sampling, detokenising. Assumed."""

PCIE_BANDWIDTH: Final = 16e9 * 16 * 128 / 130 / 8
"""Bytes/s between device and host: PCIe 4.0 with 16 lanes, 16 GT/s each, 128 of every 130 bits payload."""


KV_CACHE_DTYPES: Final = {"int8": "int8", "fp8_e4m3": "float8_e4m3"}
"""What a quantized cache stores, by the name that an engine is given (`minicache.cache.quantized`)."""

SCALE_NBYTES: Final = 4
"""A float32 for each row of a quantized cache: a key or a value of one head, or a latent vector."""


def kv_token_bytes(model: Transformer, dtype: str = "float16", kv_cache_dtype: str | None = None) -> int:
    """What one token leaves in the cache of `model`, all layers together, with the scales of a quantized cache.

    Args:
        model: the transformer.
        dtype: what a cache that is not quantized stores, see `minicache.arithmetic.arithmetic.dtype_nbytes`.
        kv_cache_dtype: "int8" or "fp8_e4m3", a byte a number and a float32 a row; None: `dtype`.

    Returns:
        Bytes.

    Raises:
        ValueError: a dtype is unknown.
    """
    if kv_cache_dtype is None:
        return cache_bytes_per_token(model, dtype)
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(KV_CACHE_DTYPES)}; got {kv_cache_dtype!r}")
    num_rows = model.num_layers * (1 if model.kv_latent_dim is not None else 2 * model.num_kv_heads)
    return cache_bytes_per_token(model, KV_CACHE_DTYPES[kv_cache_dtype]) + num_rows * SCALE_NBYTES


class StepLoad(NamedTuple):
    """What a step has to compute, summed over its batch.

    Attributes:
        num_sequences: requests in the batch.
        num_new_tokens: tokens that are computed.
        num_cached_tokens: tokens whose keys and values are read: those of each request that were computed before.
        num_pairs: (new token, token that it attends to) pairs. A request with c cached and n new tokens has
            n · c + n · (n + 1) / 2.
        num_prefills: of the requests, those with more than one new token.
    """

    num_sequences: int
    num_new_tokens: int
    num_cached_tokens: int
    num_pairs: int
    num_prefills: int

    @property
    def num_prefill_pairs(self) -> int:
        """Pairs beyond those of one new token a request: the quadratic part of a prefill. 0 in a step of decodes."""
        return self.num_pairs - self.num_cached_tokens - self.num_sequences

    @classmethod
    def of(cls, batch: Iterable[tuple[int, int]]) -> StepLoad:
        """The load of a batch that is given as (new tokens, computed tokens), request by request."""
        pairs = list(batch)
        return cls(
            num_sequences=len(pairs),
            num_new_tokens=sum(new for new, _ in pairs),
            num_cached_tokens=sum(cached for _, cached in pairs),
            num_pairs=sum(new * cached + new * (new + 1) // 2 for new, cached in pairs),
            num_prefills=sum(new > 1 for new, _ in pairs),
        )


class StepCost(Protocol):
    """What the simulator asks of a cost model."""

    def step_seconds(self, load: StepLoad) -> float:
        """How long the model takes for a step with at least one sequence, all that a server does around it included."""
        ...

    def swap_seconds(self, num_tokens: int) -> float:
        """How long it takes to copy the keys and values of `num_tokens` tokens, ≥ 1, to the host or back."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCost:
    """Every step takes the same time, whatever is in it, and a swap none: a clock that counts steps.

    Attributes:
        seconds: of a step, > 0.
    """

    seconds: float = 1.0

    def __post_init__(self) -> None:
        require_positive("seconds", self.seconds)

    def step_seconds(self, load: StepLoad) -> float:
        """`seconds`."""
        return self.seconds

    def swap_seconds(self, num_tokens: int) -> float:
        """0."""
        return 0.0


class RooflineCost:
    """A published model on a published accelerator: the longer of multiplying and reading, and a fixed overhead.

    FLOPs and bytes are those of `minicache.arithmetic.arithmetic.step_flops` and `step_bytes`, summed over a batch of
    unequal requests: 2 per weight and new token, and attention by the pair; the weights once, and the rows of every
    request.

    Args:
        model: the transformer.
        accelerator: the machine.
        dtype: of weights and cache, see `minicache.arithmetic.arithmetic.dtype_nbytes`.
        kv_cache_dtype: "int8" or "fp8_e4m3": of the cache, which is quantized then; None: `dtype`.
        flops_efficiency: the part of the peak that is reached, > 0 and ≤ 1.
        bandwidth_efficiency: the part of the bandwidth that is reached, on the device and between it and its host.
        overhead_seconds: what every step takes besides, ≥ 0.

    Attributes:
        overhead_seconds: as given.
        seconds_per_token: multiplying a new token with the weights.
        seconds_per_pair: attention of a new token to one token.
        seconds_of_weights: reading the weights.
        seconds_per_row: reading what one token has in the cache, or writing it.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds, or the dtype is unknown.
    """

    def __init__(
        self,
        model: Transformer,
        accelerator: Accelerator,
        *,
        dtype: str = "float16",
        kv_cache_dtype: str | None = None,
        flops_efficiency: float = FLOPS_EFFICIENCY,
        bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
        overhead_seconds: float = OVERHEAD_SECONDS,
    ) -> None:
        for name, share in (("flops_efficiency", flops_efficiency), ("bandwidth_efficiency", bandwidth_efficiency)):
            require_positive(name, share)
            if share > 1:
                raise ValueError(f"{name} is a part of the data sheet's figure, ≤ 1; got {share!r}")
        if overhead_seconds:
            require_positive("overhead_seconds", overhead_seconds)
        self.overhead_seconds = overhead_seconds
        per_pair = step_flops(model, 1, 1) - step_flops(model, 1, 0)
        flops, bandwidth = accelerator.peak_flops * flops_efficiency, accelerator.bandwidth * bandwidth_efficiency
        row = kv_token_bytes(model, dtype, kv_cache_dtype)
        self.seconds_per_pair = per_pair / flops
        self.seconds_per_token = (step_flops(model, 1, 0) - per_pair) / flops
        self.seconds_of_weights = weight_bytes(model.num_parameters, dtype) / bandwidth
        self.seconds_per_row = row / bandwidth
        self._seconds_per_swapped_row = row / (PCIE_BANDWIDTH * bandwidth_efficiency)

    def step_seconds(self, load: StepLoad) -> float:
        """The longer of the FLOPs' time and the bytes', and the overhead."""
        _, new, cached, pairs, _ = load
        multiplying = new * self.seconds_per_token + pairs * self.seconds_per_pair
        reading = self.seconds_of_weights + (cached + new) * self.seconds_per_row
        return max(multiplying, reading) + self.overhead_seconds

    def decode_ends(self, now: float, num_sequences: int, num_cached_tokens: int, num_steps: int) -> list[float]:
        """As the function of this name: the same sums, in the same order, without a call for each step."""
        multiplying = num_sequences * self.seconds_per_token
        of_weights, per_pair, per_row = self.seconds_of_weights, self.seconds_per_pair, self.seconds_per_row
        overhead, ends = self.overhead_seconds, list[float]()
        first = num_cached_tokens + num_sequences
        for rows in range(first, first + num_steps * num_sequences, num_sequences):
            computing, reading = multiplying + rows * per_pair, of_weights + rows * per_row
            now += (computing if computing > reading else reading) + overhead
            ends.append(now)
        return ends

    def swap_seconds(self, num_tokens: int) -> float:
        """The rows' bytes over PCIe. Nothing else runs meanwhile."""
        return num_tokens * self._seconds_per_swapped_row


@dataclass(frozen=True, slots=True)
class HostCost:
    """The course's engine on one machine, by measurement: what a step costs for each thing that is in it.

    What is in the batch is added up. All in seconds.

    Attributes:
        machine: where it was measured.
        model: of what.
        fixed: of any step.
        together: of a step with more than one request: the engine gathers what they attend to.
        per_sequence: for each request in the batch.
        per_new_token: for each token that is computed.
        per_cached_token: for each token whose KV entries are read.
        per_prefill: for each request with more than one new token.
        per_prefill_pair: for each of `StepLoad.num_prefill_pairs`.
        per_swapped_token: for each token that is copied to the host or back.
    """

    machine: str
    model: str
    fixed: float
    together: float
    per_sequence: float
    per_new_token: float
    per_cached_token: float
    per_prefill: float
    per_prefill_pair: float
    per_swapped_token: float

    def step_seconds(self, load: StepLoad) -> float:
        """What the batch adds up to."""
        sequences, new, cached, pairs, prefills = load
        seconds = (
            self.fixed
            + sequences * self.per_sequence
            + new * self.per_new_token
            + cached * self.per_cached_token
            + prefills * self.per_prefill
            + (pairs - cached - sequences) * self.per_prefill_pair
        )
        return seconds + self.together if sequences > 1 else seconds

    def swap_seconds(self, num_tokens: int) -> float:
        """In proportion to the tokens."""
        return num_tokens * self.per_swapped_token

    def save(self, file: Path) -> None:
        """Write the calibration as JSON, for `load`."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> HostCost:
        """Read what `save` has written.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no calibration. The message says what is wrong.
        """
        try:
            values: Any = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{file} is no calibration: {error}") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError(f"{file} is no calibration: it needs {', '.join(names)}, and nothing else")
        for name in names[2:]:
            if type(values[name]) not in (int, float) or not 0 <= values[name] < float("inf"):
                raise ValueError(f"{file} is no calibration: {name} must be seconds ≥ 0, got {values[name]!r}")
        return cls(**values)


def decode_ends(cost: StepCost, now: float, num_sequences: int, num_cached_tokens: int, num_steps: int) -> list[float]:
    """When each of the next steps ends, if in all of them the same sequences compute one token each.

    Args:
        cost: of the steps.
        now: when the first begins.
        num_sequences: in the batch, ≥ 1.
        num_cached_tokens: that they have in the cache before the first.
        num_steps: ≥ 0.
    """
    if isinstance(cost, RooflineCost):
        return cost.decode_ends(now, num_sequences, num_cached_tokens, num_steps)
    ends, num, cached = list[float](), num_sequences, num_cached_tokens
    for _ in range(num_steps):
        now += cost.step_seconds(StepLoad(num, num, cached, cached + num, 0))
        cached += num
        ends.append(now)
    return ends
