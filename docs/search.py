"""What the search finds: hooks of either language's build, for shared/javascripts/search.js."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Let the search find where something is taught before where it is tried or taken further.

    A page that weighs more or less than others says so in its front matter.
    """
    name = page.file.src_uri
    if boost := 0.5 if name.endswith("/notebook.md") else 0.7 if "/further/" in name else None:
        page.meta.setdefault("search", {"boost": boost})


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> None:
    """Let the search find each term of the glossary; by itself it finds headings."""
    if page.file.src_uri != "glossary.md":
        return
    plugin: Any = config.plugins["material/search"]
    entries = plugin.search_index.entries
    whole = next(entry for entry in entries if entry["location"] == page.url)
    whole["text"] = whole["text"].partition("</p>")[0]  # its terms follow
    for term in BeautifulSoup(page.content or "", "html.parser").select("dt[id]"):
        said = term.find_next_sibling("dd")
        if said is None:
            raise PluginError(f"the glossary does not say what {term.get_text()} is")
        title, text = term.get_text(strip=True), said.get_text(" ", strip=True)
        name, colon, _ = text.partition(":")
        if title.isupper() and colon and len(name) < 60:  # TTFT: "Time to first token: from …"
            title = f"{title}: {name}"
        location = f"{page.url}#{term['id']}"
        entries.append({"location": location, "title": title, "text": text, "boost": page.meta["search"]["boost"]})


def on_post_build(config: MkDocsConfig) -> None:
    """Put the pages' text where only a search loads it: the theme's own index is part of every page's first load."""
    folder = Path(config.site_dir) / "search"
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    (folder / "documents.json").write_text(json.dumps(index["docs"], ensure_ascii=False), encoding="utf-8")
    (folder / "search_index.json").write_text(json.dumps(index | {"docs": []}), encoding="utf-8")
