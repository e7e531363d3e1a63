"""Which weights of a model are wired: found by kind of layer, or by the patterns ``include`` and ``skip``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wirings.budgets.budget import matches
from wirings.errors import WiringError
from wirings.utils.layers import (
    axes_of,
    in_adapter,
    inside_parametrization,
    is_graph_weight,
    parametrizations_of,
    wired_by_default,
)
from wirings.utils.text import brief

ROUTERS = ("Router", "TopKGating")
"""Parts of the names of classes whose layers score experts."""


@dataclass(eq=False)
class Target:
    """One weight to wire, with every place that uses it (several if it is tied)."""

    weight: nn.Parameter
    places: list[tuple[str, nn.Module, str]] = field(default_factory=list)
    axes: tuple[str, ...] | None = None
    """What its dimensions are, if it is not the weight of a layer of PyTorch."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.places)

    @property
    def name(self) -> str:
        return self.names[0]

    def matches(self, pattern: str) -> bool:
        return any(matches(name, pattern) for name in self.names)


def find(model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]) -> list[Target]:
    """The weights to wire: those of known layers (or the ones that ``include`` matches), without those to skip."""
    everything = all_targets(model)
    _check_none_computed(model, include, skip)
    known = [
        t
        for t in everything
        if any(
            attribute in wired_by_default(module) and not in_adapter(name) and not _is_router(model, name, attribute)
            for name, module, attribute in t.places
        )
    ]
    if not known and include is None:
        raise WiringError(
            f"{type(model).__name__} has no layer to wire: expected a Linear, convolution, recurrent or attention "
            "layer. Name other parameters of two or more dimensions with include=[…]; wire a model before scripting or "
            "tracing it (torch.jit)."
        )
    chosen = known
    if include is not None:
        for pattern in include:
            if not any(t.matches(pattern) for t in everything):
                raise _no_match("include", pattern, everything)
        # A pattern that names a whole module takes its known weights; one that names a weight takes that.
        chosen = [
            t for t in everything if any(t.matches(p) for p in include) and (t in known or _named(t, include, known))
        ]
    for pattern in skip:
        if not any(t.matches(pattern) for t in everything):
            raise _no_match("skip", pattern, everything)
    chosen = [t for t in chosen if not any(t.matches(p) for p in skip)]
    if not chosen:
        names = ", ".join(target.name for target in everything)
        raise WiringError(f"include= and skip= together leave no layer to wire, out of {names}. Skip fewer.")
    _check_memory(model, chosen)
    return chosen


def all_targets(model: nn.Module) -> list[Target]:
    """Every weight of a model that can be wired: its parameters of two or more dimensions, tied ones once."""
    places: dict[int, Target] = {}
    for name, module, attribute, weight in _matrices(model):
        target = places.setdefault(id(weight), Target(weight))
        target.places.append((name, module, attribute))
        if not isinstance(weight, nn.parameter.UninitializedParameter):
            target.axes = axes_of(module, attribute, weight)
    return list(places.values())


def _is_router(model: nn.Module, name: str, attribute: str) -> bool:
    """Whether a weight scores experts, so that it stays dense, as the routers do that are no layers of PyTorch.

    Such a layer, or the module that holds it, is of a class such as ``Llama4Router``; or it is called ``gate`` or
    ``router`` and stands beside ``experts``.
    """
    path = name.removesuffix(attribute).rstrip(".")
    above, _, own = path.rpartition(".")
    parent = model.get_submodule(above)
    if own in ("gate", "router") and "experts" in parent._modules:
        return True
    around = [model.get_submodule(path)] if path else []
    around += [parent] if above else []  # not the model itself, whatever it is called
    return any(word in cls.__name__ for module in around for cls in type(module).__mro__ for word in ROUTERS)


