"""Nodes with a norm, an activation and a convolution of their own; on a GPU they are fused into one kernel."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings.errors import WiringError, unknown
from wirings.graph.nodes.activation import ZERO_AT_ZERO, get_activation
from wirings.graph.nodes.base import ALL, Node, NodeCost, NodeFunction, register
from wirings.utils.checks import check_bool, check_int, is_int
from wirings.utils.text import brief

PARTS = ("norm", "activation", "conv")
MAX_SIZE = 2**20  # pixels of a kernel or a stride
BATCH_MOMENTUM = 0.1  # PyTorch's default
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MAP_DIMS = tuple(_CONVOLUTIONS)
_TRITON = importlib.util.find_spec("triton") is not None


class Convolutions(NodeFunction):
    """The functions that `ConvNode` builds.

    ``parts`` maps ``"before"``, ``"after"`` and ``"between"`` to the parts that are applied there, in order. Where the
    states between two passes through the edges are not read, both parts are one chain.
    """

    running_mean: Tensor
    running_var: Tensor
    counted_parameters = ("kernel",)
    norm_parameters = ("norm_weight", "norm_bias")

    def __init__(self, recipe: ConvNode, nodes: int, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__()
        self.recipe, self.activation = recipe, get_activation(recipe.activation)
        used = {*before, *after}
        first = tuple(p for p in before if not (p == "norm" and recipe.norm is None))
        second = tuple(p for p in after if not (p == "norm" and recipe.norm is None))
        self.parts = {"before": first, "after": second, "between": second + first}
        # Whether our own kernels can compute these parts at once, where the states are on a GPU and small.
        usual = (
            recipe.norm != "batch" and recipe.activation in ("relu", None) and (recipe.kernel, recipe.stride) == (3, 1)
        )
        self._fused = {p: usual and bool(p) and p == tuple(x for x in PARTS if x in p) for p in self.parts.values()}
        self._batch_fused = (
            recipe.norm == "batch"
            and recipe.activation in ("relu", None)
            and (recipe.kernel, recipe.dims, recipe.pad) == (3, 2, False)
        )
        self.some_nodes = recipe.norm != "batch"  # its running statistics are those of all nodes
        self.quiet = "norm" not in first and (
            "activation" not in first or recipe.activation is None or recipe.activation in ZERO_AT_ZERO
        )
        self.norm_weight = self.norm_bias = self.kernel = None
        if recipe.norm is not None and "norm" in used:
            self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(nodes)), nn.Parameter(torch.zeros(nodes))
            if recipe.norm == "batch":
                self.register_buffer("running_mean", torch.zeros(nodes))
                self.register_buffer("running_var", torch.ones(nodes))
        if "conv" in used:
            size = recipe.kernel**recipe.dims
            self.kernel = nn.Parameter(torch.empty(nodes, 1, *[recipe.kernel] * recipe.dims))
            nn.init.uniform_(self.kernel, -(size**-0.5), size**-0.5)  # as PyTorch initialises such a convolution

    def before(self, state: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._chain(self.parts["before"], state, nodes)

    def after(self, received: Tensor, time: float, nodes: slice = ALL) -> Tensor:
        return self._chain(self.parts["after"], received, nodes)

    def between(self, received: Tensor, time: float, next_time: float, nodes: slice = ALL) -> Tensor:
        return self._chain(self.parts["between"], received, nodes)

    def on_rows(self, part: str, rows: Tensor, *times: float, **nodes: slice) -> Tensor:
        parts = self.parts[part]
        if self._batch_fused and (kernels := self._batch_kernels(parts, rows)) is not None:
            return self._batch_norm_fused(kernels, parts, rows)
        kernels = self._kernels(parts, rows)
        if kernels is None:
            return super().on_rows(part, rows, *times, **nodes)
        self._check(parts, rows)
        return self._run_fused(kernels, parts, rows, nodes.get("nodes", ALL))

    def _check(self, parts: tuple[str, ...], x: Tensor) -> None:
        if parts and x.dim() != 2 + self.recipe.dims:
            raise WiringError(
                f"ConvNode(dims={self.recipe.dims}) expects maps of {self.recipe.dims} dimensions, (batch, nodes, …), "
                f"got a tensor of shape {tuple(x.shape)}. Set dims=, or use an ActivationNode for single numbers."
            )
        if "norm" in parts and self.recipe.norm == "instance" and x.shape[2:].numel() == 1:
            raise WiringError(
                "ConvNode: an instance norm needs maps of more than one pixel, got maps of "
                f'{"×".join(map(str, x.shape[2:]))}. Use norm="batch", norm=None or larger maps.'
            )
        if "norm" in parts and self.recipe.norm == "batch" and self.training and x.shape[0] * x.shape[2:].numel() == 1:
            raise WiringError(
                "ConvNode: a batch norm needs more than one value per node in training, got one image of one pixel. "
                "Use larger batches or maps."
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
        """The CUDA kernels, if they can compute all of these parts at once, or None."""
        kernels = _node_kernels() if x.is_cuda and self._fused[parts] else None
        return kernels if kernels is not None and kernels.fits(x) else None

    def _run_fused(self, kernels: Any, parts: tuple[str, ...], x: Tensor, nodes: slice) -> Tensor:
        norm, conv = "norm" in parts, "conv" in parts
        gamma: Tensor | None = self.norm_weight if norm else None
        beta: Tensor | None = self.norm_bias if norm else None
        kernel: Tensor | None = self.kernel if conv else None
        if nodes != ALL:
            gamma, beta, kernel = (p if p is None else p[nodes] for p in (gamma, beta, kernel))
        lower = conv and torch.is_autocast_enabled(
            "cuda"
        )  # as under autocast: convolutions lower the precision, norms do not
        dtype = torch.get_autocast_dtype("cuda") if lower else x.dtype
        relu = "activation" in parts and self.activation is not None
        return kernels.node_map(x, gamma, beta, kernel, self.recipe.eps, relu, dtype)

    def _batch_kernels(self, parts: tuple[str, ...], x: Tensor) -> Any:
        """The CUDA kernels for nodes with a batch norm, if they can compute all of these parts at once, or None."""
        whole = x.is_cuda and parts in (PARTS, ("norm", "conv")) and x.numel() > 0
        kernels = _batch_node_kernels() if whole else None
        assert self.kernel is not None or kernels is None
        return kernels if kernels is not None and kernels.fits(x, self.recipe.stride) else None

    def _batch_norm_fused(self, kernels: Any, parts: tuple[str, ...], x: Tensor) -> Tensor:
        self._check(parts, x.transpose(0, 1))
        dtype = _precision(x)
        out, mean, var = kernels.batch_map(x, *self._arguments(parts), dtype)
        if self.training:
            note_statistics([self], [(mean, var)], [x[0].numel()])
        return out

    def _arguments(self, parts: tuple[str, ...]) -> tuple[Any, ...]:
        """What `_batch_cuda.batch_map` takes beside the states."""
        relu = "activation" in parts and self.activation is not None
        mean, var = (None, None) if self.training else (self.running_mean, self.running_var)
        return self.norm_weight, self.norm_bias, mean, var, self.kernel, self.recipe.eps, relu, self.recipe.stride

    @property
    def has_block_kernels(self) -> bool:
        """Whether `block_function` gives our kernels on a GPU, for maps of any usual precision."""
        return self._batch_fused and self.recipe.stride in (1, 2) and _batch_node_kernels() is not None

    def block_function(self, part: str, x: Tensor) -> Any:
        """A part with a batch norm as an argument of `_blocks_cuda.run`; None if our kernels cannot compute it.

        Args:
            part: ``"before"`` or ``"between"``.
            x: states like those that it will be applied to, (nodes, batch, …).
        """
        parts = self.parts[part]
        if not self._batch_fused or self._batch_kernels(parts, x) is None:
            return None
        from wirings.graph._blocks_cuda import BlockFunction

        gamma, beta, mean, var, kernel, *rest = self._arguments(parts)
        return BlockFunction(gamma, beta, kernel, mean, var, *rest)

    def _norm(self, x: Tensor, nodes: slice) -> Tensor:
        assert self.norm_weight is not None
        assert self.norm_bias is not None
        weight, bias = self.norm_weight[nodes], self.norm_bias[nodes]
        if (
            torch.promote_types(weight.dtype, x.dtype) != weight.dtype
        ):  # norms accept parameters of a wider dtype, but not of a narrower one
            weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        if x.shape[0] == 0:
            return x  # PyTorch's norms reject an empty batch
        if self.recipe.norm == "batch":
            mean, var = self.running_mean[nodes], self.running_var[nodes]
            return F.batch_norm(x, mean, var, weight, bias, self.training, BATCH_MOMENTUM, self.recipe.eps)
        if x.shape[2:].numel() == 1:
            raise WiringError(
                "ConvNode: an instance norm needs maps of more than one pixel, got one pixel after the convolution. "
                'Use norm="batch", norm=None or larger maps.'
            )
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

    def cost(self, part: str, nodes: int, size: tuple[int, ...]) -> NodeCost:
        if self.kernel is None or "conv" not in self.parts[part]:
            return super().cost(part, nodes, size)
        recipe, nodes = self.recipe, len(self.kernel)
        weights = recipe.kernel**recipe.dims
        out = tuple(-(-side // recipe.stride) for side in size)
        mult_adds, params = np.full(nodes, weights * math.prod(out)), np.full(nodes, weights)
        return NodeCost(mult_adds, params, size if recipe.pad else out)


def _precision(x: Tensor) -> torch.dtype:
    """The dtype of a convolution's result: under autocast it is lowered, unlike that of a norm."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


