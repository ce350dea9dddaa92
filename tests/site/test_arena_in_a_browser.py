"""The arena's page in headless Chromium, on the built site: a policy is scored, and a cheating one refused."""

import json
from collections.abc import Iterator

import pytest
from tests.site.chromium import Chromium

from minicache_course.arena import fleet
from minicache_course.arena.baselines import text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the site may have to be built first


@pytest.fixture(scope="module")
def page(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(f"{address}arena/")
        browser.wait_for("document.querySelector('#arena .cm-content')?.textContent.length > 50", 60)
        yield browser


def scored(page: Chromium, name: str) -> object:
    """Choose a policy, press "Score it", and wait; what the status says."""
    choice = "document.querySelector('#arena select')"
    page.evaluate(f"{choice}.value = {json.dumps(name)}; {choice}.dispatchEvent(new Event('change'))")
    page.evaluate("document.querySelector('#arena .mc-run').click()")
    page.wait_for("!document.querySelector('#arena .mc-run').disabled", 600)
    return page.evaluate("document.querySelector('#arena .mc-status').textContent")


def test_a_policy_has_the_score_of_the_command_line(page: Chromium) -> None:
    found = fleet.score(text_of("fleet_round_robin"))
    assert scored(page, "fleet_round_robin") == f"Score: {found.percent:.2f} % of the bound"
    rows = page.evaluate("[...document.querySelectorAll('#arena tbody tr')].map((row) => row.lastChild.textContent)")
    assert rows == [f"{100 * cell.share:.1f} %" for cell in found.cells]


def test_a_cheating_one_is_refused(page: Chromium) -> None:
    page.evaluate("localStorage.setItem('minicache/arena/policy.py', 'import time\\n')")
    assert "line 1: time is not allowed" in str(scored(page, "policy.py"))
