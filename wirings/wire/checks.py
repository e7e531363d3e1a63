"""Checks of a model before it is wired, and of what `wire_` is given. All of them run before anything is changed."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.cpu import KEYS
from wirings.selection.sharded import is_sharded, layout_of, on_shards
from wirings.utils.checks import is_number
from wirings.utils.layers import AXES, parametrizations_of
from wirings.utils.text import brief
from wirings.wire import fsdp
from wirings.wire.edges import Edges
from wirings.wire.layer import Layer
from wirings.wire.report import LayerReport
from wirings.wire.targets import Target


def check_not_wrapped(model: nn.Module) -> None:
    """Raise if a model is, or contains, one in `DistributedDataParallel` or the older `FullyShardedDataParallel`."""
    fsdp.check_kind(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise WiringError(
            f"{type(model).__name__} is, or contains, a model in DistributedDataParallel, which would no longer "
            "average the gradients of wired weights. Wire the model first, then wrap it."
        )


def check_patterns(argument: str, patterns: Any) -> list[str] | None:
    """Return patterns as a list if each of them is a string."""
    if isinstance(patterns, str):
        raise WiringError(
            f"{argument}= expects a list of patterns, got a string: write {argument}=[{brief(patterns)}]."
        )
    if patterns is not None and (not isinstance(patterns, Iterable) or isinstance(patterns, Tensor)):
        raise WiringError(f"{argument}= expects a list of patterns, got {brief(patterns)}.")
    patterns = None if patterns is None else list(patterns)
    for pattern in patterns or []:
        if not isinstance(pattern, str):
            hint = f"; write '{brief(pattern)}'" if isinstance(pattern, int) else ""
            raise WiringError(f"{argument}=: a pattern must be a string, got {brief(pattern)}{hint}.")
    return patterns


def check_by_pattern(argument: str, given: Any) -> dict[str, Any]:
    """Return what is given by layer pattern as a dictionary; an empty one if it is None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise WiringError(f"{argument}= expects a mapping from layer patterns, got {brief(given)}.")
    return dict(given)


def matching(argument: str, pattern: str, targets: list[Target]) -> list[Target]:
    """The targets that a pattern matches; raises if it matches none."""
    hits = [target for target in targets if target.matches(pattern)]
    if not hits:
        names = ", ".join(target.name for target in targets)
        raise WiringError(f"{argument}[{pattern!r}] matches no wired layer ({names}). Fix the pattern.")
    return hits


def check_wirable(target: Target, model: nn.Module) -> None:
    """Raise if a weight cannot be wired."""
    for name, module, attribute in target.places:
        holder = parametrizations_of(module).get(attribute)
        if holder is not None:
            if isinstance(holder[0], Edges):
                raise WiringError(
                    f"{name} is already wired. Call wirings.finalize_ or wirings.unwire_ before wiring again."
                )
            raise WiringError(
                f"{name} has another parametrization ({type(holder[0]).__name__}), so its edges have no weights of "
                "their own. Remove it first (torch.nn.utils.parametrize.remove_parametrizations), or use "
                f"skip=[{name!r}]."
            )
    skip = f"skip=[{target.name!r}]"
    if isinstance(target.weight, nn.parameter.UninitializedParameter):
        raise WiringError(f"{target.name} has no shape yet (a lazy layer): run one forward pass before wiring.")
    if not target.weight.numel():
        raise WiringError(f"{target.name} is empty: its shape is {tuple(target.weight.shape)}; use {skip}.")
    if target.weight.is_meta:
        raise WiringError(
            f"{target.name} is on the meta device and has no values to rank; initialize it before wiring."
        )
    if target.weight.layout != torch.strided:
        layout = str(target.weight.layout).removeprefix("torch.")
        raise WiringError(
            f"{target.name} is a tensor of layout {layout}, whose zeros are not stored, but edges are entries of dense "
            f"tensors. Assign nn.Parameter(weight.to_dense()), which keeps its zeros, or use {skip}."
        )
    if target.weight.dtype not in KEYS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEYS)
        raise WiringError(
            f"{target.name} is {target.weight.dtype}, but edges are ranked in {known}; convert it, or use {skip}."
        )
    if any(size > 1 and step == 0 for size, step in zip(target.weight.shape, target.weight.stride(), strict=True)):
        raise WiringError(
            f"{target.name} is an expanded tensor, whose entries share memory and so cannot be edges of their own; "
            "make it contiguous (.contiguous())."
        )
    if is_sharded(target.weight):
        layout_of(target.weight, target.name)  # raises for unknown layouts
        fsdp.check_within(model, target.weight, target.name)
    check_finite(target.name, target.weight)


