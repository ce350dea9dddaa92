"""What the build adds to the pages: shared files, generated colours, rendered notebooks, the other language.

MkDocs calls the functions named `on_…`, in either language's build. Nothing that they generate is written to the
repository.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markdown import Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from minicache.palette import GRID, INK, PALETTE, Scheme
from minicache_course.table import Task, load_course
from minicache_course.workspace import TABLE

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import notebook_pages, translation  # noqa: E402
from scripts.browser.course import is_pure  # noqa: E402

# This plugin lists all its variables at every build; its warnings are enough.
logging.getLogger("mkdocs.plugins.mkdocs_macros.util").setLevel(logging.WARNING)

SHARED = {".css", ".js", ".svg", ".png", ".woff2", ".yml"}
"""The kinds of file in docs/shared that the site serves; licences and notes stay behind."""

PREFIX = {"en": "", "es": "es/"}
"""Where each language's site stands, from the root of the whole site."""


# --- files ----------------------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what both languages share, what is generated, and the notebooks (their pages where the language has them)."""
    for path in sorted((DOCS / "shared").rglob("*")):
        if path.suffix in SHARED and _is_shown(path, config.theme["language"]):
            files.append(File.generated(config, path.relative_to(DOCS).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "shared/stylesheets/palette.css", content=palette_css()))
    # Not a page: it is to be opened on a machine with a GPU.
    colab = str(ROOT / "notebooks" / "colab" / "gpu.ipynb")
    files.append(File.generated(config, "phase-04-triton-kernels/colab-gpu.ipynb", abs_src_path=colab))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        spanish = files.get_file_from_path(f"{notebook.stem}/notebook.md")  # the rest: on_page_read_source
        if spanish or config.theme["language"] == "en":
            for name, content in rendered(notebook, spanish.content_string if spanish else None).items():
                if not (spanish and name == "notebook.md"):
                    files.append(File.generated(config, f"{notebook.stem}/{name}", content=content))
    return files


def _is_shown(path: Path, lang: str) -> bool:
    """Whether a language's pages show a shared file: a figure with words is drawn once for each language."""
    name, *kind = path.name.split(".")
    if lang == "en" or "es" in kind:
        return lang == "es" or "es" not in kind
    return not path.with_name(".".join((name, "es", *kind))).is_file()


@cache
def rendered(notebook: Path, spanish: str | None = None) -> dict[str, str | bytes]:
    """A notebook's page and pictures, and the notebook itself to download."""
    try:
        return {**notebook_pages.render(notebook, spanish), notebook.name: notebook.read_bytes()}
    except notebook_pages.NotebookError as error:
        raise PluginError(f"{notebook.name}: {error}") from None


def palette_css() -> str:
    """`minicache.palette` as CSS variables, so the site has no colour of its own for these roles."""
    return _scheme_css("light", ':root, [data-md-color-scheme="default"]') + _scheme_css(
        "dark", '[data-md-color-scheme="slate"]'
    )


def _scheme_css(scheme: Scheme, selector: str) -> str:
    lines = [f"  --mc-ink: {INK[scheme]};", f"  --mc-grid: {GRID[scheme]};"]
    for role, shade in PALETTE.items():
        lines.append(f"  --mc-{role}: {shade.shade(scheme)};")
        lines.append(f"  --mc-on-{role}: {shade.on_light if scheme == 'light' else shade.on_dark};")
    return f"{selector} {{\n" + "\n".join(lines) + "\n}\n"


