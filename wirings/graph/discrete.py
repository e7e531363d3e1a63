"""Discrete-time graphs: all nodes change together, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from wirings.budgets.budget import Amount
from wirings.errors import WiringError, unknown
from wirings.graph.base import Graph, Places, make_topology, reached
from wirings.graph.functions import NodeFunction
from wirings.graph.nodes import Recipe, build
from wirings.graph.product import Sums, through
from wirings.graph.topology import Blocks, Topology, whole
from wirings.rules import Rule


class DynamicGraph(Graph):
    """What discrete-time and continuous-time graphs share: one function for all nodes, any edges, cycles too."""

    _in_index: Tensor
    _out_index: Tensor

    def __init__(
        self,
        topology: Topology,
        inputs: Places | None,
        outputs: Places | None,
        node: Recipe | None,
        edges: Amount | None,
        rule: str | Rule | None,
        given: dict[str, Any],
    ) -> None:
        super().__init__(topology, inputs, outputs)
        if isinstance(node, Sequence):
            raise WiringError(
                f"{self._kind}: node= is one recipe for all nodes; several kinds are Groups(counts, kinds)."
            )
        self._given = given
        self.function: NodeFunction = build(node, self.nodes, self._kind)
        tiles = topology.tiles()
        self.sums = Sums(tiles, self.nodes)
        self._in, self._out = _slice(self.inputs), _slice(self.outputs)
        for name, nodes in (("_in_index", self.inputs), ("_out_index", self.outputs)):
            self.register_buffer(name, torch.from_numpy(np.asarray(nodes, np.int64)), persistent=False)
        self._finish(tiles, edges, rule)

    def _no_batch_norm(self, what: str) -> None:
        if any("running_mean" in name for name, _ in self.function.named_buffers()):
            raise WiringError(
                f"{self._kind}: {what} a step twice, and its batch norms would count it twice; take instance norm."
            )

    def initial(self, x: Tensor) -> Tensor:
        """The states at time 0, (batch, nodes, …): x at the input nodes, zero elsewhere (eq. init_discrete)."""
        return self._initial_rows(x).transpose(0, 1)

    def read(self, states: Tensor) -> Tensor:
        """The output nodes' states of all states, (batch, nodes, …)."""
        return self._read_rows(self._check_states(states))

    # States are kept as (nodes, batch, …): "rows".

    def _initial_rows(self, x: Tensor) -> Tensor:
        return self._add_input(x.new_zeros(self.nodes, x.shape[0], *x.shape[2:]), x)

    def _add_input(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows.index_add(0, self._in_index, x.transpose(0, 1).to(rows.dtype))

    def _read_rows(self, rows: Tensor) -> Tensor:
        return rows[self._out_index if self._out is None else self._out].transpose(0, 1)

    def _change(self, rows: Tensor, time: float, matrices: list[Tensor]) -> Tensor:
        """Through the nodes and the edges once: f(A Z, time)."""
        sent = self.function.on_rows("before", rows, time)
        return self._same_maps(self.function.on_rows("after", self.sums(matrices, sent), time), rows, self.nodes)

    def _check_states(self, states: Tensor, batch: int | None = None) -> Tensor:
        wrong = states.dim() < 2 or states.shape[1] != self.nodes or (batch is not None and states.shape[0] != batch)
        if wrong:
            batches = "batch" if batch is None else str(batch)
            raise WiringError(
                f"{self._kind} takes states of shape ({batches}, {self.nodes}, …), but {tuple(states.shape)} came."
            )
        return states.transpose(0, 1)

    def _same_maps(self, now: Tensor, before: Tensor, nodes: int) -> Tensor:
        """``now``, checked to be states of so many nodes, with maps of the size that they had before."""
        if len(now) != nodes:
            raise WiringError(f"{self._kind}: node= made {len(now)} nodes of {nodes}; each keeps its own state.")
        if now.shape[2:] != before.shape[2:]:
            sizes = ["×".join(map(str, x.shape[2:])) or "scalars" for x in (before, now)]
            raise WiringError(
                f"{self._kind}: the nodes' maps must keep their size from one time to the next, but node= made "
                f"{sizes[1]} of {sizes[0]}. Strided convolutions in a dynamic graph take pad=True."
            )
        return now


class DiscreteGraph(DynamicGraph):
    """A discrete-time neural graph (the paper's section 2.3): Z(ℓ + 1) = f(A Z(ℓ), ℓ) for all nodes at once.

    Input nodes may have parents. Called with the input, it gives the states of the output nodes.

    Args:
        nodes: how many; every edge is allowed, cycles and self-loops too.
        blocks, topology: instead, `Blocks` (or their sizes), a `Dag`, or a boolean matrix, [receives, sends].
        inputs, outputs: nodes: how many (the first, the last ones) or which.
        steps: L. With ``inflow="every"`` it may be left out: then there are as many as the input has.
        edges: how many are real, or a float, the density. None: all allowed ones, and no rule.
        node: the recipe of the nodes' functions (see `wirings.graph.nodes`).
        rule: a rule's name or a rule; dnw if ``edges`` are given.
        inflow: ``"first"``: the input, (batch, inputs, …), is there at time 0. ``"every"``: a sequence,
            (batch, time, inputs, …), whose part ℓ is added to the input nodes' states at time ℓ.
        reads: ``"last"``: the output nodes' states at the end, (batch, outputs, …). ``"every"``: those after every
            step, (batch, steps, outputs, …).
        checkpoint: whether a step's inner values are computed again for the gradient instead of being kept.

    >>> graph = DiscreteGraph(20, inputs=4, outputs=3, steps=5, edges=60)
    >>> graph(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        nodes: int | None = None,
        *,
        inputs: Places | None = None,
        outputs: Places | None = None,
        steps: int | None = None,
        edges: Amount | None = None,
        node: Recipe | None = None,
        rule: str | Rule | None = None,
        blocks: Sequence[int] | Blocks | None = None,
        topology: Topology | Tensor | None = None,
        inflow: str = "first",
        reads: str = "last",
        checkpoint: bool = False,
    ) -> None:
        made = make_topology("DiscreteGraph", blocks, nodes, topology)
        given = {
            "nodes": nodes, "inputs": inputs, "outputs": outputs, "steps": steps, "edges": edges, "node": node,
            "rule": rule, "blocks": blocks, "topology": None if topology is None else made,
            "inflow": None if inflow == "first" else inflow, "reads": None if reads == "last" else reads,
            "checkpoint": checkpoint or None,
        }  # fmt: skip
        for what, value, choices in (("inflow", inflow, ("first", "every")), ("reads", reads, ("last", "every"))):
            if value not in choices:
                raise unknown(what, str(value), choices)
        if steps is None and inflow == "first":
            raise WiringError(
                'DiscreteGraph: give steps=, the number of steps (a sequence has its own: inflow="every").'
            )
        self_steps = None if steps is None else whole("DiscreteGraph", "steps", steps)
        super().__init__(made, inputs, outputs, node, edges, rule, given)
        if checkpoint:
            self._no_batch_norm("checkpoint=True computes")
        self.steps, self.inflow, self.reads, self.checkpoint = self_steps, inflow, reads, checkpoint

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        """Run the graph on an input; ``states``, (batch, nodes, …), are those to start from, zero if not given."""
        sequence = self.inflow == "every"
        self._check_input(x, 2 if sequence else 1, "(batch, time, inputs, …)" if sequence else "(batch, inputs, …)")
        matrices = self.sums.matrices(self.weight)
        if not sequence and states is None and self.reads == "last" and not self.checkpoint:
            return self._run_once(x, matrices)
        inflow = x.unbind(1) if sequence else (x,)
        steps = len(inflow) if self.steps is None else self.steps
        if not inflow:
            raise WiringError("DiscreteGraph: the sequence has no part at all; it needs at least one step of input.")
        if len(inflow) > steps:
            raise WiringError(
                f"DiscreteGraph has {steps} steps, but a sequence of {len(inflow)} came; give more steps."
            )
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
        """One step: the states at time ℓ + 1 from those at time ℓ, (batch, nodes, …)."""
        return self._change(self._check_states(states), time, self.sums.matrices(self.weight)).transpose(0, 1)

    def _run_once(self, x: Tensor, matrices: list[Tensor]) -> Tensor:
        """All steps from one input to the last states, without those that nobody asks for.

        At time 0 only input nodes have anything to send; in the last step only output nodes have anything to compute.
        Between the steps, what a node does after the edges and before the next ones is one piece.
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

    def _alive(self) -> np.ndarray:
        """Nodes on a walk, of an edge at least, from an input when it comes in to an output when it is read.

        Outputs are read when what came along the edges has arrived, before the next part of a sequence is added.
        """
        targets, sources = self._real_edges()
        if self.steps is None:
            ever = reached(self.inputs, sources, targets, self.nodes)
            leads = reached(self.outputs, targets, sources, self.nodes)
            once, onto, outputs = (np.zeros(self.nodes, bool) for _ in range(3))
            once[targets[ever[sources]]] = onto[sources[leads[targets]]] = outputs[self.outputs] = True
            return np.asarray((ever & onto) | (once & outputs))
        arrived, fed, onward, counts = (np.zeros((self.steps + 1, self.nodes), bool) for _ in range(4))
        for time in range(self.steps + 1):
            fed[time] = arrived[time]
            if time == 0 or (self.inflow == "every" and time < self.steps):
                fed[time, self.inputs] = True
            if time < self.steps:
                arrived[time + 1, targets[fed[time, sources]]] = True
        for time in range(self.steps, -1, -1):
            if time < self.steps:
                onward[time, sources[counts[time + 1, targets]]] = True
            counts[time] = onward[time]
            if time == self.steps or (self.reads == "every" and time > 0):
                counts[time, self.outputs] = True
        return np.asarray(((fed & onward) | (arrived & counts)).any(0))

    def longest_path(self) -> float:
        """The most edges on a walk of real edges from an input to an output in the graph's steps; 0 for none."""
        if self.steps is None:
            return super().longest_path()
        targets, sources = self._real_edges()
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
    """The nodes as a slice, if they follow one another."""
    start, stop = int(nodes[0]), int(nodes[-1]) + 1
    return slice(start, stop) if np.array_equal(nodes, np.arange(start, stop)) else None
