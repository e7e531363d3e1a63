"""Colours of edges: distinguishable with every kind of colour vision, and from the background."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from wirings.draw.common import DIED, NEGATIVE, POSITIVE

# Colour vision deficiencies as matrices on linear RGB: Machado, Oliveira and Fernandes, 2009.
VISIONS = {
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
STYLE = (files("wirings.draw") / "page" / "style.css").read_text(encoding="utf-8")
THEMES = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root.*?\{(.*?)\}", STYLE, re.S)]


def seen(colour: str, vision: str) -> np.ndarray:
    """A colour as linear RGB, as it appears to this kind of vision."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.clip(VISIONS[vision] @ linear, 0, 1)


def lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, in which a distance of about 2 is just noticeable."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """Contrast ratio as defined by the Web Content Accessibility Guidelines."""
    light = sorted(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05 for linear in (one, other))
    return light[1] / light[0]


def test_distance_and_contrast() -> None:
    black, white = seen("#000000", "normal"), seen("#ffffff", "normal")
    assert np.linalg.norm(lab(white) - lab(black)) == pytest.approx(100, abs=0.1)
    assert contrast(black, white) == pytest.approx(21)
    red, green = (lab(seen(colour, "deuteranopia")) for colour in ("#b04030", "#607020"))
    assert np.linalg.norm(red - green) < 25, "this pair must count as indistinguishable"


def test_pictures_have_the_colours_of_the_light_theme() -> None:
    light, dark = THEMES
    assert light.keys() == dark.keys()
    assert (light["positive"], light["negative"], light["dying"]) == (POSITIVE, NEGATIVE, DIED)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_edge_colours_are_distinguishable(theme: dict[str, str], vision: str) -> None:
    colours = {name: seen(theme[name], vision) for name in ("positive", "negative", "new", "dying")}
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(lab(colours[one]) - lab(colours[other])) > 30, (one, other)
    for name, colour in colours.items():
        assert contrast(colour, seen(theme["ground"], vision)) > 3.5, name
