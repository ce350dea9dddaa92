"""An engine over a cache of one byte a number: whatever happens to a request, its tokens are those that it gets alone.

Alone is without an engine, blocks or kernels: a dense cache, whose rows are rounded as they are appended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.grid import grid
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache.cache.quantized import QuantizedStorage
from minicache.engine.decoding import decode
from minicache.engine.llm import LLM
from minicache.engine.runners import find
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.grammar import Tokenizer
from minicache.kernels import backends, plain
from minicache.kernels.quantize import dequantize_rows, quantize_rows
from minicache.memory.blocks import BlockPool
from minicache.model import Decoder, MiniGPT, MiniGPTConfig
from minicache.model.decoder import DecoderConfig
from minicache.scheduler import SCHEDULERS

PROMPTS = (
    "Yesterday I",
    "She",
    "Did the children read the book yesterday? Yes, they",
    "The dog",
    "Every day they",
    "Later my sister",
    "Yesterday the girl",
    "My brother",
)
"""Where the best token wins by more than MARGIN: two sums in another order can round a number to its neighbour."""
LENGTHS = (14, 3, 11, 1, 18, 6, 8, 16)
MARGIN = 5e-3
DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


class RoundedCache(KVCache):
    """A dense cache whose rows have been through a quantized one."""

    def __init__(self, *sizes: int, rounded_to: torch.dtype) -> None:
        super().__init__(*sizes)
        self._rounded_to = rounded_to

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().append(layer, *(dequantize_rows(*quantize_rows(rows, self._rounded_to)) for rows in (k, v)))


def tokens_alone(
    model: Any, dtype: str, prompt: Sequence[int], num_tokens: int, params: SamplingParams | None = None
) -> list[int]:
    """The tokens of a prompt alone; greedy ones win by a margin, so rounding in another order decides no test."""
    sampler = None if params is None else TokenSampler(params)
    config = model.config
    sizes = (config.num_layers, 1, config.num_kv_heads, len(prompt) + num_tokens, config.head_dim)

    def pick(logits: Tensor) -> Tensor:
        if sampler is not None:
            return torch.tensor([sampler.draw(logits[0])])
        best, second = logits[0].topk(2).values.tolist()
        assert best - second > MARGIN, "a near tie: take another prompt"
        return logits.argmax(dim=-1)

    own = RoundedCache(*sizes, rounded_to=DTYPES[dtype])
    return [int(token) for token in decode(model, torch.tensor([prompt]), num_tokens, cache=own, pick=pick)]


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def alone_rounded(model: MiniGPT) -> Callable[..., list[int]]:
    """Function: (dtype, prompt, num_tokens, params) → tokens."""

    @cache
    def tokens(dtype: str, prompt: tuple[int, ...], num_tokens: int, params: Any) -> tuple[int, ...]:
        return tuple(tokens_alone(model, dtype, prompt, num_tokens, params))

    return lambda dtype, prompt, num_tokens, params=None: list(tokens(dtype, tuple(prompt), num_tokens, params))


def greedy() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=length, ignore_eos=True) for length in LENGTHS]


def generated(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, params)]


# The same tokens


@grid(
    {
        "dtype": list(DTYPES),
        "fused": [True, False],
        "options,happens": [
            *(({"scheduler": name}, "") for name in SCHEDULERS),
            ({"max_num_seqs": 3, "block_size": 3}, ""),
            ({"max_num_batched_tokens": 5}, "chunks"),
            ({"num_blocks": 9, "block_size": 4}, "preempted"),
            ({"num_blocks": 36, "block_size": 1, "scheduler": "fair"}, "preempted"),
            ({"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 50}, "swapped in"),
            ({"num_blocks": 9, "block_size": 4, "max_num_batched_tokens": 6, "prefix_caching": True}, "preempted"),
            ({"speculative": "ngram"}, ""),
            ({"speculative": "minigpt-draft", "num_blocks": 11, "block_size": 4}, "preempted"),
        ],
    }
)
def test_greedy_tokens(
    model: MiniGPT,
    prompts: list[list[int]],
    alone_rounded: Callable[..., list[int]],
    watch: Any,
    dtype: str,
    fused: bool,
    options: dict[str, Any],
    happens: str,
) -> None:
    expected = [alone_rounded(dtype, prompt, length) for prompt, length in zip(prompts, LENGTHS, strict=True)]
    llm = LLM(model, kv_cache_dtype=dtype, observers=[watch], **{"num_blocks": 64, **options})
    if not fused and llm.speculation is None:
        llm.runner = None
    assert generated(llm, prompts, greedy()) == expected
    assert llm.scheduler.pool.num_used == 0
    assert (watch.num_preempted > 0) == (happens in ("preempted", "swapped in"))
    assert (watch.num_swapped_in > 0) == (happens == "swapped in")
    assert (max(map(len, prompts)) > options.get("max_num_batched_tokens", 99)) == ("max_num_batched_tokens" in options)


@EACH_DTYPE
def test_where_a_learners_kernels_stand_in(
    model: MiniGPT,
    prompts: list[list[int]],
    alone_rounded: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    """Then nothing compiled runs: numbers and scales are stored by `plain.store_kv`, which may be the learner's."""
    monkeypatch.setattr(backends, "is_plain_replaced", lambda: True)
    monkeypatch.setattr(find, "is_plain_replaced", lambda: True)
    stored = []
    store = plain.store_kv
    monkeypatch.setattr(plain, "store_kv", lambda *args: stored.append(args[2].dtype) or store(*args))
    expected = [alone_rounded(dtype, prompt, length) for prompt, length in zip(prompts, LENGTHS, strict=True)]
    options: dict[str, Any] = {"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 50}
    llm = LLM(model, kv_cache_dtype=dtype, **options)
    assert llm.runner is None
    assert generated(llm, prompts, greedy()) == expected
    assert set(stored) == {DTYPES[dtype], torch.float32}


@EACH_DTYPE
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 40, "scheduler": "fair"},
        {"num_blocks": 9, "block_size": 4, "max_num_batched_tokens": 6},
    ],
    ids=str,
)
def test_sampled_tokens(
    model: MiniGPT, prompts: list[list[int]], alone_rounded: Callable[..., list[int]], dtype: str, options: Any
) -> None:
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.2, top_p=0.9, seed=length)
        for length in LENGTHS
    ]
    expected = [alone_rounded(dtype, prompt, p.max_tokens, p) for prompt, p in zip(prompts, params, strict=True)]
    llm = LLM(model, kv_cache_dtype=dtype, **{"num_blocks": 64, **options})
    assert generated(llm, prompts, params) == expected


