"""`block_linear`: a linear layer that skips the blocks of its weight that are zero, and `BlockLinear`, its module."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wirings.errors import WiringError
from wirings.wire.block_products.choose import DENSE, LayerTiles, chosen
from wirings.wire.block_products.layout import BLOCKS, BlockLayout

ACTIVATIONS = ("none", "gelu", "gelu_tanh")
GRADIENTS_TO = ("real", "dense")
_HALF = (torch.bfloat16, torch.float16)
_INDEX = 2**31 - 2**20  # upper limit of offsets, which are 32-bit integers
_TOKENS = 128  # fewer are dense


def block_linear(
    x: Tensor,
    weight: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    gradient: str = "real",
    products: LayerTiles | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias)``; differentiable once. Dense where the kernels are unsupported or slower.

    Args:
        x: inputs of shape (..., inputs), in bfloat16 or float16 for the kernels.
        weight: of shape (outputs, inputs), in the dtype of ``x``. Outside of the layout's blocks it must be zero.
        layout: the blocks of the weight.
        bias: of shape (outputs,).
        activation: None, ``"gelu"`` or ``"gelu_tanh"`` (its approximation).
        gradient: which weights get a gradient: ``"real"`` for those in the layout's blocks, ``"dense"`` for all, at the
            cost of a dense product.
        products: how each product is computed; by default as `choose_products` found, or with the first tile.
    """
    activation = activation or "none"
    if activation not in ACTIVATIONS or gradient not in GRADIENTS_TO:
        raise WiringError(
            f"block_linear expects an activation of {ACTIVATIONS} and gradient= of {GRADIENTS_TO}, got {activation!r} "
            f"and {gradient!r}."
        )
    if weight.shape != layout.shape or x.shape[-1:] != weight.shape[1:]:
        raise WiringError(
            f"block_linear expects a weight of shape {layout.shape} and inputs of {layout.shape[1]} features, as the "
            f"layout has, got a weight of shape {tuple(weight.shape)} and inputs of shape {tuple(x.shape)}."
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat = x.reshape(-1, x.shape[-1])
    if not supports(flat, weight, layout):
        products = DENSE
    elif products is None:
        products = chosen(flat, weight, layout) if len(flat) >= _TOKENS else DENSE
    forward, inputs, weights = products
    lists = (
        *((None, None) if forward is None else layout.lists(group=forward.group)),
        *((None, None) if inputs is None else layout.lists(by_column=True, group=inputs.group)),
        *((None, None) if weights is None else (layout.runs(weights.blocks), layout.places())),
        layout.spread() if weights is None and gradient == "real" and weight.requires_grad else None,
    )
    out = _BlockLinear.apply(flat, weight, bias, *lists, layout.block, products, activation, gradient)
    return out.view(*x.shape[:-1], len(weight))


def supports(x: Tensor, weight: Tensor, layout: BlockLayout) -> bool:
    """Whether there are kernels for inputs of shape (tokens, inputs)."""
    device = (x.is_cuda and x.dtype in _HALF) or _interpreted()
    size = max(x.numel(), len(x) * len(weight), weight.numel())
    usual = x.dtype == weight.dtype and x.numel() > 0 and size < _INDEX
    return device and usual and layout.block in BLOCKS and layout.blocks > 0 and _has_kernels()


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *lists, block, products, activation, gradient = rest
        keep = activation != "none" and any(ctx.needs_input_grad[:3])
        if products.forward is None:
            out = before = F.linear(x, weight, bias)
            if activation != "none":
                out = F.gelu(before, approximate=_approximate(activation))
        else:
            out, before = _call("block_product", x, weight, bias, *lists[:2], block, list(products.forward), False,
                                activation, keep)  # fmt: skip
        ctx.save_for_backward(x, weight, before if keep else None, *lists)
        ctx.rest = block, products, activation, gradient, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, before, *lists = ctx.saved_tensors
        block, products, activation, gradient, has_bias = ctx.rest
        dx = dweight = dbias = None
        if before is not None:
            grad = torch.ops.aten.gelu_backward(grad, before, approximate=_approximate(activation))
        if ctx.needs_input_grad[0]:
            if products.inputs is None:
                dx = grad @ weight
            else:
                dx, _ = _call("block_product", grad, weight, None, *lists[2:4], block, list(products.inputs), True,
                              "none", False)  # fmt: skip
        if ctx.needs_input_grad[1]:
            if gradient == "dense" or products.weights is None:
                dweight = grad.T @ x
                if gradient == "real":
                    dweight = torch.where(lists[6], dweight, 0)
            else:
                dweight = _call("block_weight_gradient", grad, x, *lists[4:6], block, list(products.weights))
        if has_bias and ctx.needs_input_grad[2]:
            dbias = grad.sum(0)
        return dx, dweight, dbias, *(None,) * 11


class BlockLinear(nn.Module):
    """A linear layer whose weight consists of blocks, most of them zero.

    Args:
        linear: the layer; its parameters are used, not copied.
        block: the side of the blocks.
        activation: None, ``"gelu"`` or ``"gelu_tanh"``, computed with the product.
        gradient: which weights get a gradient, see `block_linear`.
    """

    block_mask: Tensor

    def __init__(self, linear: nn.Linear, block: int, activation: str | None = None, gradient: str = "real") -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.activation, self.gradient = block, activation, gradient
        self._layout = BlockLayout.of_weight(self.weight, block)
        self.register_buffer("block_mask", self._layout.mask, persistent=False)

    @property
    def layout(self) -> BlockLayout:
        """The blocks that are not zero, on the device of the module."""
        if self._layout.mask.device != self.block_mask.device:
            self._layout = BlockLayout(self.block_mask, self.block, self._layout.blocks)
        return self._layout

    def forward(self, x: Tensor) -> Tensor:
        return block_linear(x, self.weight, self.layout, self.bias, self.activation, gradient=self.gradient)

    def extra_repr(self) -> str:
        return f"{self.layout}, activation={self.activation!r}"


def _approximate(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


def _call(name: str, *args: Any) -> Any:
    """Call a product, as an operator only if it is compiled: the dispatcher costs the host more than a launch."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.wirings, name)(*args)
    return {"block_product": _kernels().multiply, "block_weight_gradient": _kernels().weight_gradient}[name](*args)


@functools.cache
def _kernels() -> Any:
    """The Triton kernels, or None if Triton is not installed."""
    try:
        from wirings.wire.block_products import _products_cuda
    except ImportError:
        return None
    return _products_cuda


@torch.compiler.assume_constant_result
def _has_kernels() -> bool:
    """Whether the kernels can be used; their import, which compilers cannot trace, also registers the operators."""
    return _kernels() is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
