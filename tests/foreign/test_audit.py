"""Small engines of our own, with the names of nano-vllm's and Mini-SGLang's classes: right, and with a bug each."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from minicache.errors import CheckoutError
from minicache.foreign import Limits, Workload, audit, find_adapter, replay
from minicache.foreign.workload import Arrival, random_workload, smaller
from minicache_cli.commands import app

HERE = Path(__file__).parent
SCHEDULER, BLOCKS = "scheduler.py", "block_manager.py"


def planted(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the engine with one bug."""
    shutil.copytree(HERE / "nano", folder / "nano")
    path = folder / "nano/nanovllm/engine" / file
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    return folder / "nano"


def test_a_right_engine_breaks_no_rule() -> None:
    report = audit(find_adapter(HERE / "nano"), seeds=range(150))
    assert report.findings == []
    assert report.num_workloads == 150
    assert report.num_preemptions > 50  # or it would be right for want of trouble


def test_an_option_of_a_fork_is_off(tmp_path: Path) -> None:
    fork = planted(
        tmp_path, SCHEDULER, "config = config\n", "config = config\n        assert config.speculative is None\n"
    )
    assert audit(find_adapter(fork), seeds=range(5)).findings == []


BUGS = {
    "a block freed twice": (
        (
            SCHEDULER,
            "                self.block_manager.release(sequence)\n",
            "                self.block_manager.free_block_ids += sequence.block_table\n"
            "                self.block_manager.release(sequence)\n",
        ),
        ("blocks", "2 times in the free list"),
    ),
    "a block lost": (
        (BLOCKS, "in reversed(sequence.block_table)", "in reversed(sequence.block_table[1:])"),
        ("blocks", "are lost: not free, and no request or cache has them"),
    ),
    "a block given away while it is shared": (
        (BLOCKS, "            if not self.blocks[block_id].ref_count:\n", "            if True:\n"),
        ("blocks", " is free, and request"),
    ),
    "a block given away that is still listed": (
        (BLOCKS, "        sequence.block_table.clear()\n", ""),
        ("blocks", " is free, and request"),
    ),
    "a request lost when it is preempted": (
        (SCHEDULER, "        self.waiting.appendleft(sequence)\n", "        pass\n"),
        ("places", "neither in the batch, nor waiting, nor finished"),
    ),
    "a step of nothing instead of a preemption": (
        (SCHEDULER, "                self.preempt(self.running[-1])\n", "                return [], False\n"),
        ("progress", "3 steps in a row compute nothing"),
    ),
    "a chunk forgotten": (
        (
            SCHEDULER,
            "            if sequence.num_cached_tokens < len(sequence):\n",
            "            if sequence.num_cached_tokens < len(sequence):\n"
            "                sequence.num_cached_tokens = 0\n",
        ),
        ("progress", "no request has got a token in"),
    ),
    "a prefix hit by one block's tokens alone": (
        (
            BLOCKS,
            "sequence.token_ids[: (block + 1) * self.size]",
            "sequence.token_ids[block * self.size : (block + 1) * self.size]",
        ),
        ("contents", "reads position"),
    ),
    "a budget not kept": (
        (
            SCHEDULER,
            "min(budget, len(sequence) - sequence.num_cached_tokens)",
            "len(sequence) - sequence.num_cached_tokens",
        ),
        ("work", "tokens in a step of at most"),
    ),
    "a whole prompt found in the cache": (
        (BLOCKS, "range((len(sequence) - 1) // self.size)", "range(len(sequence) // self.size)"),
        ("work", "is scheduled and computes nothing: 2 of 2 tokens are cached"),
    ),
    "a token too few": (
        (SCHEDULER, "== sequence.max_tokens", ">= sequence.max_tokens - 1"),
        ("tokens", "; alone it gets ["),
    ),
    "too few blocks": (
        (
            BLOCKS,
            "while len(sequence.block_table) * self.size < len(sequence)",
            "while len(sequence.block_table) * self.size < len(sequence) - 1",
        ),
        ("holdings", " blocks that this needs"),
    ),
    "an error": (
        (
            BLOCKS,
            "            block = self.blocks[self.free",
            "            assert len(self.free_block_ids) > 1\n            block = self.blocks[self.free",
        ),
        ("raises", "schedule() raises AssertionError in grow, block_manager.py:"),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    change, (rule, words) = BUGS[bug]
    report = audit(find_adapter(planted(tmp_path, *change)), seeds=range(150))
    found = [each for each in report.findings if each.rule == rule and words in each.message]
    assert found, [f"{each.rule}: {each.message}" for each in report.findings]
    assert report.counts[found[0].kind] >= 1


def test_the_workload_that_is_told_breaks_the_rule_and_none_smaller_does(tmp_path: Path) -> None:
    adapter = find_adapter(planted(tmp_path, *BUGS["a whole prompt found in the cache"][0]))
    (finding,) = audit(adapter, seeds=range(60)).findings
    assert replay(adapter, finding.workload)[1] == finding
    assert [len(each.prompt) for each in finding.workload.arrivals] == [2, 2]
    kinds = [found.kind for each in smaller(finding.workload) if (found := replay(adapter, each)[1])]
    assert finding.kind not in kinds


def test_mini_sglang_by_its_names() -> None:
    report = audit(find_adapter(HERE / "sglang"), seeds=range(20))
    assert report.findings == []
    assert report.num_steps > 200


def test_a_bug_in_mini_sglang(tmp_path: Path) -> None:
    shutil.copytree(HERE / "sglang", tmp_path / "sglang")
    file = tmp_path / "sglang/python/minisgl/scheduler/scheduler.py"
    file.write_text(file.read_text().replace("row[kept : req.cached_len", "row[: req.cached_len"))
    (finding, *_) = audit(find_adapter(tmp_path / "sglang"), seeds=range(20)).findings
    assert (finding.rule, finding.message) == ("blocks", "block 0 is free, and the prefix cache has it")


def test_two_checkouts_are_kept_apart(tmp_path: Path) -> None:
    wrong = find_adapter(planted(tmp_path, *BUGS["a token too few"][0]))
    right = find_adapter(HERE / "nano")
    workload = Workload(Limits(4, 2, 1, 8, 8), (Arrival(0, (1, 2), 2),))
    assert replay(right, workload)[1] is None
    found = replay(wrong, workload)[1]
    assert found is not None
    assert found.rule == "tokens"


def test_workloads_are_the_same_by_seed_and_fit() -> None:
    engine = SimpleNamespace(block_sizes=(2, 3), chunked_prefill=False, can_abort=True)
    workloads = [random_workload(seed, 6, engine) for seed in range(50)]
    assert workloads == [random_workload(seed, 6, engine) for seed in range(50)]
    assert sum(each.aborted_after is not None for workload in workloads for each in workload.arrivals) > 30
    for workload in workloads:
        limits = workload.limits
        assert limits.max_num_batched_tokens >= limits.max_model_len
        assert limits.max_model_len <= limits.num_blocks * limits.block_size
        assert all(1 < len(each.prompt) + each.max_tokens <= limits.max_model_len for each in workload.arrivals)


def test_a_scheduler_of_ours_by_an_adapter_from_a_file() -> None:
    adapter = find_adapter(HERE, str(HERE / "our_adapter.py"))
    report = audit(adapter, seeds=range(150))
    assert report.findings == []
    assert report.num_preemptions > 20


def test_an_abort_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = find_adapter(HERE, str(HERE / "our_adapter.py"))
    monkeypatch.setattr(adapter, "abort", lambda request_id: None)
    (finding,) = audit(adapter, num_requests=2, seeds=range(20)).findings
    assert finding.message == "request 0 has ended, and is still in the batch or waits"
    assert [each.aborted_after for each in finding.workload.arrivals] == [0]


ADAPTER = """
from pathlib import Path
from minicache.foreign import Adapter, Limits, RequestState, State, Work

class Wrong(Adapter):
    name, marker = "mine", "engine.py"
    def __init__(self, checkout: Path) -> None: pass
    def start(self, limits: Limits) -> None: self.limits = limits
    def add(self, request_id, prompt, max_tokens): self.request = RequestState(request_id, prompt, [0], True)
    def schedule(self): return [Work(self.request.request_id, 0, 1)]
    def commit(self, token_ids): return {}
    def state(self): return State([self.request], range(1, self.limits.num_blocks))
"""


def test_an_adapter_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ADAPTER)
    adapter = find_adapter(tmp_path, str(tmp_path / "mine.py"))
    (finding,) = audit(adapter, num_requests=1, seeds=range(3)).findings
    assert finding.rule == "progress"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (None, r"has no nanovllm/engine/scheduler\.py \(nano-vllm\) or python/minisgl"),
        ("mini-sglang", r"has no python/minisgl/scheduler/scheduler\.py \(mini-sglang\): give another folder"),
        ("vllm", r"no engine 'vllm': take nano-vllm, mini-sglang, or the path of an adapter"),
        ("nothing.py", r"there is no nothing\.py: --engine takes the path"),
    ],
)
def test_what_is_no_checkout_is_refused(engine: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match=words):
        find_adapter(tmp_path, engine)


