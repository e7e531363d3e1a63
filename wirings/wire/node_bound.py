"""A bound on multiply-adds that counts only those nodes of neural graphs that edges leave.

When layers are ranked, the nodes that the strongest edges leave are paid for, and all others are closed until the next
ranking: no edge that leaves them can be chosen, though their weights are trained like those of all hallucinated edges.
So the bound holds in between as well, whichever edges are swapped. What is open is remembered as ``edges.left``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.budgets.budget import Budget, LayerSize
from wirings.budgets.ranking import rank_layers
from wirings.rules.rule import Rule
from wirings.selection import functional
from wirings.wire.layer import Layer


class LayerRanking:
    """Shares out a global budget of multiply-adds by ranking the edges of all layers, and closes nodes.

    Args:
        rule: the rule. One that keeps its wiring chooses it when layers are ranked, and has to close nothing.
        layers: the wired layers.
        sizes: their sizes.
    """

    def __init__(self, rule: Rule, layers: Sequence[Layer], sizes: Sequence[LayerSize]) -> None:
        self.layers, self.sizes = layers, sizes
        self._senders: list[Tensor | None] = [None] * len(layers)
        self._closed = [] if rule.keeps_wiring else [i for i, size in enumerate(sizes) if size.nodes is not None]
        for i in self._closed:
            edges, weight = layers[i].edges, layers[i].weight
            everything = torch.ones_like(weight, dtype=torch.bool) if edges.allowed is None else edges.allowed.clone()
            edges.remember("left", everything)

    def rank(self, budget: Budget) -> list[int]:
        """The number of edges of every layer in a ranking of all of them, as their weights are now."""
        edges = [layer.edges for layer in self.layers]
        weights, allowed = [layer.weight for layer in self.layers], [one.allowed for one in edges]
        factors, senders = [one.rank_factor for one in edges], [self._sent(i) for i in range(len(edges))]
        return rank_layers(weights, allowed, self.sizes, budget.spent or 0, budget.k, factors, senders)

    @torch.no_grad()
    def close(self, counts: Sequence[int], ranked: Sequence[int]) -> None:
        """Close all nodes but those that the strongest edges leave; none while there are more edges than were ranked.

        Args:
            counts: the number of edges of each layer.
            ranked: their numbers in the last ranking, which counts approach if there is a schedule.
        """
        for i in self._closed:
            edges, weight, sent = self.layers[i].edges, self.layers[i].weight, self._sent(i)
            assert sent is not None
            if list(counts) != list(ranked):
                open_ = torch.ones_like(weight, dtype=torch.bool)
            else:
                real = functional.choose(weight.detach(), torch.tensor(counts[i]), edges.allowed)
                used = torch.zeros(len(self.sizes[i].nodes or ()), dtype=torch.bool, device=weight.device)
                used[sent[real].long()] = True
                open_ = used[sent.long()]
            edges.remember("left", open_ if edges.allowed is None else open_ & edges.allowed)

    def _sent(self, place: int) -> Tensor | None:
        """The node that each edge of a layer leaves, if its nodes cost something."""
        if self.sizes[place].nodes is None:
            return None
        found, weight = self._senders[place], self.layers[place].weight
        if found is None or found.device != weight.device:
            found = self._senders[place] = self.layers[place].senders()
        return found
