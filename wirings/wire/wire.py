"""`wire_` any model in place, `finalize_` it to plain modules with exact zeros, or `unwire_` it with all weights.

A model is changed in place, and only after all checks have passed. How edges sit on a module: `parametrization`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wirings import rules
from wirings.budgets import edge_costs as pixels
from wirings.budgets.budget import Amount, Budget, Density, Ramp, Size
from wirings.errors import WiringError
from wirings.rules import Edges, Layer, Pool, Rule
from wirings.selection.batched import Together
from wirings.selection.cpu import KEYS
from wirings.selection.sharded import is_sharded, on_shards, place_of
from wirings.utils.layers import edge_shape, parametrizations_of, receivers
from wirings.wire import fsdp
from wirings.wire.handle import Wiring, rank_layers
from wirings.wire.parametrization import attach, detach, forget_choice, wired
from wirings.wire.targets import Target, find


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
) -> Wiring:
    """Wire a model in place: from now on its layers use only a budget of edges, chosen by ``rule``.

    Linear, convolution (transposed and grouped ones too), recurrent and attention weights are wired; biases, norms and
    embeddings stay dense. Tied weights have one wiring. The optimizer may be made before or after.

    Args:
        model: any module. Weights that it has already, pretrained ones say, are kept; but rules whose hallucinated
            edges weigh zero (`set`, `rigl`, `sparse_momentum`) choose edges at random and set all others to zero.
        rule: a rule's name (`wirings.rules.names`) or a rule.
        density: the fraction of edges that is real, in (0, 1], or a schedule of it (`wirings.LinearSchedule`,
            `wirings.CubicSchedule`).
        k: instead of ``density``, the number of edges in all; at least one a layer, but with ``share="global"``.
        budget: instead of both, a mapping from layer patterns to a density (float or schedule) or a number of edges
            (int); the first pattern that matches a layer counts, and layers that none matches are not wired.
        params: instead of these, how many parameters the whole network is to have, biases, norms and skipped layers
            included: a number, met exactly, or as a float up to 1.0 a share of those that it has with all edges.
        mult_adds: or how many multiply-adds it is to take for ``example_input``, in the same two ways. Met exactly
            where numbers of edges near the shares can do so, else the nearest below, by less than one edge of the
            cheapest layer that is not full; printing the handle tells what is left.
        example_input: with ``mult_adds``, what the model is called with, a tensor or a tuple of arguments, its batch
            included in the count; or the shape of one example without the batch, such as (3, 32, 32). By default
            ``model.input_shape``, where the model has one.
        share: how the budget is shared out: ``"uniform"``, ``"erk"`` or ``"global"`` (all layers ranked together).
        include: patterns of the layers to wire, such as ``["layer*", "head.weight"]``; may name any parameter of two or
            more dimensions. By default every layer of a known kind.
        skip: patterns of layers to leave dense.
        allowed: for some layers' patterns, boolean masks of the edges that may exist at all.

    Returns:
        A handle: print it for a table, call its ``step()`` after every optimizer step.
    """
    if not isinstance(model, nn.Module):
        raise WiringError(f"wire_ takes a torch.nn.Module, not {type(model).__name__}.")
    _check_not_wrapped(model)
    rule = rules.get(rule)
    given = {"density": density, "k": k, "budget": budget, "params": params, "mult_adds": mult_adds}
    plan = _budget(rule, given, share, example_input)
    include, skip = _patterns("include", include), _patterns("skip", skip) or []
    targets = find(model, include, skip)
    if plan is not None and plan.mapping is not None:
        for pattern in plan.mapping:
            _some_match("budget", pattern, targets)
        targets = [t for t in targets if plan.amount_for(t.names) is not None]
    for target in targets:
        _check(target, model)
    masks = _allowed(targets, allowed or {})
    sizes = [_size(target, mask) for target, mask in zip(targets, masks, strict=True)]
    ranked = None
    if plan is not None:
        plan, sizes = _of_network(plan, model, targets, sizes, example_input)
        if plan.ranks_layers:
            ranked = rank_layers([target.weight for target in targets], masks, sizes, plan.spent or 0)
    counts = (
        [rule.budget(size.allowed, size.shape) for size in sizes] if plan is None else plan.counts(sizes, 0, ranked)
    )

    before = [edges for _, _, _, edges in wired(model)]
    pool = Pool() if plan is not None and share == "global" and not plan.ranks_layers else None
    saved = plan is not None and plan.changes
    layers = []
    try:
        for i, (target, mask) in enumerate(zip(targets, masks, strict=True)):
            k_here = counts[0] if pool is not None else counts[i]
            edges = Edges(rule, k_here, sizes[i].allowed, mask, pool, saved).to(target.weight.device)
            edges.train(target.places[0][1].training)
            for _, module, attribute in target.places:
                attach(module, attribute, edges, model)
            layers.append(Layer(target.name, *target.places[0][1:], edges, receivers))
        if pool is None and len(layers) > 1:
            together = Together()
            for layer in layers:
                layer.edges.together = together
            together.find(model)  # a compiler looks on as early as the first pass
            model.register_forward_pre_hook(together)
        if pool is not None:
            pool.layers = layers
            if forget_choice not in model._forward_pre_hooks.values():
                model.register_forward_pre_hook(forget_choice)
        with on_shards(any(is_sharded(target.weight) for target in targets)):
            rule.setup(layers)
        return Wiring(model, rule, layers, plan, sizes, ranked)
    except BaseException:
        detach(model, only=[edges for _, _, _, edges in wired(model) if edges not in before])
        raise


def finalize_(model: nn.Module) -> nn.Module:
    """Give plain modules back, in place: original ``state_dict`` keys, exact zeros for the edges that are not real.

    Outputs are those of the wired model in evaluation. Returns the model. Warns if a schedule of the density has not
    come to its end, so that there are more edges, or fewer, than were asked for; or if a rule that removes edges for
    good still trained with more.
    """
    places = _whole_wiring(model, "finalize")
    if sharding := fsdp.sharded_modules(model):  # who never asked the handle for anything was not told before
        fsdp.check(sharding, [Layer(*place, receivers) for place in places], ranked=False)
    _check_totals(places)
    layers: dict[int, tuple[str, nn.Parameter, Edges]] = {}  # tied weights once
    for name, module, attribute, edges in places:
        weight = parametrizations_of(module)[attribute].original
        layers.setdefault(id(weight), (name, weight, edges))
    with torch.no_grad(), on_shards(any(is_sharded(weight) for _, weight, _ in layers.values())):
        for name, weight, edges in layers.values():  # all of them before the first is written
            _check_finite(name, weight)
            _check_final(name, weight, edges)
        for _, weight, edges in layers.values():  # each anew: together they may take as much memory as the model
            # As data, so that layers that share a budget do not rank it anew after each of them.
            weight.data.copy_(_final_weight(weight, edges))
        torch.autograd.graph.increment_version([weight for _, weight, _ in layers.values()])
    _tell_unfinished(model, [edges for _, _, edges in layers.values()])
    detach(model)
    return model


def unwire_(model: nn.Module) -> nn.Module:
    """Give plain modules back, in place, with all weights, hallucinated ones included. Returns the model.

    Of rules whose hallucinated edges weigh zero (`set`, `rigl`, `sparse_momentum`) these are zeros.
    """
    _whole_wiring(model, "unwire")
    detach(model)
    return model


def _whole_wiring(model: nn.Module, what: str) -> list[tuple[str, nn.Module, str, Edges]]:
    """All wired places of a model, checked to be whole: nothing put on top of them, no layer of a pool elsewhere."""
    fsdp.reshard(fsdp.sharded_modules(model))
    places = wired(model)
    if not places:
        raise WiringError(
            f"{type(model).__name__} is not wired: nothing to {what}. wirings.wire_(model, …) wires it; a model that "
            "was finalized is plain already."
        )
    fsdp.check_whole(
        (name, parametrizations_of(module)[attribute].original, edges) for name, module, attribute, edges in places
    )
    here = [edges for _, _, _, edges in places]
    for name, module, attribute, edges in places:
        if len(parametrizations_of(module)[attribute]) > 1:
            other = type(parametrizations_of(module)[attribute][1]).__name__
            raise WiringError(
                f"{name} has another parametrization ({other}) on top of its edges; remove that one first."
            )
        elsewhere = [] if edges.pool is None else [layer for layer in edges.pool.layers if layer.edges not in here]
        if elsewhere:
            raise WiringError(
                f"{name} shares one budget with {elsewhere[0].name}, which is not in this {type(model).__name__}; "
                f"{what} the whole model that was wired."
            )
    return places


def _check_totals(places: list[tuple[str, nn.Module, str, Edges]]) -> None:
    """Layers that share one budget must meet it together; what is checked is the choice of this moment."""
    for pool, (name, edges) in {e.pool: (name, e) for name, _, _, e in places if e.pool is not None}.items():
        pool.forget()
        with on_shards(any(is_sharded(layer.weight) for layer in pool.layers)):
            count = sum(int(torch.count_nonzero(layer.edges.real(layer.weight))) for layer in pool.layers)
        if count != int(edges.k):
            raise WiringError(
                f"{name} and the layers that share its budget should have {int(edges.k)} real edges in all, but "
                f"they have {count}. Either rule {edges.rule.name!r} is broken, or a checkpoint of another budget "
                "was loaded without the handle's own (wiring.load_state_dict)."
            )


def _tell_unfinished(model: nn.Module, all_edges: list[Edges]) -> None:
    """Warn if the number of edges is not the one that a schedule leads to, or that training used last."""
    scheduled = [edges for edges in all_edges if edges.end is not None]
    removing = [edges for edges in all_edges if edges.left is not None]
    end = sum(edges.end or 0 for edges in _of_budgets(scheduled))
    left = sum(int(torch.count_nonzero(edges.left)) for edges in removing)  # type: ignore
    what = []
    if (now := sum(int(edges.k) for edges in _of_budgets(scheduled))) != end:
        what.append(f"finalized with {now:,} edges, but its schedule ends with {end:,}")
    if left > (now := sum(int(edges.k) for edges in _of_budgets(removing))):
        what.append(
            f"finalized with {now:,} edges, but training still used {left:,}: rule {removing[0].rule.name!r} had not "
            "removed the others yet"
        )
    for text in what:
        warnings.warn(
            f"{type(model).__name__} was {text}: training stopped before that, or wiring.step() was not called after "
            "every optimizer step.",
            stacklevel=3,
        )


def _of_budgets(all_edges: list[Edges]) -> list[Edges]:
    """For each budget one of the edges that have it: those of a pool have one for all."""
    return list({edges.pool or edges: edges for edges in all_edges}.values())


def _final_weight(weight: Tensor, edges: Edges) -> Tensor:
    """The weight that the forward pass uses in evaluation."""
    training = edges.training
    edges.eval()
    try:
        return edges(weight)
    finally:
        edges.train(training)


def _check_final(name: str, weight: Tensor, edges: Edges) -> None:
    value, real = _final_weight(weight, edges), edges.real(weight)
    count, outside = int(torch.count_nonzero(real)), int(torch.count_nonzero(value.masked_fill(real, 0.0)))
    if outside or (edges.pool is None and count != int(edges.k)):
        raise WiringError(
            f"{name}: rule {edges.rule.name!r} should have {int(edges.k)} real edges and zeros elsewhere, but it has "
            f"{count} and {outside} other weights that are not zero. Either the rule is broken, or a checkpoint of "
            "another budget was loaded without the handle's own (wiring.load_state_dict). The model was left as it is."
        )


# ---- checks, all before anything is changed -------------------------------------------------------------------


def _budget(rule: Rule, given: dict[str, Any], share: str, example_input: Any) -> Budget | None:
    """The caller's budget; None where the rule has one of its own."""
    if example_input is not None and given["mult_adds"] is None:
        raise WiringError(
            "example_input= says what multiply-adds are counted for; give mult_adds= with it, or drop it."
        )
    if not rule.own_budget:
        values = {**given, "mapping": given["budget"]}
        del values["budget"]
        if given["mult_adds"] is not None and rule.moves_budget:
            raise WiringError(
                f"rule {rule.name!r} moves edges between layers, where they cost another number of multiply-adds; give "
                "params= or k=, or another rule."
            )
        return Budget(**values, share=share, ramp=None if rule.schedule is None else Ramp.of(rule.schedule))
    if any(value is not None for value in given.values()) or share != "uniform" or rule.schedule is not None:
        came = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None) or (
            f"share={share!r}" if share != "uniform" else f"schedule={rule.schedule!r}"
        )
        raise WiringError(f"rule {rule.name!r} fixes the number of edges itself; drop {came}.")
    return None


