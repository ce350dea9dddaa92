"""Spanish pages and their English sources: hashes, addresses of sections, links to what is not translated."""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown import Markdown
from scripts import translation
from scripts.translation import TranslationError

CODE = "```sh\n# no heading\n```"
ENGLISH = f"# Title\n\nA question?\n\n## First: `code` and *words*\n\n{CODE}\n\n## Second {{ #two }}\n\nThe end.\n"
SPANISH = f"# Título\n\n¿Una pregunta?\n\n## Primera\n\n{CODE}\n\n## Segunda\n\nFin.\n"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A site of two English pages, the first of them in Spanish too."""
    english, spanish = tmp_path / "en", tmp_path / "es"
    for folder in (english / "phase", spanish / "phase"):
        folder.mkdir(parents=True)
    (english / "phase" / "page.md").write_text(ENGLISH, encoding="utf-8")
    (english / "other.md").write_text("# Other\n", encoding="utf-8")
    (spanish / "phase" / "page.md").write_text(SPANISH, encoding="utf-8")
    monkeypatch.setattr(translation, "ENGLISH", english)
    monkeypatch.setattr(translation, "SPANISH", spanish)
    monkeypatch.setattr(translation, "NOTEBOOKS", tmp_path / "notebooks")
    return english, spanish


def prepared(content: str) -> str:
    markdown = Markdown(extensions=["toc", "attr_list", "fenced_code"])
    is_stale = translation.is_stale("phase/page.md", content)
    return translation.prepare("phase/page.md", content, ENGLISH, markdown, is_stale=is_stale)


def accepted(spanish: Path) -> str:
    translation.accept("phase/page.md")
    return (spanish / "phase" / "page.md").read_text(encoding="utf-8")


def test_a_page_is_stale_until_it_is_accepted_and_when_its_source_changes(folders: tuple[Path, Path]) -> None:
    english, spanish = folders
    assert translation.stale() == ["phase/page.md"]
    content = accepted(spanish)
    assert content.startswith("---\nenglish: ")
    assert content.endswith(f"---\n\n{SPANISH}")
    assert translation.stale() == []
    assert "al día" not in prepared(content)
    (english / "phase" / "page.md").write_text(ENGLISH.replace("The end", "An end"), encoding="utf-8")
    assert translation.stale() == ["phase/page.md"]
    banner = prepared(content).split("## ")[0]
    assert "no está al día" in banner
    assert "(../../../phase/page/)" in banner
    assert accepted(spanish).count("english: ") == 1
    assert translation.stale() == []


def test_other_lines_of_the_front_matter_stay(folders: tuple[Path, Path]) -> None:
    _, spanish = folders
    (spanish / "phase" / "page.md").write_text(f"---\ntitle: Título\n---\n{SPANISH}", encoding="utf-8")
    assert accepted(spanish).startswith("---\ntitle: Título\nenglish: ")
    assert translation.stale() == []


def test_a_page_is_made_from_what_its_source_includes_too(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    english, spanish = folders
    monkeypatch.setattr(translation, "ROOT", tmp_path)
    (tmp_path / "MORE.md").write_text("More.\n", encoding="utf-8")
    (english / "phase" / "page.md").write_text(f'{ENGLISH}\n--8<-- "MORE.md:3"\n', encoding="utf-8")
    accepted(spanish)
    assert translation.stale() == []
    (tmp_path / "MORE.md").write_text("Even more.\n", encoding="utf-8")
    assert translation.stale() == ["phase/page.md"]


def test_what_is_missing_is_listed(folders: tuple[Path, Path]) -> None:
    assert translation.missing() == ["other.md"]


def test_sections_have_the_addresses_of_the_english_ones(folders: tuple[Path, Path]) -> None:
    text = prepared(SPANISH)
    assert "## Primera { #first-code-and-words }" in text
    assert "## Segunda { #two }" in text
    assert CODE in text


def test_other_headings_than_the_source_are_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(TranslationError, match="has 2 headings, and its source 3"):
        prepared(SPANISH.replace("## Segunda\n", ""))


def test_links_go_to_the_english_page_where_there_is_no_spanish_one(folders: tuple[Path, Path]) -> None:
    body = "[la otra](../other.md#part) y [esta](page.md#two)"
    text = prepared(SPANISH.replace("Fin.", body))
    assert '<a href="../../../other/#part" hreflang="en">la otra</a> y [esta](page.md#two)' in text


def test_a_link_to_a_page_in_neither_language_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(TranslationError, match="neither language"):
        prepared(SPANISH.replace("Fin.", "[nada](nothing.md)"))


@pytest.mark.parametrize(
    ("english", "spanish"),
    [
        ("<td>12,288</td>", "<td>12\u202f288</td>"),
        ("1,234,567.8 bytes", "1\u202f234\u202f567.8 bytes"),
        (r"\(2 \cdot 12{,}288\)", r"\(2 \cdot 12\,288\)"),
        ("8, 16, 320 and 3.5", "8, 16, 320 and 3.5"),
        ("0,1234 and 1,23", "0,1234 and 1,23"),
        ("<code>12,288</code> 12,288", "<code>12,288</code> 12\u202f288"),
        ("<pre><code>1,000</code> 1,000</pre>", "<pre><code>1,000</code> 1,000</pre>"),
    ],
)
def test_a_comma_in_a_number_is_a_space(english: str, spanish: str) -> None:
    assert translation.with_spanish_numbers(english) == spanish


def test_a_page_without_a_source_is_refused(folders: tuple[Path, Path]) -> None:
    _, spanish = folders
    (spanish / "alone.md").write_text("# Sola\n", encoding="utf-8")
    with pytest.raises(TranslationError, match="no source"):
        translation.stale()


def test_few_pages_of_the_site_are_missing_or_out_of_date() -> None:
    behind = [*translation.missing(), *translation.stale()]
    most = translation.MOST_BEHIND * len(translation.translated())
    assert len(behind) <= most, f"bring up to date, then python -m scripts.translation --accept: {behind}"
