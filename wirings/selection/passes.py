"""A forward pass of a model on a GPU: the weights of all its layers are made at once, when the first one is needed.

Every layer finds its weight under ``edges.ready`` and takes it from there. Whatever it depends on is noted with it, so
that a weight, a budget or a precision that has changed since is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wirings.selection import batched
from wirings.selection.expiry import expired, expires_after_step
from wirings.selection.gradient import GradientReach, pass_all, pass_all_shrunk
from wirings.selection.kept_edges import KeptEdges
from wirings.selection.shared import SelectedWeight
from wirings.utils.transforms import is_plain

DEVICES = ("cuda",)
"""Devices on which it pays to make the weights of all layers at once."""


class ReadyWeight(NamedTuple):
    """The weight of one layer for the forward pass, and what it was made of."""

    used: Tensor
    weight: Tensor
    version: int
    address: int
    budget: Tensor
    budget_version: int
    grad: bool
    training: bool

    def fits(self, weight: Tensor, training: bool) -> bool:
        """Whether the pass may use it: whether everything that it depends on is as it was."""
        return (
            self.weight is weight
            and self.version == weight._version
            and self.address == weight.data_ptr()
            and self.budget_version == self.budget._version
            and self.grad is torch.is_grad_enabled()
            and self.training is training
        )


class ForwardPass:
    """The forward pass of a model that is running, if any.

    Args:
        shared: whether all layers share one budget and are ranked together.
        kept: what the layers keep; None if their rule computes their weights itself.
    """

    def __init__(self, shared: bool, kept: KeptEdges | None) -> None:
        self.shared, self.kept = shared if kept is None else kept.together(shared), kept
        self._number = "k" if kept is None else kept.number(shared)
        self.running = False
        self._backward = -1  # or, if a pass is recomputed, the backward pass that does so
        self._made: list[Any] = []  # the edges that have a ready weight

    def end(self) -> None:
        """Drop everything that was made for the pass."""
        expired(self)
        self.running, self._backward = False, -1
        with suppress(IndexError):  # one by one: meanwhile another thread may make some, or end the pass as well
            while self._made:
                self._made.pop().__dict__["ready"].clear()

    def expire(self) -> None:
        """End the pass, since an optimizer has changed weights."""
        self.end()

    def lasts(self) -> bool:
        """Whether the pass is still going on for which weights were made."""
        return self.running or (self._backward != -1 and self._backward == torch._C._current_graph_task_id())

    def serves(self, weight: Tensor) -> bool:
        """Whether a weight is going to be used in a pass for which all weights can be made at once."""
        if self.kept is None or weight.device.type not in DEVICES or not is_plain(weight) or weight.is_inference():
            return False
        if self.running:
            return True
        backward = torch._C._current_graph_task_id()  # -1 outside of backward passes
        if backward != self._backward:
            self.end()
            self._backward = backward
        return backward != -1

    def prepare(self, layers: Sequence[SelectedWeight], weight: Tensor, dtype: torch.dtype | None) -> None:
        """Make the weights of all layers that are like ``weight`` and have none yet."""
        assert self.kept is not None
        kind, precision, device, in_training = type(weight), weight.dtype, weight.device, self.kept.in_training
        members = []
        for layer in layers:
            holder: Any = layer.module._modules["parametrizations"]._modules[layer.attribute]  # type: ignore[union-attr]
            other, edges = holder._parameters.get("original"), layer.edges
            if in_training and not edges.training:
                continue
            # With FSDP only some weights are whole at this moment; the others are when their own module runs.
            alike = type(other) is kind and other.dtype is precision and other.device == device
            if alike and (self.shared or dtype not in edges.__dict__["ready"]):
                members.append((edges, other, *budget_of(edges, self._number)))
        if not members or (self.shared and len(members) < len(layers)):
            return
        all_edges, weights, ks, within = zip(*members, strict=True)
        made, masks, thresholds = kept_of(self.kept, self.shared, all_edges, weights, ks, within, dtype)
        grad, everywhere = torch.is_grad_enabled(), self.kept.reach is None and self.kept.factor == 1.0
        reaches: list[GradientReach | None] = [None] * len(members)
        for i, edges in enumerate(all_edges):
            if not everywhere or edges._buffers["allowed"] is not None:
                reaches[i] = self.kept.gradient(edges, masks[i] if masks else None)
        if thresholds is None:
            through = pass_all(weights, made, reaches)
        else:
            learned, pulls = self.kept.learning(all_edges)
            through = pass_all_shrunk(weights, made, reaches, thresholds, learned, pulls)
        for used, (edges, other, k, _) in zip(through, members, strict=True):
            edges.__dict__["ready"][dtype] = ReadyWeight(
                used, other, other._version, other.data_ptr(), k, k._version, grad, edges.training
            )
        self._made += all_edges
        expires_after_step(self)


def budget_of(edges: Any, number: str) -> tuple[Tensor, Tensor | None]:
    """How many edges of a weight are kept (the buffer named ``number``), and among which; None for all."""
    buffers = edges._buffers  # in few operations: this is asked for every layer and pass
    allowed, left = buffers["allowed"], buffers["left"]
    return buffers[number], allowed if left is None else left


def kept_of(
    kept: KeptEdges,
    shared: bool,
    edges: Sequence[Any],
    weights: Sequence[Tensor],
    ks: Sequence[Tensor],
    within: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """What several layers keep, masks of the edges that their gradients reach, if these were ranked, and thresholds.

    Thresholds are those of all layers in one tensor, or None if they are not learned.
    """
    if kept.mask is not None:
        return batched.masked_of(weights, ks, [getattr(e, kept.mask) for e in edges], dtype), [], None
    if kept.learned is not None:
        return batched.shrunk_of(weights, ks, within, kept.power, dtype)
    more: Sequence[int] = ()
    if kept.more is not None:
        more = more_edges([e.possible for e in edges], kept.more, shared)
    options: dict[str, Any] = {"power": kept.power, "masked": kept.masked, "dtype": dtype}
    factors = factors_of(edges, shared)
    return *batched.kept_of(weights, ks, within, more=more, shared=shared, factors=factors, **options), None


def factors_of(edges: Sequence[Any], shared: bool) -> Sequence[Tensor]:
    """What magnitudes of each layer are multiplied by in a ranking of all; none if they are ranked as they are."""
    return [e.rank_factor for e in edges] if shared and edges[0].rank_factor is not None else ()


def more_edges(possible: Sequence[int], density: float, shared: bool) -> list[int]:
    """The number of edges at a larger ``density``: of each weight, or of all together if they share a budget."""
    return [int(density * n + 1e-6) for n in ([sum(possible)] if shared else possible)]
