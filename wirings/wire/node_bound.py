"""A global budget of multiply-adds, shared out by ranking the edges of all layers; which nodes it pays for.

When layers are ranked, the nodes of neural graphs that the strongest edges leave are paid for, and all others are
closed until the next ranking: no edge that leaves them can be chosen, though their weights are trained like those of
all hallucinated edges. So a bound holds in between as well, whichever edges are swapped. What is open is remembered as
``edges.left``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from wirings.budgets.bounded_ranking import FEWEST, BoundedRanking, rank_bounded
from wirings.budgets.budget import Budget, LayerSize
from wirings.budgets.ranking import rank_layers
from wirings.rules.rule import Rule, Training
from wirings.selection import functional
from wirings.wire.layer import Layer


def fewest_nodes(rule: Rule) -> float:
    """The smallest fraction of nodes in use that are left: all of them if the rule does not look at what is open."""
    return 1.0 if rule.keeps_wiring else FEWEST


class LayerRanking:
    """Shares out a global budget of multiply-adds, and closes nodes.

    Args:
        rule: the rule. One that keeps its wiring chooses it when layers are ranked, from all nodes.
        layers: the wired layers.
        sizes: their sizes.
        first: the first ranking; None if nodes are open that were saved with the model.
        spent: the multiply-adds that edges and the nodes that they leave may cost.
    """

    def __init__(
        self,
        rule: Rule,
        layers: Sequence[Layer],
        sizes: Sequence[LayerSize],
        first: BoundedRanking | None,
        spent: int | None,
    ) -> None:
        self.rule, self.layers, self.sizes, self._fewest = rule, layers, sizes, fewest_nodes(rule)
        self._spent = spent or 0
        self._senders: list[Tensor | None] = [None] * len(layers)
        self._open = [None] * len(layers) if first is None else first.open
        self._graphs = [] if rule.keeps_wiring else [i for i, size in enumerate(sizes) if size.nodes is not None]
        for i in self._graphs:
            layers[i].edges.remember("left", self._every(i))

    def rank(self, budget: Budget) -> list[int]:
        """The number of edges of every layer in a ranking of all of them, as their weights are now."""
        edges = [layer.edges for layer in self.layers]
        weights, allowed = [layer.weight for layer in self.layers], [one.allowed for one in edges]
        factors, spent = [one.rank_factor for one in edges], budget.spent or 0
        if budget.k is None:
            return rank_layers(weights, allowed, self.sizes, spent, factors)
        senders = [self._sent(i) for i in range(len(edges))]
        found = rank_bounded(weights, allowed, self.sizes, spent, budget.k, factors, senders, self._fewest)
        self._open = found.open
        return found.counts

    def is_due(self, budget: Budget, now: Training) -> bool:
        """Whether layers are ranked again after this step.

        After the first step on several processes they are: DDP made their weights equal only after they were wired.
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        differ = now.step == 1 and several and (not self.rule.keeps_wiring or budget.ramp is not None)
        return differ or self.rule.takes_ranking(now)

    @torch.no_grad()
    def close(self, counts: Sequence[int], ranked: Sequence[int]) -> None:
        """Close all nodes but those that the strongest edges leave.

        None are closed while there are more edges than were ranked, or if the bound has room for all of them.

        Args:
            counts: the number of edges of each layer.
            ranked: their numbers in the last ranking, which counts approach if there is a schedule.
        """
        most = sum(sum(size.nodes or ()) + count * size.cost for size, count in zip(self.sizes, counts, strict=True))
        gave_way = any(paid is not None and not paid.all() for paid in self._open)
        bounds = list(counts) == list(ranked) and (gave_way or most > self._spent)
        for i in self._graphs:
            edges, weight, sent, paid = self.layers[i].edges, self.layers[i].weight, self._sent(i), self._open[i]
            open_ = self._every(i)
            if sent is not None and paid is not None and bounds:
                open_ &= torch.from_numpy(paid).to(weight.device)[sent.long()]
                real = functional.choose(weight.detach(), torch.tensor(counts[i]), open_)
                used = torch.zeros(len(paid), dtype=torch.bool, device=weight.device)
                used[sent[real].long()] = True
                open_ &= used[sent.long()]
            edges.remember("left", open_)

    def _every(self, place: int) -> Tensor:
        """A mask of all allowed edges of a layer."""
        edges, weight = self.layers[place].edges, self.layers[place].weight
        return torch.ones_like(weight, dtype=torch.bool) if edges.allowed is None else edges.allowed.clone()

    def _sent(self, place: int) -> Tensor | None:
        """The node that each edge of a layer leaves, if its nodes cost something."""
        if self.sizes[place].nodes is None:
            return None
        found, weight = self._senders[place], self.layers[place].weight
        if found is None or found.device != weight.device:
            found = self._senders[place] = self.layers[place].senders()
        return found
