"""Options that many models share. A model takes a group of them by naming it as a parameter, see `register`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from wirings.budgets.budget import Amount
from wirings.errors import WiringError
from wirings.rules import Dense, Rule
from wirings.rules import get as get_rule
from wirings.selection.structure import FREE, Structure
from wirings.wire.finalize import finalize_
from wirings.wire.wire import wire_


@dataclass(frozen=True, kw_only=True)
class NetworkSize:
    """Size of a network for images."""

    width: float = 1.0
    """Multiplies the channels of every layer."""
    classes: int = 1000
    """Number of classes."""
    image_size: int = 224
    """Height and width of the images in pixels."""


@dataclass(frozen=True, kw_only=True)
class LayerWiring:
    """How the layers of a network are wired."""

    rule: str | Rule | None = None
    """A rule or its name; None leaves the network dense."""
    density: float | None = None
    """Fraction of the weights to keep. For the rule ``keep``, the new network is pruned to it by magnitude first."""
    k: int | None = None
    """Number of weights to keep, instead of the density."""
    mult_adds: float | None = None
    """At most so many multiply-adds of the whole network for one example, beside density or k; see `wirings.wire_`."""
    share: str = "uniform"
    """How the edges are shared among the layers; see `wirings.wire_`."""
    structure: str = FREE
    """Which edges are real together, such as "2:4" or "32x32"; see `wirings.wire_`."""
    gradient_every: int = 1
    """Optimizer steps from one gradient of hallucinated edges to the next, for structures; see `wirings.wire_`."""
    scale_weights: bool | float = False
    """Whether starting weights are multiplied by 1 / √density, or by which number; see `wirings.wire_`."""

    def wire(self, model: nn.Module, skip: Sequence[str] = ()) -> nn.Module:
        """Wire a model in place and keep the handle as its ``wiring``, which is None if the model stays dense.

        Args:
            model: The model.
            skip: Patterns of layers that stay dense.
        """
        rule, made = None if self.rule is None else get_rule(self.rule), Structure.of(self.structure)
        unlimited = self.density is None and self.k is None
        if rule is None or (isinstance(rule, Dense) and unlimited):
            if made is not None:
                raise WiringError(f"structure={self.structure!r} needs a rule that chooses edges, such as 'dnw'.")
            model.wiring = None  # type: ignore[assignment]
            return model
        if unlimited and not rule.own_budget and (made is None or made.fixed is None):
            raise WiringError(
                f"rule {rule.name!r} needs a budget: give the model a density, the fraction of its weights to keep, or "
                "use the rule 'dense'."
            )
        budget = {
            "density": self.density,
            "k": self.k,
            "mult_adds": self.mult_adds,
            "share": self.share,
            "structure": self.structure,
            "gradient_every": self.gradient_every,
        }
        if rule.keeps_zeros and not unlimited:
            finalize_(wire_(model, "fine_tune", skip=skip, **budget).model)  # type: ignore[arg-type]
            budget = {"structure": self.structure}
        model.wiring = wire_(model, rule, skip=skip, scale_weights=self.scale_weights, **budget)  # type: ignore
        return model


@dataclass(frozen=True, kw_only=True)
class GraphWiring:
    """How a neural graph is wired."""

    rule: str | Rule | None = None
    """A rule or its name; dnw by default."""
    edges: Amount | None = None
    """Number of edges, or their density if it is a float."""
    structure: str = FREE
    """Which edges are real together, such as "2:4" or "32x32"; see `wirings.wire_`."""

    def arguments(self, default: int) -> dict[str, Any]:
        """Return the arguments ``rule``, ``edges`` and ``structure`` of a graph.

        Args:
            default: The number of edges, unless another is given or the rule or the structure fixes it.
        """
        made = Structure.of(self.structure)
        fixed = made is not None and made.fixed is not None
        own = self.rule is not None and get_rule(self.rule).own_budget
        edges = default if self.edges is None and not own and not fixed else self.edges
        return {"rule": self.rule, "edges": edges, "structure": self.structure}


IMAGENET_SIZE = NetworkSize()
CIFAR10_SIZE = NetworkSize(classes=10, image_size=32)
DENSE_LAYERS = LayerWiring()
DEFAULT_GRAPH = GraphWiring()
