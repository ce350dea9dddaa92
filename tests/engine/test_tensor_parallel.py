"""A model on several processes gives the tokens that it gives on one, and no one is left behind when one of them fails.

Starting a process takes seconds, so the engines of this file share two models on two ranks each, and all of it runs
with `make check` only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minicache.arithmetic.parallel import rank_kv_bytes_per_token, rank_weight_bytes
from minicache.arithmetic.specs import MINIGPT
from minicache.engine.decoding import decode
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import InvariantError, RankDiedError, RankFailedError
from minicache.model import Decoder, DecoderConfig, MiniGPT, MiniGPTConfig, fused
from minicache.parallel import ParallelModel
from minicache.parallel.messages import Begin
from minicache.parallel.sharding import require_shardable, shard_config, shard_of
from minicache.scheduler.observe import Observer

NUM_NEW = 12
MARGIN = 5e-3  # of two log probabilities: what a quantized number that is rounded the other way does not bridge
SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_layers": 3, "max_seq_len": 128}

pytestmark = pytest.mark.slow  # each engine of two ranks starts a process that imports torch


def a_decoder(**options: object) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, **options})).eval()
    with torch.no_grad():  # gains and biases start as ones and zeros, which would hide that one is added twice
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
DECODERS = {
    "grouped": {},
    "one KV head, shared by both ranks": {"num_kv_heads": 1, "qk_norm": True, "tie_word_embeddings": True, **BIASES},
    "windows": {"sliding_windows": (None, 5, 3), "num_kv_heads": 4},
}


class Copies(Observer):
    """Counts copies on write."""

    num_copies = 0

    def on_schedule(self, scheduler, output):
        self.num_copies += len(output.blocks_to_copy)


@pytest.fixture(scope="module")
def ranks(model: MiniGPT) -> Iterator[ParallelModel]:
    """MiniGPT on two ranks, fused where numba is."""
    ranks = ParallelModel(model, 2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def expected(prompts, alone):
    return [alone(prompt, NUM_NEW) for prompt in prompts]


def greedy(**options):
    return SamplingParams(**{"max_tokens": NUM_NEW, "ignore_eos": True, **options})


def token_ids(completions):
    return [completion.token_ids for completion in completions]


# Shards


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS)
def test_the_shards_are_the_model(options, size):
    model = a_decoder(**options)
    config = model.config
    for name, weight in model.state_dict().items():
        parts = [shard_of(name, weight, config, rank, size) for rank in range(size)]
        if ".o_proj.bias" in name or ".down_proj.bias" in name:
            assert torch.equal(sum(parts), weight)
        elif "_proj" in name:
            axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            copies = 1 if "k_proj" not in name and "v_proj" not in name else max(1, size // config.num_kv_heads)
            assert torch.equal(torch.cat(parts[::copies], axis), weight)
        else:
            assert all(part is weight for part in parts)
    for rank in range(size):
        with torch.device("meta"):
            shard = Decoder(shard_config(config, rank, size))
        shapes = {name: each.shape for name, each in shard.state_dict().items()}
        whole = model.state_dict()
        assert shapes == {name: shard_of(name, whole[name], config, rank, size).shape for name in shapes}


def test_bytes_of_a_rank_are_those_of_the_formula(model):
    embedding, norms = model.embed_tokens.weight.numel(), 9 * 128
    with torch.device("meta"):
        shard = MiniGPT(shard_config(model.config, 1, 2))
    counted = sum(each.nbytes for each in shard.parameters())
    assert counted == rank_weight_bytes(MINIGPT.num_parameters, embedding + norms, 2, "float32")


@pytest.mark.parametrize(
    ("options", "size", "saying"),
    [
        ({"intermediate_size": 21}, 2, "intermediate_size, 21"),
        ({}, 3, "num_heads, 4"),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 24}, 6, "4 KV heads cannot be divided among 6"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, size, saying):
    with pytest.raises(ValueError, match=saying):
        require_shardable(a_decoder(**options), size)


def test_options_that_do_not_go_together(model, ranks):
    class Mine(MiniGPT):
        pass

    with pytest.raises(ValueError, match='take cache="paged"'):
        LLM(model, tensor_parallel_size=2, cache="dense")
    with pytest.raises(ValueError, match='take cache="paged"'):
        LLM(ranks, cache="dense")
    with pytest.raises(TypeError, match="got Mine"):
        LLM(Mine(MiniGPTConfig(vocab_size=5)), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="at least 2, got 0"):
        LLM(model, tensor_parallel_size=0)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ValueError, match="needs 2 GPUs"):
            LLM(model, tensor_parallel_size=2, device="cuda")


# Tokens


ENGINES = {
    "at once": {},
    "in chunks": {"max_num_batched_tokens": 5, "block_size": 3},
    "one after the other": {"max_num_seqs": 1},
    "recompute": {"num_blocks": 9, "block_size": 4, "scheduler": "paged"},
    "swap": {"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 40},
    "prefix cache": {"num_blocks": 14, "block_size": 2, "prefix_caching": True, "scheduler": "fair"},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_greedy_tokens(ranks, prompts, expected, watch, options):
    llm = LLM(ranks, observers=[watch], **{"num_blocks": 64, **options})
    assert token_ids(llm.generate(prompts, greedy())) == expected
    assert (watch.num_preempted > 0) == ("num_blocks" in options)
    assert (watch.num_swapped_in > 0) == ("num_host_blocks" in options)
    if "prefix_caching" in options:
        assert token_ids(llm.generate(prompts * 2, greedy())) == expected * 2
        assert llm.scheduler.stats.num_hit_tokens > 0


def test_forks_and_copies_on_write(ranks, prompts, alone):
    copies = Copies()
    params = [greedy(temperature=1.0, seed=seed, n=3) for seed in range(4)]
    got = LLM(ranks, observers=[copies], block_size=4).generate(prompts[:4], params)
    each = [greedy(temperature=1.0, seed=seed + turn) for seed in range(4) for turn in range(3)]
    assert token_ids(got) == [alone(prompts[i // 3], NUM_NEW, its) for i, its in enumerate(each)]
    assert copies.num_copies > 0


@pytest.mark.parametrize("speculative", ["ngram", "minigpt-draft"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 14, "block_size": 4}], ids=["at once", "preempted"])
def test_draft_tokens(ranks, prompts, expected, speculative, options):
    llm = LLM(ranks, speculative=speculative, **{"num_blocks": 64, **options})
    assert token_ids(llm.generate(prompts, greedy())) == expected
    stats = llm.scheduler.draft_stats
    assert stats.num_drafts > 0
    assert speculative == "ngram" or stats.num_accepted_tokens > 0


def decided(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, each up to where two tokens are nearly equally likely.

    There a sum in another order decides: it may round a number of the cache up instead of down.
    """
    for number, prompt in enumerate(prompts):
        llm.add_request(prompt, greedy(), request_id=number, num_logprobs=2)
    chunks: list[list[Any]] = [[] for _ in prompts]
    while llm.has_unfinished:
        for chunk in llm.step():
            chunks[chunk.request_id].append(chunk)
    answers = []
    for each in chunks:
        margins = [chunk.logprobs.top[0][1] - chunk.logprobs.top[1][1] for chunk in each]
        end = next((place for place, margin in enumerate(margins) if margin < MARGIN), len(margins))
        answers.append([chunk.token_id for chunk in each[:end]])
    return answers


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 9, "block_size": 4, "preemption": "swap", "num_host_blocks": 40}],
    ids=["at once", "swap"],
)
def test_a_quantized_cache(model, ranks, prompts, watch, kv_cache_dtype, options):
    """Each head has its scales, so a rank's blocks hold what they hold on one rank."""
    right = decided(LLM(model, kv_cache_dtype=kv_cache_dtype, num_blocks=64), prompts)
    llm = LLM(ranks, kv_cache_dtype=kv_cache_dtype, observers=[watch], **{"num_blocks": 64, **options})
    got = token_ids(llm.generate(prompts, greedy()))
    assert [tokens[: len(those)] for tokens, those in zip(got, right, strict=True)] == right
    assert sum(map(len, right)) > len(prompts) * NUM_NEW // 2
    assert (watch.num_swapped_in > 0) == ("num_host_blocks" in options)


