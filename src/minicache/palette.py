"""The one colour code: site, plots, terminal and live page draw the same thing in the same colour.

The hues are Okabe and Ito's (https://jfly.uni-koeln.de/color/), which stay apart for every common kind of colour
blindness. Each role has a shade for light and for dark backgrounds, and for each shade the text colour that is legible
on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Role:
    """What one colour means.

    Attributes:
        meaning: what the role marks, as a legend would say it.
        light: `#rrggbb` on a light background.
        dark: `#rrggbb` on a dark background.
        on_light: `#rrggbb` of text drawn on the `light` shade.
        on_dark: `#rrggbb` of text drawn on the `dark` shade.
    """

    meaning: str
    light: str
    dark: str
    on_light: str = "#1A1A1A"
    on_dark: str = "#1A1A1A"

    def shade(self, scheme: Scheme) -> str:
        """The colour for `scheme`, as `#rrggbb`."""
        return self.light if scheme == "light" else self.dark


PALETTE: dict[str, Role] = {
    "prompt": Role("prompt token", "#F0C808", "#F0E442"),
    "generated": Role("generated token", "#0072B2", "#74BCFF", on_light="#FFFFFF"),
    "end": Role("end of sequence", "#D55E00", "#FF7A33"),
    "shared": Role("shared by several sequences", "#009E73", "#129B74"),
    "free": Role("free memory", "#D9D9D9", "#4A4F5A", on_dark="#FFFFFF"),
    "wasted": Role("reserved and never used", "#CC79A7", "#E39AC4"),
}
"""Role name → colours, in the order in which a legend lists them."""

INK: dict[Scheme, str] = {"light": "#1F2430", "dark": "#E6E6E6"}
"""Text and axes in a picture, per scheme."""

GRID: dict[Scheme, str] = {"light": "#D0D4DC", "dark": "#454B57"}
"""Grid lines and outlines in a picture, per scheme."""


def color(role: str, scheme: Scheme = "light") -> str:
    """The colour of `role` as `#rrggbb`.

    Raises:
        KeyError: no such role; the message lists those there are.
    """
    if role not in PALETTE:
        raise KeyError(f"no colour role {role!r}: there are {', '.join(PALETTE)}")
    return PALETTE[role].shade(scheme)
