"""What the course's claims come to on a real model: SmolLM2-135M-Instruct, 30 layers, 9 query and 3 KV heads of 64.

    minicache pull smollm2
    python -m benchmarks.real_model [SUBJECT …]

Without subjects all are measured; with some, the others stay as they are in results/real_model.json. Prompts are
chat prompts: of real_prompts.json, of this repository's functions, and of the openings of the phases' pages. Weights
and computations are float32. Time is CPU time of this process, one thread: of each time the least of REPEATS runs.

Keys of results/real_model.json:

- `dense_cache`: kv_bytes, minigpt_kv_bytes (of a token) and their ratio; num_prompt and num_new tokens; without_s,
  with_s (all tokens), their speedup; last_without_ms, last_with_ms (the last token).
- `continuous_batching`: num_requests on batch_slots; num_tokens, shortest and longest answer; `.static` and
  `.continuous`: steps, tokens_per_second; step_ratio and speedup.
- `serving`: `minicache serve --in-process`, asked by OpenAI's client; `.clients_1`, `.clients_16`: requests,
  num_tokens, tokens_per_second, ttft_ms (the mean). The clock is the CPU time of the server's process. Linux only.
- `prefix_sharing`: `.system_prompt`: 16 questions one after the other, each behind the same system prompt of
  system_tokens; `.conversation`: turns, whose prompts are all that was said before. Of each: prompt_tokens,
  cached_tokens, share; seconds (of all prompts' steps) without the cache and with it, their ratio; and
  last_without_ms, last_with_ms (of the last prompt alone).
- `chunked_prefill`: num_decoding requests are in decode when a prompt of prompt_tokens arrives. `.whole`, `.chunked`:
  longest_gap_ms (the longest step from then on, in which each request in decode gets its next token), ttft_ms (of the
  long prompt). before_ms: a step before it arrives. gap_ratio, ttft_ratio.
- `speculation`: n-gram drafts of NUM_DRAFTS tokens, by kind of text. acceptance; share_of_steps that had draft tokens;
  tokens_per_step, of one request; `.alone`, `.together`: requests, ms a decoded token plain and ngram, speedup.
- `kv_quantization`: of each dtype: equal_answers of num_answers of num_tokens; by text (num_tokens, perplexity with a
  float32 cache), perplexity, loss (how much the perplexity is higher, in percent), same_next (share of the positions
  whose likeliest next token is float32's).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from openai import AsyncOpenAI
from rich.progress import track

from benchmarks._record import FACTS, RESULTS, record
from minicache import arithmetic, memory
from minicache.arithmetic.arithmetic import kv_bytes_per_token
from minicache.cache.dense import KVCache
from minicache.cache.quantized import KV_CACHE_DTYPES
from minicache.engine.decoding import decode
from minicache.engine.drafting import SpeculativeConfig
from minicache.engine.llm import LLM
from minicache.engine.loading import find_model, load_model, load_tokenizer
from minicache.engine.sampling import SamplingParams
from minicache.kernels import quantize
from minicache.model import load_minigpt
from minicache_course import table

ROOT: Final = Path(__file__).resolve().parents[1]
PROMPTS: Final = json.loads(Path(__file__).with_name("real_prompts.json").read_text(encoding="utf-8"))

REPEATS: Final = 3
NUM_NEW: Final = 64
NUM_REQUESTS: Final = 32
MAX_TOKENS: Final = 128
BATCH_SLOTS: Final = 8
CLIENTS: Final = (1, 16)
NUM_DRAFTS: Final = 4
NUM_DECODING: Final = 8
LONG: Final = 1500
CHUNK: Final = 128
NUM_TEXT: Final = 2000
TEXTS: Final = {
    "prose": "docs/en/phase-07-fairness/theory/04-groups-and-the-bound.md",
    "code": "src/minicache/scheduler/base.py",
}


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


def chat(*said: str, system: str | None = None) -> list[int]:
    """The prompt of a conversation: question, answer, question …, behind a system prompt."""
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    first = [] if system is None else [{"role": "system", "content": system}]
    token_ids: list[int] = tokenizer().apply_chat_template([*first, *messages])
    return token_ids


def text(kind: str) -> list[int]:
    """NUM_TEXT tokens of a text of this repository."""
    token_ids: list[int] = tokenizer().encode((ROOT / TEXTS[kind]).read_text(encoding="utf-8"))
    return token_ids[:NUM_TEXT]


def step(llm: LLM) -> float:
    """CPU seconds of a step."""
    start = time.process_time()
    llm.step()
    return time.process_time() - start


# --- phase 8 ----------------------------------------------------------------------------------------------------------


def prefix_sharing() -> dict[str, Any]:
    """Prompts with much in common, with the prefix cache and without."""
    system = PROMPTS["system"]
    desk = [chat(question, system=system) for question in PROMPTS["desk"]]
    shared = min(next(i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b) for pair in pairwise(desk))
    said: list[str] = []
    turns: list[list[int]] = []
    llm = engine()
    for question in PROMPTS["conversation"]:
        turns.append(chat(*said, question))
        [answer] = llm.generate([turns[-1]], SamplingParams(max_tokens=NUM_NEW))
        said += [question, answer.text]
    return {
        "system_prompt": {"num_prompts": len(desk), "system_tokens": shared, **with_and_without(desk, 1)},
        "conversation": {"num_prompts": len(turns), **with_and_without(turns, NUM_NEW)},
    }


def with_and_without(prompts: Sequence[list[int]], num_new: int) -> dict[str, Any]:
    """Prompts one after the other, each answered before the next; the steps that compute prompts are timed."""
    ways = {"without": False, "with": True}
    least = {way: [float("inf")] * len(prompts) for way in ways}
    cached = {}
    for _ in track(range(REPEATS), description="Prefix cache"):
        for way, prefix_caching in ways.items():
            llm = engine(prefix_caching=prefix_caching)
            cached[way] = 0
            for index, prompt in enumerate(prompts):
                name = llm.add_request(prompt, SamplingParams(max_tokens=num_new))
                request = llm.answers[name].request
                least[way][index] = min(least[way][index], step(llm))
                while llm.has_unfinished:
                    llm.step()
                cached[way] += request.num_cached_tokens
    total, seconds = sum(map(len, prompts)), {way: sum(each) for way, each in least.items()}
    return {
        "prompt_tokens": total,
        "cached_tokens": cached["with"],
        "share": round(cached["with"] / total, 3),
        **{way: round(each, 2) for way, each in seconds.items()},
        "ratio": round(seconds["without"] / seconds["with"], 2),
        **{f"last_{way}_ms": round(1e3 * each[-1]) for way, each in least.items()},
    }


# --- phase 9 ----------------------------------------------------------------------------------------------------------


def chunked_prefill() -> dict[str, Any]:
    """A long prompt among requests in decode, whole and in chunks of CHUNK."""
    running = [chat(question) for question in PROMPTS["questions"][:NUM_DECODING]]
    long_prompt = text("prose")[:LONG]
    engines = {"whole": engine(), "chunked": engine(long_prefill_threshold=CHUNK)}
    gaps: dict[str, list[float]] = {way: [] for way in engines}
    firsts: dict[str, list[float]] = {way: [] for way in engines}
    before: list[float] = []
    for _ in track(range(REPEATS), description="A long prompt"):
        for way, llm in engines.items():
            for prompt in running:
                llm.add_request(prompt, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))
            llm.step()
            before += [step(llm) for _ in range(4)]
            request = llm.answers[llm.add_request(long_prompt, SamplingParams(max_tokens=1))].request
            steps = []
            while not request.output_token_ids:
                steps.append(step(llm))
            gaps[way].append(max(steps))
            firsts[way].append(sum(steps))
            for name in list(llm.answers):
                llm.abort_request(name)
    ways = {
        way: {"longest_gap_ms": round(1e3 * min(gaps[way])), "ttft_ms": round(1e3 * min(firsts[way]))}
        for way in engines
    }
    return {
        "num_decoding": NUM_DECODING,
        "prompt_tokens": LONG,
        "chunk": CHUNK,
        "before_ms": round(1e3 * min(before)),
        **ways,
        "gap_ratio": round(min(gaps["whole"]) / min(gaps["chunked"]), 1),
        "ttft_ratio": round(min(firsts["chunked"]) / min(firsts["whole"]), 2),
    }


KINDS: Final = ("chat", "code", "translation", "quotes")
TO_EDIT: Final = (
    arithmetic.weight_bytes,
    arithmetic.cache_bytes_per_token,
    arithmetic.cache_capacity_tokens,
    memory.blocks_for,
    quantize.quantize_rows,
    quantize.dequantize_rows,
    quantize.nearest,
    table.load_course,
)
OPENINGS: Final = (0, 2, 3, 4, 5, 6, 7, 8)


def to_answer(kind: str) -> list[list[int]]:
    """Eight prompts: questions; functions to edit; texts to translate, or to quote from."""
    if kind == "chat":
        return [chat(question) for question in PROMPTS["questions"][::5]]
    if kind == "code":
        ask = "Add a comment above the return statement of this Python function. Write the whole function.\n\n{}"
        return [chat(ask.format(f"```python\n{inspect.getsource(function)}```")) for function in TO_EDIT]
    ask = "Translate this text into Spanish" if kind == "translation" else "Quote the two main sentences of this text"
    return [chat(f"{ask}:\n\n{opening(phase)}") for phase in OPENINGS]


def opening(phase: int) -> str:
    """What a phase's page begins with, up to its first picture or heading."""
    [page] = (ROOT / "docs" / "en").glob(f"phase-{phase:02}-*/index.md")
    return re.split(r"\n(?=\{\$|#)", page.read_text(encoding="utf-8").partition("\n")[2])[0].strip()