def _check_none_computed(model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]) -> None:
    """Raise if a layer's weight is not a parameter but computed by a hook, as older weight norms do."""
    for prefix, module in model.named_modules():
        for attribute in wired_by_default(module):
            name = f"{prefix}.{attribute}" if prefix else attribute
            asked = include is None or any(matches(name, pattern) for pattern in include)
            if not isinstance(module.__dict__.get(attribute), Tensor) or not asked:
                continue
            if any(matches(name, pattern) for pattern in skip):
                continue
            remedy = f", or use skip=[{prefix!r}]" if prefix else ""
            if f"{attribute}_mask" in module._buffers:
                path = f'model.get_submodule("{prefix}")' if prefix else "model"
                raise WiringError(
                    f"{name} is not a parameter: torch.nn.utils.prune computes it from {attribute}_orig and "
                    f"{attribute}_mask. Make its zeros permanent first (prune.remove({path}, {attribute!r})){remedy}."
                )
            others = ", ".join(n for n in module._parameters if n.startswith(f"{attribute}_"))
            raise WiringError(
                f"{name} is not a parameter: a hook computes it from {others or 'something else'} (weight norm, "
                "spectral norm or pruning of torch.nn.utils), so its edges have no weights of their own. Remove that "
                f"first (remove_weight_norm, remove_spectral_norm, prune.remove){remedy}."
            )


def _check_memory(model: nn.Module, chosen: list[Target]) -> None:
    """Raise if a weight to wire shares memory with another parameter: each would have edges of its own."""
    wanted = {id(target.weight): target.name for target in chosen}
    taken: list[tuple[int, int, str, int]] = []
    for name, parameter in model.named_parameters():
        start = _start(parameter)
        if start is not None:
            taken.append((start, start + _span(parameter), name, id(parameter)))
    taken.sort()
    last = taken[:1]  # the parameter whose memory ends last so far
    for here in taken[1:]:
        if here[0] < last[0][1] and (here[3] in wanted or last[0][3] in wanted):
            mine, other = (here, last[0]) if here[3] in wanted else (last[0], here)
            raise WiringError(
                f"{wanted[mine[3]]} shares its memory with {other[2]}, which is another parameter: zeros in one would "
                "change the other. Make both one parameter (a.weight = b.weight), which is wired once, or give each "
                f"its own memory (.clone()), or use skip={[wanted[mine[3]]]!r}."
            )
        last = [here] if here[1] > last[0][1] else last


def _start(parameter: Tensor) -> int | None:
    """The address of the first entry; None if there is no memory to share."""
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta or not parameter.numel():
        return None
    if parameter.layout != torch.strided:
        return None
    try:
        return parameter.data_ptr() or None
    except RuntimeError:  # a tensor subclass without memory of its own
        return None


def _span(parameter: Tensor) -> int:
    """Bytes from the first entry to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (last + 1) * parameter.element_size()


def _named(target: Target, include: Sequence[str], known: list[Target]) -> bool:
    """Whether a pattern names this weight of an unknown layer: it matches no weight of a known one."""
    return any(target.matches(p) and not any(t.matches(p) for t in known) for p in include)


def _no_match(argument: str, pattern: str, targets: list[Target]) -> WiringError:
    names = [name.removesuffix(".weight") for target in targets for name in target.names]  # all names of tied weights
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    nested = [n for n in names if n.endswith(f".{pattern}")]
    hint = f" Patterns match from the start of a name: '*.{pattern}' would match {nested[0]}." if nested else ""
    return WiringError(
        f"{argument}=[{brief(pattern)}] matches no weight of the model.{hint} Its weights: {shown or 'none'}."
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter of two or more dimensions and the edges of every graph, with the place where it is wired."""
    for prefix, module in model.named_modules():
        if inside_parametrization(prefix):
            continue
        dot = f"{prefix}." if prefix else ""
        for attribute, holder in parametrizations_of(module).items():
            weight = getattr(holder, "original", None)  # some parametrizations hold several
            if attribute in wired_by_default(module) or (isinstance(weight, nn.Parameter) and weight.dim() > 1):
                yield f"{dot}{attribute}", module, attribute, next(holder.parameters()) if weight is None else weight
        for attribute, parameter in module.named_parameters(recurse=False):
            if (
                isinstance(parameter, nn.parameter.UninitializedParameter)
                or parameter.dim() > 1
                or is_graph_weight(module, attribute)
            ):
                yield f"{dot}{attribute}", module, attribute, parameter
