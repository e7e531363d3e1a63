"""The result of `profile`: a row for each layer, totals, and a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from wirings.errors import unknown
from wirings.utils.tables import Cell, text_table

COUNTS = ("dense_params", "params", "live_params", "dense_mult_adds", "mult_adds", "live_mult_adds")
HEADER = ("layer", "kind", "params", "live", "mult-adds", "live", "edges", "live", "nodes", "no output", "dead")
NO_MODULE = "(attention)"
"""The name of the row for attention that is a function call and not a module."""


@dataclass(frozen=True)
class ProfileRow:
    """What one layer costs. Parameters and multiply-adds are counted in three ways.

    **Dense** counts every allowed edge and every node. **Real** is the paper's count: real edges, and the functions of
    nodes that an edge leaves; layers next to a graph count only the channels that it sends or reads. **Live** leaves
    out everything that is dead in the whole network.
    """

    name: str
    """The name of the module in the model, or `NO_MODULE`."""
    kind: str
    """The name of its class."""
    dense_params: int
    params: int
    live_params: int
    dense_mult_adds: int
    mult_adds: int
    live_mult_adds: int
    edges: int | None = None
    """Real edges: nonzero weights, or those that the rule has chosen. None for layers without edges."""
    live_edges: int | None = None
    """Real edges between nodes that are alive."""
    nodes: int | None = None
    """The nodes of a graph, including inputs and outputs, or the output channels or units of a layer."""
    without_output: int | None = None
    """The paper's dead nodes: nodes of a graph, other than outputs, that no real edge leaves."""
    dead_nodes: int | None = None
    """Nodes that are not on any path from the network's input to its output."""
    times: int = 1
    """How often it runs: calls of a layer, steps of a discrete graph, or evaluations of a continuous one."""
    per: str = "call"
    """What ``times`` counts: call, step or evaluation."""
    edge_mult_adds: int | None = None
    """The part of a graph's real multiply-adds that is due to its edges; its nodes take the rest."""
    norms: int = 0
    """Parameters of the norms of a graph's nodes, which neither the paper nor the counts include."""


@dataclass(frozen=True)
class Profile:
    """What a model costs, layer by layer. Print it for a table; totals have the same names as in the rows."""

    rows: tuple[ProfileRow, ...]
    """One row for each layer or graph, in the order of the model's modules."""
    notes: tuple[str, ...] = ()
    """What could not be counted or followed, and why."""
    totals: dict[str, int] = field(init=False)
    """The sum over all rows of each of the six counts."""

    def __post_init__(self) -> None:
        totals = {name: sum(getattr(row, name) for row in self.rows) for name in COUNTS}
        object.__setattr__(self, "totals", totals)

    @property
    def dense_params(self) -> int:
        """Parameters with all allowed edges, without the norms of graphs' nodes."""
        return self.totals["dense_params"]

    @property
    def params(self) -> int:
        """Parameters as the paper counts them: real edges, kernels of nodes that send, and layers outside graphs."""
        return self.totals["params"]

    @property
    def live_params(self) -> int:
        """Parameters without everything that is dead."""
        return self.totals["live_params"]

    @property
    def all_params(self) -> int:
        """All parameters of the model, including the norms of graphs' nodes."""
        return self.dense_params + sum(row.norms for row in self.rows)

    @property
    def dense_mult_adds(self) -> int:
        """Multiply-adds with all allowed edges."""
        return self.totals["dense_mult_adds"]

    @property
    def mult_adds(self) -> int:
        """Multiply-adds as the paper counts them."""
        return self.totals["mult_adds"]

    @property
    def live_mult_adds(self) -> int:
        """Multiply-adds without everything that is dead."""
        return self.totals["live_mult_adds"]

    def row(self, name: str) -> ProfileRow:
        """The row of the module with that name."""
        if name not in (known := [row.name for row in self.rows]):
            raise unknown("row", name, known)
        return self.rows[known.index(name)]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        return {
            "all_params": self.all_params,
            **self.totals,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        shown = [row for row in self.rows if row.dense_mult_adds]
        lines = [*(_cells(row) for row in shown), *self._rest()]
        text = text_table(HEADER, lines, align="ll" + "r" * (len(HEADER) - 2), footer=[self._total()])
        if self.totals["dense_params"] > self.params:
            text.append(f"dense: {self.dense_params:,} parameters, {self.dense_mult_adds:,} multiply-adds")
        if norms := self.all_params - self.dense_params:
            text.append(f"not counted: {norms:,} parameters of the norms of graphs' nodes")
        repeated = [f"{row.name} × {row.times:,} {row.per}s" for row in shown if row.times > 1]
        text += [f"counted together: {', '.join(repeated)}"] * bool(repeated) + list(self.notes)
        return "\n".join(text)

    def _rest(self) -> list[list[Cell]]:
        """One line for norms and other modules that have parameters but no multiply-adds."""
        rest = [row for row in self.rows if not row.dense_mult_adds]
        params, live = sum(row.params for row in rest), sum(row.live_params for row in rest)
        if not params:
            return []
        return [[f"{len(rest)} others", "norms and the like", params, live, *[None] * (len(HEADER) - 4)]]

    def _total(self) -> list[Cell]:
        names = ("edges", "live_edges", "nodes", "without_output", "dead_nodes")
        known = [[value for row in self.rows if (value := getattr(row, name)) is not None] for name in names]
        sums = [sum(values) if values else None for values in known]
        return ["total", "", self.params, self.live_params, self.mult_adds, self.live_mult_adds, *sums]


def _cells(row: ProfileRow) -> list[Cell]:
    return [
        row.name or "(model)", row.kind, row.params, row.live_params, row.mult_adds, row.live_mult_adds, row.edges,
        row.live_edges, row.nodes, row.without_output, row.dead_nodes,
    ]  # fmt: skip
