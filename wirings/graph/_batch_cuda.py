"""Nodes with a batch norm on a GPU: norm, ReLU and 3x3 convolution of maps of any size, two Triton kernels each way.

States lie node by node, so a node's pixels, of all images, are one run of memory. Forward, one kernel adds up the
statistics of every node and one norms, rectifies and convolves; what lies between is never written. Backward, one
kernel takes the gradient through the convolution and the ReLU and adds up all that the norm and the parameters want to
know, and one finishes the norm in place. A program takes one node and a run of its pixels; it leaves its share of
every sum in memory, and whoever needs the sum adds the shares up, always in the same order.

A pixel's nine neighbours are looked up in the cache, nine times as often as they come from memory. That is cheap
beside the memory that maps as large as these take.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings._select_cuda import on_device_of
from wirings.edges import in_transform
from wirings.graph._node_cuda import _launcher

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 1024  # pixels that a program looks at together
_HALF_TILE = 512  # where it looks at the neighbours of each, too
_PROGRAMS = 2112  # wanted at least: sixteen for each of a large GPU's 132 processors
_SHARES = 64  # at most for a node: whoever adds them up reads them all
_SUMS = 16  # places of a share: the nine of a kernel, two of the norm


def fits(x: Tensor, stride: int) -> bool:
    """Whether :func:`batch_map` can take states ``x`` of shape (nodes, images, height, width)."""
    return x.is_cuda and x.dim() == 4 and x.dtype in _DTYPES and stride in (1, 2)


def batch_map(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    kernel: Tensor,
    eps: float,
    relu: bool,
    stride: int,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm, ReLU and convolution at every node; differentiable once. Gives the maps, the mean and the variance.

    ``x``: states, of shape (nodes, images, height, width), float32, bfloat16 or float16.
    ``gamma``, ``beta``: scale and shift of the norm, one of each a node.
    ``mean``, ``var``: what to norm with, one of each a node, or both None for the batch's own (the biased variance).
    ``kernel``: weights of a zero-padded cross-correlation, of shape (nodes, 1, 3, 3).
    ``relu``: whether negative values become zero before the convolution.
    ``stride``: of the convolution, 1 or 2.
    ``out_dtype``: of the maps, ``x``'s unless given; all is computed in float32.
    """
    arguments = (x, gamma, beta, mean, var, kernel, eps, relu, stride, out_dtype or x.dtype)
    if torch.compiler.is_compiling() or in_transform(x):
        return torch.ops.wirings.batch_map(*arguments)
    return _BatchMap.apply(*arguments)


# ---- the operators --------------------------------------------------------------------------------------------

