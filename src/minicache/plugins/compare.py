"""Compares the answers of our engine and of another engine that our scheduler drives. No phase builds it.

    minicache python -m minicache.plugins.compare transformers              with your files, as far as they are written
    .venv-vllm/bin/python -m minicache.plugins.compare vllm fair chunked    in vLLM's own environment

MiniGPT answers 24 prompts greedily, 40 tokens each, half of them with 64 tokens in common at the beginning. The other
engine has 40 blocks of 16 tokens (vLLM: 26 of 32) for up to 8 requests, so requests are preempted; the auditor of phase
6 watches the scheduler. Our own engine has more memory than it needs.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from minicache.grammar import sample_text
from minicache.grammar.tokenizer import Tokenizer
from minicache.plugins.export import export_minigpt
from minicache.scheduler import SCHEDULERS, Scheduler, SchedulerOutput, has_option
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import Observer

MAX_TOKENS: Final = 40
MAX_NUM_SEQS: Final = 8


class Counter(Observer):
    """Counts steps and preemptions."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_preempted = 0

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Count a step, if it is not empty."""
        self.num_steps += bool(output.scheduled)
        self.num_preempted += len(output.preempted)


class Run(NamedTuple):
    """The result of a run.

    Attributes:
        scheduler: the stage.
        answers: the generated tokens of each prompt.
        num_steps: steps that were scheduled.
        num_preempted: preemptions in them.
    """

    scheduler: str
    answers: list[list[int]]
    num_steps: int
    num_preempted: int


def make_prompts(count: int = 24) -> list[list[int]]:
    """Token ids of sentences in MiniGPT's English, 20 to 150 tokens; every second prompt begins with the same 64."""
    rng, tokenizer = random.Random(3), Tokenizer()

    def text(length: int) -> list[int]:
        words: list[str] = []
        while len(tokens := tokenizer.encode(" ".join(words))) < length:
            words += sample_text(rng)
        return tokens[:length]

    shared = text(64)
    return [(shared if index % 2 else []) + text(rng.randrange(20, 150)) for index in range(count)]


def answer(prompts: list[list[int]]) -> list[list[int]]:
    """Our own engine's answers."""
    from minicache.engine import LLM, SamplingParams

    llm = LLM("minigpt", num_blocks=400, max_num_seqs=MAX_NUM_SEQS)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(completion.token_ids) for completion in llm.generate(prompts, params)]


def answer_in_transformers(folder: Path, prompts: list[list[int]], scheduler: str, counter: Counter) -> list[list[int]]:
    """The answers of transformers' continuous batching, with our scheduler."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from minicache.plugins.transformers import register

    register(scheduler=scheduler, observers=(Auditor(), counter))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    greedy: Any = GenerationConfig  # mypy: it has no types
    outputs = model.generate_batch(
        prompts,
        generation_config=greedy(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            scheduler_type="minicache",
            page_size=16,
            num_blocks=40,
            max_batch_tokens=96 if has_option(scheduler, "long_prefill_threshold") else 256,
            max_requests_per_batch=MAX_NUM_SEQS,
            use_async_batching=False,
        ),
        progress_bar=False,
    )
    for output in outputs.values():
        if output.error:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
    by_prompt = {tuple(output.prompt_ids): list(output.generated_tokens) for output in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def answer_in_vllm(folder: Path, prompts: list[list[int]], scheduler: str, counter: Counter) -> list[list[int]]:
    """The answers of vLLM, with our scheduler. Its core runs in this process, where it can be observed."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    from minicache.plugins.vllm import MinicacheScheduler

    shares = has_option(scheduler, "prefix_caching")

    class Watched(MinicacheScheduler):
        observers = (SharingAuditor() if shares else Auditor(), counter)

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,  # on a CPU a multiple of 32
        num_gpu_blocks_override=27,  # 26, and the null block
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=96 if has_option(scheduler, "long_prefill_threshold") else 512,
        enable_prefix_caching=shares,
        async_scheduling=False,
        scheduler_cls=Watched,
        additional_config={"minicache": {"scheduler": scheduler}},
        disable_log_stats=True,
    )
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


ENGINES: Final[dict[str, Callable[[Path, list[list[int]], str, Counter], list[list[int]]]]] = {
    "transformers": answer_in_transformers,
    "vllm": answer_in_vllm,
}


def run(engine: str, scheduler: str, prompts: list[list[int]]) -> Run:
    """Run the prompts on an engine with one of our schedulers.

    Args:
        engine: "transformers" or "vllm".
        scheduler: `create_scheduler`'s name of a stage.
        prompts: token ids.

    Raises:
        MissingExtraError: the engine is not installed.
        InvariantError: the auditor has seen the scheduler break a rule.
    """
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        answers = ENGINES[engine](export_minigpt(folder), prompts, scheduler, counter)
    return Run(scheduler, answers, counter.num_steps, counter.num_preempted)


def main(arguments: list[str]) -> int:
    """Compare, and print a line for each scheduler. The exit status is 0 if all answers are identical, else 1."""
    engine, schedulers = arguments[0] if arguments else "", arguments[1:] or list(SCHEDULERS)
    if engine not in ENGINES or not set(schedulers) <= set(SCHEDULERS):
        print(f"usage: compare {'|'.join(ENGINES)} [{'|'.join(SCHEDULERS)} …]", file=sys.stderr)
        return 2
    prompts = make_prompts()
    runs = [run(engine, scheduler, prompts) for scheduler in schedulers]
    ours = answer(prompts)  # last: it loads numba, and vLLM cannot start in a process that has
    for scheduler, theirs, num_steps, num_preempted in runs:
        same = sum(a == b for a, b in zip(theirs, ours, strict=True))
        print(
            f"{scheduler}: {same} of {len(ours)} answers identical, {num_steps} steps, {num_preempted} preemptions",
            flush=True,
        )
    return int(any(theirs != ours for _, theirs, _, _ in runs))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
