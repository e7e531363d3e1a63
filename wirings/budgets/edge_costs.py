"""What an edge costs: how many multiply-adds it takes part in when the model is called once.

An edge of a convolution is multiplied once for every pixel of its output map, one of a linear layer once for every
input row, one of a recurrent layer once for every time step. `wirings.profile` counts in the same way, and much more;
this is only what a budget of multiply-adds needs before a model is wired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from wirings.budgets.mult_adds import Call, Use, evaluating, extra, loads, shapes, uses
from wirings.errors import WiringError
from wirings.utils.example_input import ExampleInput, call_error, example_arguments
from wirings.utils.layers import multiplies, original_weight


class WeightToWire(Protocol):
    """What this module needs to know about a weight to wire. `wirings.wire.targets.Target` implements it."""

    weight: nn.Parameter
    places: list[tuple[str, nn.Module, str]]

    @property
    def name(self) -> str: ...


class Costs(NamedTuple):
    """What edges, nodes and the rest of a model cost, in multiply-adds."""

    edges: list[int]
    """One edge of each weight to wire."""
    nodes: list[tuple[int, ...] | None]
    """For weights of graphs, each node that an edge leaves, if nodes in use were asked for; otherwise None."""
    rest: int
    """Everything else."""


def costs(
    model: nn.Module,
    targets: Sequence[WeightToWire],
    example_input: ExampleInput | None,
    bound: bool = False,
    in_use: bool = False,
) -> Costs:
    """Count the multiply-adds of one edge of each target, and those of everything else in the model.

    The model runs once on ``example_input``, in evaluation mode, and is left unchanged.

    A model may tell which graph alone reads the channels of a dense layer, as a mapping between their names under
    ``sole_readers``. A channel then belongs to the node that it feeds.

    Args:
        model: the model.
        targets: the weights to wire.
        example_input: what it is called with.
        bound: whether the budget is a bound. Only then can edges of neural graphs be counted: what nodes without edges
            would compute is counted too, or else found when edges are chosen.
        in_use: whether nodes of graphs are counted one by one, for a bound on those that edges leave.
    """
    times: dict[int, dict[int, float]] = {}  # for every weight: how often it is used, and which fraction of its rows
    numel: dict[int, int] = {}
    sends: dict[int, np.ndarray] = {}  # for every weight of a graph, what its nodes cost
    found, graphs, rest = _uses(model, example_input)
    wired = {id(target.weight) for target in targets}
    for graph, call in graphs:
        weight = original_weight(graph, "weight")
        each, edges, before, after = graph.edge_cost(call)
        rest += after
        if id(weight) not in wired or not in_use:
            rest += int(before.sum())
        else:
            sends[id(weight)] = sends.get(id(weight), 0) + before
        if id(weight) not in wired:
            rest += edges
        elif (
            not bound or each is None or hasattr(graph, "effort")
        ):  # a continuous graph makes as many steps as it needs
            times[id(weight)] = {0: -1.0}  # no single cost
        else:
            parts = times.setdefault(id(weight), {})
            parts[each] = parts.get(each, 0.0) + 1.0
    for use in found:
        weight = original_weight(use.holder, use.attribute)
        parts, rows = times.setdefault(id(weight), {}), len(weight)
        parts[use.times] = parts.get(use.times, 0.0) + len(range(rows)[use.rows]) / max(rows, 1)
        numel[id(weight)] = weight.numel()
    dense = {
        key: round(sum(often * part for often, part in parts.items()) * numel[key])
        for key, parts in times.items()
        if key in numel and key not in wired
    }
    for layer, reader in getattr(model, "sole_readers", {}).items():
        weight, fed = original_weight(model.get_submodule(layer), "weight"), _inputs(model, reader)
        key, read = id(weight), id(original_weight(model.get_submodule(reader), "weight"))
        if key in dense and read in sends and len(weight) == len(fed):
            sends[read][fed] += dense.pop(key) // len(weight)
    return Costs(
        [_cost(target, times.get(id(target.weight), {})) for target in targets],
        [tuple(sends[id(t.weight)].tolist()) if id(t.weight) in sends else None for t in targets],
        rest + sum(dense.values()),
    )


def _inputs(model: Any, graph: str) -> np.ndarray:
    """The input nodes of a graph."""
    return np.asarray(model.get_submodule(graph).inputs)


def _cost(target: WeightToWire, parts: dict[int, float]) -> int:
    if any(part < 0 for part in parts.values()):
        raise WiringError(
            f"{target.name} belongs to a neural graph, whose multiply-adds depend on which nodes have edges; use a "
            "number of edges, k= or params=, and mult_adds= as a bound beside it if all edges carry maps of one size, "
            "or skip it."
        )
    if not parts:
        raise WiringError(
            f"{target.name} was not used when the model was called with example_input, so its edges have no cost; use "
            f"skip=[{target.name!r}], or k= or params=."
        )
    whole = sum(often * round(part) for often, part in parts.items() if math.isclose(part, round(part)))
    if not all(math.isclose(part, round(part)) for part in parts.values()):
        raise WiringError(
            f"the rows of {target.name} are not all multiplied equally often (queries and keys of different lengths, "
            "or experts that get different numbers of inputs), so its edges have no single cost; use "
            f"skip=[{target.name!r}], or k= or params=."
        )
    return whole


def _uses(model: nn.Module, example_input: ExampleInput | None) -> tuple[list[Use], list[tuple[Any, Call]], int]:
    """Run the model once: uses of weights by layers, calls of graphs, and multiply-adds that involve no weight."""
    arguments = example_arguments(model, example_input, "mult_adds=")
    found: list[Use] = []
    graphs: list[tuple[Any, Call]] = []
    rest = 0

    def note(graph: nn.Module, args: Any, keywords: Any, out: Any) -> None:
        given = (*args, *keywords.values())
        effort = getattr(graph, "effort", None)
        graphs.append((graph, Call(shapes(given), shapes(out), 1 if effort is None else effort.evaluations)))

    def hook(module: nn.Module, args: Any, keywords: Any, out: Any) -> None:
        nonlocal rest
        given = (*args, *keywords.values())
        call = Call(shapes(given), shapes(out), loads=loads(module, given))
        found.extend(uses(module, call))
        rest += extra(module, call)

    # The projection inside attention is counted with it.
    inside = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    counted = [m for m in model.modules() if hasattr(m, "edge_cost")]  # graphs, which count their nodes themselves
    inside |= {id(part) for graph in counted for part in graph.modules()}
    watched = [m for m in model.modules() if multiplies(m) and id(m) not in inside]
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in watched]
    hooks += [graph.register_forward_hook(note, with_kwargs=True) for graph in counted]
    try:
        with evaluating(model) as products:
            model(*arguments.args, **arguments.kwargs)
    except WiringError:
        raise
    except Exception as error:
        raise call_error(model, example_input, arguments, error, "mult_adds=") from error
    finally:
        for one in hooks:
            one.remove()
    return found, graphs, rest + products.mult_adds
