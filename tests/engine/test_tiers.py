"""Tiers in an engine: answers are those without tiers, whatever happens to what is stored."""

from __future__ import annotations

import errno
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minicache.engine import LLM, SamplingParams
from minicache.model import MiniGPT, load_minigpt
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import observe
from minicache.serving.http.metrics import Metrics
from minicache.tiers import CPUTier, DiskTier, TierStack, stack
from minicache.tiers import stack as stacks

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * number + position) % 50 for position in range(70)] for number in range(3)]


MODEL = load_minigpt()
CONFIG = MODEL.config


def another() -> MiniGPT:
    """A model of the same shape."""
    torch.manual_seed(1)
    return MiniGPT(CONFIG).eval()


def engine(tiers: Sequence[Any] | None, **options: Any) -> LLM:
    return LLM(MODEL, **{"num_blocks": 40, "kv_tiers": tiers, "max_model_len": 200} | options)


def answers(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


def counts(llm: LLM) -> dict[str, int]:
    assert llm.tiers is not None
    assert llm.tiers.flush(10)
    found: dict[str, int] = {}
    for what, number, _ in llm.tiers.take_counts():
        found[what] = found.get(what, 0) + number
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(engine(None))


@pytest.fixture
def folder(tmp_path: Path, expected: list[list[int]]) -> Path:
    """A folder that an engine has filled."""
    first = engine([f"disk:{tmp_path}"])
    assert answers(first) == expected
    assert counts(first)["stored_bytes"] > 0
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler": "fair"},
        {"scheduler": "async"},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_blocks": 13, "kv_tier_policy": "write_back"},
        {"speculative": "ngram"},
        {"kv_tier_policy": "write_back"},
        {"num_blocks": 13},
        {"num_blocks": 13, "preemption": "swap", "num_host_blocks": 20},
        {"long_prefill_threshold": 16},
    ],
)
def test_another_engine_finds_what_was_stored(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    llm = engine([f"disk:{folder}"], **options)
    assert answers(llm) == expected
    assert counts(llm)["hits"] >= 12
    assert answers(llm) == expected
    assert llm.scheduler.pool.num_used == 0
    llm.scheduler.check()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_a_quantized_cache_comes_back_with_its_scales(tmp_path: Path, kv_cache_dtype: str) -> None:
    alone = answers(engine(None, kv_cache_dtype=kv_cache_dtype))
    first = engine([f"disk:{tmp_path}"], kv_cache_dtype=kv_cache_dtype)
    assert answers(first) == alone
    counts(first)
    again = engine([f"disk:{tmp_path}"], kv_cache_dtype=kv_cache_dtype)
    assert answers(again) == alone
    assert counts(again)["hits"] == 12


def test_bytes_come_back_bit_by_bit() -> None:
    llm = engine(["cpu:1MB"])
    memory: Any = llm.memory
    for layer in range(CONFIG.num_layers):
        memory.storage.k(layer).normal_()
        memory.storage.v(layer).normal_()
    contents = memory.read([3, 5])
    assert len(contents[0]) == memory.storage.token_nbytes * 16
    memory.write([9, 3], contents)
    assert memory.read([9, 3]) == contents


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "swap"])
def test_damaged_files_are_computed_again(folder: Path, expected: list[list[int]], harm: str) -> None:
    files = list(folder.glob("??/*"))
    assert len(files) >= 12
    for each, other in zip(files, files[1:] + files[:1], strict=True):
        data = bytearray(each.read_bytes())
        if harm == "flip":
            data[len(data) // 2] ^= 4
        elif harm == "swap":
            data = bytearray(other.read_bytes())
        each.write_bytes(data[: {"cut": len(data) - 1, "empty": 0}.get(harm, len(data))])
        if harm == "swap":
            break
    llm = engine([f"disk:{folder}"])
    assert answers(llm) == expected
    assert counts(llm)["errors"] >= (0 if harm == "swap" else 3)
    again = engine([f"disk:{folder}"])
    assert answers(again) == expected
    assert counts(again)["hits"] >= 12  # they were stored anew


def test_a_full_disk_can_still_be_read(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tier: DiskTier) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskTier, "_begin", full)
    llm = engine([f"disk:{folder}"])
    assert answers(llm) == expected
    assert counts(llm)["hits"] == 12
    llm.generate([[each + 1 for each in PROMPTS[0]]], PARAMS)
    assert counts(llm)["errors"] == 1


