"""vLLM's requests, configuration and outputs around our scheduler, and a worker without a model: run by test_vllm.py.

It runs in vLLM's own environment. The worker keeps tokens where keys and values would be, in blocks, by the rules of
vLLM's model runner; the next token is a function of what the request's blocks hold. So an answer is right only if each
token was computed at its place, in blocks that nothing else has written to. With async scheduling, a step's tokens are
handed over after the next step was scheduled and run. Prints a line of JSON for each run.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import deque
from pathlib import Path

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from minicache.errors import PluginError
from minicache.plugins.vllm import MinicacheScheduler
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.audit_sharing import SharingAuditor

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 24, 64
UNKNOWN = -1  # a token that the worker has sampled and not passed on
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_MODEL_LEN,
}


def make(name, prefix_caching, budget, overlaps=False):
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching)
    cache.num_gpu_blocks = NUM_BLOCKS + 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN)
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=6,
                max_num_batched_tokens=budget,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
            ),
            cache_config=cache,
            additional_config={"minicache": {"scheduler": name} if name else {}},
        )
    config.scheduler_config.async_scheduling = overlaps  # vLLM's platform for CPUs turns it off
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(NUM_BLOCKS + 1, [], [KVCacheGroupSpec(["layer"], layer)])

    class Watched(MinicacheScheduler):
        observers = (AsyncAuditor() if overlaps else SharingAuditor() if prefix_caching else Auditor(),)

    return Watched(config, blocks, None, BLOCK_SIZE, log_stats=True)


def next_token(tokens):
    return 3 + sum((place + 7) * token for place, token in enumerate(tokens)) % 89


def expected(request):
    tokens, num_prompt = list(request.prompt_token_ids), len(request.prompt_token_ids)
    while len(tokens) < min(num_prompt + request.max_tokens, MAX_MODEL_LEN):
        tokens.append(next_token(tokens))
        if tokens[-1] in (request.sampling_params.stop_token_ids or ()):
            break
    return tokens[num_prompt:]


class Worker:
    """What vLLM's model runner keeps between steps, and how changes reach it (`_update_states`).

    If it `overlaps`, it knows no token that it has sampled: it computes the last step's from `sampled`, which is on the
    device.
    """

    def __init__(self, overlaps=False):
        self.overlaps = overlaps
        self.memory, self.tables, self.tokens, self.last = {}, {}, {}, set()
        self.num_prompt, self.sampled = {}, {}
        self.num_resumed = self.num_unknown = 0

    def catch_up(self, request_id, tokens, num_outputs):
        """A request that the last step did not have comes with all its tokens."""
        num_known, held = self.num_prompt[request_id] + num_outputs, self.tokens[request_id]
        assert num_known == len(tokens)
        if self.overlaps:  # one that was given up may be gone, else only values are new
            assert num_known <= len(held)
            assert all(old in (new, UNKNOWN) for old, new in zip(held, tokens, strict=False))
            held[:] = tokens
        assert held == tokens

    def run(self, step):
        for request_id in step.finished_req_ids:
            del self.tables[request_id], self.tokens[request_id]
        computed = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.tables
            self.tables[new.req_id], self.tokens[new.req_id] = list(new.block_ids[0]), list(new.prompt_token_ids)
            self.num_prompt[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = list(blocks[0])
                self.num_resumed += 1
            elif blocks:
                self.tables[request_id] += blocks[0]
            num_outputs = cached.num_output_tokens[index]
            if request_id not in self.last or request_id in cached.resumed_req_ids:
                self.catch_up(request_id, cached.all_token_ids[request_id], num_outputs)
            assert self.num_prompt[request_id] + num_outputs == len(self.tokens[request_id])
            computed[request_id] = cached.num_computed_tokens[index]
        scheduled = step.num_scheduled_tokens
        assert computed.keys() == scheduled.keys()
        assert sum(scheduled.values()) == step.total_num_scheduled_tokens
        self.last = set(scheduled)
        for request_id, count in scheduled.items():  # all keys and values of a step are written before any is read
            table, start = self.tables[request_id], computed[request_id]
            assert 0 not in table
            for place in range(start, start + count):
                token = self.tokens[request_id][place]
                if token == UNKNOWN:
                    assert place == len(self.tokens[request_id]) - 1
                    token = self.sampled[request_id]
                    self.num_unknown += 1
                self.memory[table[place // BLOCK_SIZE], place % BLOCK_SIZE] = token
        sampled = []
        for request_id, count in scheduled.items():
            end = computed[request_id] + count
            table = self.tables[request_id]
            held = [self.memory[table[place // BLOCK_SIZE], place % BLOCK_SIZE] for place in range(end)]
            sampled.append([next_token(held)] if end == len(self.tokens[request_id]) else [])
            self.tokens[request_id] += [UNKNOWN] * len(sampled[-1]) if self.overlaps else sampled[-1]
        ids = list(scheduled)
        self.sampled = {request_id: each[0] for request_id, each in zip(ids, sampled, strict=True) if each}
        index = {request_id: place for place, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)


def serve(scheduler, requests, disturb=None):
    """Serve all; the answers and reasons by id. `disturb(step number)` may do something before a step."""
    overlaps = scheduler.scheduler.overlaps and isinstance(scheduler.observers[0], AsyncAuditor)
    worker, answers, reasons, coming, flying = Worker(overlaps), {}, {}, list(requests), deque()
    number = num_preempted = 0
    while coming or flying or scheduler.has_requests() or scheduler.pause_state is not PauseState.UNPAUSED:
        for _ in range(min(2, len(coming))):
            scheduler.add_request(coming.pop(0))
        if disturb:
            disturb(number)
        if scheduler.has_requests() or not flying:
            step = scheduler.schedule()
            num_preempted += len(step.preempted_req_ids)
            flying.append((step, worker.run(step)))
            if overlaps and len(flying) < 2:
                continue
        for client, outputs in scheduler.update_from_output(*flying.popleft()).items():
            assert client == 0
            assert outputs.scheduler_stats is not None
            for output in outputs.outputs:
                answers.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    reasons[output.request_id] = str(output.finish_reason)
        number += 1
        assert number < 2000
    assert scheduler.scheduler.pool.num_used == 0
    assert not worker.tables
    return answers, reasons, num_preempted, worker


def make_requests(seed, count=20):
    rng = random.Random(seed)
    shared = rng.choices(range(3, 99), k=16)
    return [
        Request(
            str(index),
            (shared if index % 2 else []) + rng.choices(range(3, 99), k=rng.randrange(1, 24)),
            SamplingParams(max_tokens=rng.randrange(1, 24), ignore_eos=True, stop_token_ids=[rng.randrange(3, 92)]),
            None,
        )
        for index in range(count)
    ]


def main():
    for name, prefix_caching, budget, overlaps in (
        ("static", False, 64, False),
        ("continuous", False, 64, False),
        ("paged", True, 64, False),
        ("fair", False, 64, False),
        ("chunked", True, 16, False),
        ("async", True, 16, False),
        ("async", False, 16, True),
        ("async", True, 16, True),
        (None, True, 64, True),
    ):
        requests = make_requests(1)
        scheduler = make(name, prefix_caching, budget, overlaps)
        paused_at = 12

        def disturb(number, scheduler=scheduler, paused_at=paused_at):
            if number == 5:
                assert [each.request_id for each in scheduler.finish_requests("3", RequestStatus.FINISHED_ABORTED)] == [
                    "3"
                ]
                assert scheduler.finish_requests("3", RequestStatus.FINISHED_ABORTED) == []
            if number == 8:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
            if number == paused_at:
                assert scheduler.get_num_unfinished_requests() > 0
                scheduler.set_pause_state(PauseState.PAUSED_ALL)
                assert scheduler.get_num_unfinished_requests() == 0
            if number == paused_at + 2:
                scheduler.set_pause_state(PauseState.UNPAUSED)

        answers, reasons, num_preempted, worker = serve(scheduler, requests, disturb)
        others = [request for request in requests if request.request_id != "3"]
        right = sum(answers[request.request_id] == expected(request) for request in others)
        stopped = sum(reason == "stop" for reason in reasons.values())
        print(
            json.dumps(
                {
                    "scheduler": name,
                    "ahead": worker.num_unknown,
                    "right": right,
                    "finished": len(reasons),
                    "stopped": stopped,
                    "preempted": num_preempted,
                    "resumed": worker.num_resumed,
                }
            )
        )

    for overlaps in (False, True):
        report_refused(overlaps)
    for options in (("paged", False, 32), ("chunked", True, 16, True)):
        try:
            make(*options)
        except PluginError as error:
            print(json.dumps({"error": str(error)}))


def report_refused(overlaps):
    scheduler = make(None, True, 16, overlaps)
    grammar = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a+"))
    bad = Request("bad", [5, 6, 7], grammar, None)
    long = Request("long", list(range(3, 3 + MAX_MODEL_LEN)), SamplingParams(max_tokens=1), None)
    _, reasons, _, _ = serve(scheduler, [bad, *make_requests(2, 3), long])
    print(
        json.dumps({"refused": sorted(id for id, reason in reasons.items() if reason == "error"), "all": len(reasons)})
    )


if __name__ == "__main__":
    sys.exit(main())
