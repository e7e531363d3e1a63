"""Choosing the edges of a whole model at once, on a GPU: one selection a forward pass instead of one a layer.

Each layer has a budget of its own, so the result is what each would choose by itself, bit for bit; what is saved is
time, on the host and on the GPU, since a selection is several kernels whether it is of one layer or of a hundred.

A forward pass of the wired model begins anew. The first layer that asks has the edges of all chosen, and every layer
gets what was chosen for it once, and only if its weight is still what it was: whoever asks again (a layer that is used
twice, a pass that is computed again in the backward pass) or outside of such a pass chooses by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from wirings.rules.base import Edges
from wirings.selection import functional as primitive
from wirings.selection import sharded
from wirings.utils.layers import parametrizations_of
from wirings.utils.transforms import in_transform
from wirings.wire.parametrization import wired

DEVICES = ("cuda",)
"""Where it pays."""


class Together:
    """The layers that one call of `wire_` wired; called before every forward pass of the model, as a hook.

    A compiler may run the hook outside of what it makes of the model, so what was chosen goes through an attribute. A
    model with a layer that a pass did not ask for has it no more: what is left there would be out of date some time.
    """

    def __init__(self) -> None:
        self.members: list[tuple[nn.Module, str, Edges]] = []
        self._begun = False
        self._chosen: dict[Edges, tuple[tuple[Any, ...], Tensor]] = {}
        self._traced: list[Tensor | None] = []
        self._partly = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        """A forward pass begins."""
        if torch.compiler.is_compiling():
            self._partly |= any(kept is not None for kept in self._traced)
            self._traced = self._choose()
            return
        if not self.members:  # a copy, which has layers of its own
            self.find(model)
        self._chosen.clear()
        self._begun = len(self.members) > 1

    def find(self, model: nn.Module) -> None:
        """Learn which layers of the model these are."""
        found = {edges: (module, name, edges) for _, module, name, edges in wired(model) if edges.together is self}
        self._have(list(found.values()))

    def drop(self, gone: Collection[Edges]) -> None:
        """Layers that are wired no more leave it."""
        self._have([member for member in self.members if member[2] not in gone])

    def _have(self, members: list[tuple[nn.Module, str, Edges]]) -> None:
        self.members = members
        self._traced = [None] * len(members)
        for place, (_, _, edges) in enumerate(members):
            edges.place = place
        self.forget()

    def forget(self) -> None:
        """What was chosen is used no more; it is chosen anew when the next forward pass begins."""
        self._chosen.clear()
        self._begun = False

    def kept(self, edges: Edges, weight: Tensor) -> Tensor | None:
        """The real edges of a layer, zeros elsewhere; None if it had better choose them by itself."""
        if torch.compiler.is_compiling():
            return self._compiled(edges, weight)
        if weight.device.type not in DEVICES or in_transform(weight) or sharded.is_sharded(weight):
            return None
        if self._begun:
            self._begun = False
            members = [(e, _weight(module, name)) for module, name, e in self.members]
            # With FSDP, what is whole at this moment; other layers' weights are when their own module runs.
            members = [(e, w) for e, w in members if _alike(w, weight)]
            ks, allowed = [e.k for e, _ in members], [e.allowed for e, _ in members]
            for (e, w), kept in zip(
                members, primitive.real_edges_of([w for _, w in members], ks, allowed), strict=True
            ):
                self._chosen[e] = _stamp(e, w), kept
        found = self._chosen.pop(edges, None)
        return found[1] if found is not None and found[0] == _stamp(edges, weight) else None

    def _compiled(self, edges: Edges, weight: Tensor) -> Tensor | None:
        """The same where a compiler looks on."""
        place = edges.place
        if place >= len(self._traced):
            return None
        module, name, member = self.members[place]
        if member is not edges or _weight(module, name) is not weight:
            return None
        kept, self._traced[place] = self._traced[place], None
        return kept

    def _choose(self) -> list[Tensor | None]:
        """The real edges of all layers, or nothing for any of them where it does not pay or cannot be done."""
        weights = [_weight(module, name) for module, name, _ in self.members]
        pays = not self._partly and len(weights) > 1 and weights[0].device.type in DEVICES
        if not pays or not all(_alike(weight, weights[0]) for weight in weights):
            return [None] * len(weights)
        ks, allowed = [e.k for _, _, e in self.members], [e.allowed for _, _, e in self.members]
        return [*primitive.real_edges_of(weights, ks, allowed)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        memo[id(self)] = replica = Together()  # it finds its layers when the copied model is first used
        return replica


def _weight(module: nn.Module, name: str) -> Tensor:
    """The parameter with all edges."""
    return parametrizations_of(module)[name].original


def _alike(weight: Tensor, other: Tensor) -> bool:
    """Whether weights can be chosen from together, ``other`` being whole."""
    return not sharded.is_sharded(weight) and weight.device == other.device and weight.dtype == other.dtype


def _stamp(edges: Edges, weight: Tensor) -> tuple[Any, ...]:
    """What changes when a weight or its budget does."""
    inference = weight.is_inference() or edges.k.is_inference()
    return id(weight), weight.data_ptr(), () if inference else (weight._version, edges.k._version)
