"""The weights of a model: which entries are allowed, real and used. Tied weights are one weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wirings.budgets.mult_adds import FREE
from wirings.profiling.live import ChannelLiveness
from wirings.utils.layers import CONVOLUTIONS, multiplies, parametrizations_of, sends_first, wired_by_default
from wirings.wire.edges import Edges
from wirings.wire.parametrization import wired


@dataclass
class _Weight:
    """One weight, whichever modules share it."""

    mask: Tensor
    """The real entries."""
    allowed: Tensor | None
    """The entries that may be edges; None for all."""
    params: int | None
    """The number of parameters if the weight is computed from others, by a parametrization that is not ours."""
    near: Tensor | None = None
    """The entries that count next to graphs in any call; None before the first call."""
    far: Tensor | None = None
    """The entries that are alive in any call; None before the first call."""


@contextmanager
def ranked_once(model: nn.Module) -> Iterator[None]:
    """Rank layers that share a budget anew, and keep the ranking while the model is profiled."""
    with ExitStack() as held:
        for selection in {edges.selection for *_, edges in wired(model)}:
            selection.forget()
            held.enter_context(selection.held())
        yield


class Weights:
    """The weights of a model, looked up by module and attribute. To be used within `ranked_once`."""

    def __init__(self, model: nn.Module) -> None:
        self.real: dict[str, Tensor] = {}
        """The real entries of wired weights, by name."""
        self._masks: dict[int, Tensor] = {}
        for name, module, attribute, edges in wired(model):
            original = parametrizations_of(module)[attribute].original
            if id(original) not in self._masks:
                self._masks[id(original)] = edges.real(original).cpu()
            self.real[name] = self._masks[id(original)]
        self._found: dict[int, _Weight] = {}
        self._model = model

    def __getitem__(self, place: tuple[nn.Module, str]) -> _Weight:
        """The weight of a module and attribute."""
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

    def is_sparse(self, module: nn.Module, attribute: str) -> bool:
        """Whether a matrix of a layer that is not known has edges: it is wired, or was before it was finalized.

        Then some of its entries are zero. All entries are zero in parameters that start so, which are no wirings.
        """
        if attribute in wired_by_default(module):
            return False
        if (holder := parametrizations_of(module).get(attribute)) is not None:
            return isinstance(holder[0], Edges)
        if isinstance(module, FREE):  # a row of an embedding may be zero
            return False
        parameter = getattr(module, attribute)
        return parameter.dim() > 1 and 0 < int(torch.count_nonzero(parameter)) < parameter.numel()

    def any_zero(self) -> bool:
        """Whether any weight of a layer that multiplies has entries that are not real."""
        if any(not mask.all() for mask in self.real.values()):
            return True
        modules = (module for module in self._model.modules() if multiplies(module))
        return any((p == 0).any() for module in modules for p in module.parameters(recurse=False) if p.dim() > 1)


def count(weight: _Weight, rows: slice = slice(None)) -> int:
    """The number of allowed entries of a weight, or of some of its rows."""
    part = weight.mask[rows] if weight.allowed is None else weight.allowed[rows]
    return part.numel() if weight.allowed is None else int(part.count_nonzero())


def add(weight: _Weight, near: Tensor, far: Tensor) -> None:
    """Record which entries a call uses."""
    weight.near = near if weight.near is None else weight.near | near
    weight.far = far if weight.far is None else weight.far | far


def live_part(module: nn.Module, mask: Tensor, alive: ChannelLiveness | None) -> Tensor:
    """The real entries of a layer that lead from input channels that are fed to output channels that are wanted."""
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
