"""Which channels are alive in the whole network: those on a path from its input to its output.

A copy of the model is run once, with a random positive number for every real weight, zero for all others and for
biases, and without elementwise functions. A channel that then carries only zeros is constant, whatever the input; one
whose gradient is zero has no effect on the output. This follows whatever PyTorch computes: additions, concatenations,
pooling, shuffled channels. Graphs are followed along their edges.

Whatever cannot be decided counts as alive. The inside of recurrent and attention layers is not traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as trees

from wirings.budgets.mult_adds import Call
from wirings.errors import WiringError
from wirings.graph import Graph
from wirings.graph.work import channel_dims
from wirings.profiling.graphs import GraphEdges
from wirings.utils.example_input import CallArguments, tensors_in
from wirings.utils.layers import CONVOLUTIONS
from wirings.wire.parametrization import detach

_ZERO_AT_ZERO = {
    "relu", "relu6", "leaky_relu", "rrelu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish",
    "hardtanh", "tanh", "softsign", "tanhshrink", "hardshrink", "softshrink", "clamp", "clip", "abs", "round", "floor",
    "ceil", "trunc", "sign", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "batch_norm", "instance_norm",
}  # fmt: skip
_NOT_ZERO_AT_ZERO = {"sigmoid", "hardsigmoid", "softplus", "logsigmoid", "exp", "softmax", "log_softmax", "softmin"}


@dataclass(frozen=True)
class ChannelLiveness:
    """Which channels are alive in one call of a layer or graph. Arrays are boolean vectors."""

    fed: np.ndarray
    """The input channels that depend on the network's input."""
    wanted: np.ndarray
    """The output channels that affect the network's output."""
    made: np.ndarray
    """The output channels that depend on the network's input."""


CallLiveness = dict[str, list[ChannelLiveness]]
"""By the name of the module, the liveness in each of its calls."""


def follows(module: nn.Module) -> bool:
    """Whether channels are traced through this module itself."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, _NormBase, Graph))


def follow(
    model: nn.Module,
    arguments: CallArguments,
    real: Mapping[str, Tensor],
    edges_of: Mapping[str, GraphEdges],
    calls: Mapping[str, list[Call]],
    recursive: bool,
) -> CallLiveness:
    """Find out which channels are alive in each call of the layers that are traced.

    Args:
        model: the model, which is copied.
        arguments: what it is called with.
        real: the real entries of wired weights, by name.
        edges_of: the real edges of graphs, by name.
        calls: the calls of each module that were recorded.
        recursive: whether to trace through the whole network, or only next to graphs, as the paper counts: a layer
            before a graph makes the channels that an edge leaves, and a layer after it reads those that an edge leads
            to.

    Returns:
        The liveness in each call, by the name of the module.
    """
    random = torch.Generator().manual_seed(0)
    run = copy.deepcopy(model).cpu().float().eval()
    detach(run)
    probes: dict[str, list[_Seen]] = {}
    for name, module in list(run.named_modules()):
        if isinstance(module, Graph):
            stub = _Stub(edges_of[name], calls.get(name, []), recursive, random)
            run = _replaced(run, module, stub)
            probes[name] = stub.seen
        elif follows(module):
            probes[name] = _watch(module, recursive, random)
    _fill(run, real, random)
    with _Structure(), torch.enable_grad():
        args, kwargs = trees.tree_map(lambda x: _as_input(x, random), tuple(arguments))
        ends = [x for x in tensors_in(run(*args, **kwargs)) if x.requires_grad]
        if not ends:
            raise WiringError("no tensor in its output depends on its input")
        sum((x * _positive(x, random)).sum() for x in ends).backward()  # type: ignore[union-attr]
    return {name: [seen.alive() for seen in calls] for name, calls in probes.items()}


@torch.no_grad()
def _fill(run: nn.Module, real: Mapping[str, Tensor], random: torch.Generator) -> None:
    """Set real weights to positive numbers, all others and biases to zero. Only activations have gradients."""
    for name, parameter in run.named_parameters():
        mask = real.get(name)
        mask = parameter != 0 if mask is None else mask.cpu()
        parameter.copy_(mask * _positive(parameter, random) * ("bias" not in name.rpartition(".")[2]))
        parameter.requires_grad_(False)
    for module in run.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):  # where activations begin if the input is token ids
            module.weight.requires_grad_()


def _positive(like: Tensor, random: torch.Generator) -> Tensor:
    """Random positive numbers, whose sums do not cancel."""
    return torch.rand(like.shape, generator=random) + 0.5


def _as_input(x: Any, random: torch.Generator) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return _positive(x, random).requires_grad_()
    return x.cpu() if isinstance(x, Tensor) else x


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Replace a module by another wherever it occurs; return the model."""
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
    return new if model is old else model