def test_a_folder_that_is_not_there_and_a_checkout_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match="is no folder"):
        find_adapter(tmp_path / "nowhere")
    broken = planted(
        tmp_path, SCHEDULER, "from collections import deque\n", "from collections import queue_of_two_ends\n"
    )
    with pytest.raises(CheckoutError, match=r"cannot be imported: ImportError: cannot import name 'queue_of_two_ends'"):
        find_adapter(broken)
    (tmp_path / "none.py").write_text("")
    with pytest.raises(
        CheckoutError, match=r"none\.py defines 0 subclasses of minicache\.foreign\.Adapter: define one"
    ):
        find_adapter(tmp_path, str(tmp_path / "none.py"))


def test_the_command_tells_a_story(tmp_path: Path) -> None:
    wrong = planted(tmp_path, *BUGS["a whole prompt found in the cache"][0])
    ran = CliRunner().invoke(app, ["audit", str(wrong), "--seeds", "60"])
    assert ran.exit_code == 1
    lines = [line.strip() for line in ran.stdout.splitlines()]
    assert "request 0: prompt 0 0, 1 to generate" in lines or any(
        line.startswith("request 0: prompt") for line in lines
    )
    assert any("step 0: 0 arrives" in line and "0 computes 0–1 in blocks 0" in line for line in lines)
    assert lines[-1] == "request 1 is scheduled and computes nothing: 2 of 2 tokens are cached"


def test_the_command_passes_a_right_engine() -> None:
    ran = CliRunner().invoke(app, ["audit", str(HERE / "nano"), "--requests", "3", "--seeds", "20"])
    assert ran.exit_code == 0
    assert "20 workloads" in ran.stdout
    assert "No rule was broken." in ran.stdout


def test_what_was_recorded_has_a_fix_for_each_bug() -> None:
    file = HERE.parents[1] / "benchmarks/results/other_engines.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))
    for pair in recorded["pairs"]:
        assert pair["replayed_before"] == pair["kind"]
        assert pair["replayed_after"] is None
        assert pair["count_before"] > 0 == pair["count_after"]
    assert recorded["audits"]["nano-vllm-9fa256a"]["findings"] == []
