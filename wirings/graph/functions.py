"""The functions that node recipes make: see `wirings.graph.nodes`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings.errors import WiringError, unknown

if TYPE_CHECKING:
    from wirings.graph.nodes import ActivationNode, ConvNode

ALL = slice(None)
PARTS = ("norm", "activation", "conv")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
}
_ZERO_AT_ZERO = ("relu", "tanh", "gelu", "silu")
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRITON = importlib.util.find_spec("triton") is not None
BATCH_MOMENTUM = 0.1  # PyTorch's own
MAP_DIMS = tuple(_CONVOLUTIONS)


class NodeFunction(nn.Module):
    """The functions of a number of nodes. Override `before`, `after` or both; tensors are (batch, nodes, …)."""

    some_nodes: bool = False
    """Whether `before`, `after` and `between` take ``nodes=``, a slice, and then see these nodes alone."""
    quiet: bool = False
    """Whether a node whose state is zero always sends zero, so that a graph may leave it out."""

    def before(self, state: Tensor, time: float) -> Tensor:
        """What the nodes send."""
        return state

    def after(self, received: Tensor, time: float) -> Tensor:
        """The nodes' states."""
        return received

    def between(self, received: Tensor, time: float, next_time: float) -> Tensor:
        """From what the nodes receive to what they send next, where nobody asks for their states."""
        return self.before(self.after(received, time), next_time)

    def on_rows(self, part: str, rows: Tensor, *times: float, **nodes: slice) -> Tensor:
        """`before`, `after` or `between` on states as graphs keep them in memory, (nodes, batch, …)."""
        result: Tensor = getattr(self, part)(rows.transpose(0, 1), *times, **nodes)
        return result.transpose(0, 1)


