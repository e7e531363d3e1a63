"""Facts about PyTorch's layers: which weights they have, which of them multiply, and which nodes an edge joins.

Everything here is about modules as PyTorch defines them, and what a neural graph declares about itself
(``wired_weights``); not about whether a weight is wired, or by which rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""The projection weights of `torch.nn.MultiheadAttention`."""
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
    return getattr(module, "wired_weights", ())


def multiplies(module: nn.Module) -> bool:
    """Whether a layer (not a graph) multiplies its input by weights of two or more dimensions."""
    return isinstance(module, _MULTIPLYING) or is_transposed_linear(module)


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
    nodes = torch.arange(weight.shape[0], dtype=torch.int32).view(-1, *[1] * (weight.dim() - 1))
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):  # (in, out / groups, …): dimension 1 is the output, in its group
        within = torch.arange(weight.shape[1], dtype=torch.int32).view(1, -1, *[1] * (weight.dim() - 2))
        return nodes // (weight.shape[0] // module.groups) * weight.shape[1] + within
    units = _recurrent_units(module, attribute)
    return nodes if units is None else nodes % units


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
    lists: Any = getattr(module, "parametrizations", None) if parametrize.is_parametrized(module) else None
    return {} if lists is None else dict(lists.items())


def original_weight(module: nn.Module, attribute: str) -> nn.Parameter:
    """The parameter behind an attribute: that of its parametrization if there is one (the first of several)."""
    holder = parametrizations_of(module).get(attribute)
    if holder is None:
        return getattr(module, attribute)
    original = getattr(holder, "original", None)
    return next(holder.parameters()) if original is None else original


def inside_parametrization(name: str) -> bool:
    """Whether a module of this name (from ``named_modules``) is part of another module's parametrization."""
    return name.endswith("parametrizations") or ".parametrizations." in f".{name}"
