"""The sizes of a table's networks: the paper's figures beside what is counted here."""

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
from wirings.train.tables.format import millions
from wirings.train.untrained import new_model


@dataclass(frozen=True)
class CountedSize:
    """Parameters and multiply-adds of a row, in the paper and counted here."""

    paper_params: float | None = None
    paper_mult_adds: float | None = None
    params: float | None = None
    """The mean over results or, without results, those of the network before training; None if it cannot be counted."""
    mult_adds: float | None = None
    """Counted as ``params`` are."""
    trained: bool = False
    """Whether they are counted in results."""
    edges: float | None = None
    """For graphs before training, the multiply-adds of their edges alone."""
    reason: str | None = None
    """Why it could not be counted."""

    @property
    def same(self) -> bool:
        """Whether the paper's figures equal those counted here, rounded as in the paper."""
        pairs = ((self.paper_params, self.params), (self.paper_mult_adds, self.mult_adds))
        return all(paper is None or ours is None or millions(ours, paper) == millions(paper) for paper, ours in pairs)


def count_size(recipe: Recipe, ours: Sequence[Result]) -> CountedSize:
    """The size of a recipe's network: the mean over its results, or counted now if it has none."""
    paper = recipe.paper or {}
    known: dict[str, Any] = {"paper_params": paper.get("params"), "paper_mult_adds": paper.get("mult_adds")}
    measured = [result.mult_adds for result in ours if result.mult_adds is not None]
    if ours and len(measured) == len(ours):
        params = fmean(result.params for result in ours)
        return CountedSize(**known, params=params, mult_adds=fmean(measured), trained=True)
    try:
        model = new_model(recipe.settings)
    except WiringError as error:
        return CountedSize(**known, reason=str(error))
    counted = profile(model)
    modules = dict(model.named_modules())
    graphs = [row.edge_mult_adds or 0 for row in counted.rows if isinstance(modules.get(row.name), Graph)]
    edges = sum(graphs) if graphs else None
    return CountedSize(**known, params=counted.params, mult_adds=counted.mult_adds, edges=edges)


def remarks(size: CountedSize | None, note: str | None) -> list[str]:
    """A remark for the table if the paper's size differs from the one counted; ``note`` is the recipe's."""
    if size is None or (size.same and size.reason is None):
        return []
    if size.reason is not None:
        return [f"not counted: {size.reason}"]
    if note is None and size.edges is not None:
        return [
            "counted before training. Nodes that die in training save multiply-adds; those of the edges, "
            f"{millions(size.edges)}, remain."
        ]
    return [note or "counted differently than in the paper."]
