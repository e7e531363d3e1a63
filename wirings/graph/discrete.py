"""Discrete-time graphs: all nodes are updated together, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from wirings.budgets.budget import Amount
from wirings.errors import WiringError, unknown
from wirings.graph.base import Graph, NodeSelection, make_topology
from wirings.graph.liveness import Liveness, step_liveness
from wirings.graph.nodes import NodeFunction, NodeRecipe, build
from wirings.graph.product import Sums, through
from wirings.graph.topology import Blocks, Topology
from wirings.rules import Rule
from wirings.selection.structure import FREE
from wirings.utils.checks import check_bool, check_int


class DynamicGraph(Graph):
    """Base class of discrete-time and continuous-time graphs: one function for all nodes, and cycles are allowed."""

    _in_index: Tensor
    _out_index: Tensor

    def __init__(
        self,
        topology: Topology,
        inputs: NodeSelection | None,
        outputs: NodeSelection | None,
        node: NodeRecipe | None,
        edges: Amount | None,
        rule: str | Rule | None,
        structure: str,
        given: dict[str, Any],
    ) -> None:
        super().__init__(topology, inputs, outputs)
        if isinstance(node, Sequence) and not isinstance(node, str):
            raise WiringError(
                f"{self._kind}: node= expects one recipe for all nodes; for several kinds use Groups(counts, kinds)."
            )
        self._given = given
        self.function: NodeFunction = build(node, self.nodes, self._kind)
        tiles = topology.tiles()
        self.sums = Sums(tiles, self.nodes)
        self._in, self._out = _slice(self.inputs), _slice(self.outputs)
        for name, nodes in (("_in_index", self.inputs), ("_out_index", self.outputs)):
            self.register_buffer(name, torch.from_numpy(np.asarray(nodes, np.int64)), persistent=False)
        self._finish(tiles, edges, rule, structure)

    def _no_batch_norm(self, what: str) -> None:
        if any("running_mean" in name for name, _ in self.function.named_buffers()):
            raise WiringError(
                f"{self._kind}: {what} each step twice, so that batch norms would count it twice. Use instance norms."
            )

    def initial(self, x: Tensor) -> Tensor:
        """The states at time 0, (batch, nodes, …): x at the input nodes and zero elsewhere."""
        return self._initial_rows(x).transpose(0, 1)

    def read(self, states: Tensor) -> Tensor:
        """Select the states of the output nodes, (batch, outputs, …), from those of all nodes, (batch, nodes, …)."""
        return self._read_rows(self._check_states(states))

    # Internally, states are "rows", of shape (nodes, batch, …).

    def _initial_rows(self, x: Tensor) -> Tensor:
        return self._add_input(x.new_zeros(self.nodes, x.shape[0], *x.shape[2:]), x)

    def _add_input(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows.index_add(0, self._in_index, x.transpose(0, 1).to(rows.dtype))

    def _read_rows(self, rows: Tensor) -> Tensor:
        return rows[self._out_index if self._out is None else self._out].transpose(0, 1)

    def _change(self, rows: Tensor, time: float, matrices: list[Tensor]) -> Tensor:
        """Pass through the nodes and the edges once: f(A Z, time)."""
        sent = self.function.on_rows("before", rows, time)
        return self._same_maps(self.function.on_rows("after", self.sums(matrices, sent), time), rows, self.nodes)

    def _check_states(self, states: Tensor, batch: int | None = None) -> Tensor:
        wrong = (
            not isinstance(states, Tensor)
            or states.dim() < 2
            or states.shape[1] != self.nodes
            or (batch is not None and states.shape[0] != batch)
        )
        if wrong:
            batches = "batch" if batch is None else str(batch)
            got = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise WiringError(f"{self._kind} expects states of shape ({batches}, {self.nodes}, …), got {got}.")
        return states.transpose(0, 1)

    def _same_maps(self, now: Tensor, before: Tensor, nodes: int) -> Tensor:
        """Return ``now`` after checking that the number of nodes and the size of their maps have not changed."""
        if len(now) != nodes:
            raise WiringError(f"{self._kind}: node= returned {len(now)} nodes for {nodes}; it must keep them.")
        if now.shape[2:] != before.shape[2:]:
            sizes = ["×".join(map(str, x.shape[2:])) or "scalars" for x in (before, now)]
            raise WiringError(
                f"{self._kind}: the maps of nodes must keep their size from one time to the next, but node= changed "
                f"them from {sizes[0]} to {sizes[1]}. Use pad=True for strided convolutions in a dynamic graph."
            )
        return now


class DiscreteGraph(DynamicGraph):
    """A discrete-time neural graph (section 2.3 of the paper): Z(ℓ + 1) = f(A Z(ℓ), ℓ) for all nodes at once.

    Called with the input, it returns the states of the output nodes. Input nodes may have parents.

    Args:
        nodes: the number of nodes. Every edge is allowed, including cycles and self-loops.
        inputs: the input nodes: how many (the first ones) or a list of their numbers.
        outputs: the output nodes: how many (the last ones) or a list of their numbers.
        steps: the number of steps. With ``inflow="every"`` it is the length of the input by default.
        edges: the number of real edges, or their density as a float. None: all allowed edges, and no rule.
        node: the nodes' functions (see `wirings.graph.nodes`).
        rule: a rule or its name; dnw by default if ``edges`` is given.
        structure: which edges are real together, as for `wirings.wire_`: blocks of receiving × sending nodes, ``"row"``
            or ``"column"`` for all edges that lead to a node or leave it, or N:M, which needs no ``edges``.
        blocks: instead of nodes, the number of nodes in each block, or a `Blocks`.
        topology: instead of nodes, a `Dag`, or a boolean matrix of the allowed edges, [receives, sends].
        inflow: ``"first"``: the input, (batch, inputs, …), is fed at time 0. ``"every"``: the input is a sequence,
            (batch, time, inputs, …), whose part ℓ is added to the states of the input nodes at time ℓ.
        reads: ``"last"``: return the outputs after the last step, (batch, outputs, …). ``"every"``: return those after
            every step, (batch, steps, outputs, …).
        checkpoint: whether to recompute the inside of each step for the gradient instead of storing it.

    >>> graph = DiscreteGraph(20, inputs=4, outputs=3, steps=5, edges=60)
    >>> graph(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        nodes: int | None = None,
        *,
        inputs: NodeSelection | None = None,
        outputs: NodeSelection | None = None,
        steps: int | None = None,
        edges: Amount | None = None,
        node: NodeRecipe | None = None,
        rule: str | Rule | None = None,
        structure: str = FREE,
        blocks: Sequence[int] | Blocks | None = None,
        topology: Topology | Tensor | None = None,
        inflow: str = "first",
        reads: str = "last",
        checkpoint: bool = False,
    ) -> None:
        made = make_topology("DiscreteGraph", nodes=nodes, blocks=blocks, topology=topology)
        check_bool("DiscreteGraph", "checkpoint", checkpoint)
        for what, value, choices in (("inflow", inflow, ("first", "every")), ("reads", reads, ("last", "every"))):
            if not isinstance(value, str) or value not in choices:
                raise unknown(what, str(value), choices)
        given = {
            "nodes": nodes, "inputs": inputs, "outputs": outputs, "steps": steps, "edges": edges, "node": node,
            "rule": rule, "blocks": blocks, "topology": None if topology is None else made,
            "inflow": None if inflow == "first" else inflow, "reads": None if reads == "last" else reads,
            "checkpoint": checkpoint or None,
        }  # fmt: skip
        if steps is None and inflow == "first":
            raise WiringError(
                'DiscreteGraph needs steps=, the number of steps, unless the input is a sequence (inflow="every").'
            )
        self_steps = None if steps is None else check_int("DiscreteGraph", "steps", steps)
        super().__init__(made, inputs, outputs, node, edges, rule, structure, given)
        if checkpoint:
            self._no_batch_norm("checkpoint=True computes")
        self.steps, self.inflow, self.reads, self.checkpoint = self_steps, inflow, reads, checkpoint

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        """Run the graph.

        Args:
            x: the input, (batch, inputs, …), or with ``inflow="every"`` (batch, time, inputs, …).
            states: the states to start from, (batch, nodes, …); zeros by default.
        """
        sequence = self.inflow == "every"
        self._check_input(x, 2 if sequence else 1, "(batch, time, inputs, …)" if sequence else "(batch, inputs, …)")
        matrices = self.sums.matrices(self._weight_for(self.sums.all()))
        if not sequence and states is None and self.reads == "last" and not self.checkpoint:
            return self._run_once(x, matrices)
        inflow = x.unbind(1) if sequence else (x,)
        steps = len(inflow) if self.steps is None else self.steps
        if not inflow:
            raise WiringError("DiscreteGraph: the input sequence is empty; it needs at least one step.")
        if len(inflow) > steps:
            raise WiringError(f"DiscreteGraph has {steps} steps, got a sequence of {len(inflow)}; increase steps=.")
        rows = self._initial_rows(torch.zeros_like(inflow[0])) if states is None else self._check_states(states, len(x))
        read = []
        for time in range(steps):
            if time < len(inflow):
                rows = self._add_input(rows, inflow[time])
            if self.checkpoint and torch.is_grad_enabled():
                rows = checkpointed(self._change, rows, time, matrices, use_reentrant=False)
            else:
                rows = self._change(rows, time, matrices)
            if self.reads == "every":
                read.append(self._read_rows(rows))
        return torch.stack(read, 1) if self.reads == "every" else self._read_rows(rows)

    def step(self, states: Tensor, time: int) -> Tensor:
        """Make one step: compute the states at ``time`` + 1 from those at ``time``, (batch, nodes, …)."""
        return self._change(
            self._check_states(states), time, self.sums.matrices(self._weight_for(self.sums.all()))
        ).transpose(0, 1)

    def _run_once(self, x: Tensor, matrices: list[Tensor]) -> Tensor:
        """Run all steps from one input to the outputs, and skip states that are not needed.

        At time 0 only input nodes have anything to send, and in the last step only output nodes are computed. Between
        two steps, the part of the node function after the edges and the one before the next edges are called as one.
        """
        assert self.steps is not None
        function, rows = self.function, x.transpose(0, 1)
        some = self.sums.one_matrix and function.some_nodes
        columns = None
        if some and function.quiet and self._in is not None:
            messages = function.on_rows("before", rows, 0, nodes=self._in)
            columns = matrices[0][:, self._in]
        else:
            messages = function.on_rows("before", self._initial_rows(x), 0)
        for time in range(self.steps - 1):
            received = self.sums(matrices, messages) if columns is None else through(columns, messages)
            messages, columns = function.on_rows("between", received, time, time + 1), None
        last = self.steps - 1
        if some and self._out is not None:
            received = through((matrices[0] if columns is None else columns)[self._out], messages)
            states = function.on_rows("after", received, last, nodes=self._out)
            return self._same_maps(states, rows, len(self.outputs)).transpose(0, 1)
        received = self.sums(matrices, messages) if columns is None else through(columns, messages)
        return self._read_rows(self._same_maps(function.on_rows("after", received, last), rows, self.nodes))

    def liveness(self) -> Liveness:
        """Which nodes and real edges are, in time, on a walk from an input to an output."""
        targets, sources = self.real_edges()
        return step_liveness(
            sources, targets, self.nodes, self.inputs, self.outputs, steps=self.steps,
            input_steps=None if self.inflow == "every" else 1, read_every_step=self.reads == "every",
        )  # fmt: skip

    def longest_path(self) -> float:
        """The number of edges on the longest walk, in the graph's steps, from an input to an output; 0 without one."""
        if self.steps is None:
            return super().longest_path()
        targets, sources = self.real_edges()
        length = np.full(self.nodes, -1)
        length[self.inputs] = best = 0
        for time in range(self.steps):
            longer = np.full(self.nodes, -1)
            active = length[sources] >= 0
            np.maximum.at(longer, targets[active], length[sources[active]] + 1)
            if self.inflow == "every":
                longer[self.inputs] = np.maximum(longer[self.inputs], 0)
            length = longer
            if self.reads == "every" or time == self.steps - 1:
                best = max(best, int(length[self.outputs].max()))
        return best


def _slice(nodes: np.ndarray) -> slice | None:
    """The nodes as a slice, if they are consecutive."""
    start, stop = int(nodes[0]), int(nodes[-1]) + 1
    return slice(start, stop) if np.array_equal(nodes, np.arange(start, stop)) else None
