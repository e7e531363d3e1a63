"""What all graphs share: their weights, their wiring, and what can be told about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings import rules
from wirings.budgets.budget import Amount, ConstantSchedule, Schedule, check_density
from wirings.errors import WiringError
from wirings.graph.topology import Blocks, Complete, Matrix, Tile, Topology, shown
from wirings.rules import Rule
from wirings.utils.layers import parametrizations_of
from wirings.wire.edges import Edges
from wirings.wire.handle import Wiring
from wirings.wire.wire import wire_

if TYPE_CHECKING:
    import networkx

Places = int | Sequence[int]
"""Nodes: a number of them, or the numbers that they have."""


class Graph(nn.Module):
    """A neural graph. See `StaticGraph`, `DiscreteGraph` and `ContinuousGraph`.

    ``weight`` holds one number for every allowed edge; read it as a matrix with `matrix`, set it with `set_matrix_`.
    Which of the edges are real is a matter of the rule, as for any wired model: ``wiring`` is the handle of the
    rule that the constructor was given, and `finalize_` leaves a plain graph with zeros for the rest.
    """

    wired_weights = ("weight",)  # for `wire_`
    weight: Tensor

    def __init__(self, topology: Topology, inputs: Places | None, outputs: Places | None) -> None:
        super().__init__()
        self.topology, self.nodes = topology, topology.nodes
        default_in, default_out = topology.default_inputs(), topology.default_outputs()
        self.inputs = self._places("inputs", default_in if inputs is None else inputs, from_end=False)
        self.outputs = self._places("outputs", default_out if outputs is None else outputs, from_end=True)
        self._given: dict[str, Any] = {}
        self.wiring: Wiring | None = None

    @property
    def _kind(self) -> str:
        return next(cls.__name__ for cls in type(self).__mro__ if not cls.__name__.startswith("Parametrized"))

    def _places(self, what: str, places: Places | None, from_end: bool) -> np.ndarray:
        if places is None:
            raise WiringError(
                f"{self._kind}: say which nodes are {what}: {what}= takes a number of nodes, the "
                f"{'last' if from_end else 'first'} ones, or a list of their numbers."
            )
        if isinstance(places, (int, np.integer)) and not isinstance(places, bool):
            if not 1 <= places <= self.nodes:
                raise WiringError(
                    f"{self._kind}: {what} = {places} does not fit a graph of {self.nodes} nodes; give 1 to "
                    f"{self.nodes}."
                )
            return np.arange(self.nodes - places, self.nodes) if from_end else np.arange(places)
        numbers = np.asarray(places)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
            raise WiringError(f"{self._kind}: {what}= is a number of nodes or a list of node numbers, not {places!r}.")
        outside = numbers[(numbers < 0) | (numbers >= self.nodes)]
        if len(outside):
            raise WiringError(
                f"{self._kind}: node {outside[0]} of {what} = {shown(numbers)} is outside the graph, whose nodes are "
                f"0 to {self.nodes - 1}."
            )
        if len(np.unique(numbers)) < len(numbers):
            raise WiringError(f"{self._kind}: {what} = {shown(numbers)} names a node twice.")
        return numbers

    def _finish(self, tiles: list[Tile], edges: Amount | None, rule: str | Rule | None) -> None:
        """Make the weights of ``tiles`` and wire them; the last thing that a constructor does."""
        self.tiles = tiles
        self.allowed = sum(tile.count for tile in tiles)
        # As PyTorch starts a dense layer from all nodes that may send to all that may receive.
        bound = self.edge_shape[1] ** -0.5
        self.weight = nn.Parameter(torch.empty(self.allowed).uniform_(-bound, bound))
        if edges is None and rule is None:
            return
        rule = rules.get("dnw" if rule is None else rule)
        if rule.layers_only:
            raise WiringError(
                f"{self._kind}: rule {rule.name!r} is for layers, whose inputs lie in rows; take another."
            )
        if edges is not None and rule.own_budget:
            raise WiringError(
                f"{self._kind}: rule {rule.name!r} fixes the number of edges itself; drop edges={edges!r}."
            )
        if edges is None and not rule.own_budget:
            raise WiringError(
                f"{self._kind}: rule {rule.name!r} needs a budget: give edges=, a number of edges (up to "
                f"{self.allowed:,} are allowed) or a density."
            )
        whole = isinstance(edges, (int, np.integer)) and not isinstance(edges, bool)
        if whole and not 1 <= edges <= self.allowed:  # type: ignore[operator]
            raise WiringError(
                f"{self._kind}: edges = {edges:,} were asked for, but {self.topology!r} allows 1 to {self.allowed:,}; "
                "a float is a density."
            )
        if not whole and not isinstance(edges, (Schedule, ConstantSchedule)) and edges is not None:
            check_density(edges, f"{self._kind}: edges", " A number of edges is an int.")
        budget: Any = {} if edges is None else {"k": int(edges)} if whole else {"density": edges}  # type: ignore[arg-type]
        self.wiring = wire_(self, rule, include=["weight"], **budget)

    # ---- the wiring -------------------------------------------------------------------------------------------------

    @property
    def edge_shape(self) -> tuple[int, int]:
        """Nodes that may receive, nodes that may send: the graph as one layer, for budgets that ask for its shape."""
        return len(self._ends("targets")), len(self._ends("sources"))

    def _ends(self, what: str) -> np.ndarray:
        return np.unique(np.concatenate([np.asarray(getattr(tile, what)) for tile in self.tiles]))

    def joined(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Of the nodes that may receive, which do by ``real`` edges; of those that may send, which do."""
        receives, sends = np.zeros(self.nodes, bool), np.zeros(self.nodes, bool)
        for tile in self.tiles:
            part = real[tile.start : tile.start + tile.count].cpu().numpy()
            if tile.places is None:
                part = part.reshape(len(tile.targets), len(tile.sources))
                receives[np.asarray(tile.targets)] |= part.any(1)
                sends[np.asarray(tile.sources)] |= part.any(0)
            else:
                targets, sources = tile.edge_list()
                receives[targets[part]] = True
                sends[sources[part]] = True
        return torch.from_numpy(receives[self._ends("targets")]), torch.from_numpy(sends[self._ends("sources")])

    def real(self) -> Tensor:
        """Which of the weights are real edges now: by the rule, or in a plain graph those that are not zero."""
        holder = parametrizations_of(self).get("weight")
        if holder is None:
            return self.weight.detach() != 0
        edges: Edges = holder[0]
        return edges.real(holder.original, fresh=True)

    def all_weights(self) -> Tensor:
        """The weights of all edges, hallucinated ones too; a parameter."""
        holder = parametrizations_of(self).get("weight")
        weight: Tensor = self.weight if holder is None else holder.original
        return weight

    def matrix(self) -> Tensor:
        """The weights of the real edges as a matrix A, (nodes, nodes): A[v, u] is the edge from u to v."""
        return self._as_matrix(self._values())

    @torch.no_grad()
    def _values(self) -> Tensor:
        """The weights that the forward pass uses in evaluation, zero where no edge is real."""
        holder = parametrizations_of(self).get("weight")
        if holder is None:
            return self.weight.detach()
        edges, training = holder[0], holder[0].training
        try:
            return torch.where(self.real(), edges.eval()(holder.original), 0.0)
        finally:
            edges.train(training)

    def sparse(self) -> Tensor:
        """The same as a sparse tensor (COO, coalesced)."""
        real = self.real()
        targets, sources = (torch.from_numpy(x).to(real.device)[real] for x in self._edge_list())
        values = self._values()[real]
        places, size = torch.stack([targets, sources]), (self.nodes, self.nodes)
        with torch.sparse.check_sparse_tensor_invariants(True):
            return torch.sparse_coo_tensor(places, values, size).coalesce()

    def set_matrix_(self, matrix: Tensor) -> None:
        """Set the weights of all edges from a matrix, (nodes, nodes), that is zero where no edge is allowed."""
        if not isinstance(matrix, Tensor):
            raise WiringError(f"{self._kind}: the matrix must be a tensor, not {type(matrix).__name__}.")
        if matrix.shape != (self.nodes, self.nodes):
            raise WiringError(
                f"{self._kind}: the matrix of {self.nodes} nodes has shape ({self.nodes}, {self.nodes}), but "
                f"{tuple(matrix.shape)} came."
            )
        targets, sources = self._edge_list()
        rest = matrix.detach().clone()
        rest[targets, sources] = 0
        if rest.any():
            v, u = (int(x) for x in rest.nonzero()[0])
            raise WiringError(
                f"{self._kind}: the matrix has a weight for the edge from node {u} to node {v}, which is not allowed "
                "here."
            )
        with torch.no_grad():
            self.all_weights().copy_(matrix[targets, sources])

    def networkx(self) -> networkx.DiGraph:
        """The real edges as a networkx graph: weights on edges; on nodes ``role`` and, with blocks, ``block``."""
        import networkx

        graph = networkx.DiGraph()
        block = np.repeat(np.arange(len(b.sizes)), b.sizes) if isinstance(b := self.topology, Blocks) else None
        inputs, outputs = set(self.inputs.tolist()), set(self.outputs.tolist())
        for v in range(self.nodes):
            role = "input" if v in inputs else "output" if v in outputs else "hidden"
            role = "input and output" if v in inputs & outputs else role
            graph.add_node(v, role=role, **({} if block is None else {"block": int(block[v])}))
        edges = self.sparse()
        targets, sources = edges.indices().tolist()
        graph.add_weighted_edges_from(zip(sources, targets, edges.values().tolist(), strict=True))
        return graph

    def dead_nodes(self) -> list[int]:
        """The nodes that nothing reaches from an input, or that reach no output, along real edges."""
        return np.flatnonzero(~self._alive()).tolist()

    def _alive(self) -> np.ndarray:
        targets, sources = self._real_edges()
        fed = reached(self.inputs, sources, targets, self.nodes)
        return fed & reached(self.outputs, targets, sources, self.nodes)

    def longest_path(self) -> float:
        """The most edges on a path of real edges from an input to an output: 0 for no path, inf for a cycle."""
        dead = ~self._alive()
        targets, sources = self._real_edges()
        live = ~dead[targets] & ~dead[sources]
        targets, sources = targets[live], sources[live]
        inputs = self.inputs[~dead[self.inputs]]
        if not len(inputs):
            return 0
        longest = np.full(self.nodes, -1)
        longest[inputs] = 0
        left = np.bincount(targets, minlength=self.nodes)
        ready = np.flatnonzero((left == 0) & ~dead)
        done = 0
        while len(ready):
            done += len(ready)
            out = np.isin(sources, ready)
            np.maximum.at(longest, targets[out], longest[sources[out]] + 1)
            left -= np.bincount(targets[out], minlength=self.nodes)
            reached = np.unique(targets[out])
            ready = reached[left[reached] == 0]
        if done < np.count_nonzero(~dead):
            return math.inf
        return int(longest[self.outputs].max())

    def _edge_list(self) -> tuple[np.ndarray, np.ndarray]:
        """The node that each weight leads to, and the node that it comes from."""
        lists = [tile.edge_list() for tile in self.tiles]
        return np.concatenate([t for t, _ in lists]), np.concatenate([s for _, s in lists])

    def _real_edges(self) -> tuple[np.ndarray, np.ndarray]:
        real = self.real().cpu().numpy()
        targets, sources = self._edge_list()
        return targets[real], sources[real]

    def _as_matrix(self, values: Tensor) -> Tensor:
        matrix = values.new_zeros(self.nodes, self.nodes)
        matrix[self._edge_list()] = values
        return matrix

    # ---- what comes in ----------------------------------------------------------------------------------------------

    def _check_input(self, x: Tensor, dimension: int, layout: str) -> None:
        fits = isinstance(x, Tensor) and x.dim() > dimension and x.shape[dimension] == len(self.inputs)
        if not fits or not x.is_floating_point():
            came = f"a tensor of shape {tuple(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise WiringError(
                f"{self._kind} has {len(self.inputs)} input nodes and takes floating-point {layout}, but {came} "
                f"came. Let the module before the graph give {len(self.inputs)} channels, or change the number of "
                "inputs."
            )

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self._given.items() if value is not None)
        return f"{self._kind}({settings})"


