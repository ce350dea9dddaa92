"""What a tier is worth, on SmolLM2-135M-Instruct: 20 conversations are continued after a restart; and is it faster to
load a prefix than to compute it, from each tier, at several lengths?

A process serves the conversations' first turns, with a folder as tier, and is killed. Then new processes serve the
second turns, one after the other: with the folder, and without any tier. In each the first token of each is timed. And
the folder's reads are slowed down to some bandwidths: where loading takes as long as computing, is the break-even of
`docs/en/today/02-tiers.md`, the rate of computing times the bytes of a token.

Then, in one process, prompts of one token more than some blocks are computed, and loaded from each tier in turn.

    minicache pull smollm2                                  # and Debian's redis-server
    python -m benchmarks.kv_tiers

Times are of the wall clock, of one thread for the model; of each conversation the least of ROUNDS processes, of each
length the least of TURNS. The files are in the machine's page cache, so the disk itself is not measured, and Redis
listens on a Unix socket.

Keys of results/kv_tiers.json:

- conversations, prompt_tokens (of all second turns), token_nbytes, block_size, stored_nbytes (of the first turns).
- `.without`, `.with`: computed_tokens, of prompts; ttft_ms, the median. ratio: of the medians. equal: whether all
  answers are the same.
- wait_ms: of `with`, until the step begins that gives the first token: its blocks are in CPU memory then. The median.
  load_gb_per_s: the blocks' bytes over that time.
- tokens_per_second: computed without a tier; break_even_gb_per_s.
- by_bandwidth: times_break_even, ttft_ms (the median of SLOW conversations), ratio to that without a tier.
- by_length: tokens, nbytes; computed_ms, cpu_ms, disk_ms, redis_ms: until the first token, computed or loaded.
  token_ms: the same if the prefix cache has all but the last token. gb_per_s: by tier, the bytes of the longest over
  its time less token_ms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.tiers.contract import Key
from minicache.tiers.cpu import CPUTier
from minicache.tiers.disk import DiskTier
from minicache.tiers.redis import RedisTier

NUM_CONVERSATIONS: Final = 20
NUM_TOKENS: Final = 1000
"""Of a first turn."""
OWN: Final = 67
"""By how many tokens of the text each conversation begins later than the one before."""
ANSWER: Final = 24
ROUNDS: Final = 3
SLOW: Final = 5
TIMES: Final = (0.5, 1.0, 2.0, 4.0)
LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
TURNS: Final = 5
MAX_NBYTES: Final = 4 * 10**9
TEXT: Final = Path(__file__).parent / "texts" / "english.txt"
QUESTION: Final = " And what does that mean for those who read it today? In one sentence:"


class SlowDisk(DiskTier):
    """A folder that delivers so many bytes a second."""

    def __init__(self, folder: Path, bandwidth: float) -> None:
        super().__init__(folder, MAX_NBYTES)
        self.bandwidth = bandwidth

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """As `DiskTier.load`."""
        records = super().load(keys)
        time.sleep(sum(map(len, records)) / self.bandwidth)
        return records


def main() -> None:
    if len(sys.argv) > 1:
        options = json.loads(sys.argv[1])
        print(json.dumps(serve(options) if options else lengths()), flush=True)
        os._exit(0)  # as if it were killed
    with TemporaryDirectory() as folder:
        first = run(folder=folder, num=NUM_CONVERSATIONS)
        more = {"num": NUM_CONVERSATIONS, "answers": first["answers"]}
        rounds = [(run(**more), run(**more, folder=folder, keep=True)) for _ in track(range(ROUNDS))]
        without, with_tier = (best([pair[side] for pair in rounds]) for side in (0, 1))
        rate = without["computed_tokens"] / (sum(without["ttft"]) + 1e-9)
        break_even = rate * first["token_nbytes"]
        slow = {}
        for times in TIMES:
            slow[times] = run(**(more | {"num": SLOW}), folder=folder, keep=True, bandwidth=times * break_even)
    ttft = {name: 1000 * median(each["ttft"]) for name, each in (("without", without), ("with", with_tier))}
    plain = 1000 * median(without["ttft"][:SLOW])
    record(
        "kv_tiers",
        {
            "conversations": NUM_CONVERSATIONS,
            "prompt_tokens": without["prompt_tokens"],
            "token_nbytes": first["token_nbytes"],
            "block_size": first["block_size"],
            "stored_nbytes": first["stored_nbytes"],
            "without": {"computed_tokens": without["computed_tokens"], "ttft_ms": ttft["without"]},
            "with": {"computed_tokens": with_tier["computed_tokens"], "ttft_ms": ttft["with"]},
            "ratio": ttft["without"] / ttft["with"],
            "equal": without["answers"] == with_tier["answers"],
            "wait_ms": 1000 * median(with_tier["wait"]),
            "load_gb_per_s": with_tier["loaded_nbytes"] / sum(with_tier["wait"]) / 1e9,
            "tokens_per_second": rate,
            "break_even_gb_per_s": break_even / 1e9,
            "by_bandwidth": [
                {"times_break_even": times, "ttft_ms": (found := 1000 * median(each["ttft"])), "ratio": found / plain}
                for times, each in slow.items()
            ],
        }
        | run(),
    )


def run(**options: Any) -> dict[str, Any]:
    """What `serve` finds in a process of its own; without options, `lengths`."""
    command = [sys.executable, "-m", "benchmarks.kv_tiers", json.dumps(options)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def best(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first round, with each conversation's least times of all."""
    least = {name: [min(times) for times in zip(*(each[name] for each in rounds), strict=True)] for name in LEAST}
    return rounds[0] | least


