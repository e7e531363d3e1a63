"""Targeted weight dropout (Gomez et al., 2019), as in the appendix "Targeted Dropout" of the paper."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule
from wirings.utils.checks import check_bool, check_number

GAMMA = "gamma"


@register
class TargetedDropout(Rule):
    """The weakest edges, all but k, are each dropped with probability rho in every forward pass of training.

    Those edges are the bottom fraction γ = 1 − density. A dropped edge gets no gradient in that pass; a spared one
    does. In evaluation all of them are left out, so that exactly k are real.

    Args:
        rho: the probability, from 0 to 1, or ``"gamma"`` for γ.
        regular: rank the edges of each node separately, as Gomez et al. do: the bottom γ of every node's incoming edges
            may be dropped. By default all edges of a weight are ranked together, which the paper found better
            ("unconstrained"). If true, the k edges are shared out over nodes in proportion to their allowed incoming
            edges, by largest remainders (ties go to the earlier node).
    """

    name = "targeted_dropout"
    reaches = "some"
    acts_between_steps = False

    def __init__(self, rho: float | str = 0.95, regular: bool = False) -> None:
        hint = f' A fraction equal to γ is written "{GAMMA}".'
        self.rho: Any = rho if isinstance(rho, str) and rho == GAMMA else check_number(self.name, "rho", rho, hint=hint)
        self.regular = check_bool(self.name, "regular", regular)

    @property
    def free_only(self) -> bool:  # type: ignore[override]
        return self.regular

    def setup(self, layers: Sequence[LayerLike]) -> None:
        if not self.regular:
            return
        for layer in layers:
            edges, receiver = layer.edges, layer.receivers()
            each = receiver.expand(layer.weight.shape)
            stored = torch.bincount(each.reshape(-1))  # the edges of each node, allowed or not
            allowed = stored if edges.allowed is None else torch.bincount(each[edges.allowed], minlength=len(stored))
            edges.remember("receiver", receiver, saved=False)
            edges.remember("first", stored.cumsum(0) - stored, saved=False)
            edges.remember("incoming", allowed, saved=False)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return _strongest_of_each(weight, edges) if self.regular else edges.choose(weight)

    def used(self, weight: Tensor, edges: EdgesLike) -> Tensor | None:
        return None  # dropped edges have no gradient

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        if not edges.training:
            return super().forward(weight, edges)
        rho = 1 - edges.density() if self.rho == GAMMA else self.rho
        # Drawn in float32: in bfloat16 random numbers, and so the probabilities, would be multiples of 1/256.
        if edges.groups is None:
            drawn = torch.rand_like(weight, dtype=torch.float32)
        else:  # groups are dropped as a whole
            drawn = edges.groups.draw(device=weight.device)
        spared = drawn >= rho
        if edges.allowed is not None:
            spared &= edges.allowed
        return torch.where(self.real(weight, edges) | spared, weight, 0.0)


def shares(k: Tensor, incoming: Tensor) -> Tensor:
    """Share ``k`` edges out over nodes in proportion to their ``incoming`` edges: whole numbers, by largest remainders.

    `wirings.budgets.apportion.share_out` does the same for Python numbers; here ``k`` is a tensor, whose value may
    change between two replays of a captured step, and nothing is read back from the device. Of the shares 1.6, 1.6, 0.8
    and 0 below, the third has the largest remainder, then the first.

    >>> shares(torch.tensor(4), torch.tensor([4, 4, 2, 0]))
    tensor([2, 1, 1, 0])
    """
    total = incoming.sum()
    counts, rest = k * incoming // total, k * incoming % total
    place = rest.argsort(descending=True, stable=True).argsort()
    return counts + (place < k - counts.sum())


def _strongest_of_each(weight: Tensor, edges: EdgesLike) -> Tensor:
    """The strongest incoming edges of each node, exactly k in total; ties go to the earlier edge."""
    weight = weight.detach()
    node = edges.receiver.expand(weight.shape).reshape(-1)
    size = weight.abs() if edges.allowed is None else torch.where(edges.allowed, weight.abs(), -1.0)
    # Sorted by magnitude, then by node: a node's edges are consecutive, from position `first` on, strongest first.
    by_size = size.reshape(-1).argsort(descending=True, stable=True)
    order = by_size[node[by_size].argsort(stable=True)]
    end = edges.first + _counts(edges)
    within = torch.arange(len(node), device=node.device) < end[node[order]]
    return torch.empty_like(within).scatter_(0, order, within).view(weight.shape)


def _counts(edges: EdgesLike) -> Tensor:
    """How many edges each node of this weight keeps; with a shared budget, the nodes of all weights share it."""
    if not edges.shared:
        return shares(edges.k, edges.incoming)
    incoming: list[Tensor] = [peer.incoming for peer in edges.peers()]
    return shares(edges.k, torch.cat(incoming)).split([len(part) for part in incoming])[edges.place]