def _of_network(
    plan: Budget, model: nn.Module, targets: list[Target], sizes: list[Size], example_input: Any
) -> tuple[Budget, list[Size]]:
    """A budget of the whole network as one of these layers, with what their edges cost."""
    if plan.params is not None:
        wired_here = {id(target.weight) for target in targets}
        rest = sum(p.numel() for p in model.parameters() if id(p) not in wired_here)
        return plan.of_network(sizes, rest), sizes
    if plan.mult_adds is not None:
        costs, rest = pixels.costs(model, targets, example_input)
        sizes = [replace(size, cost=cost) for size, cost in zip(sizes, costs, strict=True)]
        return plan.of_network(sizes, rest), sizes
    return plan, sizes


def _patterns(argument: str, patterns: Sequence[str] | None) -> list[str] | None:
    if isinstance(patterns, str):
        raise WiringError(f"{argument}= takes a list of patterns, but a string came: write {argument}=[{patterns!r}].")
    patterns = None if patterns is None else list(patterns)
    for pattern in patterns or []:
        if not isinstance(pattern, str):
            raise WiringError(f"{argument}=: a pattern is a string, not {pattern!r}; write {str(pattern)!r}.")
    return patterns


def _some_match(argument: str, pattern: str, targets: list[Target]) -> list[Target]:
    hits = [target for target in targets if target.matches(pattern)]
    if not hits:
        names = ", ".join(target.name for target in targets)
        raise WiringError(
            f"{argument}[{pattern!r}] matches none of the layers to wire, which are {names}. Mend the pattern."
        )
    return hits