def test_a_folder_that_is_gone_is_computed(folder: Path, expected: list[list[int]]) -> None:
    llm = engine([f"disk:{folder}"])
    shutil.rmtree(folder)
    assert answers(llm) == expected
    found = counts(llm)
    assert "hits" not in found
    assert found["errors"] == 1


@pytest.mark.parametrize(
    "other",
    [{"model": another()}, {"kv_cache_dtype": "int8"}, {"block_size": 8}, {"model": load_minigpt().to(torch.bfloat16)}],
)
def test_blocks_of_another_model_dtype_or_size_are_not_found(folder: Path, other: dict[str, Any]) -> None:
    options = {"model": MODEL, "num_blocks": 80, "max_model_len": 200} | other
    alone, llm = LLM(**options), LLM(**options, kv_tiers=[f"disk:{folder}"])
    assert answers(llm) == answers(alone)
    assert "hits" not in counts(llm)


def test_one_changed_weight_is_another_model(folder: Path) -> None:
    changed = load_minigpt()
    with torch.no_grad():
        changed.embed_tokens.weight[7, 3] += 1e-6
    llm = LLM(changed, num_blocks=40, max_model_len=200, kv_tiers=[f"disk:{folder}"])
    llm.generate(PROMPTS, PARAMS)
    assert "hits" not in counts(llm)


def test_salts_share_nothing_in_tiers_either(folder: Path) -> None:
    llm = engine([f"disk:{folder}"])
    for name, salt in (("a", "tenant"), ("b", None)):
        llm.add_request(PROMPTS[0], PARAMS, request_id=name, cache_salt=salt)
        while llm.has_unfinished:
            llm.step()
        assert counts(llm).get("hits", 0) == (0 if salt else 4)


# Tiers that fail


class Failing(CPUTier):
    """A tier whose calls may fail, or take their time."""

    name = "failing"

    def __init__(self, *broken: str, seconds: float = 0.0) -> None:
        super().__init__(10**9)
        self.broken = set(broken)
        self.seconds = seconds
        self.asked = threading.Event()

    def _meet(self, what: str) -> None:
        self.asked.set()
        if what == "load":
            time.sleep(self.seconds)
        if what in self.broken:
            raise OSError(f"{what} failed")

    def lookup(self, keys: Sequence[bytes]) -> int:
        self._meet("lookup")
        return super().lookup(keys)

    def load(self, keys: Sequence[bytes]) -> list[bytes]:
        self._meet("load")
        return super().load(keys)

    def store(self, key: bytes, record: bytes) -> None:
        self._meet("store")
        super().store(key, record)


@pytest.mark.parametrize("broken", ["lookup", "load", "store"])
def test_a_tier_that_fails_changes_nothing_and_is_left_alone(expected: list[list[int]], broken: str) -> None:
    tier = Failing()
    if broken != "store":
        filling = engine([tier])
        assert answers(filling) == expected
        counts(filling)
    tier.broken.add(broken)
    llm = engine([tier])
    assert answers(llm) == expected
    assert 1 <= counts(llm)["errors"] <= 4  # as many threads may be in it when it fails first
    assert answers(llm) == expected
    assert "errors" not in counts(llm)