_library = torch.library.Library("wirings", "FRAGMENT")
_parts = "Tensor gamma, Tensor beta, Tensor? mean, Tensor? var, Tensor kernel, float eps, bool relu, int stride"
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"batch_map(Tensor x, {_parts}, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)", tags=_tags)
_library.define(
    "batch_map_backward(Tensor grad, Tensor x, Tensor gamma, Tensor beta, Tensor mean, Tensor var, Tensor kernel, "
    "float eps, bool relu, int stride, bool own) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)


@functools.cache
def _plan(nodes: int, pixels: int, tile: int) -> tuple[int, int]:
    """Tiles a program, and programs a node."""
    tiles = -(-pixels // tile)
    each = -(-tiles // min(-(-_PROGRAMS // nodes), tiles, _SHARES))
    return each, -(-tiles // each)


def _out_shape(x: Tensor, stride: int) -> tuple[int, int, int, int]:
    nodes, images, height, width = x.shape
    return nodes, images, (height - 1) // stride + 1, (width - 1) // stride + 1


def _forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    kernel: Tensor,
    eps: float,
    relu: bool,
    stride: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    x, gamma, beta, kernel = x.contiguous(), gamma.contiguous(), beta.contiguous(), kernel.contiguous()
    nodes, images, height, width = x.shape
    shape = _out_shape(x, stride)
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    pixels, out_pixels = images * height * width, images * shape[2] * shape[3]
    own = mean is None or var is None
    shares, parts = x.new_empty(0, dtype=torch.float32), 0
    if own:
        mean, var = (torch.empty(nodes, dtype=torch.float32, device=x.device) for _ in range(2))
        each, parts = _plan(nodes, pixels, _TILE)
        shares = torch.empty((nodes, parts, 2), dtype=torch.float32, device=x.device)
    else:
        mean, var = (t.to(torch.float32, copy=True) for t in (mean, var))  # an operator's results are its own
    launch = _launcher(x, gamma, kernel, out, rest=("batch", own, eps, relu, stride))
    with on_device_of(x):
        if own:
            launch(_add_up, nodes * parts, 4, x, shares, pixels, each, parts, _TILE)
        out_each, out_parts = _plan(nodes, out_pixels, _HALF_TILE)
        tensors = (x, gamma, beta, kernel, mean, var, shares, out)
        numbers = (pixels, out_pixels, out_each, out_parts, parts)
        padded = triton.next_power_of_2(max(parts, 1))
        constants = (eps, relu, stride, height, width, shape[2], shape[3], own, padded, _HALF_TILE)
        launch(_map, nodes * out_parts, 4, *tensors, *numbers, *constants)
    return out, mean, var


def _backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    var: Tensor,
    kernel: Tensor,
    eps: float,
    relu: bool,
    stride: int,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``x``, ``gamma``, ``beta`` and ``kernel``; ``own``: the statistics are those of ``x``."""
    x, gamma, beta, kernel = x.contiguous(), gamma.contiguous(), beta.contiguous(), kernel.contiguous()
    grad = grad.contiguous()
    nodes, images, height, width = x.shape
    _, _, out_height, out_width = _out_shape(x, stride)
    pixels = images * height * width
    dx = torch.empty_like(x)
    dgamma, dbeta, dkernel = torch.empty_like(gamma), torch.empty_like(beta), torch.empty_like(kernel)
    each, parts = _plan(nodes, pixels, _HALF_TILE)
    shares = torch.empty((nodes, parts, _SUMS), dtype=torch.float32, device=x.device)
    last_each, last_parts = _plan(nodes, pixels, _TILE)
    launch = _launcher(x, gamma, kernel, grad, rest=("batch backward", own, eps, relu, stride))
    with on_device_of(x):
        tensors = (x, gamma, beta, kernel, mean, var, grad, dx, shares)
        numbers = (pixels, images * out_height * out_width, each, parts)
        constants = (eps, relu, stride, height, width, out_height, out_width, _SUMS, _HALF_TILE)
        launch(_unmap, nodes * parts, 4, *tensors, *numbers, *constants)
        tensors = (x, gamma, mean, var, dx, shares, dgamma, dbeta, dkernel)
        padded = triton.next_power_of_2(parts)
        launch(_finish, nodes * last_parts, 4, *tensors, pixels, last_each, last_parts, parts, eps, own, padded, _SUMS,
               _TILE)  # fmt: skip
    return dx, dgamma, dbeta, dkernel


for _key in ("CUDA", "CPU"):  # the latter for Triton's interpreter
    _library.impl("batch_map", _forward, _key)
    _library.impl("batch_map_backward", _backward, _key)


@torch.library.register_fake("wirings::batch_map", lib=_library)
def _(x, gamma, beta, mean, var, kernel, eps, relu, stride, out_dtype):
    number = [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2)]
    return x.new_empty(_out_shape(x, stride), dtype=out_dtype), *number


@torch.library.register_fake("wirings::batch_map_backward", lib=_library)
def _(grad, x, gamma, beta, mean, var, kernel, eps, relu, stride, own):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gamma, beta, kernel))


def _remember(ctx, inputs, output):
    x, gamma, beta, mean, _, kernel, ctx.eps, ctx.relu, ctx.stride, ctx.dtype = inputs
    ctx.own = mean is None
    ctx.save_for_backward(x, gamma, beta, output[1], output[2], kernel)
    ctx.mark_non_differentiable(output[1], output[2])


def _gradients(ctx, grad, _mean, _var, backward=torch.ops.wirings.batch_map_backward):
    dx, dgamma, dbeta, dkernel = backward(
        grad.to(ctx.dtype), *ctx.saved_tensors, ctx.eps, ctx.relu, ctx.stride, ctx.own
    )
    return dx, dgamma, dbeta, None, None, dkernel, None, None, None, None


torch.library.register_autograd("wirings::batch_map", _gradients, setup_context=_remember, lib=_library)


class _BatchMap(torch.autograd.Function):
    """The same without the dispatcher, which would cost the host several times what a launch does."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _remember(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, mean, var):
        return _gradients(ctx, grad, mean, var, _backward)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _add_up(x, shares, pixels, tiles, parts, TILE: tl.constexpr):
    """A share of a node's sum and sum of squares, both of differences from its first pixel, so that none cancels."""
    node, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    x += node.to(tl.int64) * pixels
    first = tl.load(x).to(tl.float32)
    total, squares = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for tile in range(tiles):
        at = (part * tiles + tile) * TILE + tl.arange(0, TILE)
        real = at < pixels
        off = tl.where(real, tl.load(x + at, mask=real, other=0).to(tl.float32) - first, 0.0)
        total += off
        squares += off * off
    tl.store(shares + 2 * tl.program_id(0), tl.sum(total))
    tl.store(shares + 2 * tl.program_id(0) + 1, tl.sum(squares))


@triton.jit
def _map(x, gamma, beta, kernel, mean, var, shares, out, pixels, out_pixels, tiles, out_parts, parts,
         EPS: tl.constexpr, RELU: tl.constexpr, STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
         OUT_H: tl.constexpr, OUT_W: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """Forward: one node, ``tiles`` tiles of its output pixels."""
    node, part = tl.program_id(0) // out_parts, tl.program_id(0) % out_parts
    x += node.to(tl.int64) * pixels
    out += node.to(tl.int64) * out_pixels
    kernel += node * 9
    if OWN:
        place = tl.arange(0, PARTS)
        shares += 2 * (node * parts + place)
        shift = tl.sum(tl.load(shares, mask=place < parts, other=0)) / pixels
        squares = tl.sum(tl.load(shares + 1, mask=place < parts, other=0)) / pixels
        m, v = tl.load(x).to(tl.float32) + shift, tl.maximum(squares - shift * shift, 0.0)
        if part == 0:
            tl.store(mean + node, m)
            tl.store(var + node, v)
    else:
        m, v = tl.load(mean + node), tl.load(var + node)
    scale = tl.load(gamma + node).to(tl.float32) * tl.rsqrt(v + EPS)
    shift = tl.load(beta + node).to(tl.float32) - m * scale
    for tile in range(tiles):
        at = tl.max_contiguous((part * tiles + tile) * TILE + tl.arange(0, TILE), 1)  # see `_unmap`
        real = at < out_pixels
        image, within = at // (OUT_H * OUT_W), at % (OUT_H * OUT_W)
        row, column = within // OUT_W * STRIDE, within % OUT_W * STRIDE
        y = tl.zeros([TILE], tl.float32)
        for t in tl.static_range(9):
            r, c = row + (t // 3 - 1), column + (t % 3 - 1)
            inside = real & (r >= 0) & (r < H) & (c >= 0) & (c < W)
            near = tl.load(x + image * (H * W) + r * W + c, mask=inside, other=0).to(tl.float32) * scale + shift
            if RELU:
                near = tl.where(near <= 0, 0.0, near)  # NaN stays, unlike in a maximum
            y += tl.load(kernel + t).to(tl.float32) * tl.where(inside, near, 0.0)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _unmap(x, gamma, beta, kernel, mean, var, grad, dx, shares, pixels, out_pixels, tiles, parts,
           EPS: tl.constexpr, RELU: tl.constexpr, STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
           OUT_H: tl.constexpr, OUT_W: tl.constexpr, SUMS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Backward to before the ReLU: one node, ``tiles`` tiles of its input pixels; and a share of the sums."""
    node, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    x += node.to(tl.int64) * pixels
    dx += node.to(tl.int64) * pixels
    grad += node.to(tl.int64) * out_pixels
    kernel += node * 9
    m, inverse = tl.load(mean + node), tl.rsqrt(tl.load(var + node) + EPS)
    g, b = tl.load(gamma + node).to(tl.float32), tl.load(beta + node).to(tl.float32)
    # A sum for each of the nine taps, by pixel of a tile until the end: to add up a tile at every turn would be slow.
    k0, s0 = tl.load(kernel + 0).to(tl.float32), tl.zeros([TILE], tl.float32)
    k1, s1 = tl.load(kernel + 1).to(tl.float32), tl.zeros([TILE], tl.float32)
    k2, s2 = tl.load(kernel + 2).to(tl.float32), tl.zeros([TILE], tl.float32)
    k3, s3 = tl.load(kernel + 3).to(tl.float32), tl.zeros([TILE], tl.float32)
    k4, s4 = tl.load(kernel + 4).to(tl.float32), tl.zeros([TILE], tl.float32)
    k5, s5 = tl.load(kernel + 5).to(tl.float32), tl.zeros([TILE], tl.float32)
    k6, s6 = tl.load(kernel + 6).to(tl.float32), tl.zeros([TILE], tl.float32)
    k7, s7 = tl.load(kernel + 7).to(tl.float32), tl.zeros([TILE], tl.float32)
    k8, s8 = tl.load(kernel + 8).to(tl.float32), tl.zeros([TILE], tl.float32)
    by_shift, by_scale = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for tile in range(tiles):
        # Neighbours to neighbouring threads, not to one: what is one pixel to the side cannot be loaded in fours.
        at = tl.max_contiguous((part * tiles + tile) * TILE + tl.arange(0, TILE), 1)
        real = at < pixels
        image, within = at // (H * W), at % (H * W)
        row, column = within // W + 1, within % W + 1
        standard = (tl.load(x + at, mask=real, other=0).to(tl.float32) - m) * inverse
        y = standard * g + b
        after = tl.where(y <= 0, 0.0, y) if RELU else y
        d = tl.zeros([TILE], tl.float32)
        n = _behind(grad, image, row, column, real, 0, STRIDE, OUT_H, OUT_W)
        d += k0 * n
        s0 += n * after
        n = _behind(grad, image, row, column, real, 1, STRIDE, OUT_H, OUT_W)
        d += k1 * n
        s1 += n * after
        n = _behind(grad, image, row, column, real, 2, STRIDE, OUT_H, OUT_W)
        d += k2 * n
        s2 += n * after
        n = _behind(grad, image, row, column, real, 3, STRIDE, OUT_H, OUT_W)
        d += k3 * n
        s3 += n * after
        n = _behind(grad, image, row, column, real, 4, STRIDE, OUT_H, OUT_W)
        d += k4 * n
        s4 += n * after
        n = _behind(grad, image, row, column, real, 5, STRIDE, OUT_H, OUT_W)
        d += k5 * n
        s5 += n * after
        n = _behind(grad, image, row, column, real, 6, STRIDE, OUT_H, OUT_W)
        d += k6 * n
        s6 += n * after
        n = _behind(grad, image, row, column, real, 7, STRIDE, OUT_H, OUT_W)
        d += k7 * n
        s7 += n * after
        n = _behind(grad, image, row, column, real, 8, STRIDE, OUT_H, OUT_W)
        d += k8 * n
        s8 += n * after
        if RELU:
            d = tl.where(y <= 0, 0.0, d)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=real)
        by_shift += d
        by_scale += d * standard
    shares += tl.program_id(0) * SUMS
    tl.store(shares + 0, tl.sum(s0))
    tl.store(shares + 1, tl.sum(s1))
    tl.store(shares + 2, tl.sum(s2))
    tl.store(shares + 3, tl.sum(s3))
    tl.store(shares + 4, tl.sum(s4))
    tl.store(shares + 5, tl.sum(s5))
    tl.store(shares + 6, tl.sum(s6))
    tl.store(shares + 7, tl.sum(s7))
    tl.store(shares + 8, tl.sum(s8))
    tl.store(shares + 9, tl.sum(by_shift))
    tl.store(shares + 10, tl.sum(by_scale))


@triton.jit
def _behind(grad, image, row, column, real, TAP: tl.constexpr, STRIDE: tl.constexpr, OUT_H: tl.constexpr,
            OUT_W: tl.constexpr):  # fmt: skip
    """The gradient at the output pixels that input pixels lead to by one of a kernel's weights; zero where none is."""
    r, c = row - TAP // 3, column - TAP % 3
    inside = real & (r >= 0) & (c >= 0)
    if STRIDE == 2:
        inside &= (r % 2 == 0) & (c % 2 == 0)
        r, c = r // 2, c // 2
    inside &= (r < OUT_H) & (c < OUT_W)
    return tl.load(grad + image * (OUT_H * OUT_W) + r * OUT_W + c, mask=inside, other=0).to(tl.float32)


@triton.jit
def _finish(x, gamma, mean, var, dx, shares, dgamma, dbeta, dkernel, pixels, tiles, last_parts, parts,
            EPS: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """The rest of the way back, through the norm, in place; the first program of a node leaves its sums."""
    node, part = tl.program_id(0) // last_parts, tl.program_id(0) % last_parts
    x += node.to(tl.int64) * pixels
    dx += node.to(tl.int64) * pixels
    place, weights = tl.arange(0, PARTS)[:, None], tl.arange(0, SUMS)
    table = tl.load(
        shares + (node * parts + place) * SUMS + weights[None, :],
        mask=(place < parts) & (weights[None, :] < 11),
        other=0,
    )
    sums = tl.sum(table, 0)
    by_shift = tl.sum(tl.where(weights == 9, sums, 0.0))
    by_scale = tl.sum(tl.where(weights == 10, sums, 0.0))
    if part == 0:
        tl.store(dkernel + node * 9 + weights, sums.to(dkernel.dtype.element_ty), mask=weights < 9)
        tl.store(dbeta + node, by_shift.to(dbeta.dtype.element_ty))
        tl.store(dgamma + node, by_scale.to(dgamma.dtype.element_ty))
    m, inverse = tl.load(mean + node), tl.rsqrt(tl.load(var + node) + EPS)
    scale = tl.load(gamma + node).to(tl.float32) * inverse
    for tile in range(tiles):
        at = (part * tiles + tile) * TILE + tl.arange(0, TILE)
        real = at < pixels
        d = tl.load(dx + at, mask=real, other=0).to(tl.float32)
        if OWN:
            standard = (tl.load(x + at, mask=real, other=0).to(tl.float32) - m) * inverse
            d -= (by_shift + standard * by_scale) / pixels
        tl.store(dx + at, (d * scale).to(dx.dtype.element_ty), mask=real)
