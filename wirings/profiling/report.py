"""What `profile` gives: a row a layer, totals, a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from wirings.utils.tables import Cell, text_table

COUNTS = ("dense_params", "params", "live_params", "dense_mult_adds", "mult_adds", "live_mult_adds")
HEADER = ("layer", "kind", "params", "live", "mult-adds", "live", "edges", "live", "nodes", "no output", "dead")
NO_MODULE = "(attention)"
"""The name of the row of attention that is a function, and no module."""


@dataclass(frozen=True)
class Row:
    """What one layer costs for one example. Three counts of each: dense, real and live.

    **Dense** is with every allowed edge and every node. **Real** is the paper's count: real edges, and the functions of
    nodes that an edge leaves; next to a graph, layers count only the channels that it sends or reads. **Live** leaves
    out all that is dead, in the whole network.
    """

    name: str
    """The module's name in the model, or `NO_MODULE`."""
    kind: str
    """Its class."""
    dense_params: int
    params: int
    live_params: int
    dense_mult_adds: int
    mult_adds: int
    live_mult_adds: int
    edges: int | None = None
    """Real edges: weights that are not zero, or that the rule has chosen. None for layers without edges."""
    live_edges: int | None = None
    """Those of them between nodes that live."""
    nodes: int | None = None
    """A graph's nodes, inputs and outputs among them; a layer's output channels or units."""
    without_output: int | None = None
    """The paper's dead nodes: those of a graph that no real edge leaves, outputs aside."""
    dead_nodes: int | None = None
    """Nodes that cannot reach the network's output, or that nothing reaches from its input."""
    times: int = 1
    """How often it is done for one example: calls, steps of a discrete graph, evaluations of a continuous one."""
    per: str = "call"
    """What ``times`` counts: call, step or evaluation."""
    edge_mult_adds: int | None = None
    """Of a graph's real multiply-adds, those of its edges; the rest is its nodes'."""
    norms: int = 0
    """Parameters of the norms of a graph's nodes. The paper leaves them out, and so do the counts."""


@dataclass(frozen=True)
class Profile:
    """What a model costs for one example. Print it for a table; the totals have the rows' names."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What could not be counted or followed, and why."""
    totals: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        totals = {name: sum(getattr(row, name) for row in self.rows) for name in COUNTS}
        object.__setattr__(self, "totals", totals)

    @property
    def dense_params(self) -> int:
        """With all allowed edges; without the norms of graphs' nodes."""
        return self.totals["dense_params"]

    @property
    def params(self) -> int:
        """As the paper counts them: real edges, kernels of nodes that send, and what is not part of a graph."""
        return self.totals["params"]

    @property
    def live_params(self) -> int:
        """Without all that is dead."""
        return self.totals["live_params"]

    @property
    def all_params(self) -> int:
        """Every parameter that the model holds, the norms of graphs' nodes included."""
        return self.dense_params + sum(row.norms for row in self.rows)

    @property
    def dense_mult_adds(self) -> int:
        """With all allowed edges."""
        return self.totals["dense_mult_adds"]

    @property
    def mult_adds(self) -> int:
        """As the paper counts them."""
        return self.totals["mult_adds"]

    @property
    def live_mult_adds(self) -> int:
        """Without all that is dead."""
        return self.totals["live_mult_adds"]

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
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


def _cells(row: Row) -> list[Cell]:
    return [
        row.name or "(model)", row.kind, row.params, row.live_params, row.mult_adds, row.live_mult_adds, row.edges,
        row.live_edges, row.nodes, row.without_output, row.dead_nodes,
    ]  # fmt: skip
