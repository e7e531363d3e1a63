"""The two ends of a network of graphs on a GPU: the first convolution of images, and the mean of the last maps.

States are stored node by node, images are not. PyTorch's convolution would write its maps image by image; to copy them,
and their gradients back, takes longer than the convolution. Here, a program computes a run of pixels of all nodes at
once, as a product of the kernels and of the pixels below each of their taps, which it reads from the images in their
own precision. The gradient of the kernels is the product of the maps' gradient and the same pixels.

At the other end, norm, ReLU and mean over each map are one kernel for each direction: a program processes one node,
which it reads twice, once for the norm's statistics (in the backward pass, for its sums).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings.graph._batch_cuda import _norm_one, _standard
from wirings.graph._node_cuda import _launcher
from wirings.utils.triton_launch import on_device_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = _DTYPES[1:]  # dtypes in which products of tensor cores are as exact as PyTorch's
_TAPS = 32  # upper limit of an image's channels times nine
_NODES = (16, 32, 64)  # numbers of maps that a program can hold
_RUN = 128  # pixels of a map that a program computes at a time
_PROGRAMS = 4224  # upper limit: thirty-two for each of a large GPU's 132 multiprocessors
_BACK_PROGRAMS = 1056  # in the backward pass, where every program writes a share of the kernels' gradient
_BACK_RUNS = 4  # the fewest runs per program there
_SHARES = 64  # shares that are added at a time
_TILE = 2048  # pixels of a node that a program pools at a time
_PIXELS = 256  # upper limit of a map that is pooled
_INDEX = 2**31 - 2**20  # upper limit of offsets, which are 32-bit integers


# ---- the first convolution ------------------------------------------------------------------------------------


def convolution_fits(images: Tensor, kernel: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`convolve` supports images of shape (images, channels, height, width) in this precision."""
    if images.dim() != 4 or images.shape[1] != kernel.shape[1]:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(images.shape, images.stride(), strict=True))
    pixels = images.shape[0] * images.shape[2] * images.shape[3]
    return (
        images.dtype in _DTYPES
        and kernel.dtype in _DTYPES
        and images.numel() > 0
        and max(reach, pixels * len(kernel)) < _INDEX
        and kernel_fits(kernel, dtype)
    )


