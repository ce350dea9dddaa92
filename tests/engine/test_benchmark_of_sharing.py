"""benchmarks/sharing.py: does it count blocks as one would by hand, and is a replayed search the search?"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from random import Random

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks.sharing import Branching, Held, Sampled, Searched, common_back, endless, search, serve, told


def test_two_answers_by_hand():
    """20 tokens are two blocks. Step 0: 2 held. Step 1: both answers hold 2, the second of which is copied: 4, and 3
    different ones. Step 2: one is left, with 2."""
    held = serve([Sampled("a", (20, 2), 2)], 1)
    assert (held.num_steps, held.num_without, held.num_with, held.num_copies) == (3, 8, 7, 1)
    assert held.saved_percent == pytest.approx(12.5)
    assert held.told() == {"saved_percent": 12.5, "blocks_without": 2.7, "blocks_with": 2.3, "num_copies": 1}


def test_families_share_nothing_with_each_other():
    alone, together = serve([Sampled("a", (20, 2), 2)], 1), serve([Sampled(name, (20, 2), 2) for name in "abc"], 3)
    assert together.num_steps == alone.num_steps
    assert (together.num_without, together.num_with) == (3 * alone.num_without, 3 * alone.num_with)


def test_answers_of_one_token_are_not_forked():
    assert serve([Sampled("a", (20, 1), 4)], 1).num_without == 2


def test_two_beams_by_hand():
    """Block 0 is the prompt's, 16 tokens. The beams write their first token into blocks of their own (3 different ones
    of 4). Then the second comes from the first's: its own block is freed, the first's is copied. Still 3 of 4."""
    held = serve([Searched("a", (16, 3), iter([(0, 0), (0, 0), (0, 1)]))], 1)
    assert (held.num_steps, held.num_without, held.num_with, held.num_copies) == (3, 1 + 4 + 4, 1 + 3 + 3, 1)


@pytest.mark.parametrize("width", [2, 4])
def test_a_replayed_search_holds_what_the_search_held(width):
    lengths = [(5, 40), (17, 33), (16, 16)]
    direct, branching = Held(), Branching()
    search(lengths, width, direct, branching)
    assert [len(steps) for steps in branching.searches] == [each - 1 for _, each in lengths]
    assert all(len(parents) == width for steps in branching.searches for parents in steps)
    families = [
        Searched(name, each, iter(steps))
        for name, (each, steps) in enumerate(zip(lengths, branching.searches, strict=True))
    ]
    assert vars(serve(families, 1)) == vars(direct)


def test_what_beams_have_in_common():
    steps = [(0, 0), (0, 1), (1, 1), (0, 1)]
    assert [common_back(steps, end) for end in (1, 2, 3, 4)] == [1, 2, 1, 2]
    assert told([steps])["survivors"] == pytest.approx(5 / 3, abs=0.01)
    assert told([steps])["forks_per_step"] == pytest.approx(1 / 3, abs=0.01)


def test_an_answer_longer_than_a_search_goes_on_as_another():
    steps = list(islice(endless([[(0, 0), (0, 1), (1, 0)]], Random(0)), 7))
    assert steps == [(0, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (1, 0)]
