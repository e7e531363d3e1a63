"""Facts about PyTorch's layers: which weights they have, which of them multiply, and which nodes an edge joins.

Everything here is about modules as PyTorch defines them, and what a neural graph declares about itself
(``wired_weights``); not about whether a weight is wired, or by which rule.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wirings.errors import WiringError

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""The projection weights of `torch.nn.MultiheadAttention`."""
EXPERT_WEIGHTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "v1", "weight")
"""The names that stacks of experts' matrices have in transformers."""
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED_CONVOLUTIONS)
"""All convolution layers, transposed ones included."""
_MULTIPLYING = (nn.Linear, nn.Bilinear, *CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is Hugging Face's ``Conv1D`` (GPT-2): a linear layer whose weight has shape (in, out)."""
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def is_graph_weight(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute of a module is the vector of edges of a neural graph."""
    return attribute in getattr(module, "wired_weights", ())


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a mixture of experts that hold a matrix for every expert, stacked in dimension 0.

    Such a module is known by its class, whose name contains ``Experts`` as in transformers (``MixtralExperts``), and
    such a parameter by its name, or by another one that is a stack of as many matrices. Others are no experts, such as
    a position embedding of shape (1, tokens, width).
    """
    if not any("Experts" in cls.__name__ for cls in type(module).__mro__):
        return ()
    own: dict[str, Tensor | None] = dict(module._parameters)
    own |= {name: getattr(holder, "original", None) for name, holder in parametrizations_of(module).items()}
    stacks = {name: p for name, p in own.items() if p is not None and "bias" not in name and _is_stack(p)}
    numbers = Counter(len(p) for p in stacks.values() if len(p) > 1)
    return tuple(name for name, p in stacks.items() if name in EXPERT_WEIGHTS or numbers[len(p)] > 1)


def _is_stack(parameter: Tensor) -> bool:
    lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
    return not lazy and parameter.dim() == 3 and min(parameter.shape[1:]) > 1


AXES = {2: ("out in", "in out"), 3: ("experts out in", "experts in out", "out in kernel")}
"""What the dimensions of a parameter of an unknown layer can be, by their number; the first is the default."""


def axes_of(module: nn.Module, attribute: str, weight: Tensor) -> tuple[str, ...] | None:
    """What the dimensions of a parameter are, such as ``("experts", "out", "in")``; None for layers of PyTorch.

    What `wirings.wire_` was told comes first, then what is known about experts.
    """
    given: tuple[str, ...] | None = None
    if (holder := parametrizations_of(module).get(attribute)) is not None:
        given = getattr(holder[0], "axes", None)
    if given is not None or attribute in expert_weights(module):
        return given or (
            "experts",
            *(("in", "out") if _experts_send_first(module, attribute, weight) else ("out", "in")),
        )
    known = wired_by_default(module)
    return None if attribute in known or weight.dim() not in AXES else tuple(AXES[weight.dim()][0].split())


def _experts_send_first(module: nn.Module, attribute: str, weight: Tensor) -> bool:
    """Whether the matrices of experts have shape (in, out).

    Modules of transformers say so (``is_transposed``) or follow from the sizes: the last matrix of an expert leads back
    to the hidden size, and all others start from it.
    """
    told = getattr(module, "is_transposed", None)
    if isinstance(told, bool):
        return told
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    rows, columns = weight.shape[1:]
    return rows != columns and hidden == (columns if "down" in attribute else rows)


def wired_by_default(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights that `wirings.wire_` takes from a module; biases, norms and embeddings stay dense."""
    if isinstance(module, (nn.Linear, nn.Bilinear, *CONVOLUTIONS)) or is_transposed_linear(module):
        return ("weight",)
    if isinstance(module, nn.RNNBase):
        return tuple(name for name in module._flat_weights_names if name.startswith("weight_"))
    if isinstance(module, nn.RNNCellBase):
        return ("weight_ih", "weight_hh")
    if isinstance(module, nn.MultiheadAttention):
        return ATTENTION_WEIGHTS
    return expert_weights(module) or getattr(module, "wired_weights", ())


def multiplies(module: nn.Module) -> bool:
    """Whether a layer (not a graph) multiplies its input by weights of two or more dimensions."""
    return isinstance(module, _MULTIPLYING) or is_transposed_linear(module) or bool(expert_weights(module))


def sends_first(module: nn.Module) -> bool:
    """Whether dimension 0 of a layer's weight indexes its inputs; in most layers it indexes the outputs."""
    return isinstance(module, TRANSPOSED_CONVOLUTIONS) or is_transposed_linear(module)


def edge_shape(module: nn.Module, attribute: str, weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight as a layer of edges: its own, or the one a neural graph declares for its vector."""
    return module.edge_shape if is_graph_weight(module, attribute) else tuple(weight.shape)  # type: ignore[return-value]


def joined(module: nn.Module, attribute: str, real: Tensor) -> tuple[Tensor, Tensor]:
    """Which nodes have an incoming, and which an outgoing real edge.

    Args:
        module: the layer that holds the weight.
        attribute: the weight's name in the module.
        real: the wiring, a boolean mask of the weight's shape.

    Returns:
        Two boolean vectors, over the nodes that may receive and over those that may send.
    """
    if is_graph_weight(module, attribute):
        return module.joined(real)  # type: ignore[operator]
    if (axes := axes_of(module, attribute, real)) is not None:  # the nodes of every expert are its own
        kernels = tuple(dim for dim, axis in enumerate(axes) if axis == "kernel")
        pairs, names = (real.any(kernels) if kernels else real), [axis for axis in axes if axis != "kernel"]
        return pairs.any(names.index("in")).flatten(), pairs.any(names.index("out")).flatten()
    nodes = node_matrix(module, attribute, real)
    return nodes.any(1), nodes.any(0)


def receivers(module: nn.Module, attribute: str, weight: Tensor) -> Tensor:
    """The node that each edge of a weight leads to: int32 numbers from 0, of a shape that broadcasts to the weight's.

    Nodes are numbered as in `joined`, except those of a graph, which keep their numbers in the whole graph.
    """
    if is_graph_weight(module, attribute):
        return torch.cat([torch.from_numpy(tile.edge_list()[0]) for tile in module.tiles]).int()  # type: ignore[union-attr]
    if is_transposed_linear(module):
        return torch.arange(weight.shape[1], dtype=torch.int32).view(1, -1)
    if (axes := axes_of(module, attribute, weight)) is not None:  # experts come first, so that each has its own range
        shape = [size if axis in ("experts", "out") else 1 for size, axis in zip(weight.shape, axes, strict=True)]
        return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    nodes = torch.arange(weight.shape[0], dtype=torch.int32).view(-1, *[1] * (weight.dim() - 1))
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):  # (in, out / groups, …): dimension 1 is the output, in its group
        within = torch.arange(weight.shape[1], dtype=torch.int32).view(1, -1, *[1] * (weight.dim() - 2))
        return nodes // (weight.shape[0] // module.groups) * weight.shape[1] + within
    units = _recurrent_units(module, attribute)
    return nodes if units is None else nodes % units


def senders(module: nn.Module) -> Tensor:
    """The node that each edge of a neural graph leaves: int32 numbers of the graph's nodes."""
    return torch.cat([torch.from_numpy(tile.edge_list()[1]) for tile in module.tiles]).int()  # type: ignore[union-attr]


def node_matrix(module: nn.Module, attribute: str, real: Tensor) -> Tensor:
    """Which nodes of a layer (not a graph) are joined: a boolean matrix of shape (receiving nodes, sending nodes).

    The nodes of a convolution are its channels; those of a recurrent layer are its units, all gates of a unit together.
    """
    if isinstance(module, CONVOLUTIONS):
        channels = real.flatten(2).any(2)
        groups = module.groups
        if isinstance(module, TRANSPOSED_CONVOLUTIONS):  # (in, out / groups): dimension 0 is the input
            channels = torch.cat([part.t() for part in channels.chunk(groups)])
        if groups == 1:
            return channels
        return torch.block_diag(*channels.to(torch.uint8).chunk(groups)).bool()
    if is_transposed_linear(module):
        return real.t()
    units = _recurrent_units(module, attribute)
    return real.flatten(1) if units is None else real.view(-1, units, real.shape[1]).any(0)


def _recurrent_units(module: nn.Module, attribute: str) -> int | None:
    """The number of units of a recurrent layer, whose rows are ordered by gate, then by unit; None for other layers."""
    recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not attribute.startswith("weight_hr")
    return module.hidden_size if recurrent else None  # type: ignore[return-value]


def parametrizations_of(module: nn.Module) -> dict[str, Any]:
    """The parametrizations of a module (`torch.nn.utils.parametrize`), by attribute; empty if it has none."""
    if "parametrizations" not in module._modules:  # without PyTorch's checks, which take longer: steps ask all modules
        return {}
    lists: Any = module._modules["parametrizations"]
    return dict(lists._modules) if isinstance(lists, nn.ModuleDict) else {}


def original_weight(module: nn.Module, attribute: str) -> nn.Parameter:
    """The parameter behind an attribute: that of its parametrization if there is one (the first of several)."""
    holder = parametrizations_of(module).get(attribute)
    if holder is None:
        return getattr(module, attribute)
    original = holder._parameters.get("original")
    if original is None:
        original = getattr(holder, "original", None)
    return next(holder.parameters()) if original is None else original


def inside_parametrization(name: str) -> bool:
    """Whether a module of this name (from ``named_modules``) is part of another module's parametrization."""
    return name.endswith("parametrizations") or ".parametrizations." in f".{name}"


def in_adapter(name: str) -> bool:
    """Whether a weight of this name belongs to a LoRA adapter, which is small already and is trained as it is.

    >>> in_adapter("h.0.q_proj.lora_A.default.weight"), in_adapter("h.0.q_proj.base_layer.weight")
    (True, False)
    """
    return any(part.lower().startswith("lora_") for part in name.split("."))


def check_module(where: str, model: Any) -> None:
    """Raise, in the name of ``where``, unless ``model`` is a module whose weights can be replaced."""
    if not isinstance(model, nn.Module):
        raise WiringError(f"{where} expects a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise WiringError(
            f"{where} cannot change a scripted module: wire a model before scripting or tracing it (torch.jit)."
        )


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values: one on the meta device and a parameter of a lazy module have none."""
    return not is_lazy(x) and not x.is_meta