@pytest.fixture(scope="module")
def decoder_ranks() -> Iterator[tuple[Decoder, ParallelModel]]:
    """In float64: through the modules, and no rounding decides a token."""
    model = a_decoder(**DECODERS["one KV head, shared by both ranks"]).double()
    ranks = ParallelModel(model, 2)
    yield model, ranks
    ranks.close()


@pytest.mark.parametrize("options", [{}, {"num_blocks": 9, "block_size": 4}], ids=["at once", "preempted"])
def test_a_model_with_biases_norms_and_fewer_kv_heads_than_ranks(decoder_ranks, options):
    model, ranks = decoder_ranks
    prompts = [[7, 3, 9, 4, 4], [1], list(range(2, 16))]
    expected = [[int(token) for token in decode(model, torch.tensor([prompt]), NUM_NEW)] for prompt in prompts]
    assert token_ids(LLM(ranks, **options).generate(prompts, greedy())) == expected


def test_bytes_of_rank_0(model, ranks):
    llm = LLM(ranks, num_blocks=8, block_size=16)
    assert llm.storage.nbytes == 8 * 16 * rank_kv_bytes_per_token(MINIGPT, 2, "float32")
    replicated = model.embed_tokens.weight.numel() + 9 * 128
    assert ranks.shard.num_parameters() == (model.num_parameters() - replicated) // 2 + replicated


# Failures that the ranks survive


def test_an_error_in_rank_0_in_the_middle_of_a_step(ranks, prompts, expected, monkeypatch):
    if not _is_fused(ranks):
        pytest.skip("numba is not installed: the forward pass is another")
    llm = LLM(ranks, num_blocks=64)
    for prompt in prompts:
        llm.add_request(prompt, greedy())
    got = {request_id: [] for request_id in range(len(prompts))}
    calls, silu_mul = [], fused.kernels.silu_mul

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) in (3, 9):  # in the third layer of a prompt's step, and in a decode step
            raise MemoryError("no memory for gate and up")
        silu_mul(*arguments)

    monkeypatch.setattr(fused.kernels, "silu_mul", failing)
    num_failures = 0
    while llm.has_unfinished:
        try:
            chunks = llm.step()
        except MemoryError:
            num_failures += 1
            continue
        for chunk in chunks:
            got[chunk.request_id].append(chunk.token_id)
    assert list(got.values()) == expected
    assert num_failures == 2


