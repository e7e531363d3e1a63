"""`block_linear`: a linear layer that skips the blocks of its weight that are zero, and `BlockLinear`, its module."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.utils.transforms import is_plain
from wirings.wire.block_products import operators
from wirings.wire.block_products.choose import LayerTiles
from wirings.wire.block_products.layout import BLOCKS, BlockLayout
from wirings.wire.block_products.operators import approximate, as_ints, call, lists_of, mask_of

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
    gradient: str | BlockLayout = "real",
    products: LayerTiles | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias)``, dense where the kernels are unsupported or slower.

    Transforms of `torch.func` such as ``vmap``, and tensor subclasses, are not supported by the kernels.

    Args:
        x: inputs of shape (..., inputs), in bfloat16 or float16 for the kernels.
        weight: of shape (outputs, inputs), in the dtype of ``x``. Outside of the layout's blocks it must be zero.
        layout: the blocks of the weight.
        bias: of shape (outputs,).
        activation: None, ``"gelu"`` or ``"gelu_tanh"`` (its approximation).
        gradient: which weights get a gradient: ``"real"`` for those in the layout's blocks, ``"dense"`` for all, at the
            cost of a dense product, or those in the blocks of another layout.
        products: how each product is computed; by default as is fastest, which is measured when it first runs.
    """
    activation = activation or "none"
    if activation not in ACTIVATIONS or (isinstance(gradient, str) and gradient not in GRADIENTS_TO):
        raise WiringError(
            f"block_linear expects an activation of {ACTIVATIONS} and gradient= of {GRADIENTS_TO} or a layout, got "
            f"{activation!r} and {gradient!r}."
        )
    if weight.shape != layout.shape or x.shape[-1:] != weight.shape[1:]:
        raise WiringError(
            f"block_linear expects a weight of shape {layout.shape} and inputs of {layout.shape[1]} features, as the "
            f"layout has, got a weight of shape {tuple(weight.shape)} and inputs of shape {tuple(x.shape)}."
        )
    x, weight, bias = _converted(x, weight, bias)
    compiled = torch.compiler.is_compiling()
    plain = compiled or (is_plain(x) and is_plain(weight))
    if not plain or not supports(x, weight, layout) or (products is None and not has_kernels_for(x)):
        # Under a transform, whether a gradient is needed is not known here.
        differentiated = not plain or (torch.is_grad_enabled() and weight.requires_grad)
        if gradient != "dense" and differentiated:
            within = layout if isinstance(gradient, str) else gradient
            weight = torch.where(within.spread(), weight, weight.detach())
        out = F.linear(x, weight, bias)
        return out if activation == "none" else F.gelu(out, approximate=approximate(activation))
    tiles = [[], [], []] if products is None else [as_ints(tile) for tile in products]
    reach = None if isinstance(gradient, str) else gradient
    lists = (lists_of(layout), None if reach is None else lists_of(reach))
    densities = (layout.density, layout.density if reach is None else reach.density)
    flat = x.reshape(-1, x.shape[-1])
    out = _BlockLinear.apply(
        flat, weight, bias, *lists, layout.block, densities, tiles, activation, gradient == "dense"
    )
    return out.view(*x.shape[:-1], len(weight))


def supports(x: Tensor, weight: Tensor, layout: BlockLayout) -> bool:
    """Whether there are kernels for inputs of shape (..., inputs)."""
    device = (x.is_cuda and x.dtype in _HALF) or operators.INTERPRETED
    tokens = x.numel() // max(1, weight.shape[1])
    size = max(x.numel(), tokens * len(weight), weight.numel())
    usual = x.dtype == weight.dtype and x.numel() > 0 and size < _INDEX
    return device and usual and layout.block in BLOCKS and layout.blocks > 0 and _has_kernels()


def has_kernels_for(x: Tensor) -> bool:
    """Whether products of these inputs may be faster in blocks, in the precision that they are going to have.

    Which way is faster is measured, so that sums are rounded in one way or another: not for deterministic algorithms.
    """
    if not (x.is_cuda or operators.INTERPRETED) or x.numel() < _TOKENS * x.shape[-1]:
        return False
    kind = "cuda" if x.is_cuda else "cpu"
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return (dtype in _HALF or operators.INTERPRETED) and not torch.are_deterministic_algorithms_enabled()


