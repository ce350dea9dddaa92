"""`minicache demo`, small: all ways decode, plots are written, a cache that lies is found out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache
from minicache.errors import MinicacheError
from minicache.trace import TraceStep
from minicache_cli.demo import app, burst, memory, speed


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
