"""What a selection needs to know about the edges of one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from wirings.selection.service import Selection


class SelectableEdges(Protocol):
    """What a selection needs to know about the edges of one weight."""

    k: Tensor
    """The number of real edges: of this weight, or of all weights that share the budget."""
    allowed: Tensor | None
    """The edges that may exist, or None for all."""
    possible: int
    """The number of allowed edges."""
    place: int
    """The position of the weight among those of its selection, which sets it."""
    rank_factor: Tensor | None
    """What magnitudes are multiplied by where layers are ranked together (``share="scaled"``), or None."""
    selection: Selection

    def within(self) -> Tensor | None:
        """The edges that may be chosen, or None for all."""