def check_finite(name: str, weight: Tensor) -> None:
    """Raise if a weight contains NaN."""
    with on_shards(is_sharded(weight)):
        bad = int(torch.count_nonzero(torch.isnan(weight)))
    if bad:
        raise WiringError(
            f"{name} contains {bad} NaN among its {weight.numel()} weights, which have no magnitude to rank by. Find "
            "their origin (a diverged run, an uninitialized weight) and start from weights without NaN."
        )


def check_total(layers: Sequence[Layer], budget: int, count: int, hint: str) -> None:
    """Raise if layers with one budget do not have that number of real edges together.

    Args:
        layers: the layers.
        budget: the number of edges that they should have.
        count: the number of edges that they have.
        hint: what may be wrong and how to fix it, for the message.
    """
    if count != budget:
        raise WiringError(
            f"rule {layers[0].edges.rule.name!r} should have {budget:,} real {layers[0].edges.unit} over all layers "
            f"({first_names([layer.name for layer in layers])}), but it has {count:,}. {hint}"
        )


def first_names(names: Sequence[str]) -> str:
    """The first four of some names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def allowed_masks(targets: list[Target], masks: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The mask of allowed edges of every target, a copy on its device; None where all edges are allowed."""
    for pattern, mask in masks.items():
        if not isinstance(mask, Tensor):
            raise WiringError(f"allowed[{pattern!r}] must be a boolean tensor, got {type(mask).__name__}.")
        for target in matching("allowed", pattern, targets):
            if not mask.any():
                raise WiringError(f"allowed[{pattern!r}] allows no edge of {target.name}; skip the layer instead.")
            if mask.dtype != torch.bool or mask.shape != target.weight.shape:
                raise WiringError(
                    f"allowed[{pattern!r}] must be a boolean mask of {target.name}'s shape "
                    f"{tuple(target.weight.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}."
                )
    found = [next((m for p, m in masks.items() if target.matches(p)), None) for target in targets]
    return [None if m is None else m.to(t.weight.device, copy=True) for t, m in zip(targets, found, strict=True)]


def set_axes(targets: list[Target], given: Mapping[str, str]) -> None:
    """Set what the dimensions of weights are, by layer pattern, where the caller says so."""
    for target in targets:
        pattern = next((pattern for pattern in given if target.matches(pattern)), None)
        if pattern is None:
            continue
        axes, choices = given[pattern], AXES.get(target.weight.dim(), ())
        if target.axes is None:
            kind = type(target.places[0][1]).__name__
            raise WiringError(
                f"axes[{pattern!r}] matches {target.name}, a weight of shape {tuple(target.weight.shape)} in a {kind}, "
                "whose dimensions are known. Narrow the pattern."
            )
        if axes not in choices:
            raise WiringError(
                f"axes[{pattern!r}] must say what the {target.weight.dim()} dimensions of {target.name} are, one of "
                f"{', '.join(map(repr, choices))}, got {brief(axes)}."
            )
        target.axes = tuple(axes.split())
    for pattern in given:
        matching("axes", pattern, targets)


def unexpected_arguments(unknown: Mapping[str, object], known: Sequence[str]) -> WiringError:
    """The error for arguments that `wire_` does not have."""
    name, value = next(iter(unknown.items()))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}=?" if near else ""
    if name == "sparsity":
        meant = f"{round(1 - value, 12):g}" if is_number(value) and 0 <= value < 1 else "1 - sparsity"
        hint = f" Did you mean density={meant}?"
    return WiringError(f"wire_() got an unexpected argument {name}={brief(value)}.{hint}")


_MANY = 1000
"""Allowed edges of a layer that hardly anything passes through if only one of them is real."""


def warn_if_cut_off(reports: Sequence[LayerReport], share: str, bounded: bool) -> None:
    """Warn if a budget shared by all layers leaves no edges in some, or a bound on multiply-adds hardly any.

    Args:
        reports: the layers as they were just wired.
        share: how the budget was shared out.
        bounded: whether the budget limits multiply-adds. Every layer then keeps at least one edge.
    """
    empty = [report.name for report in reports if not report.edges]
    if share in ("global", "scaled") and empty:
        warnings.warn(
            f'share="{share}" leaves no edges in {len(empty)} of {len(reports)} layers ({first_names(empty)}), so '
            'nothing passes through them. Raise the budget, skip these layers, or use share="uniform" or "erk".',
            stacklevel=3,
        )
    single = [report.name for report in reports if report.edges == 1 and report.possible >= _MANY]
    if bounded and single:
        warnings.warn(
            f'share="{share}" with mult_adds= leaves a single edge in {len(single)} of {len(reports)} layers '
            f"({first_names(single)}), so hardly anything passes through them. Raise mult_adds=, or use another share.",
            stacklevel=3,
        )
