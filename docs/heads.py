"""What a page says of itself before it is read: its description, its card, its pictures' sizes. Hooks of MkDocs."""

from __future__ import annotations

import html
import posixpath
import re
import struct
from io import BytesIO
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from PIL import Image, ImageDraw, ImageFont

from minicache.palette import INK, PALETTE

MARK = (("prompt", "prompt", "generated"), ("generated", "shared", "free"))
"""The roles of the logo's blocks, by row."""

_PARAGRAPH = re.compile(r"^<p>((?:(?!</p>|arithmatex).)+)</p>", re.MULTILINE | re.DOTALL)
_SVG = re.compile(r'<svg[^>]* width="([\d.]+)(?:pt)?"[^>]*? height="([\d.]+)(pt)?"')
_TAG = re.compile(r"<[^>]+>")
_PICTURE = re.compile(r'<img\b[^>]* src="([^":#]+\.(?:svg|png))[^">]*"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the mark and the card."""
    files.append(File.generated(config, "shared/images/mark.svg", content=mark_svg()))
    files.append(File.generated(config, "shared/images/card.png", content=card_png()))
    return files


def mark_svg() -> str:
    """The logo and favicon: six blocks: prompt, generated and free blocks."""
    blocks = "".join(
        f'<rect x="{5 + 19 * column}" y="{14 + 20 * row}" width="16" height="17" rx="3" fill="{PALETTE[role].dark}"/>'
        for row, roles in enumerate(MARK)
        for column, role in enumerate(roles)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">'
        f'<rect width="64" height="64" rx="13" fill="{INK["light"]}"/>{blocks}</svg>'
    )


def card_png() -> bytes:
    """What other sites show of a link to this one: the mark and the name, 1200 × 630 pixels."""
    card = Image.new("RGB", (1200, 630), INK["light"])
    draw = ImageDraw.Draw(card)
    for row, roles in enumerate(MARK):
        for column, role in enumerate(roles):
            x, y = 90 + 130 * column, 190 + 136 * row
            draw.rounded_rectangle((x, y, x + 110, y + 116), 20, PALETTE[role].dark)
    draw.text((540, 235), "minicache", "#ffffff", ImageFont.load_default(110))
    draw.text((546, 375), "build an LLM serving engine", "#d5d9e2", ImageFont.load_default(42))
    card.save(made := BytesIO(), "PNG", optimize=True)
    return made.getvalue()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell the browser how large pictures are: it keeps their room before they are there."""
    shown = {file.url: file for file in files if file.src_uri.endswith((".svg", ".png"))}

    def sized(image: re.Match[str]) -> str:
        width, height = size(shown[posixpath.normpath(posixpath.join(page.url, image[1]))])
        return f'{image[0]} width="{width}" height="{height}"'

    return _PICTURE.sub(sized, html)


def size(file: File) -> tuple[int, int]:
    """Width and height in pixels of a PNG or SVG, as its file has them."""
    if file.src_uri.endswith(".png"):
        width, height = struct.unpack(">II", file.content_bytes[16:24])
        return width, height
    svg = _SVG.search(file.content_bytes.decode())
    if not svg:
        raise PluginError(f"{file.src_uri} has no width and height")
    width, height, unit = svg.groups()
    points = 4 / 3 if unit else 1
    return round(points * float(width)), round(points * float(height))


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> None:
    """Describe a page by its first paragraph without formulas, if its front matter does not.

    The home page keeps the description of the site.
    """
    if not page.is_homepage and (first := _PARAGRAPH.search(page.content or "")):
        text = in_short(html.unescape(_TAG.sub("", first[1])))
        page.meta.setdefault("description", html.escape(text))


def in_short(text: str, longest: int = 160) -> str:
    """The first sentences of a text, as many as fit; or what fits of the first.

    Args:
        text: of a paragraph.
        longest: characters.
    """
    text = " ".join(text.split())
    if len(text) <= longest:
        return text
    end = max(text.rfind(mark, 0, longest) for mark in (". ", "? "))
    return text[: end + 1] if end > 0 else text[: longest - 2].rsplit(" ", 1)[0] + " …"
