"""Wired linear layers in blocks: on a GPU they skip the blocks that are not real, where that measures faster.

The products are those of `block_products`. Everything about the wiring is as without them: the weight of the forward
pass comes from the rule, with zeros in it, and its gradient goes where the rule lets it go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from wirings.selection.block_groups import BlockGroups
from wirings.selection.grouped import reaches_hallucinated
from wirings.selection.passes import more_edges
from wirings.utils.transforms import is_plain
from wirings.wire.block_products.layout import BLOCKS, BlockLayout
from wirings.wire.block_products.linear import block_linear, has_kernels_for
from wirings.wire.edges import Edges

_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # before PyTorch 2.7 there is none


class BlockPlan(NamedTuple):
    """What is known in advance about the real blocks of a weight, so that nothing has to wait for the GPU."""

    block: int
    """The side of a block."""
    blocks: int
    """The most blocks that are real."""
    density: float
    """About the fraction that is real."""
    reach: int
    """The most blocks that the gradient reaches, if the rule chooses them."""


def plan_blocks(all_edges: Sequence[Edges], saved: bool) -> None:
    """Note for the edges of one wiring which weights consist of blocks that there are kernels for.

    If the number of blocks changes in training, by a schedule or by a rule that moves them or removes them step by
    step, layers stay dense: a choice of kernels would not hold for long.

    Args:
        all_edges: the edges of all layers.
        saved: whether a schedule changes their numbers.
    """
    rule = all_edges[0].rule
    kept, shared = rule.kept_at_once, all_edges[0].shared
    fixed = kept is not None and kept.mask in (None, "wiring") and not kept.in_training and kept.learned is None
    if not fixed or saved or rule.moves_budget:
        return
    total = sum(edges.possible for edges in all_edges)
    for edges in all_edges:
        if (block := _side(edges)) is None:
            continue
        k, reach = int(edges.k), edges.possible
        if kept is not None and kept.more is not None and not shared:
            reach = max(k, *more_edges([edges.possible], kept.more, False))
        # A mask that is remembered may come from a checkpoint with another number of blocks.
        blocks = k if kept is not None and kept.mask is None and not shared else edges.possible
        edges.blocks = BlockPlan(block, blocks, k / (total if shared else edges.possible), reach)


def _side(edges: Edges) -> int | None:
    """The side of the blocks of a matrix of outputs x inputs; None if there are no kernels for it."""
    groups = edges.groups
    if not isinstance(groups, BlockGroups) or not groups.equal or groups.layout.axes != ("out", "in"):
        return None
    height, width = groups.block
    return height if height == width and height in BLOCKS else None


def runs_in_blocks(holder: Any, x: Any) -> bool:
    """Whether a layer may skip blocks for these inputs: there are kernels, and nobody follows how it is computed."""
    if not isinstance(x, Tensor) or not has_kernels_for(x):
        return False
    if len(holder._modules) > 1 or parametrize._cache_enabled != 0:
        return False
    if torch.compiler.is_compiling():
        return not _is_exporting()
    return is_plain(holder.original)


def linear_in_blocks(edges: Edges, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """A linear layer whose edges have a `BlockPlan`.

    Args:
        edges: the edges of the layer.
        weight: its parameter, with all weights.
        bias: its bias.
        x: its inputs.
    """
    plan: Any = edges.blocks
    kept: Any = edges.rule.kept_at_once
    selection: Any = edges.selection
    side = slice(None, None, plan.block)
    superset = None
    if kept.mask is None:
        used, real, superset = selection.keep_ranked(edges, weight, kept)
    else:
        used = None if torch.compiler.is_compiling() else edges.ready_in_layer(weight)
        used, real = edges(weight) if used is None else used, getattr(edges, kept.mask)
    layout = BlockLayout(real[side, side], plan.block, plan.blocks, density=plan.density)
    gradient: str | BlockLayout = "real"
    if isinstance(kept.reach, str):
        superset = getattr(edges, kept.reach)
    if superset is not None:
        gradient = BlockLayout(superset[side, side], plan.block, plan.reach)
    elif kept.factor != 0.0 and (selection.gradient_to_all or not reaches_hallucinated(kept)):
        gradient = "dense"
    return block_linear(x, used, layout, bias, gradient=gradient)
