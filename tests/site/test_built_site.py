"""What mkdocs --strict does not notice: the site as a browser gets it."""

import json
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from scripts import translation

from minicache.palette import PALETTE
from minicache_course.table import load_course

ROOT = Path(__file__).resolve().parents[2]

# The first of these tests waits for both sites to be built.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def target(page, link: str) -> str:
    """The file that a relative link of a page leads to, from the site's root; "" for the page itself."""
    path = unquote(urlsplit(link).path)
    if not path:
        return page.path
    parts: list[str] = []
    for part in (PurePosixPath(page.path).parent / path).parts:
        if part == "..":
            assert parts, f"{page}: {link} leaves the site"
            parts.pop()
        else:
            parts.append(part)
    found = "/".join(parts)
    return f"{found}/index.html".lstrip("/") if path.endswith(("/", ".")) else found


def is_foreign(link: str) -> bool:
    return bool(urlsplit(link).netloc)


def test_every_page_of_the_nav_is_html_with_a_heading(site) -> None:
    assert site.nav
    for source, path in site.nav.items():
        assert path in site.pages, f"{source} was not built"
        page = site.pages[path]
        assert page.html.lstrip().lower().startswith("<!doctype html>"), f"{source} is not HTML"
        assert len(page.soup.find_all("h1")) == 1, f"{source} needs one heading of the first level"


def test_expected_pages_are_there(site) -> None:
    general = ["index.md", "setup.md", "course-map.md", "teaching.md", "glossary.md", "bibliography.md", "colours.md"]
    phases = [phase for phase in load_course(ROOT / "labs" / "course.toml") if phase.tasks]
    lab_pages = {task.page.removeprefix("docs/en/") for phase in phases for task in phase.tasks}
    notebooks = {f"{phase.folder}/{page}" for phase in phases for page in ("index.md", "notebook.md")}
    missing = {page for page in {*general, *lab_pages, *notebooks} if site.built(page) not in site.pages}
    assert len(phases) >= 2
    assert not missing


def test_every_page_is_there_in_both_languages(site) -> None:
    english, spanish = ({page.path for page in pages} for pages in (site.english, site.spanish))
    assert spanish == {f"es/{path}" for path in english - {site.built(page) for page in translation.missing()}}


def test_the_sections_of_a_page_have_one_address_in_both_languages(site) -> None:
    for twin in site.spanish:
        page = site.pages[twin.path.removeprefix("es/")]
        ids, others = (
            [tag["id"] for tag in each.soup.select("article :is(h1, h2, h3, h4)[id]")] for each in (page, twin)
        )
        assert ids == others, f"{page}"


def test_internal_links_and_anchors_resolve(site) -> None:
    dead = []
    for page in site.pages.values():
        for tag in page.soup.find_all(href=True) + page.soup.find_all(src=True):
            link = tag.get("href") or tag.get("src")
            if urlsplit(link).scheme or is_foreign(link):
                continue
            found = target(page, link)
            if not (site.root / found).is_file():
                dead.append(f"{page}: {link}")
            anchor = unquote(urlsplit(link).fragment)
            shown = site.pages.get(found)
            # Material's switches for light and dark pictures look like anchors.
            known = {*shown.ids, "__comments"} if shown else set()
            if shown and "=" in anchor and found.removeprefix("es/") == "playground/index.html":
                continue  # settings, which the macro has checked
            if anchor and shown and not anchor.startswith("only-") and anchor not in known:
                dead.append(f"{page}: {link} (no such anchor)")
    assert not dead, "\n".join(dead)


def test_no_other_host_is_asked(site) -> None:
    asked = []
    for page in site.pages.values():
        loads = [tag["src"] for tag in page.soup.find_all(src=True)]
        loads += [tag["href"] for tag in page.soup.find_all("link", href=True)]
        loads += [tag["data"] for tag in page.soup.find_all("object", data=True)]
        loads += re.findall(r"url\(['\"]?([^'\")]+)", " ".join(tag.get_text() for tag in page.soup.find_all("style")))
        assert not page.soup.find_all(srcset=True), f"{page}: srcset is not checked here"
        asked += [f"{page}: {link}" for link in loads if is_foreign(link)]
        policy = page.soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})
        assert policy, f"{page} has no Content-Security-Policy"
        assert "default-src 'self'" in policy["content"]
        assert "http" not in policy["content"]
    for sheet in site.root.rglob("*.css"):
        for link in re.findall(r"(?:url\(|@import\s*)['\"]?([^'\")]+)", sheet.read_text(encoding="utf-8")):
            if is_foreign(link):
                asked.append(f"{sheet.name}: {link}")
            elif not link.startswith(("data:", "#")):
                assert (sheet.parent / urlsplit(link).path).is_file(), f"{sheet.name}: {link} is missing"
    for script in [
        *(site.root / "shared" / "javascripts").rglob("*.js"),
        *(site.root / "assets/playground").glob("*.js"),
    ]:
        links = re.findall(r"https?://[^\s\"'`]+", script.read_text(encoding="utf-8"))
        asked += [f"{script.name}: {link}" for link in links if link != "http://www.w3.org/2000/svg"]
    assert not asked, "\n".join(asked)


