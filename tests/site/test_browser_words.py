"""What the browser's scripts say: all of it is in docs/es/browser.po, with the same places, and nothing else is."""

import json
import re
from pathlib import Path

import pytest
from babel.messages import pofile
from scripts.browser import build
from scripts.browser.playground.site import catalogue

SCRIPTS = Path(build.__file__).parent
SAID = re.compile(r'\bsay\(\s*("(?:[^"\\]|\\.)*")')
COMPUTED = re.compile(r'\bsay\((?!\s*")[^)]*\)')
PLACE = re.compile(r"\{\w+\}")


def said() -> set[str]:
    """Every text that a script gives to `say`: those in the scripts, and the titles of what the playground offers."""
    scripts = "".join(file.read_text(encoding="utf-8") for file in SCRIPTS.rglob("*.js"))
    assert set(COMPUTED.findall(scripts)) == {"say(text, places = {})", "say(choice.title)"}
    offered = catalogue()
    titles = {choice["title"] for kind in ("workloads", "schedulers") for choice in offered[kind].values()}
    return titles | set(map(json.loads, SAID.findall(scripts)))


def test_all_that_is_said_has_its_spanish_and_nothing_else_has() -> None:
    assert build.spanish().keys() == said()
    with build.CATALOGUE.open("rb") as file:
        entries = [message.id for message in pofile.read_po(file) if message.id]
    assert len(entries) == len(build.spanish()), "an entry without its Spanish"


@pytest.mark.parametrize(("english", "spanish"), build.spanish().items())
def test_the_spanish_has_the_places_of_the_english(english: str, spanish: str) -> None:
    assert sorted(PLACE.findall(spanish)) == sorted(PLACE.findall(english))
