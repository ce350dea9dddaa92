"""What the course's claims come to on a real model: SmolLM2-135M-Instruct, 30 layers, 9 query and 3 KV heads of 64.

    minicache pull smollm2
    python -m benchmarks.real_model [SUBJECT …]

Without subjects all are measured; with some, the others stay as they are in results/real_model.json. Prompts are
chat prompts of real_prompts.json. Weights and computations are float32. Time is CPU time, one thread: of each time the
least of REPEATS runs.

Keys of results/real_model.json:

- `dense_cache`: kv_bytes, minigpt_kv_bytes (of a token) and their ratio; num_prompt and num_new tokens; without_s,
  with_s (all tokens), their speedup; last_without_ms, last_with_ms (the last token).
- `continuous_batching`: num_requests on batch_slots; num_tokens, shortest and longest answer; `.static` and
  `.continuous`: steps, tokens_per_second; step_ratio and speedup.
- `serving`: `minicache serve --in-process`, asked by OpenAI's client; `.clients_1`, `.clients_16`: requests,
  num_tokens, tokens_per_second, ttft_ms (the mean). The clock is the CPU time of the server's process. Linux only.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from openai import AsyncOpenAI
from rich.progress import track

from benchmarks._record import FACTS, RESULTS, record
from minicache.arithmetic.arithmetic import kv_bytes_per_token
from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.engine.llm import LLM
from minicache.engine.loading import find_model, load_model, load_tokenizer
from minicache.engine.sampling import SamplingParams
from minicache.model import load_minigpt

PROMPTS: Final = json.loads(Path(__file__).with_name("real_prompts.json").read_text(encoding="utf-8"))

REPEATS: Final = 3
NUM_NEW: Final = 64
NUM_REQUESTS: Final = 32
MAX_TOKENS: Final = 128
BATCH_SLOTS: Final = 8
CLIENTS: Final = (1, 16)


def main() -> None:
    torch.set_num_threads(1)
    path = RESULTS / "real_model.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for fact in FACTS:
        found.pop(fact, None)
    for name in sys.argv[1:] or SUBJECTS:
        found[name] = SUBJECTS[name]()
        record("real_model", found)


@cache
def model() -> Any:
    return load_model(find_model("smollm2"), None, None)


@cache
def tokenizer() -> Any:
    return load_tokenizer(find_model("smollm2"))


def engine(**options: Any) -> LLM:
    """An engine with room for all requests of a subject."""
    return LLM(model(), tokenizer=tokenizer(), num_blocks=1024, **options)


def chat(question: str) -> list[int]:
    """The prompt of a question."""
    token_ids: list[int] = tokenizer().apply_chat_template([{"role": "user", "content": question}])
    return token_ids


# --- phase 1 ----------------------------------------------------------------------------------------------------------


def dense_cache() -> dict[str, Any]:
    """One answer, with a dense cache and without.

    Raises:
        RuntimeError: the tokens differ.
    """
    nbytes, mini_nbytes = (
        kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, "float32")
        for config in (model().config, load_minigpt().config)
    )
    config, prompt = model().config, torch.tensor([chat(PROMPTS["questions"][0])])
    longest = prompt.shape[1] + NUM_NEW
    least = {way: [float("inf")] * NUM_NEW for way in ("without", "with")}
    for _ in track(range(REPEATS), description="A dense cache"):
        answers: dict[str, list[int]] = {}
        for way, seconds in least.items():
            cache = KVCache(config.num_layers, 1, config.num_kv_heads, longest, config.head_dim)
            steps = decode(model(), prompt, NUM_NEW, cache=cache if way == "with" else None)
            answers[way] = []
            for index in range(NUM_NEW):
                start = time.process_time()
                answers[way].append(int(next(steps)))
                seconds[index] = min(seconds[index], time.process_time() - start)
        if answers["without"] != answers["with"]:
            raise RuntimeError("the cache has changed the tokens")
    total = {way: sum(seconds) for way, seconds in least.items()}
    return {
        "kv_bytes": nbytes,
        "minigpt_kv_bytes": mini_nbytes,
        "ratio": round(nbytes / mini_nbytes, 1),
        "num_prompt": prompt.shape[1],
        "num_new": NUM_NEW,
        **{f"{way}_s": round(seconds, 2) for way, seconds in total.items()},
        "speedup": round(total["without"] / total["with"], 1),
        **{f"last_{way}_ms": round(1e3 * seconds[-1], 1) for way, seconds in least.items()},
    }


# --- phase 5 ----------------------------------------------------------------------------------------------------------


def continuous_batching() -> dict[str, Any]:
    """Questions that arrive at once, answered by static and by continuous batching.

    Raises:
        RuntimeError: the tokens differ.
    """
    prompts = [chat(question) for question in PROMPTS["questions"][:NUM_REQUESTS]]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    engines = {stage: engine(scheduler=stage, max_num_seqs=BATCH_SLOTS) for stage in ("static", "continuous")}
    least, num_steps = dict.fromkeys(engines, float("inf")), {}
    for _ in track(range(REPEATS), description="Batches"):
        answers = {}
        for stage, llm in engines.items():
            requests = [llm.answers[llm.add_request(prompt, params)].request for prompt in prompts]
            start, num_steps[stage] = time.process_time(), 0
            while llm.has_unfinished:
                llm.step()
                num_steps[stage] += 1
            least[stage] = min(least[stage], time.process_time() - start)
            answers[stage] = [request.output_token_ids for request in requests]
        if answers["static"] != answers["continuous"]:
            raise RuntimeError("the scheduler has changed the tokens")
    lengths = [len(answer) for answer in answers["static"]]
    return {
        "num_requests": len(prompts),
        "batch_slots": BATCH_SLOTS,
        "num_tokens": sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        **{
            stage: {"steps": num_steps[stage], "tokens_per_second": round(sum(lengths) / seconds, 1)}
            for stage, seconds in least.items()
        },
        "step_ratio": round(num_steps["static"] / num_steps["continuous"], 2),
        "speedup": round(least["static"] / least["continuous"], 2),
    }


# --- phase 10 ---------------------------------------------------------------------------------------------------------


def serving() -> dict[str, Any]:
    """Questions over HTTP, asked by one client and by several at once."""
    questions = PROMPTS["questions"]
    runs: dict[int, list[tuple[float, float, int]]] = {number: [] for number in CLIENTS}
    with a_server() as (port, clock):
        asyncio.run(ask(port, clock, questions[: max(CLIENTS)]))  # the first steps of a process are slower
        for _ in track(range(REPEATS), description="Serving"):
            for number, found in runs.items():
                found.append(asyncio.run(ask(port, clock, questions[:number])))
    return {
        f"clients_{number}": {
            "requests": number,
            "num_tokens": found[0][2],
            "tokens_per_second": round(found[0][2] / min(seconds for seconds, _, _ in found), 1),
            "ttft_ms": round(1e3 * min(ttft for _, ttft, _ in found)),
        }
        for number, found in runs.items()
    }


async def ask(port: int, clock: Callable[[], float], questions: Sequence[str]) -> tuple[float, float, int]:
    """Ask all questions at once: seconds until the last token, to the first of each in the mean, and tokens."""
    begun = clock()

    async def one(question: str) -> tuple[float, int]:
        events = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_completion_tokens=NUM_NEW,
            stream=True,
            stream_options={"include_usage": True},
        )
        first, num_tokens = None, 0
        async for event in events:
            if first is None and event.choices and event.choices[0].delta.content:
                first = clock() - begun
            if event.usage is not None:
                num_tokens = event.usage.completion_tokens
        assert first is not None
        return first, num_tokens

    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
        answers = await asyncio.gather(*map(one, questions))
    return clock() - begun, fmean(first for first, _ in answers), sum(number for _, number in answers)


@contextmanager
def a_server() -> Iterator[tuple[int, Callable[[], float]]]:
    """`minicache serve --model smollm2` on a free port, without a prefix cache, and the CPU seconds of its process."""
    options = ["--model=smollm2", "--in-process", "--num-threads=1", "--no-prefix-caching", "--port=0"]
    command = [sys.executable, "-u", "-c", "from minicache_cli import app; app()", "serve", *options]
    with subprocess.Popen([*command, "--log-level=warning"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = next(int(found[1]) for line in process.stdout if (found := re.search(r":(\d+)/v1", line)))
            its = (~process.pid << 3) | 2  # as Linux numbers the clock of a process
            yield port, lambda: time.clock_gettime(its)
        finally:
            process.terminate()


SUBJECTS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    function.__name__: function for function in (dense_cache, continuous_batching, serving)
}

if __name__ == "__main__":
    main()