def _converted(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors in the precision of autocast, if it is enabled."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        lists, reach, block, densities, tiles, activation, dense = rest
        keep = activation != "none" and any(ctx.needs_input_grad[:3])
        out, before = call(
            operators.block_forward, x, weight, bias, lists, block, densities[0], tiles[0], activation, keep
        )
        ctx.save_for_backward(x, weight, bias, before if keep else None, lists, reach)
        ctx.rest = block, densities, tiles, activation, dense
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, before, lists, reach = ctx.saved_tensors
        block, densities, tiles, activation, dense = ctx.rest
        reach = lists if reach is None else reach
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # to be differentiated again: dense
        dx = dweight = dbias = None
        if before is not None:
            before = F.linear(x, weight, bias) if again else before
            grad = torch.ops.aten.gelu_backward(grad, before, approximate=approximate(activation))
        if ctx.needs_input_grad[0]:
            if again:
                dx = grad @ weight
            else:
                dx = call(operators.block_inputs, grad, weight, lists, block, densities[0], tiles[1])
        if ctx.needs_input_grad[1]:
            if dense:
                dweight = grad.T @ x
            elif again:
                dweight = torch.where(mask_of(reach, len(weight), x.shape[1], block), grad.T @ x, 0)
            else:
                dweight = call(operators.block_weights, grad, x, reach, block, densities[1], tiles[2])
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = grad.sum(0)
        return dx, dweight, dbias, *(None,) * 7


class BlockLinear(nn.Module):
    """A linear layer whose weight consists of blocks, most of them zero.

    The blocks are found again if the weight was replaced or changed in place, but not within compiled models or
    captured CUDA graphs, nor if it was changed through ``weight.data``: call `find_blocks` then.

    Args:
        linear: the layer; its parameters are used, not copied.
        block: the side of the blocks.
        activation: None, ``"gelu"`` or ``"gelu_tanh"``, computed with the product.
        gradient: which weights get a gradient, see `block_linear`.
    """

    block_mask: Tensor
    block_lists: Tensor
    _found_for: tuple[weakref.ref[Tensor], int, int] | None = None  # the weight, where it lies, its version

    def __init__(self, linear: nn.Linear, block: int, activation: str | None = None, gradient: str = "real") -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.activation, self.gradient = block, activation, gradient
        self.find_blocks()
        self.register_load_state_dict_post_hook(_find_blocks)

    def find_blocks(self) -> None:
        """Find the blocks that are not zero, after the weight has changed."""
        with torch.inference_mode(False):  # their lists are needed for gradients later
            layout = BlockLayout.of_weight(self.weight, self.block)
            self.blocks = layout.blocks
            self.register_buffer("block_mask", layout.mask, persistent=False)
            self.register_buffer("block_lists", lists_of(layout), persistent=False)
        if is_plain(self.weight):
            self._found_for = weakref.ref(self.weight), self.weight.data_ptr(), _version(self.weight)

    def _refresh(self) -> None:
        """Find the blocks again if the weight is not the one, or not as, it was."""
        weight, found = self.weight, self._found_for
        if not is_plain(weight) or weight.is_meta or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if found is None or found[0]() is not weight or found[1:] != (weight.data_ptr(), _version(weight)):
            self.find_blocks()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found_for": None}  # a copy has another weight

    @property
    def layout(self) -> BlockLayout:
        """The blocks that are not zero, on the device of the module."""
        return BlockLayout(self.block_mask, self.block, self.blocks, self.block_lists)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self._refresh()
        return block_linear(x, self.weight, self.layout, self.bias, self.activation, gradient=self.gradient)

    def extra_repr(self) -> str:
        return f"{self.layout}, activation={self.activation!r}"


def _find_blocks(module: BlockLinear, keys: object) -> None:
    module.find_blocks()


def _version(weight: Tensor) -> int:
    """How often a tensor was changed in place; tensors of the inference mode do not count it."""
    return 0 if weight.is_inference() else weight._version


@torch.compiler.assume_constant_result
def _has_kernels() -> bool:
    """Whether the kernels can be used."""
    return operators.kernels() is not None
