"""The colour code: legible text on every shade, and roles that stay apart for colour-blind eyes."""

from itertools import combinations

import numpy as np
import pytest

from minicache.palette import PALETTE, color

# Machado, Oliveira and Fernandes 2009, a model of colour vision deficiency; severity 1.0.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(hexcode: str) -> np.ndarray:
    srgb = np.array(list(bytes.fromhex(hexcode[1:]))) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear sRGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(np.maximum(xyz / np.array([0.9505, 1.0, 1.089]), 1e-9))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """WCAG 2.2 contrast ratio."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    dark, light = sorted(float(weights @ linear(hexcode)) for hexcode in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("role", PALETTE)
def test_text_on_each_shade_is_legible(role: str) -> None:
    shades = PALETTE[role]
    assert contrast(shades.light, shades.on_light) >= 4.5
    assert contrast(shades.dark, shades.on_dark) >= 4.5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_roles_stay_apart(scheme: str, vision: str) -> None:
    seen = {role: lab(np.clip(VISION[vision] @ linear(color(role, scheme)), 0, 1)) for role in PALETTE}
    for one, other in combinations(PALETTE, 2):
        distance = float(np.linalg.norm(seen[one] - seen[other]))
        assert distance > 15, f"{one} and {other} look alike ({distance:.0f}) under {vision}, {scheme}"


def test_unknown_role_names_the_known() -> None:
    with pytest.raises(KeyError, match="prompt"):
        color("purple")
