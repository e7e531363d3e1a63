"""Several kinds of nodes in one graph or block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.graph.nodes.activation import ActivationNode
from wirings.graph.nodes.base import ALL, Node, NodeCost, NodeFunction, NodeRecipe, register
from wirings.graph.nodes.build import build
from wirings.graph.nodes.plain import PlainNode
from wirings.utils.checks import check_int


class Grouped(NodeFunction):
    """The functions that `Groups` builds."""

    def __init__(self, counts: Sequence[int], functions: Sequence[NodeFunction]) -> None:
        super().__init__()
        self.counts, self.functions = list(counts), nn.ModuleList(functions)
        self.quiet = all(f.quiet for f in functions)
        self.some_nodes = all(f.some_nodes for f in functions)

    def before(self, state: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._each("before", state, (time,), nodes)

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._each("after", received, (time,), nodes)

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return self._each("between", received, (time, next_time), nodes)

    def _each(self, part: str, tensor: Tensor, times: tuple[float, ...], nodes: slice) -> Tensor:
        first, last, _ = nodes.indices(sum(self.counts))
        done, start = [], 0
        for function, count in zip(self.functions, self.counts, strict=True):
            begin, end = max(first, start), min(last, start + count)
            if begin < end:
                own = tensor[:, begin - first : end - first]
                some = {} if end - begin == count else {"nodes": slice(begin - start, end - start)}
                done.append(getattr(function, part)(own, *times, **some))
            start += count
        if any(x.shape[2:] != done[0].shape[2:] for x in done):
            sizes = ", ".join("×".join(map(str, x.shape[2:])) or "scalars" for x in done)
            raise WiringError(
                f"Groups: its kinds of nodes return maps of different sizes, {sizes}. Use pad=True for strided "
                "convolutions beside others."
            )
        return torch.cat(done, 1)

    def cost(self, part: str, nodes: int, size: tuple[int, ...]) -> NodeCost:
        groups = zip(self.functions, self.counts, strict=True)
        costs = [function.cost(part, count, size) for function, count in groups]  # type: ignore[operator]
        mult_adds, params = (np.concatenate([cost[i] for cost in costs]) for i in range(2))
        return NodeCost(mult_adds, params, costs[0].size)


@register
@dataclass(frozen=True)
class Groups(Node):
    """Several kinds of nodes in one graph or block.

    Args:
        counts: the number of nodes of each kind; the first ``counts[0]`` nodes are of kind ``kinds[0]``, and so on.
        kinds: the recipe of each kind.
    """

    name: ClassVar[str] = "groups"
    counts: Sequence[int]
    kinds: Sequence[NodeRecipe | None]

    @classmethod
    def example(cls, nodes: int) -> Groups:
        return cls([1, nodes - 1], [PlainNode(), ActivationNode("tanh", bias=True)])

    def __post_init__(self) -> None:
        for name in ("counts", "kinds"):
            if not isinstance(getattr(self, name), Sequence):
                raise WiringError(f"Groups: {name} must be a list, got {getattr(self, name)!r}.")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for count in self.counts:
            check_int("Groups", "each count", count)
        if len(self.counts) != len(self.kinds) or not self.counts:
            raise WiringError(f"Groups: got {len(self.counts)} counts for {len(self.kinds)} kinds of nodes.")

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        if sum(self.counts) != nodes:
            raise WiringError(
                f"Groups: counts {self.counts} sum to {sum(self.counts)}, but the graph has {nodes} nodes here."
            )
        parts = zip(self.counts, self.kinds, strict=True)
        return Grouped(self.counts, [build(kind, count, "Groups", sends, receives) for count, kind in parts])
