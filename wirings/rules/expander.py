"""X-nets: sparse layers as expander graphs (Prabhu, Varma and Namboodiri, ECCV 2018)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wirings.rules.random import Random, generator_of
from wirings.rules.registry import register
from wirings.rules.rule import LayerLike
from wirings.selection.kept_edges import KeptEdges


@register
class Expander(Random):
    """A fixed random graph in which all receiving nodes have the same number of incoming edges.

    Every node has a random order of its allowed incoming edges, and the nodes have a random order too. Edges are dealt
    out in rounds: each node's first edge, node by node, then each node's second, until there are k. So the numbers of
    two nodes differ by at most one, except for nodes with too few allowed edges, which have them all; and a schedule of
    the density removes or adds edges in one order. A global budget is dealt to the nodes of all layers.

    Args:
        seed: random seed of the graph; None draws one from PyTorch's generator.
    """

    name = "expander"
    kept = KeptEdges(mask="wiring", factor=0.0)
    free_only = True

    def _draw(self, layers: Sequence[LayerLike], before: Sequence[Tensor | None]) -> None:
        wirings: list[Tensor] = []
        for part in [layers] if layers[0].edges.shared else [[layer] for layer in layers]:
            rounds, turns = zip(*(_deal(layer) for layer in part), strict=True)
            order = np.lexsort((np.concatenate(turns), np.concatenate(rounds)))
            real = np.zeros(len(order), bool)
            real[order[: int(part[0].edges.k)]] = True
            sizes = np.cumsum([layer.weight.numel() for layer in part])[:-1]
            wirings += [torch.from_numpy(mask) for mask in np.split(real, sizes)]
        for layer, wiring in zip(layers, wirings, strict=True):
            layer.edges.remember("wiring", wiring.view(layer.weight.shape).to(layer.weight.device))


def _deal(layer: LayerLike) -> tuple[np.ndarray, np.ndarray]:
    """For every edge: the round in which it is dealt, and its node's turn in the round, a random number."""
    generator, shape = generator_of(layer), layer.weight.shape
    luck = torch.rand(shape, generator=generator).reshape(-1).numpy()
    node = layer.receivers().cpu().expand(shape).reshape(-1).numpy()
    allowed = None if layer.edges.allowed is None else layer.edges.allowed.cpu().reshape(-1).numpy()
    order = np.lexsort((luck, node)) if allowed is None else np.lexsort((luck, ~allowed, node))
    starts = np.cumsum(np.bincount(node)) - np.bincount(node)
    rounds = np.empty(len(node), np.int64)
    rounds[order] = np.arange(len(node)) - starts[node[order]]
    if allowed is not None:
        rounds[~allowed] = len(node)  # never reached: k is at most the number of allowed edges
    turns = torch.rand(len(starts), generator=generator, dtype=torch.float64).numpy()
    return rounds, turns[node]
