"""Training: it learns, it repeats, and its rows are grammatical."""

import pytest
import torch

from minicache.grammar import Tokenizer, check_text
from minicache.model import MiniGPTConfig
from minicache.model.training import TOKENS_PER_STEP, Corpus, learning_rate, train

TINY = MiniGPTConfig(
    Tokenizer().vocab_size,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    max_seq_len=64,
)


def test_a_few_steps_lower_the_loss() -> None:
    run = train(25, config=TINY)
    assert len(run.losses) == 25
    assert sum(run.losses[-3:]) / 3 < 0.9 * run.losses[0]
    assert not run.model.training


def test_a_seed_repeats_and_another_differs() -> None:
    first, again, other = (train(3, seed, config=TINY) for seed in (5, 5, 6))
    assert first.losses == again.losses
    for mine, same in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, same)
    assert first.losses != other.losses


def test_training_leaves_torch_as_it_was() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    threads = torch.get_num_threads()
    train(1, config=TINY)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("row_length", [64, 512])
def test_rows_are_texts_one_after_the_other(row_length: int) -> None:
    tokenizer = Tokenizer()
    rows = Corpus(3, tokenizer).batch(row_length)
    assert rows.shape == (TOKENS_PER_STEP // row_length, row_length + 1)
    for row in rows.tolist():
        *whole, last = " ".join(tokenizer.words[token_id] for token_id in row).split(tokenizer.words[0])
        for text in whole:
            check_text(text.split())
        check_text(last.split(), unfinished=True)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 1000) for step in range(1001)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] > 0
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="steps"):
        train(0, config=TINY)
    with pytest.raises(ValueError, match="tokenizer"):
        train(1, config=MiniGPTConfig(vocab_size=7))
