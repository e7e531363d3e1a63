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
from wirings.budgets.bounded_ranking import BoundedRanking, rank_bounded
from wirings.budgets.budget import Amount, Budget, Density, LayerSize, Ramp
from wirings.budgets.mult_adds import FREE
from wirings.budgets.ranking import rank_factor, rank_layers
from wirings.errors import WiringError
from wirings.rules.rule import Rule
from wirings.selection.grouped import GroupedSelection
from wirings.selection.service import Selection
from wirings.selection.sharded import is_sharded, on_shards
from wirings.selection.structure import Structure
from wirings.utils.layers import check_module, edge_shape, senders, wired_by_default
from wirings.utils.text import brief
from wirings.wire.block_layers import plan_blocks
from wirings.wire.checks import (
    allowed_masks,
    check_by_pattern,
    check_not_wrapped,
    check_patterns,
    check_total,
    check_wirable,
    first_names,
    matching,
    set_axes,
    unexpected_arguments,
    warn_if_cut_off,
)
from wirings.wire.edges import Edges
from wirings.wire.handle import Wiring
from wirings.wire.layer import Layer
from wirings.wire.node_bound import fewest_nodes
from wirings.wire.parametrization import attach, check_before_loading, detach, wired
from wirings.wire.pretrained import describe_when_saved
from wirings.wire.report import LayerReport
from wirings.wire.scale_weights import check_scale, scale
from wirings.wire.start import check_start, check_started, nonzero, numbers_of, setup_from, warn_if_all_zero
from wirings.wire.structured import (
    check_given,
    check_gradient_every,
    check_rule,
    check_total_k,
    check_whole_groups,
    complete,
    groups_of,
    in_groups,
    warn_if_denser,
)
from wirings.wire.targets import Target, all_targets, find
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
    axes: Mapping[str, str] | None = None,
    scale_weights: bool | float = False,
    start: str | None = None,
    structure: str = "free",
    gradient_every: int = 1,
    **unknown: Never,
) -> Wiring:
    """Wire a model in place: from now on its layers use only a given number of edges, chosen by ``rule``.

    Linear, convolution (also transposed and grouped), recurrent and attention weights are wired, and the matrices of
    experts that a module such as ``MixtralExperts`` holds in one parameter; biases, norms, embeddings and LoRA adapters
    (``lora_A``, ``lora_B``) stay dense. Tied weights have one wiring. The optimizer may be created before or after.
    Warns if much of the model is in matrices that belong to no known layer.

    Args:
        model: any module. Its weights, such as pretrained ones, are kept; but rules that keep hallucinated weights at
            zero (`set`, `rigl`, `sparse_momentum`) choose edges at random and set all others to zero, unless
            ``start="weights"``.
        rule: the name of a rule (`wirings.rules.names`) or a rule.
        density: the fraction of edges that is real, in (0, 1], or a schedule of it (`wirings.LinearSchedule`,
            `wirings.CubicSchedule`).
        k: instead of ``density``, the total number of edges; at least one per layer, except with ``share="global"`` or
            ``"scaled"``.
        budget: instead of both, a mapping from layer patterns to a density (float or schedule) or a number of edges
            (int); the first matching pattern counts, and layers without one are not wired.
        params: instead of these, the number of parameters of the whole network, biases, norms and skipped layers
            included: an integer, met exactly (up to whole groups, with a structure), or a float up to 1.0, a fraction
            of those it has with all edges.
        mult_adds: or the number of multiply-adds of the whole network for ``example_input``, in the same two ways. Met
            exactly if numbers of edges near the shares can do so, otherwise the nearest below, by less than one edge of
            the cheapest layer that is not full; printing the handle shows what is left. Beside ``density``, ``k`` or
            ``params`` it is a bound instead: the number of edges is met exactly, and edges move from layers where they
            cost much to others, as far as is needed.
        example_input: with ``mult_adds``, what the model is called with: a tensor or a tuple of arguments, whose batch
            counts; or the shape of one example without the batch, such as (3, 32, 32). By default ``model.input_shape``
            if the model has one.
        share: how the budget is shared out: ``"uniform"``, ``"erk"``, ``"global"`` (all layers ranked together) or
            ``"scaled"`` (the same, with magnitudes divided by the RMS of the layer's weights when it is wired). Warns
            if such a ranking leaves a layer without edges.
        include: patterns of the layers to wire, such as ``["layer*", "head.weight"]``; may name any parameter of two or
            more dimensions. By default every layer of a known kind.
        skip: patterns of layers to leave dense.
        allowed: boolean masks of the edges that may exist at all, by layer pattern.
        axes: what the dimensions of parameters are that belong to no layer of PyTorch, by layer pattern: ``"out in"``
            or ``"in out"``; with three dimensions ``"experts out in"``, ``"experts in out"`` or ``"out in kernel"``. By
            default the first of these, except for experts of transformers, which say how they are stored.
        scale_weights: for new weights, not for pretrained ones: multiply the weights of every wired layer, once, by
            1 / √density, so that a node that receives a tenth of the edges at random receives as much variance as with
            all of them; or by this number. The density is the layer's at the beginning, or that of all layers together
            if they are ranked together, which leaves their ranking unchanged. Nothing is scaled where a schedule or the
            rule (`gmp`, `l1_anneal`) begins with all edges.
        start: ``"weights"`` to start from the wiring of a network that is sparse already: where its weights are not
            zero. The budget is then optional, and by default the number of these edges in every layer. A smaller one is
            met within them, a larger one by adding edges. The rule changes the wiring from there. Rules that always
            choose their wiring in another way (`expander`, `dense`) raise.
        structure: which edges are real together: ``"free"``, every edge for itself; ``"2:4"`` or any N:M, the N
            strongest of every M neighbouring inputs of a node; ``"2:4, transposable"``, of the outputs of an input too;
            ``"32x32"`` or any block of outputs x inputs, with all places of a convolution's kernel; ``"row"`` or
            ``"column"``, all edges into an output (in graphs, a node) or out of an input. Blocks, rows and columns are
            ranked by the root mean square of their weights, and the budget is a number of them: ``density`` is the
            fraction of the groups, and ``k`` edges are rounded down to whole groups. N:M needs no budget. ``"32x32,
            padded"`` allows smaller blocks where they do not divide.
        gradient_every: with a structure, and rules whose gradient reaches all edges (`dnw`, `soft_threshold`): let it
            reach hallucinated edges in every so many optimizer steps only, counted by ``wiring.step()``, and real ones
            alone in between, when products of blocks can be skipped in the backward pass, too. Momentum and weight
            decay still move the weights it does not reach. With 1 it reaches all edges in every step.
        **unknown: rejected, with an error that suggests what was meant.

    Returns:
        A handle: print it for a table, call its ``step()`` after every optimizer step.
    """
    if unknown:
        raise unexpected_arguments(unknown, list(inspect.signature(wire_).parameters)[1:-1])
    check_module("wire_()", model)
    check_not_wrapped(model)
    if not isinstance(share, str):
        raise WiringError(f"share must be a text such as 'uniform' or 'global', got {brief(share)}.")
    rule, made = rules.get(rule), Structure.of(structure)
    check_scale(rule, scale_weights)
    check_start(start, scale_weights)
    given = {"density": density, "k": k, "budget": budget, "params": params, "mult_adds": mult_adds}
    if made is not None:
        check_rule(made, rule)
    check_gradient_every(made, rule, gradient_every)
    if made is not None:
        given = check_given(made, given, share)
    counted = start is not None and not rule.own_budget and all(value is None for value in given.values())
    plan = None if counted else _budget(rule, given, share, example_input)
    include, skip = check_patterns("include", include), check_patterns("skip", skip) or []
    targets = find(model, include, skip)
    if plan is not None and plan.mapping is not None:
        for pattern in plan.mapping:
            matching("budget", pattern, targets)
        targets = [t for t in targets if plan.amount_for(t.names) is not None]
    for target in targets:
        check_wirable(target, model)
    set_axes(targets, check_by_pattern("axes", axes))
    masks = allowed_masks(targets, check_by_pattern("allowed", allowed))
    groups = groups_of(made, targets, masks)
    sizes = [_size(target, mask) for target, mask in zip(targets, masks, strict=True)]
    if made is not None:
        check_total_k(made, k, sizes)
    starts = None if start is None or rule.keeps_zeros else nonzero(targets, masks)
    if made is not None and starts is not None:
        starts = complete(groups, starts, masks, 0 if made.nm is None else made.nm[0])
    if counted and starts is not None:
        plan = _budget(rule, {**given, "budget": numbers_of(share, targets, starts, groups)}, share, example_input)
    ranked: list[int] | BoundedRanking | None = None
    if plan is not None:
        plan, sizes = _of_network(plan, rule, model, targets, sizes, example_input)
        plan, sizes = in_groups(plan, sizes, groups)
        if plan.ranks_layers:
            ranked = _first_ranking(plan, rule, targets, masks, sizes)
    wiring, reports = put_edges(
        model, rule, plan, targets, masks, sizes, ranked, scale_weights, starts, made, gradient_every
    )
    if not rule.starts_with_all:
        warn_if_cut_off(reports, share, plan is not None and plan.spent is not None)
    if made is not None and share == "uniform":
        warn_if_denser(made, density, targets, groups)
    if rule.keeps_zeros:
        warn_if_all_zero(reports)
    if include is None and budget is None:
        _warn_if_unknown(model, skip)
    return wiring