def _check_not_wrapped(model: nn.Module) -> None:
    fsdp.check_kind(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise WiringError(
            f"{type(model).__name__} is, or has within it, a model in DistributedDataParallel, which would no longer "
            "average the gradients of weights that are wired now. Wire the model first, then wrap it."
        )


def _check(target: Target, model: nn.Module) -> None:
    for name, module, attribute in target.places:
        holder = parametrizations_of(module).get(attribute)
        if holder is not None:
            if isinstance(holder[0], Edges):
                raise WiringError(
                    f"{name} is wired already. Call wirings.finalize_ or wirings.unwire_ before wiring again."
                )
            raise WiringError(
                f"{name} is held by another parametrization ({type(holder[0]).__name__}), so its edges have no "
                "weights of their own. Remove it first (torch.nn.utils.parametrize.remove_parametrizations), or give "
                f"skip=[{name!r}]."
            )
    if isinstance(target.weight, nn.parameter.UninitializedParameter):
        raise WiringError(f"{target.name} has no shape yet (a lazy layer): run one forward pass before wiring.")
    if not target.weight.numel():
        raise WiringError(
            f"{target.name} has no weights, its shape is {tuple(target.weight.shape)}; give skip=[{target.name!r}]."
        )
    if target.weight.is_meta:
        raise WiringError(
            f"{target.name} is on the meta device and has no values to rank; give it values, then wire it."
        )
    if target.weight.dtype not in KEYS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEYS)
        raise WiringError(
            f"{target.name} is {target.weight.dtype}, and edges are ranked in {known}; convert it, or give "
            f"skip=[{target.name!r}]."
        )
    if any(size > 1 and step == 0 for size, step in zip(target.weight.shape, target.weight.stride(), strict=True)):
        raise WiringError(
            f"{target.name} holds some entries once in memory for several of its places (it was expanded), so they "
            "cannot be edges of their own; give it memory for all (.contiguous())."
        )
    if is_sharded(target.weight):
        place_of(target.weight, target.name)  # an error for layouts that we do not know
        fsdp.check_within(model, target.weight, target.name)
    _check_finite(target.name, target.weight)


