"""The rows of a profile: what each layer and each graph costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn

from wirings.budgets import mult_adds as costs
from wirings.budgets.mult_adds import Call
from wirings.graph import Graph
from wirings.graph.base import class_name
from wirings.graph.nodes import NodeFunction
from wirings.graph.work import node_work, passes
from wirings.profiling.graphs import GraphEdges
from wirings.profiling.live import CallLiveness, ChannelLiveness
from wirings.profiling.report import ProfileRow
from wirings.profiling.weights import Weights, add, count, live_part
from wirings.utils.layers import (
    CONVOLUTIONS,
    inside_parametrization,
    multiplies,
    parametrizations_of,
    wired_by_default,
)


class RowBuilder:
    """Goes through a model and builds the rows. ``notes`` describes what cannot be counted."""

    def __init__(
        self,
        model: nn.Module,
        calls: dict[str, list[Call]],
        weights: Weights,
        edges_of: dict[str, GraphEdges],
        near: CallLiveness,
        far: CallLiveness,
        notes: list[str],
    ) -> None:
        self.model, self.calls, self.weights, self.notes = model, calls, weights, notes
        self.edges_of, self.near, self.far = edges_of, near, far
        self._counted: set[int] = set()  # parameters that are already in a row

    def rows(self) -> list[ProfileRow]:
        """All rows, in the order of the model's modules."""
        found = list(self._modules())
        multiplied = {name: self._multiply(name, m) for name, m, _ in found if multiplies(m)}
        rows = []
        for name, module, in_graph in found:
            if isinstance(module, Graph):
                rows.append(self._graph(name, module))
            else:
                rows.append(self._layer(name, module, multiplied.get(name, (0, 0, 0)), in_graph))
        return [row for row in rows if row.dense_params or row.dense_mult_adds or row.norms]

    def _modules(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """The modules that get a row, graphs and those with parameters that no graph counts; whether inside a graph."""
        inside: set[int] = set()
        graphs: list[str] = []
        for name, module in self.model.named_modules():
            if inside_parametrization(name) or id(module) in inside:
                continue
            in_graph = any(not graph or name.startswith(f"{graph}.") for graph in graphs)
            if isinstance(module, nn.MultiheadAttention):
                inside.add(id(module.out_proj))
            if isinstance(module, Graph):
                graphs.append(name)
                yield name, module, False
            elif not (in_graph and isinstance(module, NodeFunction)) and (
                module._parameters or parametrizations_of(module)
            ):
                yield name, module, in_graph

    # ---- layers -----------------------------------------------------------------------------------------------------

    def _multiply(self, name: str, module: nn.Module) -> tuple[int, int, int]:
        """The multiply-adds of a layer in all its calls, dense, real and live; also records which weights are used."""
        dense = real = live = 0
        calls = self.calls.get(name, [])
        if not calls:
            self._uncalled(name)
        for number, call in enumerate(calls):
            found: dict[tuple[nn.Module, str], list[Tensor]] = {}  # by weight, which may be used in several parts
            for use in costs.uses(module, call):
                weight, place = self.weights[use.holder, use.attribute], (use.holder, use.attribute)
                if place not in found:
                    found[place] = [live_part(module, weight.mask, _at(f, name, number)) for f in (self.near, self.far)]
                    add(weight, *found[place])
                near, far = (int(part[use.rows].count_nonzero()) for part in found[place])
                dense += use.times * count(weight, use.rows)
                real, live = real + use.times * near, live + use.times * far
            more = costs.extra(module, call)
            dense, real, live = dense + more, real + more, live + more
        return dense, real, live

    def _layer(self, name: str, module: nn.Module, mult_adds: tuple[int, int, int], in_graph: bool) -> ProfileRow:
        """The row of a module that is not a graph."""
        counted, calls = multiplies(module), self.calls.get(name, [])
        holders = [module, module.out_proj] if isinstance(module, nn.MultiheadAttention) else [module]
        params = np.zeros(3, np.int64)
        edges = live_edges = 0
        has_edges = counted
        for holder in holders:
            for attribute, parameter in _own(holder).items():
                new = id(parameter) not in self._counted
                self._counted.add(id(parameter))
                if (counted and attribute in wired_by_default(holder)) or self.weights.is_sparse(holder, attribute):
                    weight, has_edges = self.weights[holder, attribute], True
                    near, far = (weight.mask if part is None else part for part in (weight.near, weight.far))
                    sums = [int(part.count_nonzero()) for part in (weight.mask, near, far)]
                    edges, live_edges = edges + sums[0], live_edges + sums[2]
                    own = [count(weight), sums[1], sums[2]] if weight.params is None else [weight.params] * 3
                else:
                    own = self._other(name, module, attribute, parameter)
                params += np.array(own) * new
        unseen = [a for a, p in _own(module).items() if p.dim() > 1]
        if unseen and not counted and not isinstance(module, costs.FREE):
            self._unseen(name, unseen)
        norms = int(params[0]) if in_graph and costs.is_norm(module) else 0
        dense, real, live = (0, 0, 0) if norms else params.tolist()
        followed = isinstance(module, (nn.Linear, *CONVOLUTIONS))
        nodes = getattr(module, "out_features", getattr(module, "out_channels", None)) if followed else None
        return ProfileRow(
            name, class_name(module), dense, real, live, mult_adds[0], mult_adds[1], mult_adds[2],
            edges=edges if has_edges else None, live_edges=live_edges if has_edges else None, nodes=nodes,
            dead_nodes=None if nodes is None else nodes - _living(self.far.get(name), nodes),
            times=max(1, len(calls)), norms=norms,
        )  # fmt: skip

    def _other(self, name: str, module: nn.Module, attribute: str, parameter: nn.Parameter) -> list[int]:
        """Dense, real and live counts of a bias, a parameter of a norm, or anything else."""
        whole, alive = parameter.numel(), self.far.get(name)
        near = self.near.get(name)
        if not alive or parameter.dim() != 1 or len(alive[0].wanted) != whole:
            return [whole] * 3
        if attribute == "bias" and multiplies(module):  # a constant channel keeps its bias
            wanted = [whole if f is None else int(np.any([a.wanted for a in f], 0).sum()) for f in (near, alive)]
            return [whole, *wanted]
        return [whole, whole, _living(alive, whole)]

    def _uncalled(self, name: str) -> None:
        self.notes.append(f"{name or 'the model'} was not called: its parameters are counted, but no multiply-adds.")

    def _unseen(self, name: str, attributes: list[str]) -> None:
        names = ", ".join(f"{name}.{attribute}" if name else attribute for attribute in attributes)
        self.notes.append(f"{names}: counted as parameters, but what they multiply is unknown.")

    # ---- graphs -----------------------------------------------------------------------------------------------------

    def _graph(self, name: str, graph: Graph) -> ProfileRow:
        calls, real_edges = self.calls.get(name, []), self.edges_of[name]
        if not calls:
            self._uncalled(name)
        edges, sends = len(real_edges.sources), real_edges.sends
        acts = sends.copy()
        acts[graph.outputs] = True  # outputs are read
        mult_adds, along, rounds = np.zeros(3, np.int64), 0, 0
        lived = [np.zeros(edges, bool), *np.zeros((3, graph.nodes), bool)]  # edges, sends, receives, nodes
        for number, call in enumerate(calls):
            alive = _at(self.far, name, number)
            fed, wanted = (np.ones(len(x), bool) for x in (graph.inputs, graph.outputs))
            if alive is not None:
                fed, wanted = alive.fed, alive.wanted
            cost, path = node_work(graph, call), real_edges.liveness(call, fed, wanted)
            often, _ = passes(graph, call)
            self._check_size(name, cost.size, call)
            dense = real_edges.dense_pixels(cost.sent) + cost.before.sum() + cost.after.sum()
            carried = int(cost.sent[real_edges.sources].sum())
            real = carried + cost.before[sends].sum() + cost.after[acts].sum()
            live_edges, sent = path.edges, cost.sent[real_edges.sources]
            live = live_edges @ sent + path.sends @ cost.before + path.receives @ cost.after
            # The liveness of a discrete graph has every step, that of a continuous one stands for all evaluations.
            mult_adds += (often * dense, often * real, live.sum() * often // len(live))
            along, rounds = along + often * carried, rounds + often
            for ever, now in zip(lived, (live_edges, path.sends, path.receives, path.nodes[None]), strict=True):
                ever |= now.any(0)
        if not calls:
            lived = [np.ones(edges, bool), sends, acts, np.ones_like(sends)]
        cost = node_work(graph, calls[0] if calls else Call(((1, 1, 1),), ((),)))
        other, norms = self._functions(name, graph)
        weight, new = graph.all_weights(), int(id(graph.all_weights()) not in self._counted)
        self._counted.add(id(weight))
        chosen = [(graph.allowed, slice(None), slice(None)), (edges, sends, acts), (lived[0].sum(), lived[1], lived[2])]
        params = [
            int(number) * new + int(cost.params_before[before].sum() + cost.params_after[after].sum()) + other
            for number, before, after in chosen
        ]
        return ProfileRow(
            name, class_name(graph), params[0], params[1], params[2], int(mult_adds[0]), int(mult_adds[1]),
            int(mult_adds[2]), edges=edges, live_edges=int(lived[0].sum()),
            nodes=graph.nodes, without_output=int((~acts).sum()), dead_nodes=int((~lived[3]).sum()),
            times=max(1, rounds), per=passes(graph, calls[0])[1] if calls else "call", edge_mult_adds=along,
            norms=norms,
        )  # fmt: skip

    def _functions(self, name: str, graph: Graph) -> tuple[int, int]:
        """The parameters of the nodes' functions that `NodeFunction.cost` does not count: all others, and norms."""
        other = norms = 0
        for inner, module in graph.named_modules():
            if not isinstance(module, NodeFunction):
                continue
            for attribute, parameter in _own(module).items():
                if id(parameter) in self._counted:
                    continue
                self._counted.add(id(parameter))
                if attribute in module.norm_parameters:
                    norms += parameter.numel()
                elif attribute not in module.counted_parameters:
                    other += parameter.numel()
                    if parameter.dim() > 1:
                        self._unseen(f"{name}.{inner}" if name else inner, [attribute])
        return other, norms

    def _check_size(self, name: str, size: tuple[int, ...], call: Call) -> None:
        """Add a note if the nodes' functions changed the size of their maps in a way that their costs do not cover."""
        given = call.outputs[0]
        if size and tuple(given[len(given) - len(size) :]) != tuple(size):
            self.notes.append(
                f"{name or 'the graph'}: its nodes change the size of their maps in an unknown way (expected {size}, "
                f"got {given}); its edges are counted at the expected size."
            )


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, including parametrized ones, by the name of the attribute."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    for attribute, holder in parametrizations_of(module).items():
        own[attribute] = next(holder.parameters())
    return own


def _at(found: CallLiveness, name: str, number: int) -> ChannelLiveness | None:
    calls = found.get(name, [])
    return calls[number] if number < len(calls) else None


def _living(calls: list[ChannelLiveness] | None, channels: int) -> int:
    """The number of output channels that are alive in any call."""
    return channels if not calls else int(np.any([call.made & call.wanted for call in calls], 0).sum())