@torch.no_grad()
def note_statistics(
    functions: Sequence[Convolutions | nn.BatchNorm2d],
    statistics: Sequence[tuple[Tensor, Tensor]],
    counts: Sequence[int],
) -> None:
    """Update the running statistics of batch norms, in few kernels however many there are.

    Args:
        functions: the functions whose norms these are, or norms of PyTorch with the same momentum.
        statistics: for each, the mean and the biased variance of every node.
        counts: for each, the number of values of a node.
    """
    means, variances = zip(*statistics, strict=True)
    unbiased = torch._foreach_mul(variances, [count / (count - 1) for count in counts])
    running: Any = [f.running_mean for f in functions], [f.running_var for f in functions]
    torch._foreach_lerp_([*running[0], *running[1]], [*means, *unbiased], BATCH_MOMENTUM)


def _node_kernels() -> Any:
    """The CUDA kernels, or None if Triton is not installed."""
    if not _TRITON:
        return None
    from wirings.graph import _node_cuda

    return _node_cuda


def _batch_node_kernels() -> Any:
    """The CUDA kernels for nodes with a batch norm, or None if Triton is not installed."""
    if not _TRITON:
        return None
    from wirings.graph import _batch_cuda

    return _batch_cuda


@register
@dataclass(frozen=True)
class ConvNode(Node):
    """A norm, an activation and a depthwise convolution: each node has a kernel of its own for its map.

    Args:
        norm: ``"instance"``, ``"batch"`` or None. Each node has a learned scale and shift.
        activation: a name (relu, tanh, sigmoid, gelu, silu), a function, or None.
        before: which of norm, activation and conv a node applies to its state before sending it, in order.
        after: which of them a node applies to what it receives, in order.
        stride: the stride of the convolution. In a static graph the map gets smaller.
        pad: whether to pad the smaller map with zeros to its former size, which dynamic graphs need.
        kernel: the width of the kernel, an odd number.
        dims: the number of dimensions of the maps: 1, 2 or 3.
        eps: what the norm adds to the variance. A node without input passes on gradients 1/√eps times as large, so a
            larger value stabilizes a wiring that is being learned.

    >>> ConvNode(before=["activation", "conv"], after=["norm"])
    ConvNode(norm='instance', activation='relu', before=('activation', 'conv'), after=('norm',),
    stride=1, pad=False, kernel=3, dims=2, eps=1e-05)
    """

    name: ClassVar[str] = "conv"
    example_state: ClassVar[tuple[int, ...]] = (6, 5)
    norm: str | None = "instance"
    activation: str | Callable[[Tensor], Tensor] | None = "relu"
    before: Sequence[str] = PARTS
    after: Sequence[str] = ()
    stride: int = 1
    pad: bool = False
    kernel: int = 3
    dims: int = 2
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.norm is not None and (not isinstance(self.norm, str) or self.norm not in ("instance", "batch")):
            raise unknown("norm", str(self.norm), ("instance", "batch"))
        get_activation(self.activation)
        object.__setattr__(self, "before", _checked(self.before))
        object.__setattr__(self, "after", _checked(self.after))
        twice = set(self.before) & set(self.after)
        if twice:
            raise WiringError(f"ConvNode: {twice.pop()!r} is in both before= and after=; name it in one of them.")
        check_int("ConvNode", "stride", self.stride, most=MAX_SIZE)
        check_int("ConvNode", "kernel", self.kernel, most=MAX_SIZE)
        check_bool("ConvNode", "pad", self.pad)
        if self.kernel % 2 == 0:
            raise WiringError(f"ConvNode: kernel must be odd, so that it has a centre, got {self.kernel}.")
        if not is_int(self.dims) or self.dims not in MAP_DIMS:
            raise WiringError(
                f"ConvNode: dims must be 1, 2 or 3, got {brief(self.dims)}; for single numbers use an ActivationNode."
            )
        if not isinstance(self.eps, (int, float)) or not 0 < self.eps < math.inf:
            raise WiringError(f"ConvNode: eps must be a positive number, got {brief(self.eps)}.")

    def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
        return Convolutions(self, nodes, self.before if sends else (), self.after if receives else ())


def _checked(parts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        hint = f"write [{parts!r}]" if isinstance(parts, str) else f"got {brief(parts)}"
        raise WiringError(f"ConvNode: before= and after= expect lists of parts: {hint}.")
    for part in parts:
        if not isinstance(part, str) or part not in PARTS:
            raise unknown("part", str(part), PARTS)
    if len(set(parts)) < len(parts):
        raise WiringError(f"ConvNode: {list(parts)} names a part twice.")
    return tuple(parts)
