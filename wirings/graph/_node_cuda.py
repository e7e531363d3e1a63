"""Node functions on a GPU: instance norm, ReLU and 3x3 convolution in one Triton kernel for each direction.

A state has at most 64 pixels, so whole images fit in a tile, one per row; the norm's statistics are computed from the
tile, and each direction reads and writes every state once. In half precision, the convolution of one node is a banded
matrix, from input pixels to output pixels, applied to a tile in one matrix product. In float32 that would be slow;
there, the nine neighbours of each pixel are read from the cache. A program processes one node and a run of images. In
the backward pass it writes its share of the parameters' gradients to memory, and the shares are added afterwards,
always in the same order.

The zeros of the banded matrix are multiplied too: in half precision, if one pixel is infinite or NaN after the ReLU,
every pixel of that image becomes NaN.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings.utils.transforms import in_transform
from wirings.utils.triton_launch import KernelLauncher, on_device_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BANDED = _DTYPES[1:]  # dtypes whose convolution is a matrix product
_PIXELS = 64  # upper limit: the banded matrix must stay small
_PROGRAMS = 1056  # the desired minimum: eight for each of a large GPU's 132 multiprocessors


def fits(x: Tensor, out_dtype: torch.dtype | None = None) -> bool:
    """Whether :func:`node_map` supports states ``x`` of shape (nodes, images, height, width)."""
    return (
        x.is_cuda
        and x.dim() == 4
        and x.shape[2] * x.shape[3] <= _PIXELS
        and x.dtype in _DTYPES
        and (out_dtype is None or out_dtype in _DTYPES)
    )


def node_map(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    kernel: Tensor | None,
    eps: float,
    relu: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm, ReLU and convolution at every node, each of which may be left out; differentiable once.

    ``x``: states, of shape (nodes, images, height, width), float32, bfloat16 or float16.
    ``gamma``, ``beta``: scale and shift of an instance norm, one of each per node, or both None for no norm.
    ``kernel``: weights of a zero-padded cross-correlation, of shape (nodes, 3, 3), or None for no convolution.
    ``eps``: added to the (biased) variance.
    ``relu``: whether negative values become zero before the convolution.
    ``out_dtype``: the dtype of the result, one of the same three, by default that of ``x``. The factors of the
    convolution are rounded to it; everything else is computed in float32.
    """
    if (gamma is None) != (beta is None):
        raise ValueError("gamma and beta: give both, or neither")
    arguments = (x, gamma, beta, kernel, eps, relu, out_dtype or x.dtype)
    if torch.compiler.is_compiling() or in_transform(x):
        return torch.ops.wirings.node_map(*arguments)
    return _NodeMap.apply(*arguments)


# ---- the operators --------------------------------------------------------------------------------------------

_library = torch.library.Library("wirings", "FRAGMENT")
_parts = "Tensor x, Tensor? gamma, Tensor? beta, Tensor? kernel, float eps, bool relu"
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"node_map({_parts}, ScalarType out_dtype) -> Tensor", tags=_tags)
_library.define(f"node_map_backward(Tensor grad, {_parts}) -> (Tensor, Tensor)", tags=_tags)


