"""How large the networks of a table are: as the paper has it, beside what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from wirings.errors import WiringError
from wirings.graph import Graph
from wirings.profiling import profile
from wirings.train.recipes import Recipe
from wirings.train.results import Result
from wirings.train.untrained import new_model


@dataclass(frozen=True)
class Size:
    """Parameters and multiply-adds of a row, as the paper has them and as counted here."""

    paper_params: float | None = None
    paper_mult_adds: float | None = None
    params: float | None = None
    """Of the results, a mean; of the network before training where there are none; None if it cannot be counted."""
    mult_adds: float | None = None
    trained: bool = False
    """Whether they are those of results."""
    edges: float | None = None
    """Multiply-adds of the graphs' edges alone, of a network before training that has graphs."""
    reason: str | None = None
    """Why it could not be counted."""

    @property
    def same(self) -> bool:
        """Whether what the paper has is what was counted, rounded as the paper rounds."""
        pairs = ((self.paper_params, self.params), (self.paper_mult_adds, self.mult_adds))
        return all(paper is None or ours is None or millions(ours, paper) == millions(paper) for paper, ours in pairs)


def size_of(recipe: Recipe, ours: Sequence[Result]) -> Size:
    """The size of a recipe's network: of its results, or of one made and counted now."""
    paper = recipe.paper or {}
    known: dict[str, Any] = {"paper_params": paper.get("params"), "paper_mult_adds": paper.get("mult_adds")}
    measured = [result.mult_adds for result in ours if result.mult_adds is not None]
    if ours and len(measured) == len(ours):
        params = fmean(result.params for result in ours)
        return Size(**known, params=params, mult_adds=fmean(measured), trained=True)
    try:
        model = new_model(recipe.settings)
    except WiringError as error:
        return Size(**known, reason=str(error))
    counted = profile(model)
    modules = dict(model.named_modules())
    graphs = [row.edge_mult_adds or 0 for row in counted.rows if isinstance(modules.get(row.name), Graph)]
    return Size(**known, params=counted.params, mult_adds=counted.mult_adds, edges=sum(graphs) if graphs else None)


def remarks(size: Size | None, note: str | None) -> list[str]:
    """What must be said where the paper's size is not the one counted; ``note`` is the recipe's."""
    if size is None or (size.same and size.reason is None):
        return []
    if size.reason is not None:
        return [f"not counted. {size.reason}"]
    if note is None and size.edges is not None:
        return [
            "counted before training, in which nodes die, and with them what they compute: at least "
            f"{millions(size.edges)} multiply-adds are left, those of the edges."
        ]
    return [note or "counted otherwise than the paper counts."]


def millions(value: float | None, like: float | None = None) -> str:
    """A number in millions, with three digits; or rounded as ``like`` is, which the paper has.

    >>> millions(55_646_946, 41e6), millions(55_646_946, 55.7e6), millions(469_072), millions(0.24e6)
    ('56M', '55.6M', '0.469M', '0.24M')
    """
    if value is None:
        return ""
    if like is None:
        return f"{value / 1e6:.3g}M"
    decimals = len(f"{like / 1e6:g}".partition(".")[2])
    return f"{value / 1e6:.{decimals}f}M"
