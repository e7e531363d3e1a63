"""A model's weights: which entries are allowed, real, and used; tied ones are one weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wirings.profiling.live import Alive
from wirings.utils.layers import CONVOLUTIONS, multiplies, parametrizations_of, sends_first
from wirings.wire.edges import Edges
from wirings.wire.parametrization import wired


@dataclass
class _Weight:
    """One weight, however many places use it."""

    mask: Tensor
    """Its real entries."""
    allowed: Tensor | None
    params: int | None
    """What it is held as, where that is not its own entries: a parametrization that is not ours."""
    near: Tensor | None = None
    """The entries that count next to graphs, in any call; None until there is one."""
    far: Tensor | None = None
    """The entries that live, in any call."""


class Weights:
    """The weights of a model that multiply."""

    def __init__(self, model: nn.Module) -> None:
        self.real: dict[str, Tensor] = {}
        """The real entries of wired weights, by name."""
        self._masks: dict[int, Tensor] = {}
        for name, module, attribute, edges in wired(model):
            original = parametrizations_of(module)[attribute].original
            if id(original) not in self._masks:
                self._masks[id(original)] = edges.real(original, fresh=True).cpu()
            self.real[name] = self._masks[id(original)]
        self._found: dict[int, _Weight] = {}
        self._model = model

    def __getitem__(self, place: tuple[nn.Module, str]) -> _Weight:
        """The weight that a module has under this name."""
        module, attribute = place
        holder = parametrizations_of(module).get(attribute)
        original = getattr(holder, "original", None) if holder is not None else getattr(module, attribute)
        key = id(holder if original is None else original)
        if key not in self._found:
            self._found[key] = self._look(module, attribute)
        return self._found[key]

    def _look(self, module: nn.Module, attribute: str) -> _Weight:
        holder = parametrizations_of(module).get(attribute)
        if holder is not None and isinstance(holder[0], Edges):
            allowed = holder[0].allowed
            mask = self._masks[id(holder.original)]
            return _Weight(mask, None if allowed is None else allowed.cpu(), None)
        with torch.no_grad():
            mask = (getattr(module, attribute) != 0).cpu()
        params = None if holder is None else sum(p.numel() for p in holder.parameters())
        return _Weight(mask, None, params)

    def any_zero(self) -> bool:
        """Whether any weight that multiplies has entries that are not real."""
        if any(not mask.all() for mask in self.real.values()):
            return True
        modules = (module for module in self._model.modules() if multiplies(module))
        return any((p == 0).any() for module in modules for p in module.parameters(recurse=False) if p.dim() > 1)


def count(weight: _Weight, rows: slice = slice(None)) -> int:
    """The allowed entries of a weight, or of some of its rows."""
    part = weight.mask[rows] if weight.allowed is None else weight.allowed[rows]
    return part.numel() if weight.allowed is None else int(part.count_nonzero())


def add(weight: _Weight, near: Tensor, far: Tensor) -> None:
    """Note which entries a call uses."""
    weight.near = near if weight.near is None else weight.near | near
    weight.far = far if weight.far is None else weight.far | far


def live_part(module: nn.Module, mask: Tensor, alive: Alive | None) -> Tensor:
    """Of a layer's real entries, those from channels that are fed to channels that are wanted."""
    if alive is None:
        return mask
    fed, wanted = torch.from_numpy(alive.fed), torch.from_numpy(alive.wanted)
    if not isinstance(module, CONVOLUTIONS):
        return mask & fed & wanted[:, None]
    first, second = (fed, wanted) if sends_first(module) else (wanted, fed)
    groups, within = module.groups, mask.shape[1]
    own = second.view(groups, within).repeat_interleave(math.ceil(mask.shape[0] / groups), 0)
    shape = (*mask.shape[:2], *[1] * (mask.dim() - 2))
    return mask & (first[:, None] & own).view(shape)
