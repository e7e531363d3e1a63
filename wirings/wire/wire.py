"""`wire_` any model in place. Edges are put on modules by `parametrization`, and removed by `finalize`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor, nn

from wirings import rules
from wirings.budgets import edge_costs
from wirings.budgets.budget import Amount, Budget, Density, LayerSize, Ramp
from wirings.budgets.ranking import rank_layers
from wirings.errors import WiringError
from wirings.rules.rule import Rule
from wirings.selection.service import Selection
from wirings.selection.sharded import is_sharded, on_shards
from wirings.utils.layers import edge_shape
from wirings.wire.checks import (
    allowed_masks,
    check_not_wrapped,
    check_patterns,
    check_total,
    check_wirable,
    first_names,
    matching,
    unexpected_arguments,
)
from wirings.wire.edges import Edges
from wirings.wire.handle import Wiring
from wirings.wire.layer import Layer
from wirings.wire.parametrization import attach, detach, wired
from wirings.wire.report import LayerReport
from wirings.wire.targets import Target, find
from wirings.wire.transaction import restored_on_error


def wire_(
    model: nn.Module,
    rule: str | Rule = "dnw",
    *,
    density: Density | None = None,
    k: int | None = None,
    budget: Mapping[str, Amount] | None = None,
    params: float | None = None,
    mult_adds: float | None = None,
    example_input: Any = None,
    share: str = "uniform",
    include: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    allowed: Mapping[str, Tensor] | None = None,
    **unknown: Never,
) -> Wiring:
    """Wire a model in place: from now on its layers use only a given number of edges, chosen by ``rule``.

    Linear, convolution (also transposed and grouped), recurrent and attention weights are wired; biases, norms and
    embeddings stay dense. Tied weights have one wiring. The optimizer may be created before or after.

    Args:
        model: any module. Its weights, such as pretrained ones, are kept; but rules that keep hallucinated weights at
            zero (`set`, `rigl`, `sparse_momentum`) choose edges at random and set all others to zero.
        rule: the name of a rule (`wirings.rules.names`) or a rule.
        density: the fraction of edges that is real, in (0, 1], or a schedule of it (`wirings.LinearSchedule`,
            `wirings.CubicSchedule`).
        k: instead of ``density``, the total number of edges; at least one per layer, except with ``share="global"``.
        budget: instead of both, a mapping from layer patterns to a density (float or schedule) or a number of edges
            (int); the first matching pattern counts, and layers without one are not wired.
        params: instead of these, the number of parameters of the whole network, biases, norms and skipped layers
            included: an integer, met exactly, or a float up to 1.0, a fraction of those it has with all edges.
        mult_adds: or the number of multiply-adds of the whole network for ``example_input``, in the same two ways. Met
            exactly if numbers of edges near the shares can do so, otherwise the nearest below, by less than one edge of
            the cheapest layer that is not full; printing the handle shows what is left.
        example_input: with ``mult_adds``, what the model is called with: a tensor or a tuple of arguments, whose batch
            counts; or the shape of one example without the batch, such as (3, 32, 32). By default ``model.input_shape``
            if the model has one.
        share: how the budget is shared out: ``"uniform"``, ``"erk"`` or ``"global"`` (all layers ranked together).
            Warns if a global budget leaves a layer without edges.
        include: patterns of the layers to wire, such as ``["layer*", "head.weight"]``; may name any parameter of two or
            more dimensions. By default every layer of a known kind.
        skip: patterns of layers to leave dense.
        allowed: boolean masks of the edges that may exist at all, by layer pattern.
        **unknown: rejected, with an error that suggests what was meant.

    Returns:
        A handle: print it for a table, call its ``step()`` after every optimizer step.
    """
    if unknown:
        raise unexpected_arguments(unknown, list(inspect.signature(wire_).parameters)[1:-1])
    if not isinstance(model, nn.Module):
        raise WiringError(f"wire_() expects a torch.nn.Module, got {type(model).__name__}.")
    check_not_wrapped(model)
    rule = rules.get(rule)
    given = {"density": density, "k": k, "budget": budget, "params": params, "mult_adds": mult_adds}
    plan = _budget(rule, given, share, example_input)
    include, skip = check_patterns("include", include), check_patterns("skip", skip) or []
    targets = find(model, include, skip)
    if plan is not None and plan.mapping is not None:
        for pattern in plan.mapping:
            matching("budget", pattern, targets)
        targets = [t for t in targets if plan.amount_for(t.names) is not None]
    for target in targets:
        check_wirable(target, model)
    masks = allowed_masks(targets, allowed or {})
    sizes = [_size(target, mask) for target, mask in zip(targets, masks, strict=True)]
    ranked = None
    if plan is not None:
        plan, sizes = _of_network(plan, model, targets, sizes, example_input)
        if plan.ranks_layers:
            ranked = rank_layers([target.weight for target in targets], masks, sizes, plan.spent or 0)
        counts = plan.counts(sizes, 0, ranked)
    else:
        counts = [rule.budget(size.allowed, size.shape) for size in sizes]
    counts = counts * len(sizes) if len(counts) == 1 else counts  # a shared budget

    before = [edges for _, _, _, edges in wired(model)]
    selection = Selection(plan is not None and share == "global" and not plan.ranks_layers, rule.kept_at_once)
    saved = plan is not None and plan.changes
    layers = []
    try:
        for target, mask, size, count in zip(targets, masks, sizes, counts, strict=True):
            edges = Edges(rule, count, size.allowed, mask, selection, saved).to(target.weight.device)
            edges.train(target.places[0][1].training)
            for _, module, attribute in target.places:
                attach(module, attribute, edges, model)
            layers.append(Layer(target.name, *target.places[0][1:], edges))
        selection.set_layers(layers)
        if selection.shared or len(layers) > 1:
            model.register_forward_pre_hook(selection)
            model.register_forward_hook(selection.end, always_call=True)
        with restored_on_error(rule, layers):
            with on_shards(any(is_sharded(target.weight) for target in targets)):
                rule.setup(layers)
            wiring = Wiring(model, rule, layers, plan, sizes, ranked)
            reports = wiring.look()
            if selection.shared:
                check_total(layers, int(layers[0].edges.k), sum(report.edges for report in reports), _RANKS_EACH)
    except BaseException:
        detach(model, only=[edges for _, _, _, edges in wired(model) if edges not in before])
        raise
    if selection.shared:
        _warn_if_cut_off(reports)
    return wiring


_RANKS_EACH = (
    'With share="global", edges.k counts the edges of all layers: let the rule use rules.choose_by, or use '
    'share="uniform" or "erk".'
)


def _warn_if_cut_off(reports: list[LayerReport]) -> None:
    """Warn if layers that share one budget get no edges at all: nothing passes through them."""
    empty = [report.name for report in reports if not report.edges]
    if empty:
        warnings.warn(
            f'share="global" leaves no edges in {len(empty)} of {len(reports)} layers ({first_names(empty)}), so '
            'nothing passes through them. Raise the budget, skip these layers, or use share="uniform" or "erk".',
            stacklevel=3,
        )


def _budget(rule: Rule, given: dict[str, Any], share: str, example_input: Any) -> Budget | None:
    """The caller's budget; None if the rule has one of its own."""
    if example_input is not None and given["mult_adds"] is None:
        raise WiringError("example_input= is used only to count multiply-adds: pass mult_adds= too, or drop it.")
    if not rule.own_budget:
        values = {**given, "mapping": given["budget"]}
        del values["budget"]
        if given["mult_adds"] is not None and rule.moves_budget:
            raise WiringError(
                f"rule {rule.name!r} moves edges between layers, where they cost different numbers of multiply-adds; "
                "use params= or k=, or another rule."
            )
        return Budget(**values, share=share, ramp=None if rule.schedule is None else Ramp.of(rule.schedule))
    if any(value is not None for value in given.values()) or share != "uniform" or rule.schedule is not None:
        got = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None) or (
            f"share={share!r}" if share != "uniform" else f"schedule={rule.schedule!r}"
        )
        raise WiringError(f"rule {rule.name!r} fixes the number of edges itself; drop {got}.")
    return None


def _of_network(
    plan: Budget, model: nn.Module, targets: list[Target], sizes: list[LayerSize], example_input: Any
) -> tuple[Budget, list[LayerSize]]:
    """Turn a budget of the whole network into one of these layers; sizes get what their edges cost."""
    if plan.params is not None:
        wired_here = {id(target.weight) for target in targets}
        rest = sum(p.numel() for p in model.parameters() if id(p) not in wired_here)
        return plan.of_network(sizes, rest), sizes
    if plan.mult_adds is not None:
        costs, rest = edge_costs.costs(model, targets, example_input)
        sizes = [replace(size, cost=cost) for size, cost in zip(sizes, costs, strict=True)]
        return plan.of_network(sizes, rest), sizes
    return plan, sizes


def _size(target: Target, mask: Tensor | None) -> LayerSize:
    edges = target.weight.numel() if mask is None else int(torch.count_nonzero(mask))
    return LayerSize(target.names, edge_shape(*target.places[0][1:], target.weight), edges)
