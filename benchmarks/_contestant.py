"""An engine in a process of its own, as `benchmarks/engine.py` times it: both ends of the conversation.

Engines that want different environments take turns in one run this way, and no engine's threads, allocator or compiled
code disturb another's. All of them read the same Hugging Face folder. A process is sent a line of JSON for each run,
what to serve and with how many batch slots, and answers with a line: wall time, CPU time, and the tokens.

The other end is `python -m benchmarks._contestant NAME FOLDER`. It runs in the engine's own environment, where neither
minicache nor rich may be installed, so everything but the standard library is imported where it is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
"""Of the environment that scripts/vllm_env.sh makes."""


class Work(NamedTuple):
    """What is to be served: prompts, and for each how many tokens it wants."""

    prompts: list[list[int]]
    num_new: list[int]


class Run(NamedTuple):
    """Work that was served: seconds on the wall, seconds of CPU of the whole process, and the answers' tokens."""

    wall: float
    cpu: float
    token_ids: list[list[int]]


# This end


class Contestant:
    """A child process that runs one engine, on one thread.

    Args:
        name: of the engine, a key of ENGINES.
        folder: the model's; the process writes its messages there, too.

    Attributes:
        name: as given.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [_python(name), "-m", "benchmarks._contestant", name, str(folder)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def serve(self, work: Work, max_num_seqs: int) -> Run:
        """Serve the work, and wait for it.

        The engine is made before the clock starts, and kept: a server's is there before the requests, too.

        Raises:
            RuntimeError: the process has died, or an answer has another length than was asked for.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps([work, max_num_seqs]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has died:\n{self._log.read_text(errors='replace')[-4000:]}")
        run = Run(*json.loads(line))
        check([len(token_ids) for token_ids in run.token_ids], work)
        return run

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def is_here(name: str) -> bool:
    """Whether the engine's environment exists."""
    return _python(name).exists()


def check(lengths: list[int], work: Work) -> None:
    """Raise unless every answer has the tokens that were wanted: an engine that generates fewer is not faster."""
    if lengths != work.num_new:
        raise RuntimeError(f"answers of {lengths} tokens, and {work.num_new} were wanted")


def _python(name: str) -> Path:
    """The interpreter of the engine's environment."""
    return VLLM_PYTHON if name.startswith("vllm") else Path(sys.executable)


# The other end: each engine, and how it is asked. What is returned is called on the clock, and returns the answers.

Serve = Callable[[], list[list[int]]]


def minicache(folder: str, work: Work, max_num_seqs: int) -> Serve:
    """Our engine with its defaults."""
    params = import_module("minicache.engine.sampling").SamplingParams
    each = [params(max_tokens=num_new, ignore_eos=True) for num_new in work.num_new]
    llm = _minicache(folder, max_num_seqs)
    return lambda: [completion.token_ids for completion in llm.generate(work.prompts, each)]


@cache
def _minicache(folder: str, max_num_seqs: int) -> Any:
    return import_module("minicache.engine.llm").LLM(folder, max_num_seqs=max_num_seqs)


def static(folder: str, work: Work, max_num_seqs: int) -> Serve:
    """`transformers`' `generate`: batches padded on the left, one after the other, each to its longest answer."""
    llama, transformers, torch = _llama(folder), import_module("transformers"), import_module("torch")

    def serve() -> list[list[int]]:
        answers: list[list[int]] = []
        for first in range(0, len(work.prompts), max_num_seqs):
            prompts, num_new = work.prompts[first : first + max_num_seqs], work.num_new[first : first + max_num_seqs]
            width = max(map(len, prompts))
            token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            config = transformers.GenerationConfig(
                max_new_tokens=max(num_new), do_sample=False, eos_token_id=None, pad_token_id=0
            )
            with torch.inference_mode():
                out = llama.generate(token_ids, attention_mask=mask, generation_config=config)
            answers += [row[width : width + wanted] for row, wanted in zip(out.tolist(), num_new, strict=True)]
        return answers

    return serve


def continuous(folder: str, work: Work, max_num_seqs: int) -> Serve:
    """`transformers`' continuous batching, for answers of one length.

    Its cache and its step are as large as the work, without which it is slower; all prompts are in the batch at once.
    """
    llama, transformers = _llama(folder), import_module("transformers")
    config = transformers.GenerationConfig(
        max_new_tokens=max(work.num_new), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = import_module("transformers.generation").ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=4096, allow_block_sharing=False
    )

    def serve() -> list[list[int]]:
        answers = llama.generate_batch(
            work.prompts,
            generation_config=config,
            continuous_batching_config=sizes,
            persistent_manager=True,  # its cache is kept
            warmup=False,
        )
        return [answer.generated_tokens for answer in answers.values()]

    return serve


@cache
def _llama(folder: str) -> Any:
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def vllm_eager(folder: str, work: Work, max_num_seqs: int) -> Serve:
    """The CPU backend of vLLM, its model run by PyTorch operation by operation."""
    return _vllm_serve(folder, work, max_num_seqs, enforce_eager=True)


def vllm_compiled(folder: str, work: Work, max_num_seqs: int) -> Serve:
    """The CPU backend of vLLM, its model compiled by torch.compile: its default."""
    return _vllm_serve(folder, work, max_num_seqs, enforce_eager=False)


def _vllm_serve(folder: str, work: Work, max_num_seqs: int, *, enforce_eager: bool) -> Serve:
    llm, params = _vllm(folder, max_num_seqs, enforce_eager), import_module("vllm").SamplingParams
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    each = [params(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False) for num_new in work.num_new]
    return lambda: [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, each, use_tqdm=False)]


@cache
def _vllm(folder: str, max_num_seqs: int, enforce_eager: bool) -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, whose CPU time is taken
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": f"{sys.prefix}/cache",  # what torch.compile makes stays in the environment
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    return import_module("vllm").LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=enforce_eager,
        dtype="float32",
        block_size=32,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,  # as our default: all prompts fit in one step
        enable_prefix_caching=False,  # the same prompts come in every round; with it they would not be computed
        async_scheduling=False,  # one thread
        disable_log_stats=True,
    )


ENGINES: Final[dict[str, Callable[[str, Work, int], Serve]]] = {
    "minicache": minicache,
    "static": static,
    "continuous": continuous,
    "vllm_eager": vllm_eager,
    "vllm_compiled": vllm_compiled,
}


def main() -> None:
    """Serve what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print, too
    name, folder = sys.argv[1:]
    for line in sys.stdin:
        (prompts, num_new), max_num_seqs = json.loads(line)
        serve = ENGINES[name](folder, Work(prompts, num_new), max_num_seqs)
        wall, cpu = time.perf_counter(), time.process_time()
        token_ids = serve()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps(Run(wall, cpu, token_ids)), file=answers, flush=True)


if __name__ == "__main__":
    main()