def test_pictures_have_alt_text_and_a_twin(site) -> None:
    for page in site.pages.values():
        images = page.soup.select("article img")
        for image in images:
            assert len(image.get("alt", "").strip()) > 20, f"{page}: {image.get('src')} says too little to the blind"
        shown = {scheme: [i for i in images if i["src"].endswith(f"#only-{scheme}")] for scheme in ("light", "dark")}
        assert [i["alt"] for i in shown["light"]] == [i["alt"] for i in shown["dark"]], f"{page}: a picture is missing"
        for figure in page.soup.select("figure.drawn"):
            assert len(figure.find_all("img")) == 2, f"{page}: a drawn figure has two pictures"


def test_pictures_have_a_size(site) -> None:
    for page in site.pages.values():
        for image in page.soup.select("article img"):
            assert int(image["width"]) > 0, f"{page}: {image}"
            assert int(image["height"]) > 0, f"{page}: {image}"


def test_every_page_says_what_it_is_about(site) -> None:
    for pages in (site.english, site.spanish):
        said: dict[str, str] = {}
        for page in pages:
            text = page.soup.find("meta", attrs={"name": "description"})["content"]
            assert 20 < len(text) <= 180, f"{page}: {text}"
            assert text not in said, f"{page} and {said[text]}: {text}"
            said[text] = page.path
            assert page.soup.find("meta", property="og:description")["content"] == text
            assert page.soup.find("meta", property="og:title")["content"]
            card = target(page, page.soup.find("meta", property="og:image")["content"])
            assert (site.root / card).is_file(), f"{page}: {card}"


def test_every_figure_is_used_by_a_page() -> None:
    texts = [path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]]
    names = {path.name.split(".")[0] for path in (ROOT / "docs" / "shared" / "figures").glob("*.svg")}
    unused = {name for name in names if not any(f'"{name}"' in text or f"/{name}." in text for text in texts)}
    assert not unused


def test_colours_come_from_the_palette(site) -> None:
    sheet = (site.root / "shared" / "stylesheets" / "palette.css").read_text(encoding="utf-8")
    for name, role in PALETTE.items():
        assert f"--mc-{name}: {role.light}" in sheet
        assert f"--mc-{name}: {role.dark}" in sheet


@pytest.mark.parametrize("prefix", ["", "es/"])
def test_search_index_has_every_page(site, prefix: str) -> None:
    folder = site.root / prefix / "search"
    index, documents = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in ("search_index.json", "documents.json")
    )
    found = {entry["location"].split("#")[0] for entry in documents}
    pages = site.spanish if prefix else site.english
    assert {page.path.removeprefix(prefix).removesuffix("index.html") for page in pages} <= found
    assert index["config"]["lang"] == ["es" if prefix else "en"]


def test_notebooks_are_rendered_and_small(site) -> None:
    notebooks = [page for page in site.english if page.path.endswith("/notebook/index.html")]
    assert len(notebooks) >= 2
    for page in notebooks:
        assert page.file.stat().st_size < 300_000, f"{page} is too heavy"
        assert page.soup.select(".output"), f"{page} shows no output"
        assert page.soup.select("img.notebook-plot"), f"{page} shows no plot"
        links = [tag["href"] for tag in page.soup.select("article a[href$='.ipynb']")]
        assert links, f"{page} has no notebook to download"
        downloaded = json.loads((site.root / target(page, links[0])).read_text(encoding="utf-8"))
        assert downloaded["nbformat"] == 4


def test_every_plot_of_a_spanish_notebook_has_words_of_its_own(site) -> None:
    plots = [target(page, tag["src"]) for page in site.spanish for tag in page.soup.select("img.notebook-plot")]
    assert len(plots) > 50
    for plot in plots:
        english = site.root / plot.removeprefix("es/")
        assert (site.root / plot).read_text(encoding="utf-8") != english.read_text(encoding="utf-8"), plot


def test_language_switch_leads_to_existing_pages(site) -> None:
    for page in site.pages.values():
        here, there = ("es", "en") if page in site.spanish else ("en", "es")
        assert page.soup.html["lang"] == here
        links = {tag["hreflang"]: target(page, tag["href"]) for tag in page.soup.select(".languages a")}
        assert links[here] == page.path
        same = page.path.removeprefix("es/") if here == "es" else f"es/{page.path}"
        assert links[there] == (same if same in site.pages else "es/index.html")


def test_nothing_is_left_unexpanded(site) -> None:
    for page in site.pages.values():
        article = page.soup.find("article")
        text = [node for node in article.find_all(string=True) if not node.find_parent(["code", "pre", "script"])]
        prose = " ".join(node for node in text if not node.find_parent(class_="arithmatex"))
        for delimiter in ("{$", "$}"):
            assert delimiter not in prose, f"{page}: a macro was not expanded"
        for delimiter in ("\\(", "\\["):
            assert delimiter not in prose, f"{page}: math was not recognised"


def test_skip_link_comes_first(site) -> None:
    for page in site.pages.values():
        first = page.soup.find("body").find("a")
        assert "md-skip" in first.get("class", []), f"{page}: the keyboard has to walk through the whole bar"


def test_license_of_what_is_vendored_is_in_the_repository() -> None:
    assert "MIT" in (ROOT / "docs" / "shared" / "katex" / "LICENSE").read_text(encoding="utf-8")
    assert "Mozilla Public License" in (ROOT / "tests" / "site" / "axe" / "LICENSE").read_text(encoding="utf-8")
