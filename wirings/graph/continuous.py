"""Continuous-time graphs: the states follow a differential equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirings.budgets.budget import Amount
from wirings.errors import unknown
from wirings.graph.adjoint import solve_adjoint
from wirings.graph.base import Places, make_topology
from wirings.graph.discrete import DynamicGraph
from wirings.graph.nodes import Recipe
from wirings.graph.solve import METHODS, Function, Solution, solve
from wirings.graph.topology import Blocks, Topology
from wirings.rules import Rule


@dataclass(frozen=True)
class Effort:
    """What solving took: evaluations of dZ/dt, steps accepted, steps tried in vain."""

    evaluations: int
    accepted: int
    rejected: int

    @classmethod
    def of(cls, solution: Solution) -> Effort:
        return cls(solution.evaluations, solution.accepted, solution.rejected)


class ContinuousGraph(DynamicGraph):
    """A continuous-time neural graph (the paper's section 2.3): dZ/dt = f(A Z(t), t), from time 0 to ``until``.

    Called with the states of the input nodes at time 0, (batch, inputs, …), it gives those of the output nodes at the
    end, (batch, outputs, …). The other nodes start at zero: with fewer inputs than nodes this is an augmented neural
    ODE.

    Args:
        nodes: how many; every edge is allowed, cycles and self-loops too.
        blocks, topology: instead, `Blocks` (or their sizes), a `Dag`, or a boolean matrix, [receives, sends].
        inputs, outputs: nodes: how many (the first, the last ones) or which.
        edges: how many are real, or a float, the density. None: all allowed ones, and no rule.
        node: the recipe of the nodes' functions (see `wirings.graph.nodes`).
        rule: a rule's name or a rule; dnw if ``edges`` are given.
        solver: ``"dopri5"`` or ``"bosh3"``, which choose their steps; ``"euler"``, ``"midpoint"`` or ``"rk4"``.
        rtol, atol: the error allowed in a step, relative to the states and absolute.
        steps: equal steps, this many, instead of chosen ones.
        until: the time at the end.
        max_steps: a solver that has tried this many steps gives up with an error.
        adjoint: whether the gradient comes from solving the adjoint equation backwards, in memory that does not grow
            with the steps, instead of going back through the solver's steps.

    After a forward pass ``effort`` says how many evaluations and steps it took; with ``adjoint``, after the backward
    pass, ``adjoint_effort`` those of the adjoint equation.

    >>> graph = ContinuousGraph(20, inputs=4, outputs=3, edges=60)
    >>> graph(torch.zeros(2, 4)).shape, graph.effort.evaluations > 0
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        nodes: int | None = None,
        *,
        inputs: Places | None = None,
        outputs: Places | None = None,
        edges: Amount | None = None,
        node: Recipe | None = None,
        rule: str | Rule | None = None,
        solver: str = "dopri5",
        rtol: float = 1e-3,
        atol: float = 1e-3,
        steps: int | None = None,
        until: float = 1.0,
        max_steps: int = 1000,
        adjoint: bool = False,
        blocks: Sequence[int] | Blocks | None = None,
        topology: Topology | Tensor | None = None,
    ) -> None:
        made = make_topology("ContinuousGraph", blocks, nodes, topology)
        adaptive = steps is None
        given = {
            "nodes": nodes, "inputs": inputs, "outputs": outputs, "edges": edges, "node": node, "rule": rule,
            "solver": solver, "rtol": rtol if adaptive else None, "atol": atol if adaptive else None, "steps": steps,
            "until": None if until == 1.0 else until, "max_steps": None if max_steps == 1000 else max_steps,
            "adjoint": adjoint or None, "blocks": blocks, "topology": None if topology is None else made,
        }  # fmt: skip
        if not isinstance(solver, str) or solver not in METHODS:
            raise unknown("solver", str(solver), METHODS)
        super().__init__(made, inputs, outputs, node, edges, rule, given)
        if adjoint:
            self._no_batch_norm("adjoint=True computes")
        self.solver, self.rtol, self.atol, self.steps = solver, rtol, atol, steps
        self.until, self.max_steps, self.adjoint = until, max_steps, adjoint
        self.effort: Effort | None = None
        self.adjoint_effort: Effort | None = None
        self._solve(torch.zeros(()), lambda t, y: y, since=until)  # bad settings are told now, not at the first batch

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, 1, "(batch, inputs, …)")
        matrices = self.sums.matrices(self.weight)
        start = self._initial_rows(x.to(torch.promote_types(x.dtype, torch.float32)))
        parameters = [*matrices, *self.function.parameters()]
        solution = self._solve(start, lambda time, rows: self._change(rows, time, matrices), parameters)
        self.effort = Effort.of(solution)
        return self._read_rows(solution.y)

    def _solve(
        self, start: Tensor, change: Function, parameters: Sequence[Tensor] = (), since: float = 0.0
    ) -> Solution:
        options: dict[str, Any] = {
            "method": self.solver,
            "rtol": self.rtol,
            "atol": self.atol,
            "steps": self.steps,
            "max_steps": self.max_steps,
            "where": self._kind,
        }
        if not self.adjoint:
            return solve(change, start, since, self.until, **options)

        def report(solution: Solution) -> None:
            self.adjoint_effort = Effort.of(solution)

        return solve_adjoint(change, start, since, self.until, parameters, report=report, **options)
