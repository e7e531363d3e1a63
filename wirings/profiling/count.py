"""`profile`: run the model once, note the shapes that every layer sees, and add up.

An edge costs one multiply-add for each pixel that it carries, a node its kernel for each pixel of its map; norms,
activations and biases cost none. Tied weights count once as parameters and every time as multiply-adds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wirings.budgets import mult_adds as costs
from wirings.budgets.mult_adds import Call, Products
from wirings.errors import WiringError
from wirings.graph import ContinuousGraph, Graph
from wirings.profiling.graphs import GraphEdges
from wirings.profiling.live import CallLiveness, follow, follows
from wirings.profiling.report import NO_MODULE, Profile, ProfileRow
from wirings.profiling.rows import RowBuilder
from wirings.profiling.weights import Weights, ranked_once
from wirings.utils.example_input import CallArguments, ExampleInput, call_error, example_arguments
from wirings.utils.layers import multiplies


def profile(model: nn.Module, example_input: ExampleInput | None = None) -> Profile:
    """Count the parameters and multiply-adds of a model, wired or plain, layer by layer.

    Args:
        model: any module. It is run once, in evaluation mode, and left unchanged.
        example_input: what to run it on: a tensor, a tuple or list of inputs, or a dict of keyword inputs, whose batch
            is included in the counts; or the shape of one example without the batch dimension, such as (3, 224, 224).
            By default, the shape ``model.input_shape``. Models of token ids need a tensor: a shape makes
            floating-point numbers.

    Returns:
        The counts. Print them for a table.

    Raises:
        WiringError: if the model does not run on the example input.

    >>> from torch import nn
    >>> counted = profile(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), (3, 10, 10))
    >>> counted.params, counted.mult_adds
    (224, 21600)
    """
    if not isinstance(model, nn.Module):
        raise WiringError(f"profile() expects a torch.nn.Module, got {type(model).__name__}.")
    arguments = example_arguments(model, example_input, "profile")
    with ranked_once(model):
        return _profile(model, example_input, arguments)


def _profile(model: nn.Module, example_input: ExampleInput | None, arguments: CallArguments) -> Profile:
    try:
        calls, products = _run(model, arguments)
    except WiringError:
        raise
    except Exception as error:
        raise call_error(model, example_input, arguments, error, "profile") from error
    weights = Weights(model)
    notes: list[str] = []
    graphs = {name: module for name, module in model.named_modules() if isinstance(module, Graph)}
    edges_of = {name: GraphEdges(graph, weights[graph, "weight"].mask.numpy()) for name, graph in graphs.items()}
    near, far = _alive(model, arguments, weights, edges_of, calls, notes)
    rows = RowBuilder(model, calls, weights, edges_of, near, far, notes).rows()
    if n := products.mult_adds:
        rows.append(ProfileRow(NO_MODULE, "scaled_dot_product_attention", 0, 0, 0, n, n, n, times=products.calls))
    return Profile(tuple(rows), tuple(notes))


def _run(model: nn.Module, arguments: CallArguments) -> tuple[dict[str, list[Call]], Products]:
    """Run the model once; note every call of a layer or graph, and of attention that is not a module."""
    calls: dict[str, list[Call]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, keywords: Any, out: Any) -> None:
            given = (*args, *keywords.values())
            effort = module.effort if isinstance(module, ContinuousGraph) else None
            often = 1 if effort is None else effort.evaluations
            call = Call(costs.shapes(given), costs.shapes(out), often, costs.loads(module, given))
            calls.setdefault(name, []).append(call)

        return hook

    watched = [(n, m) for n, m in model.named_modules() if isinstance(m, Graph) or multiplies(m) or follows(m)]
    hooks = [module.register_forward_hook(note(name), with_kwargs=True) for name, module in watched]
    try:
        with costs.evaluating(model) as products:
            model(*arguments.args, **arguments.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, products


def _alive(
    model: nn.Module,
    arguments: CallArguments,
    weights: Weights,
    edges_of: dict[str, GraphEdges],
    calls: dict[str, list[Call]],
    notes: list[str],
) -> tuple[CallLiveness, CallLiveness]:
    """What counts next to graphs, and what is alive in the whole network. Layers that are missing count in full."""
    if not edges_of and not weights.any_zero():
        return {}, {}  # if every edge is real, nothing is dead
    given = model, arguments, weights.real, edges_of, calls
    try:
        return follow(*given, recursive=False) if edges_of else {}, follow(*given, recursive=True)
    except Exception as error:  # a model of the user's may do anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        notes.append(f"dead channels could not be traced through the model ({reason}), so nothing counts as dead.")
        return {}, {}
