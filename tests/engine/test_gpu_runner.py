"""A step on a GPU, without one: on a device that is simulated, and with graphs that are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from minicache import kernels
from minicache.engine.decoding import decode
from minicache.engine.kv import PagedMemory
from minicache.engine.llm import LLM
from minicache.engine.runners import find
from minicache.engine.runners.gpu import GPUModelRunner, Run, eagerly, padded_batch
from minicache.engine.sampling import SamplingParams
from minicache.kernels import oracle, plain, quantize, runtime
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.model.minigpt import Transformer

runtime.interpret_without_gpu()  # before anything imports Triton

from tests.engine.simulated_gpu import Traffic, WaitedError, moved, simulated_gpu  # noqa: E402

NUM_NEW = 12


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    with simulated_gpu(monkeypatch) as traffic:
        yield traffic


@pytest.fixture
def gpu_model(model: MiniGPT, traffic: Traffic) -> MiniGPT:
    return moved(deepcopy(model))


def serve(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[Any, list[int | None]]:
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    got: dict[Any, list[int | None]] = {}
    while llm.has_unfinished:
        for chunk in llm.step():
            got.setdefault(chunk.request_id, []).append(chunk.token_id)
    return got


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5, "block_size": 3},
        {"num_blocks": 14, "block_size": 2, "prefix_caching": True},
    ],
)
def test_a_step_is_one_copy_and_waits_once(
    gpu_model: MiniGPT,
    traffic: Traffic,
    alone: Callable[..., list[int]],
    prompts: list[list[int]],
    options: dict[str, Any],
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(find, "CUDACapture", lambda device: eagerly)
    llm = LLM(gpu_model, enforce_eager=not graphs, **({"num_blocks": 100} | options))
    fine = llm.run_model
    copies, reads = [], []

    def run_model(output: Any) -> Tensor:
        before = traffic.copies, traffic.reads
        logits = fine(output)
        copies.append(traffic.copies - before[0])
        assert traffic.reads == before[1]
        return logits

    monkeypatch.setattr(llm, "run_model", run_model)
    pick = llm.pick

    def watched_pick(output: Any, logits: Tensor) -> Any:
        before = traffic.copies, traffic.reads
        picked = pick(output, logits)
        reads.append(traffic.reads - before[1])
        assert traffic.copies - before[0] == (0 < len(picked) < len(output.scheduled))  # which rows they are
        return picked

    monkeypatch.setattr(llm, "pick", watched_pick)
    got = serve(llm, prompts, [SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)] * len(prompts))
    assert list(got.values()) == [alone(prompt, NUM_NEW) for prompt in prompts]
    assert set(copies) == {1}
    assert set(reads) <= {0, 1}
    assert sum(reads) >= NUM_NEW


def test_random_rows_cost_one_copy_more(gpu_model: MiniGPT, traffic: Traffic, prompts: list[list[int]]) -> None:
    llm = LLM(gpu_model, num_blocks=100, enforce_eager=True)
    params = [SamplingParams(4, 0.8, top_k=k, top_p=p, seed=1, ignore_eos=True) for k, p in ((0, 1.0), (5, 0.9))]
    serve(llm, prompts[:2], params)
    assert (traffic.copies, traffic.reads) == (8, 4)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.max().item(),
        lambda x: int(x.max()),
        lambda x: bool((x > 0).any()),
        lambda x: x.isfinite().all() and 1,
        lambda x: x[x > 0],
        lambda x: x[[0]],
        lambda x: x.cpu(),
        lambda x: x + torch.ones(x.shape),
        lambda x: torch.tensor([1], device=x.device),
        lambda x: torch.zeros(2).to(x.device),
        lambda x: torch.nonzero(x),
    ],
)
def test_the_simulated_gpu_notices(gpu_model: MiniGPT, wait: Callable[[Tensor], object], prompts: Any) -> None:
    """Otherwise the tests above could not fail."""
    gpu_model.norm.register_forward_pre_hook(lambda module, args: wait(args[0]) and None)
    llm = LLM(gpu_model, num_blocks=100, enforce_eager=True)
    llm.add_request(prompts[0], SamplingParams())
    with pytest.raises(WaitedError):
        llm.step()


# Graphs


@torch.library.custom_op("minicache_tests::store", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"))
def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    if k_scale is None or v_scale is None:
        plain.store_kv(k, v, k_cache, v_cache, slots)
    else:
        quantize.store_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


@torch.library.custom_op("minicache_tests::attend", mutates_args=())
def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    return oracle.attention(q, k_cache, v_cache, tables, lens, k_scale=k_scale, v_scale=v_scale).clone()


class Traced:
    """What a CUDA graph does: the operations of one call, and on which memory, are recorded; later they alone run."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, run: Run) -> Run:
        run()  # the warm-up
        graph = make_fx(run)()
        self.num_captured += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            return graph()

        return replay


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Captures by tracing, with kernels that a trace records as one operation."""

    def attended(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: Any, *, sliding_window: None, **scales: Any
    ) -> Tensor:
        if metadata.query_start_loc is None:
            return attend(q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, **scales)
        paged = (q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, metadata.query_start_loc)
        return oracle.attention(*paged, **scales)

    monkeypatch.setattr(kernels, "store_kv", store)
    monkeypatch.setattr(kernels, "paged_attention", attended)
    monkeypatch.setattr(Transformer, "_check_token_ids", lambda model, token_ids: None)  # as on a GPU
    monkeypatch.setattr(Transformer, "_check_positions", lambda model, positions: None)
    return Traced()


@pytest.mark.parametrize("kv_cache_dtype", [None, "int8", "fp8_e4m3"])
def test_replayed_steps_give_the_same_tokens(traced: Traced, kv_cache_dtype: str | None) -> None:
    """Batches of 3 down to 1, of growing contexts, by a graph a size: all that changes must be in the buffer."""
    torch.manual_seed(0)
    config = MiniGPTConfig(
        vocab_size=50, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32
    )
    model = MiniGPT(config).double().eval()
    llm = LLM(model, num_blocks=100, block_size=3, kv_cache_dtype=kv_cache_dtype)
    assert isinstance(llm.memory, PagedMemory)
    llm.runner = GPUModelRunner(model, llm.memory, 256, traced)
    prompts, lengths = [[7], [1, 2, 3], [4, 5]], range(4, 13, 4)
    got = serve(llm, prompts, [SamplingParams(length) for length in lengths])
    for prompt, length, tokens in zip(prompts, lengths, got.values(), strict=True):
        if kv_cache_dtype is None:
            assert tokens == [int(token) for token in decode(model, torch.tensor([prompt]), length)]
        else:
            alone = LLM(model, num_blocks=100, kv_cache_dtype=kv_cache_dtype)
            assert [tokens] == list(serve(alone, [prompt], [SamplingParams(length)]).values())
    assert (traced.num_captured, traced.num_replayed) == (3, max(lengths) - 1)  # of 4, 2, 1; first comes a prefill


def test_padding_touches_no_slot(model: MiniGPT, prompts: list[list[int]]) -> None:
    """5 requests in a step of 8: 5 slots are written, and no others."""
    llm = LLM(model, num_blocks=100, block_size=4)
    assert isinstance(llm.memory, PagedMemory)
    llm.runner = GPUModelRunner(model, llm.memory, 256, eagerly)
    requests = [llm.answers[llm.add_request(prompt, SamplingParams(8))].request for prompt in prompts[:5]]
    llm.step()
    before = llm.memory.storage.k(0).clone()
    positions = [request.num_computed_tokens for request in requests]
    llm.step()
    written = (llm.memory.storage.k(0) != before).any(dim=-1).any(dim=-1).flatten().nonzero().flatten().tolist()
    slots = [request.block_ids[at // 4] * 4 + at % 4 for request, at in zip(requests, positions, strict=True)]
    assert written == sorted(slots)


def test_capturing_that_fails_is_no_error(
    model: MiniGPT, alone: Callable[..., list[int]], prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    llm = LLM(model, num_blocks=100)
    assert isinstance(llm.memory, PagedMemory)
    llm.runner = GPUModelRunner(model, llm.memory, 256, fails)
    got = serve(llm, prompts[:3], [SamplingParams(5, ignore_eos=True)] * 3)
    assert list(got.values()) == [alone(prompt, 5) for prompt in prompts[:3]]
    assert caplog.text.count("not permitted when stream is capturing") == 1


def test_sizes_of_graphs() -> None:
    sizes = [padded_batch(num_seqs) for num_seqs in range(1, 34)]
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert all(size >= num_seqs for num_seqs, size in enumerate(sizes, 1))


def test_a_model_of_unknown_make_gets_no_graph(model: MiniGPT, prompts: list[list[int]]) -> None:
    class Other(torch.nn.Module):
        config = model.config

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, token_ids: Tensor, cache: Any) -> Tensor:
            return self.inner(token_ids, cache)

    def refuses(run: Run) -> Run:
        raise AssertionError("captured")

    llm = LLM(Other(), num_blocks=100)
    assert isinstance(llm.memory, PagedMemory)
    llm.runner = GPUModelRunner(llm.model, llm.memory, 256, refuses)
    params = SamplingParams(5, ignore_eos=True)
    assert serve(llm, prompts[:2], [params] * 2)[0] == LLM(model).generate(prompts[:1], params)[0].token_ids
