"""The first wiring of a network that is sparse already: ``wire_(model, rule, start="weights")``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.rules.rule import Rule, choose_by
from wirings.selection.sharded import is_sharded, on_shards, whole
from wirings.selection.weight_groups import WeightGroups
from wirings.utils.text import brief
from wirings.wire.checks import first_names
from wirings.wire.layer import Layer
from wirings.wire.report import LayerReport
from wirings.wire.targets import Target
from wirings.wire.transaction import restored_on_error

STARTS = ("weights",)


def check_start(start: object, scale_weights: bool | float) -> None:
    """Raise unless `wire_` knows this ``start``."""
    if start is None:
        return
    if not isinstance(start, str) or start not in STARTS:
        raise unknown("start", start if isinstance(start, str) else brief(start), STARTS)
    if scale_weights is not False:
        raise WiringError(
            f"start={start!r} is for trained weights, which must not be scaled; drop "
            f"scale_weights={brief(scale_weights)}."
        )


def nonzero(targets: Sequence[Target], masks: Sequence[Tensor | None]) -> list[Tensor]:
    """The allowed edges of every weight that are not zero: a mask for each."""
    found = []
    for target, mask in zip(targets, masks, strict=True):
        with torch.no_grad(), on_shards(is_sharded(target.weight)):
            real = whole(target.weight.detach() != 0)
        found.append(real if mask is None else real & mask)
        if not found[-1].any():
            raise WiringError(
                f"{target.name} has no edge to start from: all its allowed weights are zero. Use "
                f"skip=[{target.name!r}], or rule 'keep', which keeps the layer as it is."
            )
    return found


def numbers_of(
    share: str, targets: Sequence[Target], starts: Sequence[Tensor], groups: Sequence[WeightGroups | None]
) -> dict[str, float]:
    """The budget of the first wiring itself, by the weight's name: its number of edges, or its density in groups."""
    if share != "uniform":
        raise WiringError(
            f'without a budget, start="weights" gives every layer as many edges as it has nonzero weights; drop '
            f"share={share!r}, or add a budget such as density=."
        )
    return {
        target.name: int(torch.count_nonzero(start)) if one is None else int(one.count(start)) / one.possible
        for target, start, one in zip(targets, starts, groups, strict=True)
    }


def check_started(rule: Rule, layers: Sequence[Layer], starts: Sequence[Tensor]) -> None:
    """Raise if the first wiring that a rule has chosen is not the one that it should start from.

    A smaller budget must be met within the start, and a larger one by adding edges to it; a rule with its own budget
    must have exactly these edges.
    """
    together = layers[0].edges.shared or rule.moves_budget
    for part in [range(len(layers))] if together else [[i] for i in range(len(layers))]:
        wirings = [whole(layers[i].edges.real(layers[i].weight)) for i in part]
        more = sum(int(torch.count_nonzero(real & ~starts[i])) for i, real in zip(part, wirings, strict=True))
        lost = sum(int(torch.count_nonzero(starts[i] & ~real)) for i, real in zip(part, wirings, strict=True))
        if (more and lost) or (rule.own_budget and (more or lost)):
            where = layers[part[0]].name if len(part) == 1 else f"{layers[0].name} … {layers[-1].name}"
            raise WiringError(
                f"rule {rule.name!r} cannot start from these weights: in {where} it leaves out {lost:,} edges that are "
                f'not zero and adds {more:,} others. Drop start="weights", or use a rule that can start from any '
                "wiring, such as 'dnw', 'set' or 'rigl', or 'keep'."
            )


def setup_from(rule: Rule, layers: Sequence[Layer], starts: Sequence[Tensor] | None) -> None:
    """Let a rule set up its layers; with ``starts``, from these edges, which it finds as ``edges.start``."""
    for layer, start in zip(layers, starts or [], strict=starts is not None):
        layer.edges.start = start
    try:
        rule.setup(layers)
    finally:
        for layer in layers:
            layer.edges.start = None


def prune_to_budget(layers: Sequence[Layer]) -> None:
    """Prune wired layers to their budget: all but their strongest edges become zero, and the rule starts from these.

    All layers must be wired by one call of `wire_`.
    """
    rule = layers[0].edges.rule
    starts = choose_by(layers, [layer.weight.detach().abs() for layer in layers], magnitudes=True)
    if all(bool(start.all()) for start in starts):
        raise WiringError(
            f"there is nothing to prune: the budget has all {sum(start.numel() for start in starts):,} edges of "
            f"{layers[0].name} and others. Give the model a density below 1, without a schedule."
        )
    with restored_on_error(rule, layers):
        for layer, start in zip(layers, starts, strict=True):
            with torch.no_grad():
                layer.weight.masked_fill_(~start, 0.0)
        setup_from(rule, layers, starts)
        check_started(rule, layers, starts)


def warn_if_all_zero(reports: Sequence[LayerReport]) -> None:
    """Warn if all weights of a layer are zero, and will stay so."""
    empty = [report.name for report in reports if not report.edges]
    if empty:
        warnings.warn(
            f"all weights of {len(empty)} of {len(reports)} layers are zero ({first_names(empty)}) and stay zero, so "
            "nothing passes through them. To train such a layer, use skip=[…], or initialize it before wiring.",
            stacklevel=3,
        )