def speculation() -> dict[str, Any]:
    """N-gram drafts on each kind of text, for single requests and for eight at once."""
    config = SpeculativeConfig("ngram", NUM_DRAFTS)
    ways = {"plain": engine(), "ngram": engine(speculative=config)}
    found: dict[str, Any] = {"num_drafts": NUM_DRAFTS, "num_new_tokens": NUM_NEW}
    for kind in KINDS:
        prompts = to_answer(kind)
        before = counted(ways["ngram"])
        together = compared(ways, [prompts], f"{kind}, together")
        after = counted(ways["ngram"])
        drafts, drafted, accepted = ((now - then) // REPEATS for now, then in zip(after, before, strict=True))
        num_tokens = together["tokens"]
        num_own = num_tokens - accepted
        found[kind] = {
            "num_prompts": len(prompts),
            "num_tokens": num_tokens,
            "acceptance": round(accepted / drafted, 3),
            "share_of_steps": round(drafts / num_own, 3),
            "tokens_per_step": round(num_tokens / num_own, 2),
            "alone": compared(ways, [[prompt] for prompt in prompts[::3]], f"{kind}, alone"),
            "together": together,
        }
    return found


def counted(llm: LLM) -> tuple[int, int, int]:
    """How often a request has had draft tokens so far, how many, and how many were accepted."""
    scheduler: Any = llm.scheduler
    stats = scheduler.draft_stats
    return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens


def compared(engines: dict[str, LLM], batches: Sequence[list[list[int]]], what: str) -> dict[str, Any]:
    """Batches one after the other, both ways in turns; the steps after those of the prompts are timed.

    Raises:
        RuntimeError: the tokens of the ways differ.
    """
    least = {way: [float("inf")] * len(batches) for way in engines}
    num_tokens = 0
    for _ in track(range(REPEATS), description=what):
        for index, batch in enumerate(batches):
            answers = {}
            for way, llm in engines.items():
                names = [llm.add_request(prompt, SamplingParams(max_tokens=NUM_NEW)) for prompt in batch]
                requests = [llm.answers[name].request for name in names]
                llm.step()  # the prompts
                start = time.process_time()
                while llm.has_unfinished:
                    llm.step()
                least[way][index] = min(least[way][index], time.process_time() - start)
                answers[way] = [request.output_token_ids for request in requests]
            if answers["plain"] != answers["ngram"]:
                raise RuntimeError(f"{what}: draft tokens have changed the answers")
            num_tokens += sum(len(answer) - 1 for answer in answers["plain"])
    num_tokens //= REPEATS
    seconds = {way: sum(each) for way, each in least.items()}
    return {
        "requests": len(batches[0]),
        "tokens": num_tokens,
        **{f"{way}_ms": round(1e3 * each / num_tokens, 2) for way, each in seconds.items()},
        "speedup": round(seconds["plain"] / seconds["ngram"], 2),
    }


# --- phase 4 ----------------------------------------------------------------------------------------------------------


def kv_quantization() -> dict[str, Any]:
    """Greedy answers and perplexity with a cache of one byte a number, next to float32's."""
    prompts, params = [chat(question) for question in PROMPTS["questions"]], SamplingParams(max_tokens=NUM_NEW)
    dtypes = {"float32": None, **{name: name for name in KV_CACHE_DTYPES}}
    answers: dict[str, list[list[int]]] = {}
    nats: dict[str, dict[str, torch.Tensor]] = {}
    likeliest: dict[str, dict[str, torch.Tensor]] = {}
    for name, dtype in track(dtypes.items(), description="Quantised caches"):
        llm = engine(kv_cache_dtype=dtype)
        answers[name] = [answer.token_ids for answer in llm.generate(prompts, params)]
        nats[name], likeliest[name] = {}, {}
        for kind in TEXTS:
            nats[name][kind], likeliest[name][kind] = read(llm, text(kind))
    found: dict[str, Any] = {
        "num_answers": len(prompts),
        "num_tokens": NUM_NEW,
        "texts": {
            kind: {"num_tokens": len(text(kind)), "perplexity": round(nats["float32"][kind].exp().item(), 3)}
            for kind in TEXTS
        },
    }
    for name in KV_CACHE_DTYPES:
        found[name] = {
            "equal_answers": sum(a == b for a, b in zip(answers[name], answers["float32"], strict=True)),
            **{
                kind: {
                    "perplexity": round(nats[name][kind].exp().item(), 3),
                    "loss": round(100 * (nats[name][kind] - nats["float32"][kind]).expm1().item(), 2),
                    "same_next": round(likeliest[name][kind].eq(likeliest["float32"][kind]).float().mean().item(), 4),
                }
                for kind in TEXTS
            },
        }
    return found


@torch.inference_mode()
def read(llm: LLM, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean nats of a text's tokens, given those before, over an engine's cache; and the likeliest at each place."""
    name = llm.add_request(token_ids, SamplingParams(max_tokens=1))
    blocks = llm.memory.make_step(llm.scheduler.schedule())
    logits = model()(torch.tensor([token_ids]), blocks)[0, :-1].double()
    llm.abort_request(name)
    return torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[1:])), logits.argmax(-1)


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
    function.__name__: function
    for function in (
        dense_cache,
        continuous_batching,
        serving,
        prefix_sharing,
        chunked_prefill,
        speculation,
        kv_quantization,
    )
}

if __name__ == "__main__":
    main()