LEAST: Final = ("ttft", "wait")


def serve(options: dict[str, Any]) -> dict[str, Any]:
    """Serve the first turns; or, given `answers` to them, the second ones.

    Args:
        options: num, of conversations; folder, of a tier, if there is one; keep, whether nothing is stored in it;
            bandwidth, of its reads; answers.
    """
    torch.set_num_threads(1)
    folder, bandwidth = options.get("folder"), options.get("bandwidth")
    tiers: list[Any] | None = None
    if folder:
        tiers = [SlowDisk(Path(folder), bandwidth or 1e12)]
    policy = "write_back" if options.get("keep") else "write_through"  # nothing is evicted, so nothing is written
    llm = LLM("smollm2", prefix_caching=True, kv_tiers=tiers, kv_tier_policy=policy, num_blocks=2000)
    assert llm.tokenizer is not None
    assert llm.storage is not None
    text, question = (llm.tokenizer.encode(each) for each in (TEXT.read_text(encoding="utf-8"), QUESTION))
    llm.generate([text[-300:]], SamplingParams(max_tokens=4))  # memory is touched, kernels are there
    found: dict[str, Any] = {"ttft": [], "wait": [], "answers": [], "prompt_tokens": 0, "computed_tokens": 0}
    for number in range(options["num"]):
        prompt = text[number * OWN :][:NUM_TOKENS]
        if "answers" in options:
            prompt = [*prompt, *options["answers"][number], *question]
        start = time.perf_counter()
        name = llm.add_request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
        request = llm.answers[name].request
        tokens: list[int] = []
        while llm.has_unfinished:
            before = time.perf_counter()
            for chunk in llm.step():
                if chunk.token_id is not None:
                    tokens.append(chunk.token_id)
                    if len(tokens) == 1:
                        found["wait"].append(before - start)
                        found["ttft"].append(time.perf_counter() - start)
        found["answers"].append(tokens)
        found["prompt_tokens"] += len(prompt)
        found["computed_tokens"] += len(prompt) - request.num_cached_tokens
    counts: dict[str, int] = {}
    if llm.tiers is not None:
        llm.tiers.flush(60)
        counts = {what: number for what, number, _ in llm.tiers.take_counts()}
    sizes = {"token_nbytes": llm.storage.token_nbytes, "block_size": llm.storage.pool.block_size}
    return found | sizes | {f"{what}_nbytes": counts.get(f"{what}_bytes", 0) for what in ("loaded", "stored")}


def lengths() -> dict[str, Any]:
    """How long the first token takes, computed and loaded, by the length of the prefix."""
    torch.set_num_threads(1)
    num_blocks = 2 * max(LENGTHS) // 16
    computing = LLM("smollm2", prefix_caching=True, num_blocks=num_blocks)
    assert computing.tokenizer is not None
    assert computing.storage is not None
    token_nbytes = computing.storage.token_nbytes
    text = computing.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    with TemporaryDirectory(dir="/tmp") as folder, redis_server(Path(folder)) as url:
        stores = {
            "cpu": CPUTier(MAX_NBYTES),
            "disk": DiskTier(Path(folder) / "kv", MAX_NBYTES),
            "redis": RedisTier(url),
        }
        filling = LLM("smollm2", kv_tiers=list(stores.values()), num_blocks=num_blocks)
        first_token(filling, text[: max(LENGTHS) + 1])
        assert filling.tiers is not None
        assert filling.tiers.flush(60)
        loading = {
            name: LLM("smollm2", kv_tiers=[tier], kv_tier_policy="write_back", num_blocks=num_blocks)
            for name, tier in stores.items()
        }
        rows: list[dict[str, Any]] = []
        for length in LENGTHS:
            prompt, times = text[: length + 1], dict[str, list[float]]()
            for _ in range(TURNS):
                for name, llm in (("computed", computing), *loading.items()):
                    llm.scheduler.recover()  # empties the prefix cache
                    times.setdefault(name, []).append(first_token(llm, prompt))
                times.setdefault("token", []).append(first_token(computing, prompt))
            nbytes = length * token_nbytes
            row = {"tokens": length, "nbytes": nbytes}
            rows.append(row | {f"{name}_ms": 1000 * min(each) for name, each in times.items()})
    long = rows[-1]
    bandwidths = {name: long["nbytes"] / (long[f"{name}_ms"] - long["token_ms"]) / 1e6 for name in stores}
    return {"by_length": rows, "gb_per_s": bandwidths}


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds until a request has its token."""
    start = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1))
    return time.perf_counter() - start


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis server on a Unix socket: its URL."""
    command = [
        "redis-server",
        "--port",
        "0",
        "--unixsocket",
        f"{folder}/redis.sock",
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not (folder / "redis.sock").exists():
                time.sleep(0.05)
            yield f"unix://{folder}/redis.sock"
        finally:
            server.kill()


if __name__ == "__main__":
    main()
