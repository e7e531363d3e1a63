"""Compute all sums over edges of a compiled network in tiles, whatever is faster."""

from unittest import mock

from wirings.engine import EngineModel, tiled_sums
from wirings.engine.step import StepChoice
from wirings.engine.tiled_sums import TILED


def in_tiles(made: EngineModel, tile_bytes: int = tiled_sums.TILE_BYTES) -> int:
    """Choose tiles for every step that can be computed so; returns their number.

    Args:
        made: the compiled network.
        tile_bytes: bytes of a tile's inputs; with few, the inputs are cut into many blocks.
    """
    count = 0
    with mock.patch.object(tiled_sums, "TILE_BYTES", tile_bytes):
        for plan in made._plans():
            tiled = [TILED in step.ways() for step in plan.steps]
            count += sum(tiled)
            plan._kept.clear()  # what was packed with other tiles
            plan.choose(
                [StepChoice(TILED, own.strips) if yes else own for yes, own in zip(tiled, plan.choices, strict=True)]
            )
    return count
