"""Layers with sliding windows: the same tokens as by full recomputation, and blocks outside the window go back."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from minicache.engine.decoding import decode
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.memory.groups import without_null
from minicache.model import Decoder, DecoderConfig
from minicache.model.groups import layer_groups
from minicache.scheduler import GroupedScheduler, Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.audit_grouped import GroupedAuditor

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "max_seq_len": 256}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
WINDOWS = {
    "all layers": (9, 9, 9),
    "some layers": (9, None, 9, 9, 9),
    "two windows": (None, 5, 20, None, 5, 20),
    "a padded group": (7, 7, None, None, 7),
}
BLOCK_SIZE = 4
FEW = {"all layers": 10, "some layers": 60, "two windows": 40, "a padded group": 40}
"""So few blocks that requests are preempted."""


class Auditor(GroupedAuditor):
    """And it counts preemptions."""

    num_preempted = 0

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        super().on_schedule(scheduler, output)
        self.num_preempted += len(output.preempted)


@cache
def model_of(name: str) -> Decoder:
    torch.manual_seed(0)
    windows = WINDOWS[name]
    model = Decoder(DecoderConfig(**SIZES, **HEADS, num_layers=len(windows), sliding_windows=windows)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that far tokens count
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.4)
    return model


@cache
def alone(name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """A request's greedy tokens by full recomputation; it asserts that no second token is near."""

    def pick(logits: torch.Tensor) -> torch.Tensor:
        best, second = logits[0].topk(2).values.tolist()
        assert best - second > 1e-4, "a near tie: take another prompt"
        return logits.argmax(dim=-1)

    found = decode(model_of(name), torch.tensor([prompt]), num_tokens, pick=pick)
    return [int(token) for token in found]


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(60) for _ in range(24)]
    return [shared[: length // 2] + [rng.randrange(60) for _ in range(length - length // 2)] for length in lengths]


PROMPTS = prompts_of(1, 3, 50, 17, 1, 33, 9)
PARAMS = [SamplingParams(max_tokens=count) for count in (30, 12, 1, 40, 20, 25)]
OPTIONS: dict[str, dict[str, Any]] = {
    "one step a prompt": {},
    "chunks": {"max_num_batched_tokens": 7},
    "few blocks": {"max_num_batched_tokens": 12, "reserve_full_prompt": False},
    "prefix cache": {"prefix_caching": True},
    "prefix cache, few blocks": {"prefix_caching": True, "max_num_batched_tokens": 11},
    "two at a time": {"max_num_seqs": 2},
}


def engine(name: str, *, fused: bool = True, observers: Any = (), **options: Any) -> LLM:
    options = {"num_blocks": 400, "block_size": BLOCK_SIZE, "max_model_len": 128} | options
    llm = LLM(model_of(name), observers=observers, **options)
    if not fused:
        assert llm.runner is not None
        llm.runner = None
    return llm


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", WINDOWS)
def test_tokens_are_those_of_full_recomputation(name: str, how: str, fused: bool) -> None:
    auditor = Auditor()
    few = {"num_blocks": FEW[name]} if "few blocks" in how else {}
    llm = engine(name, fused=fused, observers=[auditor], **few, **OPTIONS[how])
    wanted = [alone(name, tuple(p), each.max_tokens) for p, each in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(2):  # a prefix cache finds them the second time
        got = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
        assert got == wanted
    assert llm.scheduler.pool.num_used == 0
    assert (auditor.num_preempted > 0) == ("few blocks" in how)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_quantized_cache_has_groups_too(name: str, fused: bool) -> None:
    llm = engine(name, fused=fused, kv_cache_dtype="int8", max_num_batched_tokens=11)
    assert isinstance(llm.scheduler, GroupedScheduler)
    without = engine(name, kv_cache_dtype="int8", scheduler="fair")
    assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == [
        answer.token_ids for answer in without.generate(PROMPTS, PARAMS)
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"async_scheduling": True}, "AsyncChunkedScheduler"),
        ({"scheduler": "fair"}, "FairScheduler"),
        ({"preemption": "swap", "num_host_blocks": 40, "num_blocks": 40}, "ChunkedPrefillScheduler"),
        ({"cache": "dense"}, "ChunkedPrefillScheduler"),
        ({"speculative": "ngram"}, "SpeculativeScheduler"),
        ({"tensor_parallel_size": 2}, "GroupedScheduler"),
    ],
    ids=str,
)
def test_where_there_are_no_groups_the_tokens_are_the_same(options: dict[str, Any], name: str) -> None:
    """But for several processes, which have groups: the blocks of each are the same."""
    llm = LLM(model_of("some layers"), **{"num_blocks": 400, "block_size": BLOCK_SIZE, "max_model_len": 128} | options)
    assert type(llm.scheduler).__name__ == name
    got = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
    assert got == [alone("some layers", tuple(p), each.max_tokens) for p, each in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("name", WINDOWS)
def test_a_running_request_gives_back_what_left_the_window(name: str) -> None:
    llm, groups = engine(name), layer_groups(WINDOWS[name])
    llm.add_request(PROMPTS[1], SamplingParams(max_tokens=60))
    for _ in range(52):
        llm.step()
    (request,) = llm.scheduler.running
    num_computed = request.num_computed_tokens
    assert num_computed == 100
    held = [len(without_null(table)) for table in request.group_block_ids]
    for window, count in zip(groups.windows, held, strict=True):
        assert count == (25 if window is None else 25 - (num_computed - window) // BLOCK_SIZE)
    assert llm.scheduler.pool.num_used == sum(held) < 25 * len(groups.windows)


def test_a_long_request_fits_into_a_pool_with_fewer_slots() -> None:
    llm = engine("all layers", num_blocks=8, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=70)
    assert llm.generate([PROMPTS[1]], params)[0].token_ids == alone("all layers", tuple(PROMPTS[1]), 70)


@pytest.mark.parametrize("name", WINDOWS)
def test_an_abort_and_a_failed_step_in_the_middle(name: str) -> None:
    llm = engine(name, num_blocks=60, max_num_batched_tokens=20, prefix_caching=True)
    first, *others = [llm.add_request(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
    got: dict[Any, list[int]] = {each: [] for each in others}
    run, num_steps = llm.run_model, 0
    while llm.has_unfinished:
        num_steps += 1
        if num_steps == 4:
            assert llm.abort_request(first)
        if num_steps == 9:
            llm.run_model = lambda output: [][0]  # type: ignore[method-assign]
            with pytest.raises(IndexError):
                llm.step()
            llm.run_model = run  # type: ignore[method-assign]
        for chunk in llm.step():
            if chunk.request_id in got and chunk.token_id is not None:
                got[chunk.request_id].append(chunk.token_id)
    wanted = [alone(name, tuple(p), each.max_tokens) for p, each in zip(PROMPTS, PARAMS, strict=True)]
    assert list(got.values()) == wanted[1:]
    assert llm.scheduler.pool.num_used == 0


def test_several_answers_to_a_prompt_are_requests_of_their_own() -> None:
    llm = engine("some layers", prefix_caching=True)
    answers = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=12, n=3))
    assert [each.token_ids for each in answers] == [alone("some layers", tuple(PROMPTS[2]), 12)] * 3


def test_how_many_blocks_there_are() -> None:
    """A request of 128 tokens: in a window's group the 8 tokens before a step and its 16, in 7 blocks at most."""
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": 128, "max_num_batched_tokens": 16}
    llm = LLM(model_of("some layers"), max_num_seqs=2, **options)
    assert llm.scheduler.pool.num_blocks == 2 * (32 + 4 * 7)
    assert llm.storage is not None
    row_nbytes = 2 * 8 * 4  # of a token and layer: KV heads, numbers, bytes
    assert llm.storage.token_nbytes == 2 * row_nbytes  # keys and values of one layer: so many has a group
    assert llm.storage.nbytes == (2 * (32 + 4 * 7) + 1) * BLOCK_SIZE * 2 * row_nbytes


def test_a_scheduler_with_other_windows_is_refused() -> None:
    scheduler = create_scheduler("chunked", num_blocks=40, windows=(None, 9))
    with pytest.raises(ValueError, match=r"windows \(None, 9\), and the model's layers \(9,\)"):
        LLM(model_of("all layers"), scheduler=scheduler)  # type: ignore[arg-type]
    all_tokens = create_scheduler("chunked", num_blocks=40, block_size=BLOCK_SIZE, windows=(None,))
    llm = LLM(model_of("all layers"), scheduler=all_tokens)  # type: ignore[arg-type]
    assert isinstance(llm.scheduler, GroupedScheduler)
    assert llm.generate(PROMPTS[:1], PARAMS[:1])[0].token_ids == alone("all layers", tuple(PROMPTS[0]), 30)


@pytest.mark.parametrize(
    ("windows", "groups", "num_layers", "places"),
    [
        ((None, None), (None,), 2, ((0, 0), (0, 1))),
        ((8, 8, 8), (8,), 3, ((0, 0), (0, 1), (0, 2))),
        ((8, None, 8, 8), (None, 8, 8, 8), 1, ((1, 0), (0, 0), (2, 0), (3, 0))),
        ((8, 8, None, None, 8), (None, 8, 8), 2, ((1, 0), (1, 1), (0, 0), (0, 1), (2, 0))),
        ((8, 8, 8, 8, None, 8, None, None, None, None, None), (None, 8), 6, None),  # 5 and 6 layers
    ],
    ids=str,
)
def test_groups_of_equally_many_layers(windows: Any, groups: Any, num_layers: int, places: Any) -> None:
    found = layer_groups(windows)
    assert (found.windows, found.num_layers) == (groups, num_layers)
    assert places is None or found.places == places
    assert len(set(found.places)) == len(windows)
    assert all(found.windows[group] == window for window, (group, _) in zip(windows, found.places, strict=True))
