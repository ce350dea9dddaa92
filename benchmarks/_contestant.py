"""An engine in a process of its own, as `benchmarks/engine.py` times it: both ends of the conversation.

Engines that want different environments take turns in one run this way, and no engine's threads, allocator or compiled
code disturb another's. All of them read the same Hugging Face folder, but for llama.cpp: it reads MODEL_GGUF in it. A
process is sent a line of JSON for each run, what to serve and how many requests at once, and answers with a line: CPU
time and the tokens.

The other end is `python -m benchmarks._contestant NAME FOLDER`. It runs in the engine's own environment, where neither
minicache nor rich may be installed, so everything but the standard library is imported where it is used.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
LLAMA_CPP: Final = ROOT / ".llama-cpp" / "libdriver.so"
"""What scripts/peers_env.sh makes; the library is compiled from `benchmarks/_llama_cpp.cpp`."""
MODEL_GGUF: Final = "llama.cpp/model.gguf"
NUM_SLOTS: Final = 32
"""The most requests in an engine's batch."""


class Work(NamedTuple):
    """What is to be served: prompts, and for each how many tokens it wants."""

    prompts: list[list[int]]
    num_new: list[int]


class Run(NamedTuple):
    """Work that was served: seconds of CPU of the whole process, and the answers' tokens."""

    cpu: float
    token_ids: list[list[int]]


# This end


class Contestant:
    """A child process that runs one engine, on one thread.

    Args:
        name: of the engine, a key of ENGINES.
        folder: the model's; the process writes there, too.

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

    def serve(self, work: Work, at_once: int) -> Run:
        """Serve the work, so many requests at once, and the next when they are done; and wait for it.

        The engine is made before the clock starts, and kept: a server's is there before the requests, too.

        Raises:
            RuntimeError: the process has died, or an answer has another length than was asked for.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps([work, at_once]), file=self._process.stdin, flush=True)
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
    """Whether what the engine needs has been made."""
    return LLAMA_CPP.exists() if name.startswith("llama") else _python(name).exists()


def check(lengths: list[int], work: Work) -> None:
    """Raise unless every answer has the tokens that were wanted: an engine that generates fewer is not faster."""
    if lengths != work.num_new:
        raise RuntimeError(f"answers of {lengths} tokens, and {work.num_new} were wanted")


def _python(name: str) -> Path:
    """The interpreter of the engine's environment."""
    return VLLM_PYTHON if name.startswith("vllm") else Path(sys.executable)


# The other end: each engine, and how it is asked. What is returned is called on the clock, and returns the answers.

Serve = Callable[[], list[list[int]]]


def minicache(folder: str, work: Work) -> Serve:
    """Our engine with its defaults."""
    return _minicache_serve(folder, work)


def minicache_int8(folder: str, work: Work) -> Serve:
    """Our engine with weights in int8."""
    return _minicache_serve(folder, work, "int8")


def _minicache_serve(folder: str, work: Work, weight_dtype: str | None = None) -> Serve:
    params = import_module("minicache.engine.sampling").SamplingParams
    each = [params(max_tokens=num_new, ignore_eos=True) for num_new in work.num_new]
    llm = _minicache(folder, weight_dtype)
    return lambda: [completion.token_ids for completion in llm.generate(work.prompts, each)]


@cache
def _minicache(folder: str, weight_dtype: str | None) -> Any:
    llm = import_module("minicache.engine.llm").LLM
    return llm(folder, max_num_seqs=NUM_SLOTS, weight_dtype=weight_dtype)


def static(folder: str, work: Work) -> Serve:
    """`transformers`' `generate`: batches padded on the left, one after the other, each to its longest answer."""
    llama, transformers, torch = _llama(folder), import_module("transformers"), import_module("torch")

    def serve() -> list[list[int]]:
        answers: list[list[int]] = []
        for first in range(0, len(work.prompts), NUM_SLOTS):
            prompts, num_new = work.prompts[first : first + NUM_SLOTS], work.num_new[first : first + NUM_SLOTS]
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


