"""`minicache demo`, small: all ways decode, plots are written, a cache that lies is found out."""

import heapq
import io
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from tests.chatting import SAID, write_folder
from typer.testing import CliRunner

from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache
from minicache.engine import llm
from minicache.errors import MinicacheError
from minicache.grammar import Tokenizer
from minicache.memory.blocks import blocks_for
from minicache.model.tokenizer import folder_tokenizer
from minicache.trace import TraceStep
from minicache_cli.demo import NUM_TIMED, PROMPTS, app, burst, memory, questions, speed


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Demo(NamedTuple):
    """One run of the demo: what it printed, its plots, and the schedulers of the engines that it made."""

    output: str
    out: Path
    schedulers: list[str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    schedulers, num_threads = [], torch.get_num_threads()

    class Watched(llm.LLM):
        def __init__(self, *args, **options) -> None:
            schedulers.append(options.get("scheduler"))
            super().__init__(*args, **options)

    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "LLM", Watched)
        patch.setenv("HF_HOME", str(out))  # where no model is
        result = CliRunner().invoke(app, ["--out", str(out), "--max-seq-len", "24"], env={"COLUMNS": "120"})
    torch.set_num_threads(num_threads)
    assert result.exit_code == 0, result.output
    return Demo(result.output, out, schedulers)


@pytest.mark.slow
def test_demo_shows_completions_totals_and_a_plot(demo: Demo) -> None:
    for prompt in PROMPTS[:NUM_TIMED]:
        assert prompt in demo.output
    # The prompts of P tokens, N new ones each: P·N + N(N − 1)/2 positions without the cache, P + N − 1 with it.
    lengths = [len(Tokenizer().encode(prompt)) for prompt in PROMPTS[:NUM_TIMED]]
    assert f"{sum(sum(range(length, 24)) for length in lengths):,}" in demo.output
    assert f"{NUM_TIMED * 23:,}" in demo.output
    assert "2,048" in demo.output  # bytes a token: 2 · 4 layers · 2 KV heads · 32 · 4 bytes
    assert (demo.out / "time_per_token.png").read_bytes().startswith(b"\x89PNG")
    # Dense: eight caches of 24 rows, 2,048 bytes a row. Paged: no text ends that early, so each takes two blocks of 16.
    rows = {line.split("│")[1].strip(): line for line in demo.output.splitlines() if line.count("│") == 7}
    assert f" {8 * 24 * 2} " in rows["dense"]
    assert f" {8 * 2 * 16 * 2} " in rows["paged"]
    assert (demo.out / "memory.png").read_bytes().startswith(b"\x89PNG")
    # A byte a number and 4 a row: 2 · 4 layers · 2 KV heads · (32 + 4).
    assert "a token takes 576 bytes instead of 2,048" in demo.output
    assert "3.6 times as many tokens" in demo.output


