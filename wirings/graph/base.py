"""What all graphs share: their weights, their wiring, and what can be asked about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings import rules
from wirings.budgets.budget import Amount, ConstantSchedule, Schedule, check_density
from wirings.budgets.mult_adds import Call
from wirings.errors import WiringError
from wirings.graph.liveness import Liveness, path_liveness
from wirings.graph.product import Product
from wirings.graph.topology import Blocks, Complete, EdgeTile, Matrix, Topology, short_list
from wirings.rules import Rule
from wirings.selection.structure import FREE, Structure
from wirings.utils.checks import is_int
from wirings.utils.layers import parametrizations_of
from wirings.utils.text import brief
from wirings.wire.edges import Edges
from wirings.wire.handle import Wiring
from wirings.wire.parametrization import read_converted
from wirings.wire.wire import wire_

if TYPE_CHECKING:
    import networkx

NodeSelection = int | Sequence[int]
"""Nodes: how many of them, or a list of their numbers."""


class Graph(nn.Module):
    """Base class of neural graphs: `StaticGraph`, `DiscreteGraph` and `ContinuousGraph`.

    ``weight`` holds one number for every allowed edge; read it as a matrix with `matrix`, and set it with
    `set_matrix_`. As in any wired model, the rule chooses which edges are real: ``wiring`` is the handle of the rule
    given to the constructor, and `finalize_` leaves a plain graph with zeros for all other edges.
    """

    wired_weights = ("weight",)  # for `wire_`
    weight: Tensor

    def __init__(self, topology: Topology, inputs: NodeSelection | None, outputs: NodeSelection | None) -> None:
        super().__init__()
        self.topology, self.nodes = topology, topology.nodes
        default_in, default_out = topology.default_inputs(), topology.default_outputs()
        self.inputs = self._node_numbers("inputs", default_in if inputs is None else inputs, from_end=False)
        self.outputs = self._node_numbers("outputs", default_out if outputs is None else outputs, from_end=True)
        self._given: dict[str, Any] = {}
        self.wiring: Wiring | None = None

    @property
    def _kind(self) -> str:
        return class_name(self)

    def _node_numbers(self, what: str, nodes: Any, from_end: bool) -> np.ndarray:
        """The numbers of the nodes that ``inputs=`` or ``outputs=`` selects."""
        expected = f"a number of nodes (the {'last' if from_end else 'first'} ones) or a list of node numbers"
        if nodes is None:
            raise WiringError(f"{self._kind} needs {what}=: {expected}.")
        if is_int(nodes):
            if not 1 <= nodes <= self.nodes:
                raise WiringError(f"{self._kind}: {what} must be 1 to {self.nodes}, the number of nodes, got {nodes}.")
            return np.arange(self.nodes - nodes, self.nodes) if from_end else np.arange(nodes)
        try:
            numbers = np.asarray(nodes)
        except ValueError:  # lists of different lengths
            numbers = np.empty((0, 0))
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
            got = repr(nodes) if isinstance(nodes, (bool, float, str)) else type(nodes).__name__
            shape = f" of shape {tuple(nodes.shape)}" if isinstance(nodes, (Tensor, np.ndarray)) else ""
            raise WiringError(f"{self._kind}: {what}= expects {expected}, got {got}{shape}.")
        outside = numbers[(numbers < 0) | (numbers >= self.nodes)]
        if len(outside):
            raise WiringError(
                f"{self._kind}: node {outside[0]} in {what}={short_list(numbers)} is out of range; the graph's nodes "
                f"are 0 to {self.nodes - 1}."
            )
        if len(np.unique(numbers)) < len(numbers):
            raise WiringError(f"{self._kind}: {what}={short_list(numbers)} contains duplicate nodes.")
        return numbers

    def edge_cost(self, call: Call) -> tuple[int | None, int, np.ndarray, int]:
        """What a budget of multiply-adds has to know about a call: see `wirings.graph.work.edge_cost`."""
        from wirings.graph.work import edge_cost  # which imports the kinds of graphs, and so this module

        return edge_cost(self, call)

    def _finish(
        self, tiles: list[EdgeTile], edges: Amount | None, rule: str | Rule | None, structure: str = FREE
    ) -> None:
        """Make the weights of ``tiles`` and wire them; the last step of a constructor."""
        self.tiles = tiles
        self.allowed = sum(tile.count for tile in tiles)
        # As PyTorch initialises a dense layer from all nodes that may send to all that may receive.
        bound = self.edge_shape[1] ** -0.5
        try:
            weight = torch.empty(self.allowed)
        except RuntimeError as error:
            raise WiringError(
                f"{self._kind}: {self.allowed:,} allowed edges take {4 * self.allowed / 2**30:,.0f} GiB, which cannot "
                "be allocated. Use fewer nodes, or a topology that allows fewer edges."
            ) from error
        self.weight = nn.Parameter(weight.uniform_(-bound, bound))
        made = Structure.of(structure)
        if made is not None:
            self._given["structure"] = made.text
        elif edges is None and rule is None:
            return
        rule = rules.get("dnw" if rule is None else rule)
        if edges is not None and rule.own_budget:
            raise WiringError(
                f"{self._kind}: rule {rule.name!r} sets the number of edges itself; remove edges={brief(edges)}."
            )
        fixed = made is not None and made.fixed is not None
        if edges is None and not rule.own_budget and not fixed:
            raise WiringError(
                f"{self._kind}: rule {rule.name!r} needs edges=, a number of edges (at most {self.allowed:,}) or a "
                "density."
            )
        whole = is_int(edges)
        if whole and not 1 <= edges <= self.allowed:  # type: ignore[operator]
            raise WiringError(
                f"{self._kind}: {self.topology!r} allows 1 to {self.allowed:,} edges, got edges={edges:,}. "
                "A float is a density."
            )
        if not whole and not isinstance(edges, (Schedule, ConstantSchedule)) and edges is not None:
            check_density(edges, f"{self._kind}: edges", " A number of edges must be an int.")
        budget: Any = {} if edges is None else {"k": int(edges)} if whole else {"density": edges}  # type: ignore[arg-type]
        self.wiring = wire_(self, rule, include=["weight"], structure=structure, **budget)

    # ---- the wiring -------------------------------------------------------------------------------------------------

    @property
    def edge_shape(self) -> tuple[int, int]:
        """The numbers of nodes that may receive and that may send: the shape of the graph as one layer, for budgets."""
        return len(self._ends("targets")), len(self._ends("sources"))

    def _ends(self, what: str) -> np.ndarray:
        return np.unique(np.concatenate([np.asarray(getattr(tile, what)) for tile in self.tiles]))

    def joined(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the nodes that may receive, and which of those that may send, have an edge in ``real``."""
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
        """A boolean mask over ``weight``: the edges that the rule has chosen; in a plain graph, the nonzero ones."""
        holder = parametrizations_of(self).get("weight")
        if holder is None:
            return self.weight.detach() != 0
        edges: Edges = holder[0]
        return edges.real(holder.original, fresh=True)

    def _weight_for(self, products: Sequence[Product]) -> Tensor:
        """The weights of the forward pass for `wirings.graph.product.split`, in the precision that it will give them.

        If all products are going to convert them under autocast, a wired weight is made in that precision at once.
        """
        return self.weight if any(product.sparse for product in products) else read_converted(self, "weight")

    def all_weights(self) -> Tensor:
        """The parameter with the weights of all edges, including hallucinated ones."""
        holder = parametrizations_of(self).get("weight")
        weight: Tensor = self.weight if holder is None else holder.original
        return weight

    def matrix(self) -> Tensor:
        """The weights of the real edges as a matrix A of shape (nodes, nodes): A[v, u] is the edge from u to v."""
        return self._as_matrix(self._values())

    @torch.no_grad()
    def _values(self) -> Tensor:
        """The weights that the forward pass uses in evaluation mode; zero where no edge is real."""
        holder = parametrizations_of(self).get("weight")
        if holder is None:
            return self.weight.detach()
        edges, training = holder[0], holder[0].training
        try:
            return torch.where(self.real(), edges.eval()(holder.original), 0.0)
        finally:
            edges.train(training)

    def sparse(self) -> Tensor:
        """The matrix of the real edges as a coalesced sparse COO tensor of shape (nodes, nodes)."""
        real = self.real()
        targets, sources = (torch.from_numpy(x).to(real.device)[real] for x in self.edge_list())
        values = self._values()[real]
        places, size = torch.stack([targets, sources]), (self.nodes, self.nodes)
        with torch.sparse.check_sparse_tensor_invariants(True):
            return torch.sparse_coo_tensor(places, values, size).coalesce()

    def set_matrix_(self, matrix: Tensor) -> None:
        """Set the weights of all edges from a matrix of shape (nodes, nodes), zero where no edge is allowed."""
        if not isinstance(matrix, Tensor):
            raise WiringError(f"{self._kind}: set_matrix_() expects a tensor, got {type(matrix).__name__}.")
        if matrix.shape != (self.nodes, self.nodes):
            raise WiringError(
                f"{self._kind}: set_matrix_() expects shape ({self.nodes}, {self.nodes}) for {self.nodes} nodes, got "
                f"{tuple(matrix.shape)}."
            )
        targets, sources = self.edge_list()
        rest = matrix.detach().clone()
        rest[targets, sources] = 0
        if rest.any():
            v, u = (int(x) for x in rest.nonzero()[0])
            raise WiringError(
                f"{self._kind}: the matrix has a weight for the edge from node {u} to node {v}, which the "
                "topology does not allow."
            )
        with torch.no_grad():
            self.all_weights().copy_(matrix[targets, sources])

    def networkx(self) -> networkx.DiGraph:
        """The real edges as a networkx graph. Edges have a ``weight``; nodes a ``role`` and perhaps a ``block``."""
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
        """The nodes that are not on a path of real edges from an input to an output."""
        return np.flatnonzero(~self.liveness().nodes).tolist()

    def liveness(self) -> Liveness:
        """Which nodes and real edges are on a path from an input to an output."""
        targets, sources = self.real_edges()
        return path_liveness(sources, targets, self.nodes, self.inputs, self.outputs)

    def longest_path(self) -> float:
        """The number of real edges on the longest path from an input to an output: 0 without one, inf with a cycle."""
        dead = ~self.liveness().nodes
        targets, sources = self.real_edges()
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

    def edge_list(self) -> tuple[np.ndarray, np.ndarray]:
        """For every weight, the node that its edge leads to and the node that it leaves."""
        lists = [tile.edge_list() for tile in self.tiles]
        return np.concatenate([t for t, _ in lists]), np.concatenate([s for _, s in lists])

    def real_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """For every real edge, the node that it leads to and the node that it leaves."""
        real = self.real().cpu().numpy()
        targets, sources = self.edge_list()
        return targets[real], sources[real]

    def _as_matrix(self, values: Tensor) -> Tensor:
        matrix = values.new_zeros(self.nodes, self.nodes)
        matrix[self.edge_list()] = values
        return matrix

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check_input(self, x: Tensor, dimension: int, layout: str) -> None:
        fits = isinstance(x, Tensor) and x.dim() > dimension and x.shape[dimension] == len(self.inputs)
        if not fits or not x.is_floating_point():
            got = f"a tensor of shape {tuple(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise WiringError(
                f"{self._kind} has {len(self.inputs)} input nodes and expects a floating-point tensor {layout}, got "
                f"{got}. Let the module before the graph return {len(self.inputs)} channels, or change inputs=."
            )

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self._given.items() if value is not None)
        return f"{self._kind}({settings})"


def class_name(module: nn.Module) -> str:
    """The name of a module's class, without what a parametrization adds to it."""
    return next(cls.__name__ for cls in type(module).__mro__ if not cls.__name__.startswith("Parametrized"))


def make_topology(kind: str, **given: Any) -> Topology:
    """The topology that a constructor's arguments select; exactly one of ``given`` must not be None."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) != 1:
        choices = ", ".join(f"{name}=" for name in given)
        raise WiringError(f"{kind} expects exactly one of {choices}, got {' and '.join(chosen) or 'none'}.")
    ((name, value),) = chosen.items()
    if isinstance(value, Topology):
        return value
    return Blocks(value) if name == "blocks" else Complete(value) if name == "nodes" else Matrix(value)


def _short(value: Any) -> str:
    return (
        repr(value.tolist())
        if isinstance(value, np.ndarray)
        else value.__name__
        if isinstance(value, type)
        else repr(value)
    )