# --- two languages --------------------------------------------------------------------------------------------------


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Give the Spanish site the English nav: Spanish titles, and links to English where a page is not translated."""
    if config.theme["language"] == "en":
        return nav
    titles = config.extra["nav"]
    for item in _walk(nav.items):
        if isinstance(item, Link):
            item.url = f"../{english_url(item.url)}"
            item.title = f"{titles.get(item.title, item.title)} (en)"
        elif item.title in titles:
            item.title = titles[item.title]
    return nav


def _walk(items: list[Any]) -> Iterator[Any]:
    for item in items:
        yield item
        if isinstance(item, Section):
            yield from _walk(item.children)


def english_url(source: str) -> str:
    """Where the English site has the page of `docs/en/<source>`, from that site's root."""
    generated = source.endswith("/notebook.md") and (ROOT / "notebooks" / f"{Path(source).parent}.ipynb").is_file()
    if not generated and not (DOCS / "en" / source).is_file():
        raise PluginError(f"neither docs/es nor docs/en has {source}")
    return source.removesuffix(".md").removesuffix("index") + ("" if source.endswith("index.md") else "/")


def on_env(env: jinja2.Environment, config: MkDocsConfig, files: Files) -> jinja2.Environment:
    """Let templates link from the Spanish site to the English one.

    MkDocs' own `url` filter loses its way when the target leaves the site and shares a folder name with the page.
    """
    own = env.filters["url"]

    @jinja2.pass_context
    def url(context: jinja2.runtime.Context, value: str) -> str:
        page = context.get("page")
        if not value.startswith("../") or page is None:
            return str(own(context, value))
        return get_relative_url(value.removeprefix("../"), PREFIX["es"] + page.url)

    env.filters["url"] = url
    return env


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Give a Spanish page's sections the addresses of the English ones, and say whether it is out of date."""
    if config.theme["language"] == "en" or not page.file.abs_src_path:
        return None
    name = page.file.src_uri
    content = Path(page.file.abs_src_path).read_text(encoding="utf-8")
    try:
        is_stale = translation.is_stale(name, content)
        if name.endswith("/notebook.md"):
            notebook = ROOT / "notebooks" / f"{Path(name).parent}.ipynb"
            english, content = (str(rendered(notebook, words)["notebook.md"]) for words in (None, content))
        else:
            english = (DOCS / "en" / name).read_text(encoding="utf-8")
        return translation.prepare(name, content, english, _markdown(config), is_stale=is_stale)
    except translation.TranslationError as error:
        raise PluginError(f"docs/es/{name}: {error}") from None


def _markdown(config: MkDocsConfig) -> Markdown:
    return Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs or {})


def on_post_build(config: MkDocsConfig) -> None:
    """List what is not translated, or was translated from another state of its source."""
    if config.theme["language"] == "es":
        log = logging.getLogger("mkdocs.hooks.translation")
        for what, names in (("not translated", translation.missing()), ("out of date", translation.stale())):
            log.info("%d pages are %s: %s", len(names), what, ", ".join(names) or "none")


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Point the language switch at the same page in the other language, or at its home where there is none."""
    here = config.theme["language"]
    config.extra["languages"] = [
        {"name": name, "lang": lang, "link": page.url if lang == here else _elsewhere(page.file.src_uri, lang)}
        for lang, name in (("en", "English"), ("es", "Español"))
    ]
    return context


def _elsewhere(source: str, lang: str) -> str:
    """The page of `source` on the other language's site, from this site's root."""
    exists = lang == "en" or (DOCS / lang / source).is_file()
    return ("../" if lang == "en" else PREFIX[lang]) + english_url(source if exists else "index.md")


# --- pages ----------------------------------------------------------------------------------------------------------


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the button that opens a lab in front of its handout's first section, and spaces in Spanish numbers.

    And tell screen readers that a table's cell without words is no heading.
    """
    lang = config.theme["language"]
    if lang == "es":
        html = translation.with_spanish_numbers(html)
    if tasks := tasks_by_page().get(page.file.src_uri):
        html = html.replace("<h2", f"{lab_opener(tasks, PREFIX[lang] + page.url, lang)}<h2", 1)
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


