"""Does vLLM's own scheduler decide the same three steps as ours, on the example of the page that compares them?

It runs vLLM's `Scheduler` without a model, on the three requests of docs/en/reference/one-iteration.md, and prints of
each step what that page's program prints, and the block tables. vLLM's block 0 is a null block, so its numbers are
larger by one. It needs the environment that scripts/peers_env.sh vllm makes:

    scripts/peers_env.sh vllm && .venv-vllm/bin/python -m benchmarks.vllm_schedule
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPTS = {"A": [1, 2, 3, 4], "B": list(range(10, 30)), "C": [1, 2, 3, 4, 5, 6]}
ARRIVALS = {0: ["A", "B"], 1: ["C"]}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}


def make_scheduler(folder: Path) -> Any:
    """Make vLLM's scheduler over the same pool and budget; the model's configuration is read, and no model made."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    num_blocks = NUM_BLOCKS + 1  # and the null block
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, is_encoder_decoder=False
        ),
        cache_config=cache,
    )
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        structured_output_manager=StructuredOutputManager(config),
    )


def main() -> None:
    """Three steps, as the page's program takes them: each request that has computed all of its tokens gets token 7."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(Path(folder))
    for iteration in range(3):
        for name in ARRIVALS.get(iteration, []):
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            scheduler.add_request(Request(name, PROMPTS[name], params, None, block_hasher=hasher))
        output = scheduler.schedule()
        tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        print(output.num_scheduled_tokens, sorted(output.preempted_req_ids), num_free, end="  ")
        print({name: [block.block_id for block in tables[name]] for name in output.num_scheduled_tokens})
        names = list(output.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        tokens = [[7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        order = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, order, sampled_token_ids=tokens))


if __name__ == "__main__":
    main()
