"""What the catalogues of the command line are made from, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from scripts import catalogues

SOURCE = '''
"""A module about its own affairs."""

LIMIT = 3
"""How many there may be, at most."""


def test_nothing(n):
    """Nothing is freed.

    As the second line says.
    """
    that("what is left", 3).gives(4)
    that(f"blocks after {n.count} and {len(n)} steps", 3)
    raise ValueError(f"no block {n} of {n + 1} or {n!r}{', or more' if n else ''}")
    _("said by the command line")
    kind = f"a {said('large') if n else 'small'} one"
    lines = [labelled("called", f"f({n})")]
    run("-m pytest", "x", r"\\s+ \\w+")
'''


def test_what_a_file_tells(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(SOURCE, encoding="utf-8")
    assert set(catalogues.told_by(file)) == {
        "Nothing is freed.",
        "what is left",
        "blocks after {count} and {n} steps",
        "called",
        "no block {n} of {what} or {n2}{what2}",
        ", or more",
        "a {what} one",
        "large",
    }


def test_translations_are_kept_and_new_messages_wait(tmp_path: Path) -> None:
    file = tmp_path / "some.po"
    file.write_text('msgid "kept"\nmsgstr "se queda"\n\nmsgid "gone"\nmsgstr "se va"\n', encoding="utf-8")
    found = {message.id: message.string for message in catalogues.updated(file, ["kept", "new"]) if message.id}
    assert found == {"kept": "se queda", "new": ""}


@pytest.mark.parametrize(
    ("spanish", "is_wrong"),
    [("quedan {count}", False), ("quedan", False), ("quedan {cuenta}", True), ("quedan {count", True)],
)
def test_a_translation_has_the_names_of_its_message(spanish: str, is_wrong: bool) -> None:
    catalogue = Catalog()
    catalogue.add("{count} left", spanish)
    assert bool(list(catalogues.faults(catalogue))) == is_wrong