@functools.cache
def _plan(shape: torch.Size, dtype: torch.dtype) -> tuple[tuple[int, int], tuple[int, int, bool, int, int]]:
    """How states of a shape are divided among programs if the result (or its gradient) has this dtype.

    Returns tiles per program and programs per node; then the constants of the kernels: height, width, whether the
    convolution is a matrix product, pixels with padding, images per tile.
    """
    nodes, images, height, width = shape
    banded = dtype in _BANDED
    tile = 64 if banded else 16  # the nine neighbours need registers, too
    tiles = -(-images // tile)
    each = -(-tiles // min(-(-_PROGRAMS // nodes), tiles))
    pixels = max(1 << (height * width - 1).bit_length(), 16)  # the minimum for a matrix product
    return (each, -(-tiles // each)), (height, width, banded, pixels, tile)


def _launcher(*tensors: Tensor | None, rest: tuple[object, ...]) -> KernelLauncher:
    """A launcher for kernels on the device of the first tensor; ``rest`` is everything else that they depend on."""
    like = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    return KernelLauncher((tensors[0].device, *like, tensors[0].shape, *rest))


def _forward(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    kernel: Tensor | None,
    eps: float,
    relu: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    x, gamma, beta, kernel = (t if t is None else t.contiguous() for t in (x, gamma, beta, kernel))
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return out
    nodes, images = x.shape[:2]
    (each, splits), constants = _plan(x.shape, out_dtype)
    tensors = (x, gamma, beta, kernel, out)
    launch = _launcher(*tensors, rest=("forward", eps, relu))
    with on_device_of(x):
        launch(_map, nodes * splits, 4, *tensors, images, each, splits, eps, relu, *constants)
    return out


def _backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    kernel: Tensor | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and of all parameters, concatenated (gamma, beta, kernel), in float32."""
    x, gamma, beta, kernel = (t if t is None else t.contiguous() for t in (x, gamma, beta, kernel))
    grad, dx, count = grad.contiguous(), torch.empty_like(x), _count(x, gamma, kernel)
    if x.numel() == 0:
        return dx, torch.zeros(count, dtype=torch.float32, device=x.device)
    nodes, images = x.shape[:2]
    (each, splits), constants = _plan(x.shape, grad.dtype)
    shares = torch.empty((splits, count), dtype=torch.float32, device=x.device)
    tensors = (x, gamma, beta, kernel, grad, dx, shares)
    launch = _launcher(*tensors, rest=("backward", eps, relu))
    with on_device_of(x):
        # Four more warps for a matrix product: each thread needs half as many registers, so that two programs fit on a
        # multiprocessor.
        warps = 8 if grad.dtype in _BANDED else 4
        launch(_unmap, nodes * splits, warps, *tensors, nodes, images, each, splits, eps, relu, *constants)
    return dx, shares.view(count) if splits == 1 else shares.sum(0)


def _count(x: Tensor, gamma: Tensor | None, kernel: Tensor | None) -> int:
    """The number of parameters of all nodes."""
    return x.shape[0] * ((0 if gamma is None else 2) + (0 if kernel is None else 9))


for _key in ("CUDA", "CPU"):  # CPU for Triton's interpreter
    _library.impl("node_map", _forward, _key)
    _library.impl("node_map_backward", _backward, _key)


@torch.library.register_fake("wirings::node_map", lib=_library)
def _(x, gamma, beta, kernel, eps, relu, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype)


@torch.library.register_fake("wirings::node_map_backward", lib=_library)
def _(grad, x, gamma, beta, kernel, eps, relu):
    return x.new_empty(x.shape), x.new_empty(_count(x, gamma, kernel), dtype=torch.float32)


def _remember(ctx, inputs, output):
    *tensors, ctx.eps, ctx.relu, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad, backward=torch.ops.wirings.node_map_backward):
    x, gamma, beta, kernel = ctx.saved_tensors
    dx, parts = backward(grad.to(ctx.dtype), x, gamma, beta, kernel, ctx.eps, ctx.relu)
    dgamma = dbeta = dkernel = None
    nodes = x.shape[0]
    if gamma is not None and kernel is not None:
        dgamma, dbeta, dkernel = parts.split((nodes, nodes, 9 * nodes))
    elif gamma is not None:
        dgamma, dbeta = parts.split(nodes)
    elif kernel is not None:
        dkernel = parts
    if gamma is not None:
        dgamma, dbeta = dgamma.to(gamma.dtype), dbeta.to(beta.dtype)
    if kernel is not None:
        dkernel = dkernel.view(kernel.shape).to(kernel.dtype)
    return dx, dgamma, dbeta, dkernel, None, None, None


torch.library.register_autograd("wirings::node_map", _gradients, setup_context=_remember, lib=_library)


class _NodeMap(torch.autograd.Function):
    """The same without the dispatcher, which would cost the host several times as much as a launch."""

    @staticmethod
    def forward(ctx, *inputs):
        _remember(ctx, inputs, None)
        return _forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gradients(ctx, grad, _backward)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _taps(H: tl.constexpr, W: tl.constexpr, PIXELS: tl.constexpr):
    """The index of the kernel weight that leads from an input pixel (row) to an output pixel (column), or -1."""
    source, target = tl.arange(0, PIXELS)[:, None], tl.arange(0, PIXELS)[None, :]
    down, right = source // W - target // W + 1, source % W - target % W + 1
    near = (down >= 0) & (down < 3) & (right >= 0) & (right < 3) & (source < H * W) & (target < H * W)
    return tl.where(near, 3 * down + right, -1)


@triton.jit
def _tile(node, rows, images, SPACE: tl.constexpr, PIXELS: tl.constexpr):
    """The offsets of a tile of images in the states, and a mask of valid ones, both of shape (rows, PIXELS)."""
    at = tl.arange(0, PIXELS)[None, :]
    base = node.to(tl.int64) * images * SPACE  # the states together may have more than 2**31 pixels
    return base + (rows[:, None] * SPACE + at), (rows[:, None] < images) & (at < SPACE)


@triton.jit
def _shifted(states, place, real, DOWN: tl.constexpr, RIGHT: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
             PIXELS: tl.constexpr):  # fmt: skip
    """The pixels of a tile, shifted down and to the right, zero beyond the border; and a mask of those within."""
    at = tl.arange(0, PIXELS)[None, :]
    row, column = at // W + DOWN, at % W + RIGHT
    within = real & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(states + place + (DOWN * W + RIGHT), mask=within, other=0).to(tl.float32), within


@triton.jit
def _statistics(x, present, EPS: tl.constexpr, SPACE: tl.constexpr, PIXELS: tl.constexpr):
    """The mean and inverse standard deviation of each image; the latter is 0 for images that are not ``present``."""
    mean = tl.sum(x, 1) / SPACE  # padding is zero
    off = x - mean[:, None]
    if SPACE < PIXELS:
        off = tl.where(tl.arange(0, PIXELS)[None, :] < SPACE, off, 0.0)
    return mean, tl.where(present, tl.rsqrt(tl.sum(off * off, 1) / SPACE + EPS), 0.0)


@triton.jit
def _map(x, gamma, beta, kernel, out, images, tiles, splits, EPS: tl.constexpr, RELU: tl.constexpr,
         H: tl.constexpr, W: tl.constexpr, BANDED: tl.constexpr, PIXELS: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """Forward: one node, ``tiles`` tiles of images."""
    SPACE: tl.constexpr = H * W
    node, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    if gamma is not None:
        g, b = tl.load(gamma + node).to(tl.float32), tl.load(beta + node).to(tl.float32)
    if kernel is not None:
        kernel += node * 9
        if BANDED:
            tap = _taps(H, W, PIXELS)
            band = tl.load(kernel + tap, mask=tap >= 0, other=0).to(out.dtype.element_ty)
    for tile in tl.range(0, tiles, num_stages=2 if BANDED else 1):
        rows = (split * tiles + tile) * TILE + tl.arange(0, TILE)
        place, real = _tile(node, rows, images, SPACE, PIXELS)
        y = tl.load(x + place, mask=real, other=0).to(tl.float32)
        if gamma is not None:
            mean, scale = _statistics(y, rows < images, EPS, SPACE, PIXELS)
        if kernel is None or BANDED:
            if gamma is not None:
                y = (y - mean[:, None]) * scale[:, None] * g + b
            if RELU:
                y = tl.where(y <= 0, 0.0, y)  # keeps NaN, unlike tl.maximum
            if kernel is not None:  # padding is multiplied by zeros of the band
                y = tl.dot(y.to(out.dtype.element_ty), band, input_precision="ieee")
        else:
            y = tl.zeros([TILE, PIXELS], tl.float32)
            for t in tl.static_range(9):
                near, within = _shifted(x, place, real, t // 3 - 1, t % 3 - 1, H, W, PIXELS)
                if gamma is not None:
                    near = (near - mean[:, None]) * scale[:, None] * g + b
                if RELU:
                    near = tl.where(near <= 0, 0.0, near)
                y += tl.load(kernel + t).to(tl.float32) * tl.where(within, near, 0.0)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _unmap(x, gamma, beta, kernel, grad, dx, shares, nodes, images, tiles, splits,
           EPS: tl.constexpr, RELU: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
           BANDED: tl.constexpr, PIXELS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Backward: one node, ``tiles`` tiles of images; the input of the norm is recomputed."""
    SPACE: tl.constexpr = H * W
    node, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    shares += split * nodes * ((0 if gamma is None else 2) + (0 if kernel is None else 9))
    if gamma is not None:
        g, b = tl.load(gamma + node).to(tl.float32), tl.load(beta + node).to(tl.float32)
        dgamma, dbeta = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)  # by image of a tile
    if kernel is not None:
        kernel += node * 9
        if BANDED:
            # Rows are output pixels and columns input pixels here: in the transposed band, weights are reversed.
            tap = _taps(H, W, PIXELS)
            band = tl.load(kernel + 8 - tap, mask=tap >= 0, other=0).to(grad.dtype.element_ty)
            dband = tl.zeros([PIXELS, PIXELS], tl.float32)
        else:
            weights, dkernel = tl.arange(0, 16), tl.zeros([TILE, 16], tl.float32)  # by image of a tile
    for tile in tl.range(0, tiles, num_stages=2 if BANDED else 1):
        rows = (split * tiles + tile) * TILE + tl.arange(0, TILE)
        place, real = _tile(node, rows, images, SPACE, PIXELS)
        y = tl.load(x + place, mask=real, other=0).to(tl.float32)
        d = tl.load(grad + place, mask=real, other=0)  # zero at padding, and so is everything computed from it
        if gamma is not None:
            mean, scale = _statistics(y, rows < images, EPS, SPACE, PIXELS)
            standard = (y - mean[:, None]) * scale[:, None]
            y = standard * g + b
        after = tl.where(y <= 0, 0.0, y) if RELU else y
        if kernel is None:
            dy = d.to(tl.float32)
        elif BANDED:
            dband = tl.dot(tl.trans(d), after.to(d.dtype), dband, input_precision="ieee")
            dy = tl.dot(d, band, input_precision="ieee")
        else:
            dy = tl.zeros([TILE, PIXELS], tl.float32)
            for t in tl.static_range(9):  # the output pixel to which this one contributes through weight t
                near, _ = _shifted(grad, place, real, 1 - t // 3, 1 - t % 3, H, W, PIXELS)
                dy += tl.load(kernel + t).to(tl.float32) * near
                dkernel += tl.where(weights[None, :] == t, tl.sum(after * near, 1)[:, None], 0.0)
        if RELU:
            dy = tl.where(y <= 0, 0.0, dy)
        if gamma is not None:
            total, along = tl.sum(dy, 1), tl.sum(dy * standard, 1)
            dbeta += total
            dgamma += along
            dy = (dy - (total / SPACE)[:, None] - standard * (along / SPACE)[:, None]) * (scale * g)[:, None]
        tl.store(dx + place, dy.to(dx.dtype.element_ty), mask=real)
    if gamma is not None:
        tl.store(shares + node, tl.sum(dgamma))
        tl.store(shares + nodes + node, tl.sum(dbeta))
        shares += 2 * nodes
    if kernel is not None:
        if BANDED:
            for t in tl.static_range(9):
                tl.store(shares + node * 9 + t, tl.sum(tl.where(tap == 8 - t, dband, 0.0)))
        else:
            tl.store(shares + node * 9 + weights, tl.sum(dkernel, 0), mask=weights < 9)
