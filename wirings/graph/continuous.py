"""Continuous-time graphs: the states of the nodes follow a differential equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirings.budgets.budget import Amount
from wirings.errors import unknown
from wirings.graph.adjoint import solve_adjoint
from wirings.graph.base import NodeSelection, make_topology
from wirings.graph.discrete import DynamicGraph
from wirings.graph.nodes import NodeRecipe
from wirings.graph.solve import METHODS, Derivative, Solution, solve
from wirings.graph.topology import Blocks, Topology
from wirings.rules import Rule
from wirings.selection.structure import FREE
from wirings.utils.checks import check_bool, is_number


@dataclass(frozen=True)
class Effort:
    """What it took to solve the differential equation."""

    evaluations: int
    """Evaluations of dZ/dt."""
    accepted: int
    """Accepted steps."""
    rejected: int
    """Rejected steps."""

    @classmethod
    def of(cls, solution: Solution) -> Effort:
        """The effort of a solution."""
        return cls(solution.evaluations, solution.accepted, solution.rejected)


class ContinuousGraph(DynamicGraph):
    """A continuous-time neural graph (section 2.3 of the paper): dZ/dt = f(A Z(t), t), from time 0 to ``until``.

    Called with the states of the input nodes at time 0, (batch, inputs, …), it returns those of the output nodes at the
    end, (batch, outputs, …). All other nodes start at zero: with fewer inputs than nodes, it is an augmented neural
    ODE.

    After a forward pass, ``effort`` holds the number of evaluations and steps; with ``adjoint=True``,
    ``adjoint_effort`` holds those of the adjoint equation after the backward pass.

    Args:
        nodes: the number of nodes. Every edge is allowed, including cycles and self-loops.
        inputs: the input nodes: how many (the first ones) or a list of their numbers.
        outputs: the output nodes: how many (the last ones) or a list of their numbers.
        edges: the number of real edges, or their density as a float. None: all allowed edges, and no rule.
        node: the nodes' functions (see `wirings.graph.nodes`).
        rule: a rule or its name; dnw by default if ``edges`` is given.
        structure: which edges are real together, as for `wirings.wire_`: blocks of receiving × sending nodes, ``"row"``
            or ``"column"`` for all edges that lead to a node or leave it, or N:M, which needs no ``edges``.
        solver: ``"dopri5"`` or ``"bosh3"``, which adapt their steps; ``"euler"``, ``"midpoint"`` or ``"rk4"``.
        rtol: the relative error allowed in a step.
        atol: the absolute error allowed in a step.
        steps: the number of equal steps to take instead of adaptive ones.
        until: the final time.
        max_steps: the number of steps, accepted or rejected, after which an adaptive solver raises an error.
        adjoint: whether to compute the gradient by solving the adjoint equation backwards in time, in memory that does
            not grow with the number of steps, instead of differentiating through the solver's steps.
        blocks: instead of nodes, the number of nodes in each block, or a `Blocks`.
        topology: instead of nodes, a `Dag`, or a boolean matrix of the allowed edges, [receives, sends].

    >>> graph = ContinuousGraph(20, inputs=4, outputs=3, edges=60)
    >>> graph(torch.zeros(2, 4)).shape, graph.effort.evaluations > 0
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        nodes: int | None = None,
        *,
        inputs: NodeSelection | None = None,
        outputs: NodeSelection | None = None,
        edges: Amount | None = None,
        node: NodeRecipe | None = None,
        rule: str | Rule | None = None,
        structure: str = FREE,
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
        made = make_topology("ContinuousGraph", nodes=nodes, blocks=blocks, topology=topology)
        check_bool("ContinuousGraph", "adjoint", adjoint)
        adaptive = steps is None
        given = {
            "nodes": nodes, "inputs": inputs, "outputs": outputs, "edges": edges, "node": node, "rule": rule,
            "solver": solver, "rtol": rtol if adaptive else None, "atol": atol if adaptive else None, "steps": steps,
            "until": None if until is None or (is_number(until) and until == 1.0) else until,
            "max_steps": None if is_number(max_steps) and max_steps == 1000 else max_steps,
            "adjoint": adjoint or None, "blocks": blocks, "topology": None if topology is None else made,
        }  # fmt: skip
        if not isinstance(solver, str) or solver not in METHODS:
            raise unknown("solver", str(solver), METHODS)
        super().__init__(made, inputs, outputs, node, edges, rule, structure, given)
        if adjoint:
            self._no_batch_norm("adjoint=True computes")
        self.solver, self.rtol, self.atol, self.steps = solver, rtol, atol, steps
        self.until, self.max_steps, self.adjoint = until, max_steps, adjoint
        self.effort: Effort | None = None
        self.adjoint_effort: Effort | None = None
        self._solve(
            torch.zeros(()), lambda t, y: y, since=until
        )  # rejects invalid settings now, not at the first batch

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, 1, "(batch, inputs, …)")
        matrices = self.sums.matrices(self._weight_for(self.sums.all()))
        start = self._initial_rows(x.to(torch.promote_types(x.dtype, torch.float32)))
        parameters = [*matrices, *self.function.parameters()]
        solution = self._solve(start, lambda time, rows: self._change(rows, time, matrices), parameters)
        self.effort = Effort.of(solution)
        return self._read_rows(solution.y)

    def _solve(
        self, start: Tensor, change: Derivative, parameters: Sequence[Tensor] = (), since: float = 0.0
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