@EACH_DTYPE
def test_a_prefix_is_found_with_its_scales(
    model: MiniGPT, prompts: list[list[int]], alone_rounded: Callable[..., list[int]], dtype: str
) -> None:
    system = [token for prompt in prompts for token in prompt][:24]
    asked = [system + prompt for prompt in prompts]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    llm = LLM(model, kv_cache_dtype=dtype, num_blocks=64, block_size=4, prefix_caching=True)
    expected = [alone_rounded(dtype, prompt, 6) for prompt in asked]
    assert generated(llm, asked[:1], params) == expected[:1]
    assert generated(llm, asked, params) == expected
    assert llm.scheduler.stats.num_hit_tokens >= 7 * 24  # type: ignore[attr-defined]


@EACH_DTYPE
@pytest.mark.parametrize("num_blocks", [24, 100], ids=["preempted", "room"])
def test_forks_copy_blocks_with_their_scales(
    model: MiniGPT, prompts: list[list[int]], alone_rounded: Callable[..., list[int]], dtype: str, num_blocks: int
) -> None:
    """Answer j of n is what a request with seed + j would get."""
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=4, ignore_eos=True)
    llm = LLM(model, kv_cache_dtype=dtype, num_blocks=num_blocks, block_size=4)
    copied = []
    move = llm.memory.move_blocks
    llm.memory.move_blocks = lambda output: copied.extend(output.blocks_to_copy) or move(output)  # type: ignore
    expected = [
        alone_rounded(dtype, prompt, 9, SamplingParams(max_tokens=9, temperature=1.0, seed=3 + j, ignore_eos=True))
        for prompt in prompts[:3]
        for j in range(4)
    ]
    assert generated(llm, prompts[:3], params) == expected
    assert copied