def _check_finite(name: str, weight: Tensor) -> None:
    with on_shards(is_sharded(weight)):
        bad = int(torch.count_nonzero(torch.isnan(weight)))
    if bad:
        raise WiringError(
            f"{name} holds {bad} NaN among its {weight.numel()} weights, and NaN has no magnitude to rank by. Find "
            "where it came from (a diverged run, an uninitialised weight) and start from weights without it."
        )


def _allowed(targets: list[Target], masks: Mapping[str, Tensor]) -> list[Tensor | None]:
    for pattern, mask in masks.items():
        if not isinstance(mask, Tensor):
            raise WiringError(f"allowed[{pattern!r}] must be a boolean tensor, not {type(mask).__name__}.")
        for target in _some_match("allowed", pattern, targets):
            if not mask.any():
                raise WiringError(
                    f"allowed[{pattern!r}] allows no edge at all of {target.name}; skip the layer instead."
                )
            if mask.dtype != torch.bool or mask.shape != target.weight.shape:
                raise WiringError(
                    f"allowed[{pattern!r}] must be a boolean mask of {target.name}'s shape "
                    f"{tuple(target.weight.shape)}, but it is {mask.dtype} of shape {tuple(mask.shape)}."
                )
    found = [next((m for p, m in masks.items() if target.matches(p)), None) for target in targets]
    return [None if m is None else m.to(t.weight.device, copy=True) for t, m in zip(targets, found, strict=True)]


def _size(target: Target, mask: Tensor | None) -> Size:
    edges = target.weight.numel() if mask is None else int(torch.count_nonzero(mask))
    return Size(target.names, edge_shape(*target.places[0][1:], target.weight), edges)
