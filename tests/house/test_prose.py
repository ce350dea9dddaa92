"""The check of the course's vocabulary finds what it is for, and nothing in code."""

from __future__ import annotations

import pytest
from scripts.prose import Vocabulary, num_words


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


def found(vocabulary: Vocabulary, path: str, text: str) -> list[tuple[int, str]]:
    return [(each.line, each.found) for each in vocabulary.findings(path, text)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Each request has a seat.", "seat"),
        ("The model waits so that nothing is lost.", "so that"),
        ("It waits for\never.", "for ever"),
        ("A request waits. Who comes later waits longer.", "Who comes later waits longer."),
        ("The request, who waits, is next.", "request, who"),
        ("It runs. That is why it waits.", ". That is why"),
    ],
)
def test_it_finds_a_word(vocabulary: Vocabulary, text: str, word: str) -> None:
    (finding,) = vocabulary.findings("docs/en/page.md", f"# Title\n\n{text}\n")
    assert finding.line == 3
    assert finding.found.lstrip(". ") == word.lstrip(". ")


@pytest.mark.parametrize(
    "text",
    [
        "`so that` in code",
        "```python\nx = nobody  # so that\n```",
        "[a link](docs/seat.md) and https://example.org/seat",
        "Who waits? A request.",
    ],
)
def test_it_leaves_the_rest_alone(vocabulary: Vocabulary, text: str) -> None:
    assert not vocabulary.findings("docs/en/page.md", text + "\n")


def test_in_python_it_reads_comments_and_strings(vocabulary: Vocabulary) -> None:
    text = 'def seat(nobody):\n    """Give a seat."""\n    # so\n    # that\n    return f"{nobody} beside"\n'
    assert found(vocabulary, "src/module.py", text) == [(2, "seat"), (3, "so that"), (5, "nobody"), (5, "beside")]


def test_a_phrase_around_a_word_can_be_right(vocabulary: Vocabulary) -> None:
    assert not vocabulary.findings("docs/en/page.md", "Decode reads the weights from memory.\n")
    assert vocabulary.findings("docs/en/page.md", "The paper's figure, from memory.\n")


def test_a_page_has_at_most_1800_words_outside_its_folds(vocabulary: Vocabulary) -> None:
    page = "# Title\n\n" + "word " * 1795 + '\n\n??? info "A fold"\n    ' + "more " * 100 + "\n\nThe end.\n"
    assert num_words(page) == 1799
    assert not vocabulary.findings("docs/en/page.md", page)
    (finding,) = vocabulary.findings("docs/en/page.md", page.replace("The end", "The very end of the page"))
    assert "1,803 words" in finding.found
