"""Targeted weight dropout (Gomez et al., 2019), as in the paper's appendix "Targeted Dropout"."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.rules.base import Edges, Layer, Rule, register
from wirings.utils.checks import number, yes_or_no

GAMMA = "gamma"


@register
class TargetedDropout(Rule):
    """The weakest edges, all but k, are each dropped with probability rho in every forward pass of training.

    Those edges are the bottom fraction γ = 1 − density. One that is dropped gets no gradient in that pass; one that was
    spared gets it. In evaluation all of them are left out, so that exactly k are real.

    Args:
        rho: the probability, from 0 to 1, or ``"gamma"`` for γ.
        regular: rank the edges of each node apart, as Gomez et al. do: the bottom γ of every node's incoming edges may
            be dropped. By default all edges of a weight are ranked together, which the paper found better
            ("unconstrained"). The k edges are then shared out over nodes in proportion to their allowed incoming edges,
            rounded down, and the rest given one each to the nodes with the largest remainders (the earlier node, where
            they are equal).
    """

    name = "targeted_dropout"
    reaches = "some"

    def __init__(self, rho: float | str = 0.95, regular: bool = False) -> None:
        hint = f' A fraction equal to γ is written "{GAMMA}".'
        self.rho: Any = rho if rho == GAMMA else number(self.name, "rho", rho, hint=hint)
        self.regular = yes_or_no(self.name, "regular", regular)

    def setup(self, layers: Sequence[Layer]) -> None:
        if not self.regular:
            return
        for layer in layers:
            edges, receiver = layer.edges, layer.receivers()
            each = receiver.expand(layer.weight.shape)
            stored = torch.bincount(each.reshape(-1))  # edges of each node that have a weight, allowed or not
            allowed = stored if edges.allowed is None else torch.bincount(each[edges.allowed], minlength=len(stored))
            edges.remember("receiver", receiver, saved=False)
            edges.remember("first", stored.cumsum(0) - stored, saved=False)
            edges.remember("incoming", allowed, saved=False)

    def real(self, weight: Tensor, edges: Edges) -> Tensor:
        return _strongest_of_each(weight, edges) if self.regular else edges.choose(weight)

    def used(self, weight: Tensor, edges: Edges) -> Tensor | None:
        return None  # what was dropped has no gradient

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        if not edges.training:
            return super().forward(weight, edges)
        rho = 1 - edges.density() if self.rho == GAMMA else self.rho
        # Drawn in float32: in bfloat16 random numbers are multiples of 1/256, and so would the probabilities be.
        spared = torch.rand_like(weight, dtype=torch.float32) >= rho
        if edges.allowed is not None:
            spared &= edges.allowed
        return torch.where(self.real(weight, edges) | spared, weight, 0.0)


def shares(k: Tensor, incoming: Tensor) -> Tensor:
    """``k`` edges over nodes, in proportion to their ``incoming`` edges: whole numbers, by largest remainders.

    Of 1.6, 1.6, 0.8 and 0 the last but one has the largest remainder, then the first.

    >>> shares(torch.tensor(4), torch.tensor([4, 4, 2, 0]))
    tensor([2, 1, 1, 0])
    """
    total = incoming.sum()
    counts, rest = k * incoming // total, k * incoming % total
    place = rest.argsort(descending=True, stable=True).argsort()
    return counts + (place < k - counts.sum())


def _strongest_of_each(weight: Tensor, edges: Edges) -> Tensor:
    """The strongest incoming edges of each node, exactly k in all; ties go to the earlier edge."""
    weight = weight.detach()
    node = edges.receiver.expand(weight.shape).reshape(-1)  # type: ignore[operator]
    size = weight.abs() if edges.allowed is None else torch.where(edges.allowed, weight.abs(), -1.0)
    # Sorted by magnitude, then by node: a node's edges lie together, from place `first` on, the strongest first.
    by_size = size.reshape(-1).argsort(descending=True, stable=True)
    order = by_size[node[by_size].argsort(stable=True)]
    end = edges.first + _counts(edges)  # type: ignore[operator]
    within = torch.arange(len(node), device=node.device) < end[node[order]]
    return torch.empty_like(within).scatter_(0, order, within).view(weight.shape)


def _counts(edges: Edges) -> Tensor:
    """How many edges each node of this weight keeps; in a pool the nodes of all weights share one budget."""
    if edges.pool is None:
        return shares(edges.k, edges.incoming)  # type: ignore[arg-type]
    incoming: list[Tensor] = [layer.edges.incoming for layer in edges.pool.layers]  # type: ignore[misc]
    place = next(i for i, layer in enumerate(edges.pool.layers) if layer.edges is edges)
    return shares(edges.k, torch.cat(incoming)).split([len(part) for part in incoming])[place]
