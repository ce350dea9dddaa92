"""Phase 12, task 12: masks in a batch in which others are free."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minicache.engine.masking import mask_rows
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

INF, NAN = float("inf"), float("nan")


def a_mask(*rows):
    """`[R, vocab]` from strings: x where a token is allowed."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows], dtype=torch.bool)


def test_one_of_three_rows():
    """The middle request may have tokens 1 and 3; the two others are free."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 1.0, 2.0, 3.0]])
    expected = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-INF, 6.0, -INF, 8.0], [9.0, 1.0, 2.0, 3.0]])
    call(mask_rows, logits, [1], a_mask(".x.x")).gives(expected)


def test_masks_go_to_their_rows():
    """Rows 0 and 2 of four: the second mask is about row 2."""
    logits = torch.arange(12.0).reshape(4, 3)
    expected = torch.tensor([[0, -INF, -INF], [3, 4, 5], [-INF, 7, 8], [9, 10, 11]])
    call(mask_rows, logits, [0, 2], a_mask("x..", ".xx")).gives(expected)


def test_every_row_and_no_row():
    """All constrained; none; and a batch of one."""
    logits = torch.arange(6.0).reshape(2, 3)
    call(mask_rows, logits, [0, 1], a_mask("x.x", ".x.")).gives(torch.tensor([[0, -INF, 2], [-INF, 4, -INF]]))
    call(mask_rows, logits, [], torch.ones(0, 3, dtype=torch.bool)).gives(logits)
    call(mask_rows, logits[:1], [0], a_mask("..x")).gives(torch.tensor([[-INF, -INF, 2]]))


def test_a_row_without_an_allowed_token():
    """−∞ throughout: its request ends with an error, and the other requests go on."""
    logits = torch.arange(6.0).reshape(2, 3)
    call(mask_rows, logits, [0], a_mask("...")).gives(torch.tensor([[-INF] * 3, [3, 4, 5]]))


def test_what_is_ruled_out_is_ruled_out_whatever_its_logit_is():
    """A logit of NaN or +∞ that is not allowed becomes −∞; one that is allowed stays, and so does one of a free row."""
    logits = torch.tensor([[NAN, INF, 1.0, -INF, 0.0], [INF, INF, -INF, 2.0, 0.0]])
    expected = torch.tensor([[-INF, -INF, 1.0, -INF, -INF], [INF, INF, -INF, 2.0, 0.0]])
    call(mask_rows, logits, [0], a_mask("..xx.")).gives(expected)
    masked = call(mask_rows, logits, [1], a_mask("x...x")).value
    that("where the free row is NaN", torch.isnan(masked[0]).tolist()).gives([True, False, False, False, False])
    that("the constrained row", masked[1]).gives(torch.tensor([INF, -INF, -INF, -INF, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_was_given_stays(dtype):
    """Logits, mask and list are not changed, even if no row is free; the result has the dtype of the logits."""
    for rows in ([1], [0, 1]):
        logits, allowed, given = torch.randn(2, 5).to(dtype), torch.rand(len(rows), 5) < 0.5, list(rows)
        before = logits.clone(), allowed.clone()
        masked = call(mask_rows, logits, given, allowed).value
        that("the logits afterwards", logits).gives(before[0])
        that("the mask afterwards", allowed).gives(before[1])
        that("the rows afterwards", given).gives(rows)
        that("dtype of the result", str(masked.dtype)).gives(str(dtype))


@pytest.mark.parametrize(
    ("rows", "shape"), [([0, 2], (1, 4)), ([0], (2, 4)), ([0, 1], (2, 3)), ([1], (1, 1)), ([0], (4,)), ([], (1, 4))]
)
def test_a_mask_of_another_shape(rows, shape):
    """PyTorch would stretch some of them: one mask over two rows, one column over the vocabulary."""
    call(mask_rows, torch.zeros(3, 4), rows, torch.ones(shape, dtype=torch.bool)).raises(ValueError)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed):
    """Number by number, written with loops."""
    rng = random.Random(fresh(seed))
    torch.manual_seed(fresh(seed))
    size, vocab = rng.randint(1, 9), rng.randint(1, 12)
    rows = sorted(rng.sample(range(size), rng.randint(0, size)))
    logits, allowed = torch.randn(size, vocab), torch.rand(len(rows), vocab) < 0.5
    expected = logits.clone()
    for number, row in enumerate(rows):
        for token_id in range(vocab):
            if not allowed[number, token_id]:
                expected[row, token_id] = -INF
    call(mask_rows, logits, rows, allowed).gives(expected)


def test_what_is_picked():
    """Softmax of a masked row is the model's distribution over the allowed tokens: their shares keep their ratios."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]))
    masked = call(mask_rows, logits, [0], a_mask(".xx.")).value
    that("softmax of the two rows", torch.softmax(masked, -1)).is_close(
        torch.tensor([[0.0, 2 / 3, 1 / 3, 0.0], [0.25, 0.25, 0.25, 0.25]])
    )


class Operations(TorchDispatchMode):
    """Counts the tensor operations that run meanwhile."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_forty_rows_take_as_many_operations_as_two():
    """On a GPU an operation is a launch: none for each row."""
    counted = []
    for count in (2, 40):
        logits, allowed = torch.zeros(50, 6), torch.ones(count, 6, dtype=torch.bool)
        with Operations() as operations:
            outcome = call(mask_rows, logits, list(range(count)), allowed)
        counted.append(operations.num)
        outcome.gives(torch.zeros(50, 6))
    that("tensor operations for 40 rows beyond those for 2", counted[1] - counted[0]).gives(0)