def kernel_fits(kernel: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`convolve` supports a convolution in this precision, of images that are not too large."""
    return dtype in _PRODUCTS and len(kernel) in _NODES and 9 * kernel.shape[1] <= _TAPS


def convolve(images: Tensor, kernel: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """The maps of a 3x3 convolution, (nodes, images, height, width); differentiable once, by the kernel.

    ``images``: of shape (images, channels, height, width), float32, bfloat16 or float16, in any memory format.
    ``kernel``: weights of a zero-padded cross-correlation, of shape (nodes, channels, 3, 3).
    ``stride``: the stride of the convolution, 1 or 2.
    ``dtype``: the dtype of the maps, bfloat16 or float16, to which the factors are rounded. Sums are float32.
    """
    return _Convolution.apply(images, kernel, stride, dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, kernel, stride, dtype):
        kernel = kernel.contiguous()
        ctx.save_for_backward(images, kernel)
        ctx.stride, ctx.dtype = stride, dtype
        return _convolution(images, kernel, stride, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, _kernel_gradient(grad.to(ctx.dtype), *ctx.saved_tensors, ctx.stride), None, None


def _convolution(images: Tensor, kernel: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    shape, constants = _constants(images, kernel, stride)
    out = torch.empty((len(kernel), len(images), *shape), dtype=dtype, device=images.device)
    pixels = out[0].numel()
    each, programs = _runs(pixels, _PROGRAMS, 1)
    launch = _launcher(images, kernel, out, rest=("convolution", images.stride(), *constants))
    with on_device_of(images):
        launch(_convolve, programs, 4, images, kernel, out, *images.stride(), pixels, each, *constants)
    return out


def _kernel_gradient(grad: Tensor, images: Tensor, kernel: Tensor, stride: int) -> Tensor:
    grad = grad.contiguous()
    _, constants = _constants(images, kernel, stride)
    pixels = grad[0].numel()
    each, parts = _runs(pixels, _BACK_PROGRAMS, _BACK_RUNS)
    nodes, taps = constants[-2:]
    shares = torch.empty((parts, nodes, taps), dtype=torch.float32, device=images.device)
    out = torch.empty_like(kernel)
    launch = _launcher(images, kernel, grad, rest=("kernel gradient", images.stride(), *constants))
    with on_device_of(images):
        launch(_correlate, parts, 4, images, grad, shares, *images.stride(), pixels, each, *constants)
        launch(_add_shares, nodes, 4, shares, out, parts, out[0].numel(), nodes, taps, _SHARES)
    return out


def _constants(images: Tensor, kernel: Tensor, stride: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The height and width of the maps, and the constants of the kernels."""
    _, channels, height, width = images.shape
    shape = (height - 1) // stride + 1, (width - 1) // stride + 1
    taps = max(16, triton.next_power_of_2(9 * channels))
    return shape, (stride, channels, height, width, *shape, _RUN, len(kernel), taps)


@functools.cache
def _runs(pixels: int, programs: int, least: int) -> tuple[int, int]:
    """The number of runs per program, and of programs."""
    runs = -(-pixels // _RUN)
    each = max(least, -(-runs // programs))
    return each, -(-runs // each)


@triton.jit
def _below_taps(images, begin, by_image, by_channel, by_row, by_column, pixels, STRIDE: tl.constexpr,
                CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
                RUN: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """For a run of the maps' pixels, the image's pixel below each tap of a kernel, (taps, run); zero beyond it."""
    at, tap = begin + tl.arange(0, RUN), tl.arange(0, TAPS)
    image, place = at // (OUT_H * OUT_W), at % (OUT_H * OUT_W)
    row, column = place // OUT_W * STRIDE - 1, place % OUT_W * STRIDE - 1
    channel, down, right = tap // 9, tap % 9 // 3, tap % 3
    start = image * by_image + row * by_row + column * by_column
    offset = channel * by_channel + down * by_row + right * by_column
    y, x = row[None, :] + down[:, None], column[None, :] + right[:, None]
    inside = (tap < CHANNELS * 9)[:, None] & (at < pixels)[None, :] & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return tl.load(images + (start[None, :] + offset[:, None]), mask=inside, other=0)


@triton.jit
def _convolve(images, kernel, out, by_image, by_channel, by_row, by_column, pixels, each, STRIDE: tl.constexpr,
              CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
              RUN: tl.constexpr, NODES: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """Forward: ``each`` runs of pixels, at all nodes."""
    node, tap = tl.arange(0, NODES)[:, None], tl.arange(0, TAPS)[None, :]
    weights = tl.load(kernel + node * (CHANNELS * 9) + tap, mask=tap < CHANNELS * 9, other=0).to(out.dtype.element_ty)
    for run in range(each):
        begin = (tl.program_id(0) * each + run) * RUN
        values = _below_taps(images, begin, by_image, by_channel, by_row, by_column, pixels, STRIDE, CHANNELS, H, W,
                             OUT_H, OUT_W, RUN, TAPS)  # fmt: skip
        sums = tl.dot(weights, values.to(out.dtype.element_ty))
        at = begin + tl.arange(0, RUN)[None, :]
        tl.store(out + node * pixels + at, sums.to(out.dtype.element_ty), mask=at < pixels)


@triton.jit
def _correlate(images, grad, shares, by_image, by_channel, by_row, by_column, pixels, each, STRIDE: tl.constexpr,
               CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
               RUN: tl.constexpr, NODES: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """Backward: the share of ``each`` runs of pixels in the gradient of all kernels."""
    node, tap = tl.arange(0, NODES)[:, None], tl.arange(0, TAPS)[None, :]
    sums = tl.zeros([NODES, TAPS], tl.float32)
    for run in range(each):
        begin = (tl.program_id(0) * each + run) * RUN
        values = _below_taps(images, begin, by_image, by_channel, by_row, by_column, pixels, STRIDE, CHANNELS, H, W,
                             OUT_H, OUT_W, RUN, TAPS)  # fmt: skip
        at = begin + tl.arange(0, RUN)[None, :]
        behind = tl.load(grad + node * pixels + at, mask=at < pixels, other=0)
        sums += tl.dot(behind, tl.trans(values.to(grad.dtype.element_ty)))
    tl.store(shares + (tl.program_id(0) * NODES + node) * TAPS + tap, sums)


@triton.jit
def _add_shares(shares, out, parts, taps, NODES: tl.constexpr, TAPS: tl.constexpr, SHARES: tl.constexpr):
    """Add the shares in the gradient of one node's kernel, always in the same order."""
    node = tl.program_id(0)
    part, tap = tl.arange(0, SHARES)[:, None], tl.arange(0, TAPS)
    sums = tl.zeros([SHARES, TAPS], tl.float32)
    for begin in range(0, parts, SHARES):
        at = shares + ((begin + part) * NODES + node) * TAPS + tap[None, :]
        sums += tl.load(at, mask=begin + part < parts, other=0)
    tl.store(out + node * taps + tap, tl.sum(sums, 0).to(out.dtype.element_ty), mask=tap < taps)


# ---- norm, ReLU and mean --------------------------------------------------------------------------------------


def pooling_fits(x: Tensor) -> bool:
    """Whether :func:`pool` supports states of shape (nodes, images, height, width)."""
    usual = x.dtype in _DTYPES and x.dim() == 4 and x.is_contiguous()
    return usual and 0 < x.shape[2:].numel() <= _PIXELS and x.numel() > 0


def pool(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor | None, var: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of every map after a batch norm and a ReLU, (nodes, images); differentiable once. Also mean and variance.

    ``x``: states, of shape (nodes, images, height, width), float32, bfloat16 or float16. The result has their dtype.
    ``gamma``, ``beta``: scale and shift of the norm, one of each per node.
    ``mean``, ``var``: statistics for the norm, one of each per node; both None for the batch's own (biased variance).
    """
    return _Pooling.apply(x, gamma, beta, mean, var, eps)


class _Pooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, mean, var, eps):
        own = mean is None
        nodes, images = x.shape[:2]
        out = torch.empty((nodes, images), dtype=x.dtype, device=x.device)
        if own:
            mean, var = (torch.empty(nodes, dtype=torch.float32, device=x.device) for _ in range(2))
        else:
            mean, var = (t.to(torch.float32, copy=True) for t in (mean, var))  # running statistics may change
        constants = (eps, own, *_tile_of(x))
        launch = _launcher(x, gamma, beta, rest=("pooling", *constants))
        with on_device_of(x):
            launch(_pool, nodes, 8, x, gamma, beta, mean, var, out, images, *constants)
        ctx.save_for_backward(x, gamma, beta, mean, var)
        ctx.constants = constants
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return out, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        if grad is None:
            return (None,) * 6
        x, gamma, beta, mean, var = ctx.saved_tensors
        dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(beta)
        tensors = (x, gamma, beta, mean, var, grad, dx, dgamma, dbeta)
        launch = _launcher(x, gamma, beta, grad, rest=("pooling backward", grad.stride(), *ctx.constants))
        with on_device_of(x):
            launch(_unpool, len(x), 8, *tensors, x.shape[1], *grad.stride(), *ctx.constants)
        return dx, dgamma, dbeta, None, None, None


def _tile_of(x: Tensor) -> tuple[int, int, int]:
    """The number of pixels of a map, the next power of two, and how many maps a program processes at a time."""
    pixels = x[0, 0].numel()
    padded = triton.next_power_of_2(pixels)
    return pixels, padded, _TILE // padded


@triton.jit
def _pool(x, gamma, beta, mean, var, out, images, EPS: tl.constexpr, OWN: tl.constexpr, PIXELS: tl.constexpr,
          PADDED: tl.constexpr, MAPS: tl.constexpr):  # fmt: skip
    """Forward: all maps of one node."""
    node = tl.program_id(0)
    x += node.to(tl.int64) * images * PIXELS
    if OWN:
        # Sums of differences from the first pixel, to avoid cancellation.
        count = images * PIXELS
        first = tl.load(x).to(tl.float32)
        total, squares = tl.zeros([MAPS * PADDED], tl.float32), tl.zeros([MAPS * PADDED], tl.float32)
        for begin in range(0, count, MAPS * PADDED):
            at = begin + tl.arange(0, MAPS * PADDED)
            off = tl.where(at < count, tl.load(x + at, mask=at < count, other=0).to(tl.float32) - first, 0.0)
            total += off
            squares += off * off
        moved = tl.sum(total) / count
        m, v = first + moved, tl.maximum(tl.sum(squares) / count - moved * moved, 0.0)
        tl.store(mean + node, m)
        tl.store(var + node, v)
    else:
        m, v = tl.load(mean + node), tl.load(var + node)
    scale = tl.load(gamma + node).to(tl.float32) * tl.rsqrt(v + EPS)
    shift = tl.load(beta + node).to(tl.float32) - m * scale
    pixel = tl.arange(0, PADDED)[None, :]
    for begin in range(0, images, MAPS):
        image = begin + tl.arange(0, MAPS)
        real = (image[:, None] < images) & (pixel < PIXELS)
        value = tl.load(x + image[:, None] * PIXELS + pixel, mask=real, other=0)
        sums = tl.sum(_norm_one(value, real, scale, shift, True), 1)
        tl.store(out + node * images + image, (sums / PIXELS).to(out.dtype.element_ty), mask=image < images)


@triton.jit
def _unpool(x, gamma, beta, mean, var, grad, dx, dgamma, dbeta, images, by_node, by_image, EPS: tl.constexpr,
            OWN: tl.constexpr, PIXELS: tl.constexpr, PADDED: tl.constexpr, MAPS: tl.constexpr):  # fmt: skip
    """Backward: all maps of one node. First its sums, then the gradient of its states."""
    node = tl.program_id(0)
    x += node.to(tl.int64) * images * PIXELS
    dx += node.to(tl.int64) * images * PIXELS
    grad += node * by_node
    m, inverse = tl.load(mean + node), tl.rsqrt(tl.load(var + node) + EPS)
    g, b = tl.load(gamma + node).to(tl.float32), tl.load(beta + node).to(tl.float32)
    by_shift, by_scale = tl.zeros([MAPS, PADDED], tl.float32), tl.zeros([MAPS, PADDED], tl.float32)
    for begin in range(0, images, MAPS):
        at, real, standard, d = _through_relu(x, grad, begin, images, by_image, m, inverse, g, b, PIXELS, PADDED, MAPS)
        by_shift += d
        by_scale += d * standard
    shifted, scaled = tl.sum(by_shift), tl.sum(by_scale)
    tl.store(dbeta + node, shifted.to(dbeta.dtype.element_ty))
    tl.store(dgamma + node, scaled.to(dgamma.dtype.element_ty))
    for begin in range(0, images, MAPS):
        at, real, standard, d = _through_relu(x, grad, begin, images, by_image, m, inverse, g, b, PIXELS, PADDED, MAPS)
        if OWN:
            d -= (shifted + standard * scaled) / (images * PIXELS)
        tl.store(dx + at, (d * (g * inverse)).to(dx.dtype.element_ty), mask=real)


@triton.jit
def _through_relu(x, grad, begin, images, by_image, mean, inverse, gamma, beta, PIXELS: tl.constexpr,
                  PADDED: tl.constexpr, MAPS: tl.constexpr):  # fmt: skip
    """Where the pixels of some maps are, which of them exist, their standardised values, and the norm's gradient."""
    image, pixel = begin + tl.arange(0, MAPS), tl.arange(0, PADDED)[None, :]
    at, real = image[:, None] * PIXELS + pixel, (image[:, None] < images) & (pixel < PIXELS)
    standard, y, _ = _standard(tl.load(x + at, mask=real, other=0), mean, inverse, gamma, beta, True)
    d = tl.load(grad + image * by_image, mask=image < images, other=0).to(tl.float32) / PIXELS
    return at, real, standard, tl.where(real, tl.where(y <= 0, 0.0, d[:, None]), 0.0)
