"""``wire_(…, scale_weights=…)``: larger starting weights, since a node receives fewer of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from wirings.errors import WiringError
from wirings.rules.rule import Rule
from wirings.utils.checks import is_number
from wirings.utils.text import brief
from wirings.wire.layer import Layer


def check_scale(rule: Rule, scale: bool | float) -> None:
    """Raise unless starting weights can be scaled in this way."""
    if isinstance(scale, bool) or (is_number(scale) and 0 < scale < math.inf):
        if scale is not False and rule.needs_trained_weights:
            raise WiringError(
                f"rule {rule.name!r} is for trained weights, which must not be scaled; drop scale_weights={scale!r}."
            )
        return
    raise WiringError(
        "scale_weights= expects True, for 1 / √density, False, or the factor itself, a finite number above 0, got "
        f"{brief(scale)}."
    )


@torch.no_grad()
def scale(layers: Sequence[Layer], by: bool | float, together: bool) -> None:
    """Multiply the starting weights: by 1 / √density for True, by ``by`` for a number.

    Args:
        layers: the wired layers, not yet set up by the rule.
        by: what `wire_` was given.
        together: whether layers are ranked together, so that one factor for all has to leave the ranking unchanged.
    """
    if by is False:
        return
    edges = [layer.edges for layer in layers]
    used = [one.possible if one.rule.starts_with_all else int(one.k) for one in edges]
    possible = [one.possible for one in edges]
    if together:
        shared = edges[0].shared and not edges[0].rule.starts_with_all  # then every k is that of all layers
        used, possible = [used[0] if shared else sum(used)] * len(edges), [sum(possible)] * len(edges)
    for layer, count, most in zip(layers, used, possible, strict=True):
        layer.weight.mul_(math.sqrt(most / count) if by is True else float(by))