def _first_ranking(
    plan: Budget, rule: Rule, targets: Sequence[Target], masks: Sequence[Tensor | None], sizes: Sequence[LayerSize]
) -> list[int] | BoundedRanking:
    """The number of edges of each layer in a ranking of all of them."""
    weights, spent = [target.weight for target in targets], plan.spent or 0
    factors: list[Tensor | None] = [None] * len(weights)
    if plan.share == "scaled":
        factors = [rank_factor(w, m, size.allowed) for w, m, size in zip(weights, masks, sizes, strict=True)]
    if plan.k is None:
        return rank_layers(weights, masks, sizes, spent, factors)
    sent = [
        None if size.nodes is None else senders(target.places[0][1]).to(target.weight.device)
        for target, size in zip(targets, sizes, strict=True)
    ]
    return rank_bounded(weights, masks, sizes, spent, plan.k, factors, sent, fewest_nodes(rule))


def put_edges(
    model: nn.Module,
    rule: Rule,
    plan: Budget | None,
    targets: list[Target],
    masks: list[Tensor | None],
    sizes: list[LayerSize],
    ranked: list[int] | BoundedRanking | None,
    scale_weights: bool | float = False,
    starts: Sequence[Tensor] | None = None,
    structure: Structure | None = None,
    gradient_every: int = 1,
) -> tuple[Wiring, list[LayerReport]]:
    """Put edges on weights and let the rule choose among them; if it raises, the model is left unchanged.

    Args:
        model: the model.
        rule: the rule.
        plan: the budget of these weights, or None if the rule has its own.
        targets: the weights.
        masks: their allowed edges, None for all.
        sizes: their sizes.
        ranked: the number of edges of each weight in a ranking of all, if the budget is shared out by it.
        scale_weights: as for `wire_`.
        starts: masks of the edges that the rule should start from, if not its own choice.
        structure: which edges are real together; None if every edge is chosen for itself.
        gradient_every: as for `wire_`.

    Returns:
        The handle, and its first report.
    """
    if plan is not None:
        counts = plan.counts(sizes, 0, ranked.counts if isinstance(ranked, BoundedRanking) else ranked)
    else:
        counts = [rule.budget(size.allowed, size.shape) for size in sizes]
    counts = counts * len(sizes) if len(counts) == 1 else counts  # a shared budget

    before = [edges for _, _, _, edges in wired(model)]
    together = plan is not None and plan.ranks_together
    shared = together and not plan.ranks_layers  # type: ignore[union-attr]
    groups = groups_of(structure, targets, masks)
    selection = (Selection if structure is None else GroupedSelection)(shared, rule.kept_at_once)
    if isinstance(selection, GroupedSelection):
        selection.gradient_every = gradient_every
    saved = plan is not None and plan.changes
    layers = []
    try:
        for target, mask, size, count, grouped in zip(targets, masks, sizes, counts, groups, strict=True):
            edges = Edges(rule, count, size.allowed, mask, selection, saved, target.axes, grouped)
            edges.to(target.weight.device)
            edges.train(target.places[0][1].training)
            for _, module, attribute in target.places:
                attach(module, attribute, edges, model)
            layers.append(Layer(target.name, *target.places[0][1:], edges))
        if rule.keeps_zeros:
            check_before_loading(model)
        selection.set_layers(layers)
        if structure is not None:
            plan_blocks([layer.edges for layer in layers], saved)
        if selection.shared or len(layers) > 1:
            model.register_forward_pre_hook(selection)
            model.register_forward_hook(selection.end, always_call=True)
        with restored_on_error(rule, layers):
            with on_shards(any(is_sharded(target.weight) for target in targets)):
                scale(layers, scale_weights, together)
                if plan is not None and plan.share == "scaled":
                    for layer in layers:
                        layer.edges.rank_by_scale(layer.weight)
                setup_from(rule, layers, starts)
            if starts is not None:
                check_started(rule, layers, starts)
            wiring = Wiring(model, rule, layers, plan, sizes, ranked, structure)
            reports = wiring.look()
            if selection.shared:
                check_total(layers, int(layers[0].edges.k), sum(report.counted for report in reports), _RANKS_EACH)
            if structure is not None:
                for layer in layers:
                    check_whole_groups(layer, layer.edges.real(layer.weight))
    except BaseException:
        detach(model, only=[edges for _, _, _, edges in wired(model) if edges not in before])
        raise
    describe_when_saved(model, wiring)
    return wiring, reports


