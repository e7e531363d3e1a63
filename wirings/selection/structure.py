"""Structures: which edges are real or hallucinated together. `Structure.of` reads what `wirings.wire_` is given."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from wirings.errors import WiringError
from wirings.selection.block_groups import BlockGroups
from wirings.selection.nm_groups import NMGroups
from wirings.selection.tile_patterns import LARGEST_TILE
from wirings.selection.transposable_groups import TransposableGroups
from wirings.selection.weight_groups import WeightGroups
from wirings.selection.weight_layout import WeightLayout
from wirings.utils.text import brief

FREE = "free"
LONGEST = 60
"""The most characters of a structure. Patterns of spaces take quadratic time, and files of others may hold any text."""
_EXPECTED = (
    'structure= expects "free", an N:M such as "2:4", a block such as "32x32" (outputs x inputs; "32x32, padded" where '
    'it does not divide a layer), "row", "column", or an N:M along outputs too, such as "2:4, transposable"'
)


@dataclass(frozen=True)
class Structure:
    """A structure of the edges of any weight. The free one, in which every edge stands alone, is None."""

    text: str
    """How it is written."""
    nm: tuple[int, int] | None = None
    """Of every ``nm[1]`` neighbouring inputs of a node, ``nm[0]`` edges are real."""
    block: tuple[int | None, int | None] = (None, None)
    """The outputs and inputs of a block, None for all."""
    padded: bool = False
    """Whether blocks may be smaller where they do not divide a weight."""
    transposable: bool = False
    """Whether N:M holds for neighbouring outputs of an input too."""

    @classmethod
    def of(cls, given: object) -> Structure | None:
        """Read a structure; None for ``"free"``.

        >>> Structure.of("2:4").nm, Structure.of("32x16").block, Structure.of("free")
        ((2, 4), (32, 16), None)
        """
        if isinstance(given, str) and len(given) <= LONGEST:
            text = re.sub(r"\s*[xX×]\s*", "x", given.strip())
            if text == FREE:
                return None
            if text in ("row", "column"):
                return cls(text, block=(1, None) if text == "row" else (None, 1))
            if match := re.fullmatch(r"(\d{1,9}):(\d{1,9})(\s*,\s*transposable)?", text):
                n, m, transposable = int(match[1]), int(match[2]), match[3] is not None
                if not 1 <= n <= m:
                    raise WiringError(
                        f"structure={given!r}: of every M edges N are real, so N must be from 1 to M, got N = {n} and "
                        f"M = {m}."
                    )
                if transposable and m > LARGEST_TILE:
                    raise WiringError(
                        f"structure={given!r}: transposable patterns are chosen by comparing all of a tile, so M may "
                        f'be at most {LARGEST_TILE}, got {m}. Use "2:4, transposable", or "{n}:{m}" for inputs alone.'
                    )
                text = f"{n}:{m}" + (", transposable" if transposable else "")
                return cls(text, nm=(n, m), transposable=transposable)
            if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})(\s*,\s*padded)?", text):
                height, width, padded = int(match[1]), int(match[2]), match[3] is not None
                if not height or not width:
                    raise WiringError(
                        f"structure={given!r}: a block needs at least one output and one input, got {height} and "
                        f"{width}."
                    )
                text = f"{height}x{width}" + (", padded" if padded else "")
                return cls(text, block=(height, width), padded=padded)
        hint = " YAML reads 2:4 without quotes as a number: write '2:4'." if isinstance(given, int) else ""
        raise WiringError(f"{_EXPECTED}; got {brief(given)}.{hint}")

    @property
    def fixed(self) -> float | None:
        """The density, if the structure fixes it."""
        return None if self.nm is None else self.nm[0] / self.nm[1]

    def lay_over(self, name: str, layout: WeightLayout, allowed: Tensor | None) -> WeightGroups:
        """The groups of a weight; raises if the structure does not fit it.

        Args:
            name: the name of the weight, for messages.
            layout: its shape, and what its dimensions are.
            allowed: the edges that may exist, or None for all.
        """
        _, outputs, inputs = layout.matrices
        skip = f"Leave the layer dense with skip=[{name!r}]"
        has = f"but {name} of shape {layout.shape} has"
        if layout.parts > 1:
            has = f"but each of the {layout.parts} groups of {name} of shape {layout.shape} has"
        if self.nm is not None:
            n, m = self.nm
            what = f"structure={self.text!r} keeps {n} of every {m} inputs of a node"
            if self.transposable:
                what += f" and {n} of every {m} outputs of an input"
            for size, side in ((inputs, "inputs"), (outputs, "outputs")):
                if size % m and (side == "inputs" or self.transposable):
                    raise WiringError(f"{what}, {has} {size} {side}, which is not a multiple of {m}. {skip}.")
            if allowed is not None:
                raise WiringError(
                    f"{what}, but allowed= excludes edges of {name}, so some groups would have fewer. Drop allowed=, "
                    f"or use skip=[{name!r}]."
                )
            return TransposableGroups(layout, m) if self.transposable else NMGroups(layout, m)
        height, width = self.block[0] or outputs, self.block[1] or inputs
        if not self.padded and (outputs % height or inputs % width):
            near = f"{nearest_divisor(outputs, height)}x{nearest_divisor(inputs, width)}"
            raise WiringError(
                f"structure={self.text!r} needs layers that blocks of {height} outputs and {width} inputs divide, "
                f'{has} {outputs} outputs and {inputs} inputs. The nearest block that divides it is "{near}". '
                f'"{self.text}, padded" makes the blocks at its edges smaller. {skip}.'
            )
        return BlockGroups(layout, (min(height, outputs), min(width, inputs)), allowed)

    def __str__(self) -> str:
        return self.text


def nearest_divisor(size: int, wanted: int) -> int:
    """The divisor of ``size`` that is nearest to ``wanted``, the smaller of two."""
    divisors = [d for low in range(1, int(size**0.5) + 1) if size % low == 0 for d in (low, size // low)]
    return min(sorted(divisors), key=lambda divisor: abs(divisor - wanted))
