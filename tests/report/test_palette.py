"""The colours of reports: readable on their ground, and devices apart for colour-blind readers, in light and dark."""

import itertools
import re

import numpy as np
import pytest

from onnxplace.reports.page_rendering import COLORS, PAGE_FOLDER

# Contrasts that the Web Content Accessibility Guidelines 2.2 ask for: of texts, and of graphics.
MIN_TEXT_CONTRAST, MIN_GRAPHIC_CONTRAST = 4.5, 3.0
# In CIELAB; a difference of about 2 is just visible next to each other.
MIN_DIFFERENCE = 15.0
# How colours look without one kind of cones: Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009, severity 1.0.
VISION = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def read_palettes() -> dict[str, dict[str, np.ndarray]]:
    """Return the colours of the page by name, as linear RGB, of the light and the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", (PAGE_FOLDER / "page.css").read_text(encoding="utf-8"), re.S)
    palettes = []
    for block in blocks:
        colors = {}
        for name, text in re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block):
            parts = np.array([int(text[index : index + 2], 16) for index in (1, 3, 5)]) / 255
            colors[name] = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        palettes.append(colors)
    return dict(zip(("light", "dark"), palettes, strict=True))


PALETTES = read_palettes()
schemes = pytest.mark.parametrize("scheme", ["light", "dark"])


def measure_contrast(first: np.ndarray, second: np.ndarray) -> float:
    darker, lighter = sorted(float(TO_XYZ[1] @ color) for color in (first, second))
    return (lighter + 0.05) / (darker + 0.05)


def convert_to_lab(color: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(color, 0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@schemes
def test_texts_and_graphics_stand_out(scheme):
    palette = PALETTES[scheme]
    for name in ("text", "quiet", "link"):
        for ground in ("page", "raised"):
            assert measure_contrast(palette[name], palette[ground]) >= MIN_TEXT_CONTRAST, (name, ground)
    for name in ("limit", *(f"device-{index}" for index in range(COLORS))):
        assert measure_contrast(palette[name], palette["page"]) >= MIN_GRAPHIC_CONTRAST, name


@schemes
@pytest.mark.parametrize("vision", VISION)
def test_colours_of_devices_differ_for_every_eye(scheme, vision):
    seen = [convert_to_lab(VISION[vision] @ PALETTES[scheme][f"device-{index}"]) for index in range(COLORS)]
    for first, second in itertools.combinations(range(COLORS), 2):
        assert np.linalg.norm(seen[first] - seen[second]) >= MIN_DIFFERENCE, (first, second)
