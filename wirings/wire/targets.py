"""Which weights of a model can be wired, and which nodes their edges join."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wirings.budgets.budget import matches
from wirings.errors import WiringError
from wirings.rules.base import held

_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_MULTIPLYING = (nn.Linear, nn.Bilinear, *_CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


@dataclass(eq=False)
class Target:
    """One weight to be wired, with every place that uses it (more than one if it is tied)."""

    weight: nn.Parameter
    places: list[tuple[str, nn.Module, str]] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.places)

    @property
    def name(self) -> str:
        return self.names[0]

    def matches(self, pattern: str) -> bool:
        return any(matches(name, pattern) for name in self.names)


def find(model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]) -> list[Target]:
    """The weights to wire: those of known layers (or, with ``include``, the matching ones) less those to skip."""
    places: dict[int, Target] = {}  # every matrix of the model, tied ones once
    for name, module, attribute, weight in _matrices(model):
        target = places.setdefault(id(weight), Target(weight))
        target.places.append((name, module, attribute))
    everything = list(places.values())
    _check_none_computed(model, include, skip)
    known = [t for t in everything if any(attribute in wired_by_default(module) for _, module, attribute in t.places)]
    if not known and include is None:
        raise WiringError(
            f"{type(model).__name__} has no layer to wire: expected a Linear, convolution, recurrent or attention "
            "layer in it. Name other parameters of two or more dimensions with include=[…]; a model that was scripted "
            "or traced (torch.jit) is wired before that."
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
        raise WiringError(f"include= and skip= together leave no layer to wire, of {names}. Skip less.")
    _check_memory(model, chosen)
    return chosen


def _check_none_computed(model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]) -> None:
    """Raise if a layer's weight is no parameter but computed from others by a hook, as older weight norms do."""
    for prefix, module in model.named_modules():
        for attribute in wired_by_default(module):
            name = f"{prefix}.{attribute}" if prefix else attribute
            asked = include is None or any(matches(name, pattern) for pattern in include)
            if not isinstance(module.__dict__.get(attribute), Tensor) or not asked:
                continue
            if any(matches(name, pattern) for pattern in skip):
                continue
            others = ", ".join(n for n in module._parameters if n.startswith(f"{attribute}_"))
            remedy = f", or give skip=[{prefix!r}]" if prefix else ""
            raise WiringError(
                f"{name} is no parameter: a hook computes it from {others or 'something else'} (weight norm, spectral "
                "norm or pruning of torch.nn.utils), so its edges have no weights of their own. Remove that first "
                f"(remove_weight_norm, remove_spectral_norm, prune.remove){remedy}."
            )


def _check_memory(model: nn.Module, chosen: list[Target]) -> None:
    """Raise if a weight to wire lies in the same memory as another parameter: each would have edges of its own."""
    wanted = {id(target.weight): target.name for target in chosen}
    taken: list[tuple[int, int, str, int]] = []
    for name, parameter in model.named_parameters():
        start = _start(parameter)
        if start is not None:
            taken.append((start, start + _span(parameter), name, id(parameter)))
    taken.sort()
    last = taken[:1]  # the one that reaches furthest so far
    for here in taken[1:]:
        if here[0] < last[0][1] and (here[3] in wanted or last[0][3] in wanted):
            mine, other = (here, last[0]) if here[3] in wanted else (last[0], here)
            raise WiringError(
                f"{wanted[mine[3]]} shares its memory with {other[2]}, which is another parameter: what one makes zero "
                "the other would lose. Let both be one parameter (a.weight = b.weight), which is wired once, or give "
                f"each memory of its own (.clone()), or skip={[wanted[mine[3]]]!r}."
            )
        last = [here] if here[1] > last[0][1] else last


def _start(parameter: Tensor) -> int | None:
    """The address of the first entry; None where there is no memory to share."""
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta or not parameter.numel():
        return None
    try:
        return parameter.data_ptr() or None
    except RuntimeError:  # a tensor of another kind, which has no memory of its own
        return None


def _span(parameter: Tensor) -> int:
    """Bytes from the first entry to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (last + 1) * parameter.element_size()


def _named(target: Target, include: Sequence[str], known: list[Target]) -> bool:
    """Whether a pattern asks for this weight although it is of no known layer: it matches no known one."""
    return any(target.matches(p) and not any(t.matches(p) for t in known) for p in include)


def _no_match(argument: str, pattern: str, targets: list[Target]) -> WiringError:
    names = [target.name.removesuffix(".weight") for target in targets]
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    nested = [n for n in names if n.endswith(f".{pattern}")]
    hint = f" Patterns match from the start of a name: '*.{pattern}' would match {nested[0]}." if nested else ""
    return WiringError(
        f"{argument}=[{pattern!r}] matches no weight of the model.{hint} Its weights: {shown or 'none'}."
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter of two or more dimensions, and every graph's edges, as far as it has a place to be wired."""
    for prefix, module in model.named_modules():
        if _inside_parametrization(prefix):
            continue
        dot = f"{prefix}." if prefix else ""
        for attribute, holder in held(module).items():
            weight = getattr(holder, "original", None)  # some parametrizations hold several
            if attribute in wired_by_default(module) or (isinstance(weight, nn.Parameter) and weight.dim() > 1):
                yield f"{dot}{attribute}", module, attribute, next(holder.parameters()) if weight is None else weight
        for attribute, parameter in module.named_parameters(recurse=False):
            if (
                isinstance(parameter, nn.parameter.UninitializedParameter)
                or parameter.dim() > 1
                or _is_graph(module, attribute)
            ):
                yield f"{dot}{attribute}", module, attribute, parameter


