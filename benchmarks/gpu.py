"""Everything that a GPU can say about this project, in one run: `make gpu`.

Kernel tests on the device; the engine's tokens against the CPU's; the ladder and the other kernels against the
bandwidth of a copy; decode and prefill attention against PyTorch's SDPA, and FlashAttention if it is installed
(`benchmarks/kernels.py` says how those are measured); the engine against `transformers`. About half an hour, most of it
for compiling. The results are in `benchmarks/results/gpu-<name of the GPU>.json`, and pages show them.

Each section runs in a process of its own: one that fails is recorded with its reason, and the others run.

    python -m benchmarks.gpu                    everything
    python -m benchmarks.gpu --section decode   one section; prints what it found and records nothing
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import typer
from rich.console import Console

from benchmarks import kernels
from benchmarks._record import record
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.kernels import runtime
from minicache.model import MiniGPTConfig

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda"
NO_GPU = 2
"""The exit code where there is no GPU."""

MOST_SECONDS = 2400
"""What a section may take."""

TESTS = ("tests/kernels", "tests/phase-04-triton-kernels")
PROMPTS = ("Yesterday I", "She", "The", "Later my sister", "Tomorrow the boy will", "They are")
NUM_TOKENS = 40

SHAPE = MiniGPTConfig(
    vocab_size=32_000,
    hidden_size=1024,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=2816,
    max_seq_len=1024,
)
"""The engine's model: a random Llama of 230 million parameters."""

NUM_REQUESTS, SHORTEST, LONGEST, NUM_NEW, ROUNDS = 32, 50, 100, 100, 3

Found = dict[str, Any]
console = Console()


def main(
    section: Annotated[str | None, typer.Option(help="Only this one: print what it finds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write what the section finds, as JSON.")] = None,
) -> None:
    """Measure everything on this machine's GPU."""
    if section is not None and section not in SECTIONS:
        raise typer.BadParameter(f"sections: {', '.join(SECTIONS)}")
    try:
        about = gpu()
    except (RuntimeError, AssertionError) as error:
        console.print(
            f"No GPU to measure: {error}. It takes an NVIDIA GPU, its driver, and a PyTorch that was built for CUDA "
            f"(this one is {torch.__version__}). Without one, notebooks/colab/gpu.ipynb runs this on a borrowed GPU.",
            soft_wrap=True,
        )
        raise typer.Exit(NO_GPU) from None
    if section is not None:
        found = tried(SECTIONS[section])
        console.print_json(data=found)
        if out is not None:
            out.write_text(json.dumps(found), encoding="utf-8")
        return
    console.print(f"{about['gpu']}, compute capability {about['capability']}, {about['memory_gib']} GiB")
    results: Found = about
    for name in SECTIONS:
        console.rule(name)
        results[name] = in_a_process(name)
        # Written after each section: whatever happens then, this is kept.
        path = record(f"gpu-{slug(about['gpu'])}", results | {"summary": summary(results)})
    for row in summary(results):
        console.print(f"{row['what']:45} {row['found']}", soft_wrap=True)
    console.print(f"\nWritten to {path.relative_to(ROOT)}. Commit it, and the pages show it.")


def gpu() -> Found:
    """Which GPU, and with what software.

    Raises:
        RuntimeError, AssertionError: there is none, or CUDA cannot use it.
    """
    if not runtime.has_gpu():
        raise RuntimeError("PyTorch finds no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device=DEVICE)  # says what is wrong with the driver, if anything is
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "triton": installed("triton"),
        "flash_attn": installed("flash_attn"),
        "transformers": installed("transformers"),
        "dtype": str(kernels.half()).removeprefix("torch."),
    }


def installed(package: str) -> str | None:
    """A package's version; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def slug(name: str) -> str:
    """A GPU's name in a file name: "NVIDIA A100-SXM4-40GB" is nvidia-a100-sxm4-40gb."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# Sections, and what fails in them


def tried(section: Callable[[], Found]) -> Found:
    """What a section finds, or why it does not."""
    try:
        return section()
    except Exception as error:
        console.print_exception()
        return failed(f"{type(error).__name__}: {error}")


def failed(reason: str) -> Found:
    """What is recorded of a section that failed."""
    return {"failed": reason.strip()[:500]}