@EACH_DTYPE
def test_what_is_swapped_out_takes_its_scales_along(
    model: MiniGPT, prompts: list[list[int]], alone_rounded: Callable[..., list[int]], watch: Any, dtype: str
) -> None:
    """All that is free is overwritten before each step: what comes back from the host is all there is of it."""
    options = {"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 50}
    llm = LLM(model, kv_cache_dtype=dtype, observers=[watch], **options)
    storage = llm.storage
    assert isinstance(storage, QuantizedStorage)
    for prompt, params in zip(prompts, greedy(), strict=True):
        llm.add_request(prompt, params)
    got: dict[Any, list[Any]] = {request_id: [] for request_id in range(len(prompts))}
    while llm.has_unfinished:
        free = [block for block in range(9) if not llm.scheduler.pool.ref_count(block)]
        for layer in range(model.config.num_layers):
            for numbers in (storage.k(layer), storage.v(layer)):
                numbers[free] = torch.full_like(numbers[free], 7)
            for scales in (storage.k_scale(layer), storage.v_scale(layer)):
                scales[free] = torch.nan
        for chunk in llm.step():
            got[chunk.request_id].append(chunk.token_id)
    expected = [alone_rounded(dtype, prompt, length) for prompt, length in zip(prompts, LENGTHS, strict=True)]
    assert list(got.values()) == expected
    assert watch.num_swapped_in >= 2


@EACH_DTYPE
def test_a_step_that_failed_is_computed_again(
    model: MiniGPT, prompts: list[list[int]], alone_rounded: Callable[..., list[int]], dtype: str
) -> None:
    """In the middle of a pass: some layers have rows of the step, and others have not."""
    llm = LLM(model, kv_cache_dtype=dtype, num_blocks=64)
    llm.runner = None
    ids = [llm.add_request(prompt, params) for prompt, params in zip(prompts, greedy(), strict=True)]
    got: dict[Any, list[Any]] = {request_id: [] for request_id in ids}
    failures = iter([True, False, False, True, False])
    handle = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0 if next(failures, False) else None)
    try:
        while llm.has_unfinished:
            try:
                chunks = llm.step()
            except ZeroDivisionError:
                continue
            for chunk in chunks:
                got[chunk.request_id].append(chunk.token_id)
    finally:
        handle.remove()
    expected = [alone_rounded(dtype, prompt, length) for prompt, length in zip(prompts, LENGTHS, strict=True)]
    assert list(got.values()) == expected


@EACH_DTYPE
@pytest.mark.parametrize("window", [None, 12])
def test_a_llama_with_windows_and_long_prompts(dtype: str, window: int | None) -> None:
    """Prompts of 150 tokens attend in PyTorch, the others in the compiled kernel, and layer 1 has a window."""
    torch.manual_seed(1)
    config = DecoderConfig(
        vocab_size=60,
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_seq_len=256,
        sliding_windows=(None, window, None),
    )
    llama = Decoder(config).eval()
    for weight in llama.parameters():
        weight.data *= 3
    prompts = [torch.randint(60, (length,)).tolist() for length in (150, 3, 97, 40, 1)]
    expected = [tokens_alone(llama, dtype, prompt, 6) for prompt in prompts]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    few = 14 if window is None else 36  # a block is of one group of layers
    for options in ({}, {"max_num_batched_tokens": 31}, {"num_blocks": few}):
        llm = LLM(llama, kv_cache_dtype=dtype, **{"num_blocks": 64, **options})
        assert generated(llm, prompts, params) == expected


def test_log_probabilities_are_those_of_the_rounded_cache(model: MiniGPT, prompts: list[list[int]]) -> None:
    """They differ from the float cache's, a little: it is the quantized one that is served."""
    by_cache = []
    for dtype in (None, "int8"):
        llm = LLM(model, kv_cache_dtype=dtype, num_blocks=64)
        llm.add_request(prompts[2], SamplingParams(max_tokens=8, ignore_eos=True), num_logprobs=0)
        found = []
        while llm.has_unfinished:
            found += [chunk.logprobs.logprob for chunk in llm.step() if chunk.logprobs is not None]
        by_cache.append(found)
    exact, rounded = map(torch.tensor, by_cache)
    assert len(exact) == 8
    assert exact.ne(rounded).any()
    torch.testing.assert_close(exact, rounded, rtol=0, atol=0.2)


# Memory, counted


def tensors_of(llm: LLM) -> int:
    """Bytes of all tensors that a layer is read from and written to."""
    storage = llm.storage
    assert storage is not None
    return sum(
        each.untyped_storage().nbytes()
        for each in {
            tensor.untyped_storage().data_ptr(): tensor
            for layer in range(storage.num_layers)
            for tensor in (
                storage.k(layer),
                storage.v(layer),
                *((storage.k_scale(layer), storage.v_scale(layer)) if isinstance(storage, QuantizedStorage) else ()),
            )
        }.values()
    )