def _inside_parametrization(prefix: str) -> bool:
    return prefix.endswith("parametrizations") or ".parametrizations." in f".{prefix}"


def wired_by_default(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights that `wire_` takes from a module of this kind; biases and norms stay dense."""
    if isinstance(module, (nn.Linear, nn.Bilinear, *_CONVOLUTIONS)) or is_turned(module):
        return ("weight",)
    if isinstance(module, nn.RNNBase):
        return tuple(name for name in module._flat_weights_names if name.startswith("weight_"))
    if isinstance(module, nn.RNNCellBase):
        return ("weight_ih", "weight_hh")
    if isinstance(module, nn.MultiheadAttention):
        return _ATTENTION
    return getattr(module, "wired_weights", ())  # a neural graph names its own


def is_turned(module: nn.Module) -> bool:
    """Whether this is Hugging Face's Conv1D: a linear layer whose weight is (in, out), that of GPT-2 and its kin."""
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def multiplies(module: nn.Module) -> bool:
    """Whether a layer, a graph apart, multiplies by weights of two or more dimensions."""
    return isinstance(module, _MULTIPLYING) or is_turned(module)


def sends_first(module: nn.Module) -> bool:
    """Whether the first dimension of a layer's weight is of the nodes that send, not of those that receive."""
    return isinstance(module, _TRANSPOSED) or is_turned(module)


def edge_shape(module: nn.Module, attribute: str, weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight as a layer of edges: its own, or what a neural graph says of its vector of edges."""
    return module.edge_shape if _is_graph(module, attribute) else tuple(weight.shape)  # type: ignore[return-value]


def joined(module: nn.Module, attribute: str, real: Tensor) -> tuple[Tensor, Tensor]:
    """Of the nodes that may receive, which do by ``real`` edges; of those that may send, which do: boolean vectors."""
    if _is_graph(module, attribute):
        return module.joined(real)  # type: ignore[operator]
    nodes = node_matrix(module, attribute, real)
    return nodes.any(1), nodes.any(0)


def receivers(module: nn.Module, attribute: str, weight: Tensor) -> Tensor:
    """The node that each edge of a weight leads to: int32 numbers from 0, of a shape that broadcasts to the weight's.

    Nodes are those of `joined`, but a graph's go by their numbers in the whole graph.
    """
    if _is_graph(module, attribute):
        return torch.cat([torch.from_numpy(tile.edge_list()[0]) for tile in module.tiles]).int()  # type: ignore[union-attr]
    if is_turned(module):
        return torch.arange(weight.shape[1], dtype=torch.int32).view(1, -1)
    nodes = torch.arange(weight.shape[0], dtype=torch.int32).view(-1, *[1] * (weight.dim() - 1))
    if isinstance(module, _TRANSPOSED):  # (in, out / groups, …): the second dimension receives, in its group
        within = torch.arange(weight.shape[1], dtype=torch.int32).view(1, -1, *[1] * (weight.dim() - 2))
        return nodes // (weight.shape[0] // module.groups) * weight.shape[1] + within
    units = _units(module, attribute)
    return nodes if units is None else nodes % units


def _units(module: nn.Module, attribute: str) -> int | None:
    """The units of a recurrent layer, whose gates' rows follow one another: all units' first gate, then the second."""
    recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not attribute.startswith("weight_hr")
    return module.hidden_size if recurrent else None  # type: ignore[return-value]


def _is_graph(module: nn.Module, attribute: str) -> bool:
    return attribute in getattr(module, "wired_weights", ())


def node_matrix(module: nn.Module, attribute: str, real: Tensor) -> Tensor:
    """Which nodes are joined: a boolean matrix (nodes that receive, nodes that send) from a wiring.

    A convolution's nodes are channels; a recurrent layer's are its units (the gates of a unit are one node).
    """
    if isinstance(module, _CONVOLUTIONS):
        channels = real.flatten(2).any(2)
        groups = module.groups
        if isinstance(module, _TRANSPOSED):  # (in, out / groups): the first dimension sends
            channels = torch.cat([part.t() for part in channels.chunk(groups)])
        if groups == 1:
            return channels
        return torch.block_diag(*channels.to(torch.uint8).chunk(groups)).bool()
    if is_turned(module):
        return real.t()
    units = _units(module, attribute)
    return real.flatten(1) if units is None else real.view(-1, units, real.shape[1]).any(0)