def in_a_process(name: str) -> Found:
    """What a section finds in a process of its own: an error of CUDA spoils a process for good."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, "--out", str(out)]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=MOST_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return failed(f"took longer than {MOST_SECONDS} s")
        if not out.is_file():
            return failed(f"its process ended with exit code {code}")
        found: Found = json.loads(out.read_text(encoding="utf-8"))
        return found


def kernel_tests() -> Found:
    """The kernels' tests and phase 4's, on the device."""
    import pytest

    with TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        pytest.main(["-q", "-p", "no:cacheprovider", "-o", "timeout=600", f"--junitxml={report}", *TESTS])
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    reasons = {
        f"{case.get('classname')}::{case.get('name')}": (problem.get("message") or "")[:300]
        for case in cases
        for problem in (*case.findall("failure"), *case.findall("error"))
    }
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - num_skipped - len(reasons)
    return {"passed": passed, "failed_tests": len(reasons), "skipped": num_skipped, "reasons": reasons}


def tokens() -> Found:
    """Whether the engine on the GPU gives the tokens of the engine on the CPU, with graphs and without."""
    greedy = SamplingParams(NUM_TOKENS)
    expected = [answer.token_ids for answer in LLM().generate(PROMPTS, greedy)]
    ways: dict[str, Found] = {
        "float32 as on the CPU": {"dtype": torch.float32, "enforce_eager": True},
        "float32 with graphs as on the CPU": {"dtype": torch.float32},
        "16 bits with graphs as on the CPU": {},
    }
    same: dict[str, int] = {}
    for name, options in ways.items():
        answers = LLM(device=DEVICE, num_blocks=256, **options).generate(PROMPTS, greedy)
        same[name] = sum(answer.token_ids == ids for answer, ids in zip(answers, expected, strict=True))
    random = SamplingParams(NUM_TOKENS, temperature=0.9, top_k=50, top_p=0.95, seed=1)
    twice = [
        [answer.token_ids for answer in LLM(device=DEVICE, num_blocks=256).generate(PROMPTS, random)] for _ in range(2)
    ]
    same["sampled, twice with one seed"] = sum(one == other for one, other in zip(*twice, strict=True))
    pool = LLM(device=DEVICE).scheduler.pool
    return {"answers": len(expected), "same": same, "default_cache_tokens": pool.num_blocks * pool.block_size}


def ladder() -> Found:
    """The rungs, against the bandwidth of a copy."""
    from benchmarks.ladder import RUNGS

    bandwidth = kernels.copy_bandwidth()
    work = kernels.goal_workload("cuda", torch.cuda.get_device_properties(0).multi_processor_count)
    times = kernels.measure({rung.name: partial(rung.run, work) for rung in RUNGS})
    rungs = [kernels.rung_result(rung, work, bandwidth, times.get(rung.name)) for rung in RUNGS]
    return {"copy_bandwidth": bandwidth, "shape": kernels.shape(work), "rungs": rungs}


def decode() -> Found:
    """Decode attention at two shapes, against everyone."""
    bandwidth = kernels.copy_bandwidth()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shapes: Found = {}
    for heads in kernels.HEADS:
        gc.collect()
        shapes[f"{heads[0]} over {heads[1]}"] = tried(partial(kernels.decode_result, heads, processors, bandwidth))
    return {"copy_bandwidth": bandwidth, "shapes": shapes}


def others() -> Found:
    """Store and gather against the bandwidth, prefill in FLOP/s."""
    bandwidth = kernels.copy_bandwidth()
    rows = kernels.other_rows(bandwidth, kernels.measure(kernels.other_contestants()))
    return {"copy_bandwidth": bandwidth, "kernels": rows}


def engine() -> Found:
    """Tokens per second of a random Llama: ours with and without graphs, and `transformers`' two ways."""
    from benchmarks import engine as on_cpu

    dtype = kernels.half()
    llama, model = on_cpu.the_same_model(SHAPE)
    llama, model = llama.to(DEVICE, dtype), model.to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (NUM_REQUESTS,), generator=generator).tolist()
    prompts = [torch.randint(SHAPE.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    engines = {
        name: LLM(model, max_num_seqs=NUM_REQUESTS, gpu_memory_utilization=0.4, enforce_eager=eager)
        for name, eager in (("minicache", False), ("minicache, without graphs", True))
    }
    ways: dict[str, Callable[[], list[list[int]]]] = {
        **{name: partial(served, llm, prompts) for name, llm in engines.items()},
        "transformers, static batch": partial(generated, llama, prompts),
        "transformers, continuous batching": partial(generated_continuously, llama, prompts),
    }
    found: Found = {}
    seconds: dict[str, list[float]] = {}
    answers: dict[str, list[list[int]]] = {}
    for name, way in ways.items():
        outcome = tried(partial(first_run, way))
        if "failed" in outcome:
            found[name] = outcome
        else:
            answers[name], seconds[name] = outcome["answers"], []
    for _ in range(ROUNDS):
        for name in seconds:
            torch.cuda.synchronize()
            start = time.perf_counter()
            ways[name]()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    for name, each in seconds.items():
        rates = sorted(sum(map(len, answers[name])) / value for value in each)
        agreeing = sum(ids == other for ids, other in zip(answers[name], answers.get("minicache", []), strict=False))
        found[name] = {
            "tokens_per_second": {"maximum": rates[-1], "median": statistics.median(rates)},
            "answers_as_minicache": agreeing,
        }
    about = f"random Llama, {model.num_parameters():,} parameters, {dtype}, {NUM_REQUESTS} requests of {NUM_NEW} tokens"
    return {"work": about, "ways": found}


def first_run(way: Callable[[], list[list[int]]]) -> Found:
    """A way's answers, from a run in which it also compiles and captures what it needs."""
    return {"answers": way()}


def served(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Our engine's answers."""
    completions = llm.generate(prompts, SamplingParams(NUM_NEW, ignore_eos=True))
    return [completion.token_ids for completion in completions]


def generated(llama: Any, prompts: list[list[int]]) -> list[list[int]]:
    """`transformers`' answers, by one batch that is padded on the left."""
    from benchmarks.engine import transformers

    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=DEVICE)
    config = transformers.GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        rows = llama.generate(token_ids, attention_mask=mask, generation_config=config)
    answers: list[list[int]] = rows[:, width:].tolist()
    return answers


def generated_continuously(llama: Any, prompts: list[list[int]]) -> list[list[int]]:
    """`transformers`' answers, by its continuous batching."""
    from benchmarks.engine import transformers

    config = transformers.GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = transformers.generation.ContinuousBatchingConfig(max_batch_tokens=4096)
    out = llama.generate_batch(
        prompts, generation_config=config, continuous_batching_config=sizes, persistent_manager=True
    )
    return [answer.generated_tokens for answer in out.values()]


SECTIONS: dict[str, Callable[[], Found]] = {
    "tests": kernel_tests,
    "tokens": tokens,
    "ladder": ladder,
    "decode": decode,
    "others": others,
    "engine": engine,
}


# What pages show


def summary(results: Found) -> list[dict[str, str]]:
    """The results in words, a row each: what, and what was found."""
    pairs: list[tuple[str, str]] = []
    for section, in_words in WORDS.items():
        found = results.get(section)
        if found is not None:
            pairs += [(section, _reason(found))] if "failed" in found else in_words(found)
    # In one line, and without what would end a table's cell.
    return [{"what": what, "found": " ".join(found.replace("|", "/").split())} for what, found in pairs]


def tests_in_words(found: Found) -> list[tuple[str, str]]:
    """How many passed."""
    return [
        ("kernel tests", f"{found['passed']} passed, {found['failed_tests']} failed, {found['skipped']} not for a GPU")
    ]


def tokens_in_words(found: Found) -> list[tuple[str, str]]:
    """How many answers are the same."""
    same = {name: f"{count} of {found['answers']} answers" for name, count in found["same"].items()}
    return [(f"same tokens: {name}", count) for name, count in same.items()]


def ladder_in_words(found: Found) -> list[tuple[str, str]]:
    """The yardstick, and each rung."""
    copy = ("copy bandwidth, read and written", f"{found['copy_bandwidth'] / 1e9:,.0f} GB/s")
    return [copy, *((f"ladder: {row['name']}", kernel_in_words(row)) for row in found["rungs"])]


def decode_in_words(found: Found) -> list[tuple[str, str]]:
    """Everyone at each shape."""
    pairs: list[tuple[str, str]] = []
    for heads, shape in found["shapes"].items():
        name = f"decode, {heads} heads"
        if "failed" in shape:
            pairs.append((name, _reason(shape)))
        else:
            pairs += [(f"{name}: {row['name']}", kernel_in_words(row)) for row in shape["contestants"]]
    return pairs


def others_in_words(found: Found) -> list[tuple[str, str]]:
    """Store, gather and prefill."""
    return [(row["name"], kernel_in_words(row)) for row in found["kernels"]]


def engine_in_words(found: Found) -> list[tuple[str, str]]:
    """Tokens per second of each way."""
    return [
        (
            f"engine: {name}",
            _reason(way)
            if "failed" in way
            else f"{way['tokens_per_second']['median']:,.0f} tokens/s, at best "
            f"{way['tokens_per_second']['maximum']:,.0f}",
        )
        for name, way in found["ways"].items()
    ]


def kernel_in_words(row: Found) -> str:
    """A kernel's time, and its share of the bandwidth or its FLOP/s."""
    if row["measurement"] == kernels.NOT_MEASURED:
        return kernels.NOT_MEASURED
    return f"{row['measurement']}, {row['share']}"


def _reason(found: Found) -> str:
    return f"failed: {found['failed']}"


WORDS: dict[str, Callable[[Found], list[tuple[str, str]]]] = {
    "tests": tests_in_words,
    "tokens": tokens_in_words,
    "ladder": ladder_in_words,
    "decode": decode_in_words,
    "others": others_in_words,
    "engine": engine_in_words,
}


if __name__ == "__main__":
    typer.run(main)
