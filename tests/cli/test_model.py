"""`minicache generate` and `minicache train`, as they are typed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import minicache_cli as cli
from minicache.grammar import check_text, split_words
from minicache.model import load_minigpt
from minicache.model.checkpoint import SHIPPED_DRAFT


def run(*arguments: str) -> list[str]:
    """The lines that a command printed; it has to succeed."""
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What a command that has to be refused prints on stderr: one line."""
    monkeypatch.setattr(sys, "argv", ["minicache", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert stop.value.code == 1
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_generate_completes_the_prompt() -> None:
    text, summary = run("generate", "Yesterday I", "--max-tokens", "20")
    assert text.startswith("Yesterday I ")
    check_text(split_words(text.removesuffix(" ■")), unfinished=True)
    assert re.fullmatch(r"\d+ tokens, [\d.]+ s, \d+ tokens/s, [\d,]+ bytes of KV cache used", summary)


def test_generate_says_the_same_without_a_cache() -> None:
    cached, cached_summary = run("generate", "Did you", "--max-tokens", "20")
    recomputed, recomputed_summary = run("generate", "Did you", "--max-tokens", "20", "--cache", "none")
    assert cached == recomputed
    # 4 layers × 2 (keys, values) × 2 heads × 32 × 4 bytes a row; the last token is never fed back.
    assert f"{(2 + 20 - 1) * 4 * 2 * 2 * 32 * 4:,} bytes" in cached_summary
    assert "no KV cache" in recomputed_summary


def test_generate_says_the_same_through_a_paged_cache() -> None:
    dense = run("generate", "Did you", "--max-tokens", "20")
    paged = run("generate", "Did you", "--max-tokens", "20", "--cache", "paged")
    assert dense[0] == paged[0]
    assert dense[1].split(", ")[-1] == paged[1].split(", ")[-1]  # the bytes in use


def test_a_seed_repeats_a_sample() -> None:
    first, again, other = (
        run("generate", "Now we", "--temperature", "1", "--seed", seed)[0] for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_generate_stops_at_the_models_last_position() -> None:
    prompt = " ".join(["Yesterday I slept."] * 127)  # 508 of 512 positions
    _, summary = run("generate", prompt, "--max-tokens", "50")
    assert summary.split()[0] in ("1", "2", "3", "4")


def test_an_unknown_word_is_one_clear_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = refusal(capsys, monkeypatch, "generate", "Yesterdy I")
    assert "'Yesterdy'" in line
    assert "'Yesterday'" in line


def test_a_missing_checkpoint_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere.safetensors" in refusal(capsys, monkeypatch, "generate", "Now we", "--model", "nowhere.safetensors")


def test_an_empty_prompt_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["generate", ""])
    assert result.exit_code == 2
    assert "prompt" in result.stderr


def test_train_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.safetensors"
    lines = run("train", "--steps", "1", "--seed", "3", "--out", str(out))
    assert "after 1 steps" in lines[-1]
    assert load_minigpt(out).config == load_minigpt().config
    run("train", "--draft", "--steps", "1", "--out", str(out))
    assert load_minigpt(out).config == load_minigpt(SHIPPED_DRAFT).config


def test_help_needs_neither_torch_nor_an_extra() -> None:
    extras = {"fastapi", "libcst", "numba", "pytest", "transformers"}
    code = f"import sys; from minicache_cli import app; print({extras | {'torch'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