def make_topology(
    kind: str, blocks: Sequence[int] | Blocks | None, nodes: int | None, topology: Topology | Tensor | None
) -> Topology:
    """The topology that a constructor's arguments name: exactly one of them."""
    given = {"blocks": blocks, "nodes": nodes, "topology": topology}
    came = [name for name, value in given.items() if value is not None]
    if len(came) != 1:
        raise WiringError(
            f"{kind} takes one of {', '.join(f'{name}=' for name in given)}, but {' and '.join(came) or 'none'} came."
        )
    if blocks is not None:
        return blocks if isinstance(blocks, Blocks) else Blocks(blocks)
    if nodes is not None:
        return Complete(nodes)
    return topology if isinstance(topology, Topology) else Matrix(topology)  # type: ignore[arg-type]


def reached(start: np.ndarray, sources: np.ndarray, targets: np.ndarray, nodes: int) -> np.ndarray:
    """The nodes that are reached from ``start`` along edges, themselves included."""
    seen = np.zeros(nodes, bool)
    seen[start] = True
    while True:
        found = targets[seen[sources] & ~seen[targets]]
        if not len(found):
            return seen
        seen[found] = True


def _short(value: Any) -> str:
    return (
        repr(value.tolist())
        if isinstance(value, np.ndarray)
        else value.__name__
        if isinstance(value, type)
        else repr(value)
    )