@EACH_DTYPE
def test_bytes_are_those_of_the_tensors(model: MiniGPT, dtype: str) -> None:
    """A number a byte and 4 bytes a row: 36 instead of 128 of d = 32, and so 3.6 times as many tokens."""
    config = model.config
    llm, plain = LLM(model, kv_cache_dtype=dtype), LLM(model)
    rows = 2 * config.num_layers * config.num_kv_heads
    assert llm.storage.token_nbytes == rows * (config.head_dim + 4)
    assert plain.storage.token_nbytes == rows * config.head_dim * 4
    for each in (llm, plain):
        pool = each.scheduler.pool
        assert tensors_of(each) == each.storage.nbytes == each.storage.token_nbytes * pool.num_blocks * pool.block_size
    assert 64 * 2**20 - llm.storage.token_nbytes * 16 < llm.storage.nbytes <= 64 * 2**20 == plain.storage.nbytes
    assert llm.scheduler.pool.num_blocks == plain.scheduler.pool.num_blocks * 128 // 36
    assert llm.storage.dtype == DTYPES[dtype]


def test_a_draft_models_cache_holds_the_same(model: MiniGPT) -> None:
    """It has as many blocks, and its share of the memory is that of its bytes a token."""
    llm = LLM(model, kv_cache_dtype="int8", speculative="minigpt-draft")
    draft = LLM("minigpt-draft", kv_cache_dtype="int8", num_blocks=1).storage
    both = (llm.storage.token_nbytes + draft.token_nbytes) * 16
    assert llm.scheduler.pool.num_blocks == pytest.approx(64 * 2**20 / both, abs=1)


def test_the_swap_space_counts_its_scales_too(model: MiniGPT) -> None:
    llm = LLM(model, kv_cache_dtype="int8", preemption="swap", num_host_blocks=10, num_blocks=20)
    assert llm.memory.host_storage.nbytes == 10 * 16 * llm.storage.token_nbytes  # type: ignore[attr-defined]


def test_more_requests_run_at_once_in_the_same_memory(model: MiniGPT, prompts: list[list[int]], watch: Any) -> None:
    """Counted in the batch: 16 KiB are 2 blocks of float32, and 7 of int8."""
    batches = {}
    for dtype in (None, "int8"):
        probe = LLM(model, kv_cache_dtype=dtype, num_blocks=1, max_model_len=16)
        num_blocks = 2 * 32768 // (16 * probe.storage.token_nbytes)
        llm = LLM(model, kv_cache_dtype=dtype, num_blocks=num_blocks, max_model_len=16, observers=[watch])
        assert llm.storage.nbytes <= 2 * 32768
        watch.batches.clear()
        llm.generate([prompt[:3] for prompt in prompts], SamplingParams(max_tokens=12, ignore_eos=True))
        batches[dtype] = max(map(len, watch.batches))
    assert batches == {None: 2, "int8": 7}


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"kv_cache_dtype": "int4"}, ValueError, '"int8" or "fp8_e4m3"'),
        ({"kv_cache_dtype": "fp8"}, ValueError, "fp8_e4m3"),
        ({"kv_cache_dtype": torch.int8}, TypeError, '"int8" or "fp8_e4m3"'),
        ({"kv_cache_dtype": ""}, ValueError, "None for the dtype"),
        ({"kv_cache_dtype": "int8", "cache": "dense"}, ValueError, "dense"),
    ],
    ids=str,
)
def test_an_engine_refuses(model: MiniGPT, options: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        LLM(model, **options)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": torch.float32}, TypeError),
        ({"dtype": torch.uint8}, TypeError),
        ({"dtype": "int8"}, TypeError),
        ({"head_dim": 0}, ValueError),
        ({"num_layers": 0}, ValueError),
        ({"num_kv_heads": 2.0}, TypeError),
    ],
    ids=str,
)
def test_a_storage_refuses(changes: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        QuantizedStorage(BlockPool(2, 4), **{"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, **changes})


@pytest.mark.parametrize("layer", [-1, 3])
@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
def test_a_layer_that_is_not_there(layer: int, name: str) -> None:
    storage = QuantizedStorage(BlockPool(2, 4), 3, 2, 8)
    with pytest.raises(IndexError, match="layer"):
        getattr(storage, name)(layer)


def test_a_model_of_another_dtype() -> None:
    """Weights in float64 and rows in one byte: the fallback in PyTorch serves it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    model = MiniGPT(MiniGPTConfig(**sizes)).double()
    llm = LLM(model, kv_cache_dtype="int8", num_blocks=8)
    assert llm.runner is None
    (answer,) = generated(llm, [[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer) == 5
