"""Masks in a batch: the rows of constrained requests, and no others."""

from __future__ import annotations

import pytest
import torch

from minicache.engine.masking import mask_rows


@pytest.mark.parametrize("rows", [[], [1], [0, 3], [0, 1, 2, 3]])
def test_other_rows_stay_as_they_are(rows: list[int]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7)
    before, allowed = logits.clone(), torch.rand(len(rows), 7) < 0.5
    masked = mask_rows(logits, rows, allowed)
    assert torch.equal(logits, before)
    for row in range(4):
        if row in rows:
            its = allowed[rows.index(row)]
            assert torch.equal(masked[row][its], logits[row][its])
            assert bool((masked[row][~its] == -torch.inf).all())
        else:
            assert torch.equal(masked[row], logits[row])


def test_a_mask_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of 5 tokens need a mask each"):
        mask_rows(torch.zeros(3, 5), [0, 2], torch.ones(2, 4, dtype=torch.bool))