class _Structure(TorchFunctionMode):
    """Skips elementwise functions and norms of single channels, and turns products of activations into sums."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name in _ZERO_AT_ZERO and args:
            return args[0]
        if name in _NOT_ZERO_AT_ZERO and args:
            return args[0] + 1
        if name in ("mul", "multiply", "rmul", "imul") and all(isinstance(x, Tensor) and x.requires_grad for x in args):
            # One factor may be a nonzero constant that no input reaches: the other one is alive nevertheless.
            return torch.add(*args)
        return func(*args, **(kwargs or {}))


class _Seen:
    """What is recorded of one call: its input and output channels, and later the gradient of its output."""

    wanted: np.ndarray | None = None

    def __init__(self, fed: np.ndarray, made: np.ndarray, out: Tensor | None, dim: int) -> None:
        self.fed, self.made, self.out, self.dim = fed, made, out, dim

    def alive(self) -> ChannelLiveness:
        wanted = self.wanted
        if wanted is None and self.out is not None and self.out.grad is not None:
            wanted = _channels(self.out.grad, self.dim)
        # Without a gradient, the path to the output is hidden (detach, no_grad): then everything may matter.
        return ChannelLiveness(self.fed, np.ones_like(self.made) if wanted is None else wanted, self.made)


def _channels(x: Tensor, dim: int) -> np.ndarray:
    """The channels with any nonzero entry."""
    return (x.detach().movedim(dim, 0).flatten(1) != 0).any(1).numpy()


def _watch(module: nn.Module, recursive: bool, random: torch.Generator) -> list[_Seen]:
    """Record what a layer's channels carry; the list is filled whenever the layer is called."""
    seen, received = list[_Seen](), list[np.ndarray]()

    def channel_dim(x: Tensor) -> int:
        if isinstance(module, _NormBase):
            return min(1, x.dim() - 1)
        return x.dim() - 1 - (len(module.kernel_size) if isinstance(module, CONVOLUTIONS) else 0)

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
        received.append(_channels(inputs[0], channel_dim(inputs[0])))
        if recursive or isinstance(module, _NormBase):
            return None
        return (_Level.apply(inputs[0], random, False), *inputs[1:])

    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        made = _channels(out, channel_dim(out))
        seen.append(_Seen(received.pop(), made, out if out.requires_grad else None, channel_dim(out)))
        if out.requires_grad:
            out.retain_grad()
        return _Level.apply(out, random, True)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return seen


class _Level(torch.autograd.Function):
    """Replace nonzero numbers by numbers around one, forwards and backwards, so that none underflows in a deep network.

    Without ``keep``, replace zeros as well: what lies behind is then not traced.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, random: torch.Generator, keep: bool) -> Tensor:
        ctx.random, ctx.keep = random, keep
        return _positive(x, random) * (x != 0) if keep else _positive(x, random)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        level = _positive(grad, ctx.random)
        return level * (grad != 0) if ctx.keep else level, None, None


class _Stub(nn.Module):
    """Stands in for a graph: its output is nonzero for the output nodes that are reached."""

    def __init__(self, edges: GraphEdges, calls: list[Call], recursive: bool, random: torch.Generator) -> None:
        super().__init__()
        self.edges, self.calls, self.recursive, self.random = edges, calls, recursive, random
        self.seen: list[_Seen] = []

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        edges, call = self.edges, self.calls[len(self.seen)]
        graph, (into, out) = edges.graph, channel_dims(edges.graph)
        fed, everything = _channels(x, into), np.ones(len(graph.outputs), bool)
        reached = edges.liveness(call, fed, everything).fed if self.recursive else edges.receives
        made = reached[graph.outputs]
        seen = _Seen(fed, made, None, out)
        self.seen.append(seen)

        def backward(grad: Tensor) -> np.ndarray:
            wanted = seen.wanted = _channels(grad, out)
            used = edges.liveness(call, fed, wanted).used if self.recursive else edges.sends
            return np.asarray(used[graph.inputs])

        return _Through.apply(x, (call.outputs[0], into, out, made), backward, self.random)


class _Through(torch.autograd.Function):
    """A graph's output for the nodes that are reached, and its input's gradient for the nodes that matter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, about: Any, backward: Callable[[Tensor], np.ndarray], random: torch.Generator
    ) -> Tensor:
        shape, into, out, made = about
        ctx.shape, ctx.into, ctx.inner, ctx.random = x.shape, into, backward, random
        return _along(torch.ones(shape), made, out) * (torch.rand(shape, generator=random) + 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _along(torch.ones(ctx.shape), ctx.inner(grad), ctx.into), None, None, None


def _along(x: Tensor, mask: np.ndarray, dim: int) -> Tensor:
    return x * torch.from_numpy(np.asarray(mask)).view(-1, *[1] * (x.dim() - 1 - dim))