class Unsteady(CPUTier):
    """A tier that fails now and then, brings too little, or other bytes than were stored."""

    def __init__(self, seed: int) -> None:
        super().__init__(600_000)
        self.choose = random.Random(seed)

    def _may_fail(self) -> None:
        if self.choose.random() < 0.1:
            raise OSError("no")

    def load(self, keys: Sequence[bytes]) -> list[bytes]:
        self._may_fail()
        records = super().load(keys)[: self.choose.choice([1, 100])]
        if records and self.choose.random() < 0.2:
            place = self.choose.randrange(len(records))
            record = bytearray(records[place])
            record[self.choose.randrange(len(record))] ^= 1
            records[place] = bytes(record[: self.choose.choice([0, 100, len(record)])])
        return records

    def store(self, key: bytes, record: bytes) -> None:
        self._may_fail()
        super().store(key, record)

    def discard(self, keys: Sequence[bytes]) -> None:
        self._may_fail()
        super().discard(keys)


@pytest.mark.parametrize("scheduler", ["chunked", "async"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_whatever_tiers_do_an_auditor_sees_sound_steps_and_answers_are_the_same(
    scheduler: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "PAUSE_SECONDS", 0.0)
    choose = random.Random(f"{scheduler} {policy}")
    auditor = AsyncAuditor() if scheduler == "async" else SharingAuditor()
    options: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 8}
    llm = engine([Unsteady(1), Unsteady(2)], scheduler=scheduler, kv_tier_policy=policy, observers=[auditor], **options)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[choose.randrange(50) for _ in range(choose.randrange(8, 60))] for _ in range(10)]
    expected = [each.token_ids for each in engine(None, **options).generate(prompts, params)]
    for _ in range(6):
        numbers = choose.sample(range(10), 10)
        got = llm.generate([prompts[number] for number in numbers], params)
        assert [each.token_ids for each in got] == [expected[number] for number in numbers]
    found = counts(llm)
    assert found["hits"] > 20
    assert found["errors"] > 5
    assert llm.scheduler.pool.num_used == 0


def test_the_next_tier_stands_in_for_one_that_fails(folder: Path, expected: list[list[int]]) -> None:
    llm = engine([Failing("lookup"), f"disk:{folder}"])
    assert answers(llm) == expected
    assert counts(llm)["hits"] == 12


