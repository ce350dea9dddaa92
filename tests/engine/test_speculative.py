"""The drafter's option. What it proposes, and how draft tokens are verified, is graded in phase 9."""

from __future__ import annotations

import pytest

from minicache.engine.speculative import NgramDrafter


@pytest.mark.parametrize(("max_ngram", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_a_longest_ending_of_no_tokens_is_refused(max_ngram, error):
    with pytest.raises(error, match="max_ngram"):
        NgramDrafter(max_ngram)