class After(NodeFunction):
    """Any module, as the part after the edges."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def after(self, received: Tensor, time: float) -> Tensor:
        return self.module(received)


class Plain(NodeFunction):
    """See `PlainNode`."""

    some_nodes = True
    quiet = True

    def before(self, state: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return state

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return received

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return received


class Activations(Plain):
    """See `ActivationNode`."""

    def __init__(self, recipe: ActivationNode, nodes: int) -> None:
        super().__init__()
        self.activation = get_activation(recipe.activation)
        self.bias = nn.Parameter(torch.zeros(nodes)) if recipe.bias else None

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        if self.bias is not None:
            received = received + _by_node(self.bias[nodes], received)
        return received if self.activation is None else self.activation(received)

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return self.after(received, time, nodes)


class Convolutions(NodeFunction):
    """See `ConvNode`. What stands before and after the edges is one chain where nobody asks for the states between."""

    def __init__(self, recipe: ConvNode, nodes: int, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__()
        self.recipe, self.activation = recipe, get_activation(recipe.activation)
        parts = {*before, *after}
        self._before = tuple(p for p in before if not (p == "norm" and recipe.norm is None))
        self._after = tuple(p for p in after if not (p == "norm" and recipe.norm is None))
        self._parts = {"before": self._before, "after": self._after, "between": self._after + self._before}
        # Whether our own kernels can do these parts at once, where the states are on a GPU and small.
        usual = (
            recipe.norm != "batch" and recipe.activation in ("relu", None) and (recipe.kernel, recipe.stride) == (3, 1)
        )
        self._at_once = {p: usual and bool(p) and p == tuple(x for x in PARTS if x in p) for p in self._parts.values()}
        self._batch_at_once = (
            recipe.norm == "batch"
            and recipe.activation in ("relu", None)
            and (recipe.kernel, recipe.dims, recipe.pad) == (3, 2, False)
        )
        self.some_nodes = recipe.norm != "batch"  # or its running statistics would miss nodes
        self.quiet = "norm" not in self._before and (
            "activation" not in self._before or recipe.activation is None or recipe.activation in _ZERO_AT_ZERO
        )
        self.norm_weight = self.norm_bias = self.kernel = None
        if recipe.norm is not None and "norm" in parts:
            self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(nodes)), nn.Parameter(torch.zeros(nodes))
            if recipe.norm == "batch":
                self.register_buffer("running_mean", torch.zeros(nodes))
                self.register_buffer("running_var", torch.ones(nodes))
        if "conv" in parts:
            size = recipe.kernel**recipe.dims
            self.kernel = nn.Parameter(torch.empty(nodes, 1, *[recipe.kernel] * recipe.dims))
            nn.init.uniform_(self.kernel, -(size**-0.5), size**-0.5)  # PyTorch's own for such a convolution

    def before(self, state: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._chain(self._before, state, nodes)

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._chain(self._after, received, nodes)

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return self._chain(self._after + self._before, received, nodes)

    def on_rows(self, part: str, rows: Tensor, *times: float, **nodes: slice) -> Tensor:
        parts = self._parts[part]
        if self._batch_at_once and (kernels := self._batch_kernels(parts, rows)) is not None:
            return self._batch_in_one(kernels, parts, rows)
        kernels = self._kernels(parts, rows)
        if kernels is None:
            return super().on_rows(part, rows, *times, **nodes)
        self._check(parts, rows)
        return self._in_one(kernels, parts, rows, nodes.get("nodes", ALL))

    def _check(self, parts: tuple[str, ...], x: Tensor) -> None:
        if parts and x.dim() != 2 + self.recipe.dims:
            raise WiringError(
                f"ConvNode(dims={self.recipe.dims}) takes maps of {self.recipe.dims} dimensions, (batch, nodes, …), "
                f"but a tensor of shape {tuple(x.shape)} came. Give dims=, or scalars an ActivationNode."
            )
        if "norm" in parts and self.recipe.norm == "instance" and x.shape[2:].numel() == 1:
            raise WiringError(
                "ConvNode: an instance norm takes maps of more than one pixel, but maps of "
                f'{"×".join(map(str, x.shape[2:]))} came. Take norm="batch" or None, or larger maps.'
            )
        if "norm" in parts and self.recipe.norm == "batch" and self.training and x.shape[0] * x.shape[2:].numel() == 1:
            raise WiringError(
                "ConvNode: a batch norm takes more than one value a node in training, but one image of one pixel came. "
                "Take larger batches or maps."
            )

    def _chain(self, parts: tuple[str, ...], x: Tensor, nodes: slice) -> Tensor:
        self._check(parts, x)
        for part in parts:
            if part == "norm":
                x = self._norm(x, nodes)
            elif part == "activation":
                x = x if self.activation is None else self.activation(x)
            else:
                x = self._convolve(x, nodes)
        return x

    def _kernels(self, parts: tuple[str, ...], x: Tensor) -> Any:
        """Our own kernels, if they can do all of these parts at once; else None."""
        kernels = _node_kernels() if x.is_cuda and self._at_once[parts] else None
        return kernels if kernels is not None and kernels.fits(x) else None

    def _in_one(self, kernels: Any, parts: tuple[str, ...], x: Tensor, nodes: slice) -> Tensor:
        norm, conv = "norm" in parts, "conv" in parts
        gamma: Tensor | None = self.norm_weight if norm else None
        beta: Tensor | None = self.norm_bias if norm else None
        kernel: Tensor | None = self.kernel if conv else None
        if nodes != ALL:
            gamma, beta, kernel = (p if p is None else p[nodes] for p in (gamma, beta, kernel))
        lower = conv and torch.is_autocast_enabled("cuda")  # as autocast has it: a convolution lowers, a norm does not
        dtype = torch.get_autocast_dtype("cuda") if lower else x.dtype
        relu = "activation" in parts and self.activation is not None
        return kernels.node_map(x, gamma, beta, kernel, self.recipe.eps, relu, dtype)

    def _batch_kernels(self, parts: tuple[str, ...], x: Tensor) -> Any:
        """Our own kernels for nodes with a batch norm, if they can do all of these parts at once; else None."""
        whole = x.is_cuda and parts in (PARTS, ("norm", "conv")) and x.numel() > 0
        kernels = _batch_node_kernels() if whole else None
        assert self.kernel is not None or kernels is None
        return kernels if kernels is not None and kernels.fits(x, self.recipe.stride) else None

    def _batch_in_one(self, kernels: Any, parts: tuple[str, ...], x: Tensor) -> Tensor:
        self._check(parts, x.transpose(0, 1))
        lower = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if lower else x.dtype
        relu = "activation" in parts and self.activation is not None
        mean, var = (None, None) if self.training else (self.running_mean, self.running_var)
        kernel = (self.norm_weight, self.norm_bias, mean, var, self.kernel)
        out, mean, var = kernels.batch_map(x, *kernel, self.recipe.eps, relu, self.recipe.stride, dtype)
        if self.training:
            count = x[0].numel()
            with torch.no_grad():
                self.running_mean.lerp_(mean, BATCH_MOMENTUM)  # type: ignore[operator]
                self.running_var.lerp_(var * (count / (count - 1)), BATCH_MOMENTUM)  # type: ignore[operator]
        return out

    def _norm(self, x: Tensor, nodes: slice) -> Tensor:
        assert self.norm_weight is not None
        assert self.norm_bias is not None
        weight, bias = self.norm_weight[nodes], self.norm_bias[nodes]
        if torch.promote_types(weight.dtype, x.dtype) != weight.dtype:  # norms take wider parameters, no narrower ones
            weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        if x.shape[0] == 0:
            return x  # PyTorch's norms take no empty batch
        if self.recipe.norm == "batch":
            mean, var = self.running_mean[nodes], self.running_var[nodes]  # type: ignore[index]
            return F.batch_norm(x, mean, var, weight, bias, self.training, BATCH_MOMENTUM, self.recipe.eps)
        return F.instance_norm(x, weight=weight, bias=bias, eps=self.recipe.eps)

    def _convolve(self, x: Tensor, nodes: slice) -> Tensor:
        assert self.kernel is not None
        recipe, kernel = self.recipe, self.kernel[nodes]
        convolution = _CONVOLUTIONS[recipe.dims]
        out = convolution(x, kernel.to(x.dtype), stride=recipe.stride, padding=recipe.kernel // 2, groups=x.shape[1])
        if not recipe.pad:
            return out
        missing = [big - small for big, small in zip(x.shape[:1:-1], out.shape[:1:-1], strict=True)]
        return F.pad(out, [side for m in missing for side in (m // 2, m - m // 2)])


class Grouped(NodeFunction):
    """See `Groups`."""

    def __init__(self, counts: Sequence[int], functions: Sequence[NodeFunction]) -> None:
        super().__init__()
        self.counts, self.functions = list(counts), nn.ModuleList(functions)
        self.quiet = all(f.quiet for f in functions)
        self.some_nodes = all(f.some_nodes for f in functions)

    def before(self, state: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._each("before", state, (time,), nodes)

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._each("after", received, (time,), nodes)

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return self._each("between", received, (time, next_time), nodes)

    def _each(self, part: str, tensor: Tensor, times: tuple[float, ...], nodes: slice) -> Tensor:
        first, last, _ = nodes.indices(sum(self.counts))
        done, start = [], 0
        for function, count in zip(self.functions, self.counts, strict=True):
            begin, end = max(first, start), min(last, start + count)
            if begin < end:
                own = tensor[:, begin - first : end - first]
                some = {} if end - begin == count else {"nodes": slice(begin - start, end - start)}
                done.append(getattr(function, part)(own, *times, **some))
            start += count
        if any(x.shape[2:] != done[0].shape[2:] for x in done):
            sizes = ", ".join("×".join(map(str, x.shape[2:])) or "scalars" for x in done)
            raise WiringError(
                f"Groups: its kinds of nodes give maps of different sizes, {sizes}. Strided convolutions beside "
                "others take pad=True."
            )
        return torch.cat(done, 1)


class Stepwise(NodeFunction):
    """See `PerStep`."""

    def __init__(self, functions: Sequence[NodeFunction]) -> None:
        super().__init__()
        self.functions = nn.ModuleList(functions)
        self.quiet = all(f.quiet for f in functions)

    def before(self, state: Tensor, time: float) -> Tensor:
        return self._at(time).before(state, time)

    def after(self, received: Tensor, time: float) -> Tensor:
        return self._at(time).after(received, time)

    def _at(self, time: float) -> NodeFunction:
        if time != int(time) or not 0 <= time < len(self.functions):
            raise WiringError(
                f"PerStep has functions for steps 0 to {len(self.functions) - 1}, but the graph is at time {time}. "
                "Give it as many steps as the DiscreteGraph has; a ContinuousGraph takes a TimeNode."
            )
        return self.functions[int(time)]  # type: ignore[return-value]


class Timed(NodeFunction):
    """See `TimeNode`."""

    def __init__(self, nodes: int, rest: NodeFunction) -> None:
        super().__init__()
        self.slope, self.rest = nn.Parameter(torch.zeros(nodes)), rest

    def before(self, state: Tensor, time: float) -> Tensor:
        return self.rest.before(state, time)

    def after(self, received: Tensor, time: float) -> Tensor:
        return self.rest.after(received + time * _by_node(self.slope, received), time)


def _node_kernels() -> Any:
    """The kernels for CUDA, or None where Triton is missing."""
    if not _TRITON:
        return None
    from wirings.graph import _node_cuda

    return _node_cuda


def _batch_node_kernels() -> Any:
    """The kernels for CUDA of nodes with a batch norm, or None where Triton is missing."""
    if not _TRITON:
        return None
    from wirings.graph import _batch_cuda

    return _batch_cuda


def get_activation(activation: str | Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    if activation is None or callable(activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise unknown("activation", str(activation), ACTIVATIONS)
    return ACTIVATIONS[activation]


def _by_node(values: Tensor, states: Tensor) -> Tensor:
    """One number a node, shaped to be added to states."""
    return values.view(-1, *[1] * (states.dim() - 2))