def test_an_interrupt_while_rank_0_waits_for_the_others(ranks, prompts, expected, monkeypatch):
    """Ctrl-C in the middle of an all-reduce: it is under way, and must neither be made twice nor be missed."""
    llm = LLM(ranks, num_blocks=64)
    group = ranks._rank.group
    allreduce, calls = group._group.allreduce, []

    class Interrupted:
        def __init__(self, work):
            self.work = work
            self.wait = self.interrupt

        def interrupt(self):
            self.wait = self.work.wait
            raise KeyboardInterrupt

    class Interrupting:
        def allreduce(self, tensors):
            calls.append(tensors)
            work = allreduce(tensors)
            return Interrupted(work) if len(calls) == 4 else work

    monkeypatch.setattr(group, "_group", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy())
    assert len(calls) == 2 * MINIGPT.num_layers  # the step's, each once
    assert token_ids(llm.generate(prompts, greedy())) == expected


def _is_fused(ranks: ParallelModel) -> bool:
    return fused.fuse(ranks.shard) is not None


def test_an_error_in_another_rank(ranks, prompts, expected):
    llm = LLM(ranks, num_blocks=64)
    for prompt in prompts:
        llm.add_request(prompt, greedy())
    got = {request_id: [] for request_id in range(len(prompts))}

    def step():
        for chunk in llm.step():
            got[chunk.request_id].append(chunk.token_id)

    step()
    ranks.move(llm.storage, [], [], [(0, 64)])  # rank 0 has said what only rank 1 is to do, and it cannot
    with pytest.raises(RankFailedError, match="rank 1: IndexError: no target 64"):
        step()
    step()
    ranks._send(Begin(1, 16, 0, None))  # rank 1 has one block, and finds out when the step has begun
    ranks._wait_for_ready()
    with pytest.raises(RankFailedError, match="rank 1: IndexError"):
        step()
    ranks._send(Begin(64, 16, 0, None))
    ranks._wait_for_ready()
    while llm.has_unfinished:
        step()
    assert list(got.values()) == expected


def test_one_engine_at_a_time(ranks, prompts):
    older, newer = LLM(ranks), LLM(ranks)
    with pytest.raises(ValueError, match="another engine has begun"):
        older.generate(prompts[:1], greedy())
    newer.generate(prompts[:1], greedy())


def test_a_run_model_that_does_not_ask_the_runner(ranks, prompts):
    llm = LLM(ranks)
    llm.runner = None
    with pytest.raises(InvariantError, match="must ask it"):
        llm.generate(prompts[:1], greedy())


# Failures that they do not


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_a_rank_that_is_killed(model, prompts, expected):
    llm = LLM("minigpt", tensor_parallel_size=2)
    assert token_ids(llm.generate(prompts, greedy())) == expected
    pid = llm.model.pids[1]
    llm.add_request(prompts[0], greedy())
    llm.step()
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RankDiedError, match=rf"rank 1 \(process {pid}\) was ended by signal 9"):
            llm.step()
    assert not Path(f"/proc/{pid}").exists()  # no zombie


def test_a_rank_that_hangs(prompts):
    ranks = ParallelModel(a_decoder(), 2, timeout_seconds=20)  # which its start has as well, on a busy machine
    llm = LLM(ranks)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    with pytest.raises(RankDiedError, match="a rank does not answer"):
        llm.generate([[1, 2, 3]], greedy())
    assert not Path(f"/proc/{ranks.pids[1]}").exists()


def test_ranks_end_with_their_engine():
    code = """
import torch
from minicache import LLM, SamplingParams
llm = LLM(tensor_parallel_size=2)
print(llm.model.pids[1], flush=True)
while True:
    llm.generate(["She"], SamplingParams(max_tokens=50, ignore_eos=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        pid = int(engine.stdout.readline())
        time.sleep(0.5)
        engine.kill()
    deadline = time.monotonic() + 20
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_dropped_engine_takes_its_ranks_with_it():
    llm = LLM("minigpt", tensor_parallel_size=2)
    pid = llm.model.pids[1]
    del llm
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_more_ranks_and_other_dtypes(size, dtype):
    model = a_decoder(head_dim=8, intermediate_size=32, **BIASES).to(dtype)
    ranks = ParallelModel(model, size)
    prompts = [[7, 3, 9, 4, 4], [1], list(range(2, 16))]
    got = token_ids(LLM(ranks).generate(prompts, greedy()))
    ranks.close()
    # In 16 bits the sum of rounded parts is another: what must agree is what was generated so far, given the same.
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, got, strict=True):
            logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            assert (logits.amax(-1) - chosen).max() <= (0.1 if dtype == torch.bfloat16 else 1e-4)