def test_a_slow_tier_costs_a_bounded_wait(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Failing()
    filling = engine([tier])
    answers(filling)
    counts(filling)
    monkeypatch.setattr(stacks, "LOAD_SECONDS", 0.05)
    tier.seconds = 0.5
    llm = engine([tier])
    assert answers(llm) == expected
    assert counts(llm)["errors"] >= 1


def test_generate_waits_for_a_load_however_many_steps_that_takes(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Failing()
    filling = engine([tier])
    answers(filling)
    counts(filling)
    monkeypatch.setattr("minicache.engine.tiered.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("minicache.engine.llm.IDLE_SECONDS", 0.0)
    tier.seconds = 0.3
    llm = engine([tier])
    assert answers(llm) == expected
    assert counts(llm)["hits"] == 12


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(expected: list[list[int]]) -> None:
    tier = Failing()
    filling = engine([tier])
    answers(filling)
    counts(filling)
    tier.seconds = 0.2
    tier.asked.clear()
    llm = engine([tier])
    llm.add_request(PROMPTS[0], PARAMS, request_id="leaves")
    llm.step()
    assert tier.asked.wait(10)
    assert llm.num_loading == 1
    assert llm.abort_request("leaves")
    assert not llm.has_unfinished
    llm.scheduler.check()
    assert llm.scheduler.pool.num_used == 0
    assert answers(llm) == expected


def test_too_much_to_store_is_dropped(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_STORE_NBYTES", 10)
    llm = engine(["cpu:1MB"])
    assert answers(llm) == expected
    assert counts(llm)["dropped"] > 0


def test_a_faster_tier_gets_what_a_slower_one_had(folder: Path, expected: list[list[int]]) -> None:
    fast = CPUTier(10**9)
    first = engine([fast, f"disk:{folder}"])
    assert answers(first) == expected
    counts(first)
    llm = engine([fast])
    assert answers(llm) == expected
    assert counts(llm)["hits"] == 12


def test_a_failed_step_leaves_the_tiers_sound(folder: Path, expected: list[list[int]]) -> None:
    llm = engine([f"disk:{folder}"], num_blocks=13)
    for prompt in PROMPTS:
        llm.add_request(prompt, PARAMS)
    memory: Any = llm.memory
    make_step, memory.begin = memory.begin, lambda output: 1 / 0
    for _ in range(100):
        try:
            llm.step()
        except ZeroDivisionError:
            break
    memory.begin = make_step
    tokens: dict[Any, list[int]] = {}
    while llm.has_unfinished:
        for chunk in llm.step():
            tokens.setdefault(chunk.request_id, []).append(chunk.token_id or 0)
    assert list(tokens.values()) == expected or sorted(tokens.values()) == sorted(expected)
    assert answers(engine([f"disk:{folder}"])) == expected


USER = """
import sys
import torch
from minicache.engine import LLM, SamplingParams
torch.set_num_threads(1)
llm = LLM(num_blocks=40, kv_tiers=[f"disk:{sys.argv[1]}?max=4MB"], max_model_len=200)
print("serves", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    prompts = [[(number * each + place) % 50 for place in range(70)] for each in range(1, 4)]
    llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
"""


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_sound_blocks(tmp_path: Path) -> None:
    choose, num_hits, alone = random.Random(0), 0, engine(None)
    for number in range(8):
        command = [sys.executable, "-c", USER, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "serves\n"
            time.sleep(0.2 + choose.random() * 0.5)
            process.kill()
        llm = engine([f"disk:{tmp_path}?max=4MB"])
        assert not list(tmp_path.glob("*.making"))
        for step in range(1, 4):
            prompts = [[((number + step) * each + place) % 50 for place in range(70)] for each in range(1, 4)]
            expected = [each.token_ids for each in alone.generate(prompts, PARAMS)]
            assert [each.token_ids for each in llm.generate(prompts, PARAMS)] == expected
        found = counts(llm)
        assert "errors" not in found
        num_hits += found.get("hits", 0)
    assert num_hits > 20


def test_threads_end_with_their_engine() -> None:
    before = threading.active_count()
    tiers = TierStack([CPUTier(100)], bytes(32), 10)
    assert threading.active_count() == before + stack.NUM_LOADERS + 1
    tiers.store(b"hash", bytes(10))
    del tiers
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    assert threading.active_count() == before


def test_metrics_count_by_tier(folder: Path, expected: list[list[int]]) -> None:
    metrics, llm = Metrics("minigpt"), engine(["cpu:10MB", f"disk:{folder}"])
    llm.scheduler = observe(llm.scheduler, metrics.watch(llm.scheduler))
    assert answers(llm) == expected
    assert llm.tiers is not None
    assert llm.tiers.flush(10)
    llm.generate([[1]], PARAMS)  # the next step passes on what the threads have counted
    text, labels = metrics.render().decode(), 'engine="0",model_name="minigpt",tier='
    assert f'minicache:kv_tier_hits_total{{{labels}"disk"}} 12.0' in text
    assert f'minicache:kv_tier_stored_bytes_total{{{labels}"cpu"}}' in text
    assert "minicache:kv_tier_errors_total{" not in text


# Options


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"kv_tiers": ["tape:1"]}, "no tier"),
        ({"kv_tiers": ["cpu:1MB"], "cache": "dense"}, "no blocks to keep"),
        ({"kv_tiers": ["cpu:1MB"], "scheduler": "static"}, "shares no blocks"),
        ({"kv_tiers": ["cpu:1MB"], "kv_tier_policy": "never"}, "policy of tiers"),
    ],
)
def test_engines_that_cannot_have_tiers(options: dict[str, Any], saying: str) -> None:
    with pytest.raises(ValueError, match=saying):
        LLM(MODEL, num_blocks=40, **options)


def test_tiers_are_a_list() -> None:
    with pytest.raises(TypeError, match="write \\['cpu:1MB'\\]"):
        engine("cpu:1MB")
