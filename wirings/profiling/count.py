"""Counting: run the model once, look at every layer's shapes, and add up.

An edge costs a multiply-add for each pixel that it carries, a node its kernel for each pixel of its map; norms,
activations and biases cost none. Tied weights are parameters once and multiply every time.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wirings.budgets import mult_adds as costs
from wirings.budgets.mult_adds import Call, Products
from wirings.errors import WiringError
from wirings.graph import ContinuousGraph, Graph
from wirings.profiling.graphs import Wires
from wirings.profiling.live import Found, follow, follows
from wirings.profiling.report import NO_MODULE, Profile, Row
from wirings.profiling.rows import Counting
from wirings.profiling.weights import Weights
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
    try:
        calls, products = _run(model, arguments)
    except WiringError:
        raise
    except Exception as error:
        raise call_error(model, example_input, arguments, error, "profile") from error
    weights = Weights(model)
    notes: list[str] = []
    graphs = {name: module for name, module in model.named_modules() if isinstance(module, Graph)}
    wires = {name: Wires(graph, weights[graph, "weight"].mask.numpy()) for name, graph in graphs.items()}
    near, far = _alive(model, arguments, weights, wires, calls, notes)
    rows = Counting(model, calls, weights, wires, near, far, notes).rows()
    if n := products.mult_adds:
        rows.append(Row(NO_MODULE, "scaled_dot_product_attention", 0, 0, 0, n, n, n, times=products.calls))
    return Profile(tuple(rows), tuple(notes))


def _run(model: nn.Module, arguments: CallArguments) -> tuple[dict[str, list[Call]], Products]:
    """Run the model once and note every call of a layer or graph, and of attention that is none."""
    calls: dict[str, list[Call]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, keywords: Any, out: Any) -> None:
            shapes = costs.shapes((*args, *keywords.values())), costs.shapes(out)
            effort = module.effort if isinstance(module, ContinuousGraph) else None
            calls.setdefault(name, []).append(Call(*shapes, 1 if effort is None else effort.evaluations))

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
    wires: dict[str, Wires],
    calls: dict[str, list[Call]],
    notes: list[str],
) -> tuple[Found, Found]:
    """What counts next to graphs, and what lives in the whole network. Layers that are not there count whole."""
    if not wires and not weights.any_zero():
        return {}, {}  # where every edge is real, nothing is dead
    given = model, arguments, weights.real, wires, calls
    try:
        return follow(*given, recursive=False) if wires else {}, follow(*given, recursive=True)
    except Exception as error:  # a model may do anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        notes.append(f"what is dead could not be followed through the model ({reason}), so nothing counts as dead.")
        return {}, {}