@pytest.mark.usefixtures("threads")
def test_demo_refuses_to_praise_a_cache_that_changes_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = KVCache.read

    def forgetful(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = read(cache, layer)
        return k, torch.zeros_like(v)

    monkeypatch.setattr(KVCache, "read", forgetful)
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--max-seq-len", "24"])
    assert isinstance(result.exception, MinicacheError)
    assert "changed the tokens" in str(result.exception)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_demo_refuses_to_praise_a_paged_cache_that_changes_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = PagedKVCache.attend
    monkeypatch.setattr(PagedKVCache, "attend", lambda cache, layer, q: attend(cache, layer, -q))
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--max-seq-len", "24"])
    assert isinstance(result.exception, MinicacheError)
    assert "the paged cache changed the tokens" in str(result.exception)


def steps_of_the_burst() -> dict[str, int]:
    """How many steps the burst takes: batch by batch the longest answer, or each batch slot on its own."""
    lens, seats = burst.ANSWER_LENS, burst.MAX_NUM_SEQS
    batches = [lens[start : start + seats] for start in range(0, len(lens), seats)]
    free = [0] * seats  # when each batch slot is free again
    for length in lens:
        heapq.heappush(free, heapq.heappop(free) + length)
    return {"static": sum(map(max, batches)), "continuous": max(free)}


@pytest.mark.slow
def test_demo_serves_a_burst_with_both_schedulers(demo: Demo) -> None:
    for stage, steps in steps_of_the_burst().items():
        assert f"{stage} batching, {steps} steps" in demo.output
        row = next(line for line in demo.output.splitlines() if line.startswith(f"│ {stage} "))
        busy = 100 * sum(burst.ANSWER_LENS) / (burst.MAX_NUM_SEQS * steps)
        assert [cell.strip() for cell in row.split("│")[2:4]] == [str(steps), f"{busy:.0f} %"]
        trace = json.loads((demo.out / f"burst-{stage}.trace.json").read_text())
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert len(slices) == sum(burst.ANSWER_LENS)
    assert (demo.out / "burst.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_schedulers_take_turns(demo: Demo) -> None:
    assert demo.schedulers[:6] == ["static", "continuous"] * 3


def a_run(num_steps: int, seconds: float) -> burst.Run:
    steps = [TraceStep(step, 0.0, 0.0, (), 0, 0, 0, 0, 0, ()) for step in range(num_steps)]
    return burst.Run(steps, token_ids=[], seconds=seconds)


def test_what_the_demo_concludes_follows_from_what_it_measured() -> None:
    static = a_run(173, seconds=1.2)
    assert burst.verdict({"static": static, "continuous": a_run(113, seconds=0.8)}) == (
        "Same tokens, in 113 steps instead of 173, 1.5 times as fast."
    )
    for seconds in (1.2, 1.3):
        assert "in no less time" in burst.verdict({"static": static, "continuous": a_run(113, seconds)})
    assert (speed.verdict(6.52), memory.verdict(4.0)) == (
        "Same tokens, computed 6.5 times as fast.",
        "Same tokens, with 4.0 times less memory reserved.",
    )
    assert "no time was saved (0.9 ×)" in speed.verdict(0.9)
    assert "no memory was saved (0.8 ×)" in memory.verdict(0.75)


def test_demo_looks_at_its_folder_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "file" / "demo")])
    assert result.exit_code == 2
    assert "cannot be created" in " ".join(result.output.replace("│", " ").split())  # rich wraps and frames it


def ask(model: str, *, width: int = 120) -> list[str]:
    """The lines of the demo's last part, without a terminal."""
    console = Console(record=True, width=width, file=io.StringIO())
    questions.show(model, console)
    return console.export_text().splitlines()


@pytest.mark.usefixtures("threads")
def test_sixteen_questions_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    *cells, first, second, legend, speeds, used = ask(str(folder))
    assert "a block of a prompt" in legend
    text = "\n".join(cells)
    assert text.count(SAID) == len(questions.QUESTIONS)
    for question in questions.QUESTIONS:
        assert question in text
    # A byte is a token, two more are the roles'; the answer's last one is not computed.
    ends = [
        len(folder_tokenizer(folder).encode(f"<|user|>{each}<|end|><|assistant|>{SAID}"))
        for each in questions.QUESTIONS
    ]
    held = [blocks_for(end, questions.BLOCK_SIZE) for end in ends]
    assert used == f"At most {sum(held)} of {questions.NUM_BLOCKS} blocks were in use, 16 tokens each."
    letters = first + second
    assert [letters.count(letter) for letter in string.ascii_lowercase[:16]] == held
    assert letters.count("·") == questions.NUM_BLOCKS - sum(held)
    assert re.fullmatch(r"Tokens a second: \d+ all together, \d+ one question after the other\.", speeds)


@pytest.mark.usefixtures("threads")
def test_answers_are_cut_to_no_width(tmp_path: Path) -> None:
    assert "\n".join(ask(str(write_folder(tmp_path)), width=60)).count(SAID) == len(questions.QUESTIONS)


def test_without_the_model_the_last_part_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert ask("smollm2") == ["smollm2 is not on this machine. To see this part: minicache pull smollm2"]
    assert list(tmp_path.iterdir()) == []