@cache
def tasks_by_page() -> dict[str, list[Task]]:
    """The tasks that each page of docs/en asks for."""
    found: dict[str, list[Task]] = {}
    for phase in load_course(ROOT / TABLE):
        for task in phase.tasks:
            found.setdefault(task.page.removeprefix("docs/en/"), []).append(task)
    return found


OPENER = {
    "en": {
        "open": "Open in the browser",
        "missing": "The lab could not be loaded: reload the page.",
        "here": 'Edit and grade {tasks} here, <a href="{about}">without an installation</a>.',
        "one": '{tasks} needs more than Python, such as PyTorch: <a href="{setup}">set up</a>, then {commands}.',
        "several": '{tasks} need more than Python, such as PyTorch: <a href="{setup}">set up</a>, then {commands}.',
        "task": "task {0}",
        "two": "tasks {0} and {1}",
        "more": "tasks {0} to {1}",
    },
    "es": {
        "open": "Abrir en el navegador",
        "missing": "No se ha podido cargar el lab: recarga la página.",
        "here": 'Edita y corrige aquí {tasks}, <a href="{about}">sin instalar nada</a>.',
        "one": 'Para {tasks} no basta con Python: <a href="{setup}">instala</a> lo que falta y escribe {commands}.',
        "several": 'Para {tasks} no basta con Python: <a href="{setup}">instala</a> lo que falta y escribe {commands}.',
        "task": "la tarea {0}",
        "two": "las tareas {0} y {1}",
        "more": "las tareas {0} a {1}",
    },
}
"""What stands at the button that opens a lab, by language."""


def lab_opener(tasks: list[Task], here: str, lang: str) -> str:
    """The button that opens the page's tasks in the browser, and what to do about those that need PyTorch.

    Nothing is loaded before the click.

    Args:
        tasks: of the page.
        here: URL of the page, from the root of the whole site.
        lang: the page's language.
    """
    pure, others = [task for task in tasks if is_pure(task)], [task for task in tasks if not is_pure(task)]
    words, parts = OPENER[lang], []
    if pure:
        module, about = (
            get_relative_url(url, here) for url in ("assets/browser/lab.js", _page("in-the-browser", lang))
        )
        folder = load_course(ROOT / TABLE).phase(pure[0].phase).folder
        load = f"import('{module}').then((lab) => lab.open(this.parentNode))"
        told = words["here"].format(tasks=_listed(pure, words), about=about)
        parts.append(
            f'<div class="mc-open" data-phase="{folder}" data-tasks="{" ".join(task.id for task in pure)}">'
            f"<button class='md-button' type='button' onclick=\"{load}"
            f".catch(() => (this.nextElementSibling.textContent = '{words['missing']}'))\">{words['open']}</button> "
            f"<span>{told}</span></div>"
        )
    if others:
        commands = ", ".join(f"<code>minicache grade {task.id}</code>" for task in others)
        text = words["several" if len(others) > 1 else "one"]
        setup = get_relative_url(_page("setup", lang), here)
        told = text.format(tasks=_listed(others, words), setup=setup, commands=commands)
        parts.append(f"<p>{told[0].upper()}{told[1:]}</p>")
    return "".join(parts)


def _page(name: str, lang: str) -> str:
    """The URL of a page in a language, or in English where it is not translated, from the root of the whole site."""
    return (PREFIX[lang] if (DOCS / lang / f"{name}.md").is_file() else "") + f"{name}/"


def _listed(tasks: list[Task], words: dict[str, str]) -> str:
    """`task 5.1`, `tasks 5.3 and 5.4`, `tasks 0.2 to 0.6`."""
    form = "task" if len(tasks) == 1 else "two" if len(tasks) == 2 else "more"
    return words[form].format(tasks[0].id, tasks[-1].id)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Give the search dialog, which the theme leaves without one, a name."""
    dialog = 'data-md-component="search" role="dialog"'
    name = {"en": "Search", "es": "Buscar"}[config.theme["language"]]
    return output.replace(dialog, f'{dialog} aria-label="{name}"')