_RANKS_EACH = (
    'With share="global" or "scaled", edges.k counts the edges of all layers: let the rule use rules.choose_by, or use '
    'share="uniform" or "erk".'
)


UNKNOWN = 0.1
"""The fraction of a model's parameters in matrices of unknown layers above which `wire_` warns that they stay dense."""


def _warn_if_unknown(model: nn.Module, skip: Sequence[str]) -> None:
    """Warn if much of a model is in matrices that belong to no known layer, and so stay dense."""
    done = {name for name, _, _, _ in wired(model)}
    # Functions of a graph's nodes have kernels, which are no edges.
    graphs = tuple(f"{name}." if name else "" for name, m in model.named_modules() if hasattr(m, "wired_weights"))
    dense = [
        target
        for target in all_targets(model)
        if not any(attribute in wired_by_default(module) for _, module, attribute in target.places)
        if not any(isinstance(module, FREE) for _, module, _ in target.places)
        if not done.intersection(target.names) and not any(target.matches(pattern) for pattern in skip)
        if not target.name.startswith(graphs) and "bias" not in target.name.rpartition(".")[2]
    ]
    number, total = sum(target.weight.numel() for target in dense), sum(p.numel() for p in model.parameters())
    if number > UNKNOWN * total:
        names = first_names([target.name for target in dense])
        warnings.warn(
            f"{number:,} of {total:,} parameters of {type(model).__name__} are matrices of layers that wirings does "
            f"not know ({names}), which stay dense. Name those to wire in include=[…], and the others in skip=[…].",
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
        got = ", ".join(f"{name}={brief(value)}" for name, value in given.items() if value is not None) or (
            f"share={brief(share)}" if share != "uniform" else f"schedule={rule.schedule!r}"
        )
        raise WiringError(f"rule {rule.name!r} fixes the number of edges itself; drop {got}.")
    return None


def _of_network(
    plan: Budget, rule: Rule, model: nn.Module, targets: list[Target], sizes: list[LayerSize], example_input: Any
) -> tuple[Budget, list[LayerSize]]:
    """Turn a budget of the whole network into one of these layers; sizes get what their edges and nodes cost."""
    if plan.params is not None:
        wired_here = {id(target.weight) for target in targets}
        rest = sum(p.numel() for p in model.parameters() if id(p) not in wired_here)
        plan = plan.of_network(sizes, rest)
    if plan.mult_adds is not None:
        bound = plan.k is not None or plan.density is not None
        in_use = bound and plan.ranks_together and rule.follows_ranking
        costs = edge_costs.costs(model, targets, example_input, bound, in_use)
        sizes = [
            replace(size, cost=cost, nodes=nodes)
            for size, cost, nodes in zip(sizes, costs.edges, costs.nodes, strict=True)
        ]
        return plan.of_network(sizes, costs.rest), sizes
    return plan, sizes


def _size(target: Target, mask: Tensor | None) -> LayerSize:
    return size_of(target, target.weight.numel() if mask is None else int(torch.count_nonzero(mask)))


def size_of(target: Target, allowed: int, cost: int = 1, nodes: tuple[int, ...] | None = None) -> LayerSize:
    """The size of a weight, with its number of allowed edges and the multiply-adds of one, and of its nodes."""
    shape = edge_shape(*target.places[0][1:], target.weight)
    return LayerSize(target.names, shape, allowed, cost, target.axes is not None and target.axes[0] == "experts", nodes)