@cache
def _llama(folder: str) -> Any:
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def vllm(folder: str, work: Work) -> Serve:
    """The CPU backend of vLLM, its model compiled by torch.compile: its default."""
    llm, params = _vllm(folder), import_module("vllm").SamplingParams
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    each = [params(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False) for num_new in work.num_new]
    return lambda: [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, each, use_tqdm=False)]


@cache
def _vllm(folder: str) -> Any:
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
        dtype="float32",
        block_size=32,
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=8192,  # as our default: all prompts fit in one step
        enable_prefix_caching=False,  # the same prompts come in every round; with it they would not be computed
        async_scheduling=False,  # one thread
        disable_log_stats=True,
    )


def llama_f32(folder: str, work: Work) -> Serve:
    """llama.cpp with weights in float32. Its cache is in float16, its default."""
    return _llama_cpp_serve(folder, work, "F32", 0)


def llama_q8_0(folder: str, work: Work) -> Serve:
    """llama.cpp with weights in 8 bits, and its cache in float16."""
    return _llama_cpp_serve(folder, work, "Q8_0", 7)


def _llama_cpp_serve(folder: str, work: Work, name: str, kind: int) -> Serve:
    """Args: as of an engine; a name for the file with such weights, and its number in llama.h (llama_ftype)."""
    source, path = Path(folder, MODEL_GGUF), Path(folder, MODEL_GGUF).with_name(f"{name}.gguf")
    if not path.exists() and _llama_cpp().convert(bytes(source), bytes(path), kind) != 0:
        raise RuntimeError(f"llama.cpp cannot write {path}")
    longest = max(len(prompt) + num_new for prompt, num_new in zip(*work, strict=True))
    longest = -(-longest // 256) * 256  # as llama.cpp rounds it
    engine = _llama_cpp_engine(path, min(NUM_SLOTS, len(work.prompts)), longest)
    prompts = [token for prompt in work.prompts for token in prompt]
    inputs = [_ints(prompts), _ints(map(len, work.prompts)), _ints(work.num_new)]

    def serve() -> list[list[int]]:
        answers = _ints([0] * sum(work.num_new))
        if _llama_cpp().serve(engine, len(work.prompts), *inputs, answers) != 0:
            raise RuntimeError("llama.cpp has failed: its own message stands above")
        tokens = iter(answers)
        return [list(islice(tokens, num_new)) for num_new in work.num_new]

    return serve


@cache
def _llama_cpp() -> Any:
    library = ctypes.CDLL(str(LLAMA_CPP))
    library.open_engine.restype = ctypes.c_void_p
    return library


@cache
def _llama_cpp_engine(path: Path, num_slots: int, longest: int) -> ctypes.c_void_p:
    engine = ctypes.c_void_p(_llama_cpp().open_engine(bytes(path), num_slots, longest))
    if not engine:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    return engine


def _ints(values: Iterable[int]) -> ctypes.Array[ctypes.c_int]:
    values = list(values)
    return (ctypes.c_int * len(values))(*values)


ENGINES: Final[dict[str, Callable[[str, Work], Serve]]] = {
    "minicache": minicache,
    "vllm": vllm,
    "llama_f32": llama_f32,
    "transformers": static,
    "minicache_int8": minicache_int8,
    "llama_q8_0": llama_q8_0,
}


def main() -> None:
    """Serve what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print, too
    name, folder = sys.argv[1:]
    for line in sys.stdin:
        (prompts, num_new), at_once = json.loads(line)
        parts = [slice(first, first + at_once) for first in range(0, len(prompts), at_once)]
        serves = [ENGINES[name](folder, Work(prompts[part], num_new[part])) for part in parts]
        start = time.process_time()
        token_ids = [answer for serve in serves for answer in serve()]
        print(json.dumps(Run(time.process_time() - start, token_ids)), file=answers, flush=True)


if __name__ == "__main__":
    main()
