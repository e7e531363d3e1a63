"""Nodes with a batch norm on a GPU: norm, ReLU and 3x3 convolution in two Triton kernels for each direction.

States are stored node by node, so a node's pixels, of all images, are contiguous in memory. In the forward pass, one
kernel sums the statistics of every node, and another applies norm, ReLU and convolution; intermediate maps are never
written. In the backward pass, one kernel propagates the gradient through the convolution and the ReLU and sums what the
gradients of the norm and the parameters need, and another finishes the norm in place. A program processes one node and
a run of its pixels. It writes its share of every sum to memory; the kernel that needs a sum adds the shares, always in
the same order.

A program that convolves moves down many adjacent columns of pixels and reads every row once: what a row contributes to
the rows above and below stays in registers.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings.graph._node_cuda import _launcher
from wirings.utils.transforms import in_transform
from wirings.utils.triton_launch import on_device_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 1024  # pixels that a program loads at a time
_COLUMNS = 256  # adjacent columns of pixels that a program processes together
_BACK_COLUMNS = 128  # in the backward pass, which needs more registers for each
_ROWS = 8  # the fewest rows per program (if the map has as many), since the rows above and below are read as well
_PROGRAMS = 2112  # the desired minimum: sixteen for each of a large GPU's 132 multiprocessors
_SHARES = 64  # upper limit per node, since the kernel that adds them reads them all
_SUMS = 16  # entries of a share: nine for the kernel, two for the norm, padded


def fits(x: Tensor, stride: int) -> bool:
    """Whether :func:`batch_map` supports states ``x`` of shape (nodes, images, height, width)."""
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
    """Batch norm, ReLU and convolution at every node; differentiable once. Returns the maps, the mean and the variance.

    ``x``: states, of shape (nodes, images, height, width), float32, bfloat16 or float16.
    ``gamma``, ``beta``: scale and shift of the norm, one of each per node.
    ``mean``, ``var``: statistics for the norm, one of each per node; both None for the batch's own (biased variance).
    ``kernel``: weights of a zero-padded cross-correlation, of shape (nodes, 1, 3, 3).
    ``relu``: whether negative values become zero before the convolution.
    ``stride``: the stride of the convolution, 1 or 2.
    ``out_dtype``: the dtype of the maps, by default that of ``x``. Everything is computed in float32.
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
    """The number of tiles per program, and of programs per node."""
    tiles = -(-pixels // tile)
    each = -(-tiles // min(-(-_PROGRAMS // nodes), tiles, _SHARES))
    return each, -(-tiles // each)


@functools.cache
def _columns(nodes: int, images: int, height: int, width: int, strip: int) -> tuple[int, int, int, int, int]:
    """How columns are divided into strips of ``strip``, and strips into pieces if there are too few of them.

    Returns the number of strips, rows per piece, pieces in total, pieces per program, and programs per node.
    """
    strips = -(-images * width // strip)
    cuts = max(1, min(height // _ROWS, -(-_PROGRAMS // (nodes * strips))))
    rows = -(-height // cuts)
    pieces = strips * -(-height // rows)
    each = -(-pieces // min(-(-_PROGRAMS // nodes), pieces, _SHARES))
    return strips, rows, pieces, each, -(-pieces // each)


def out_shape(x: Tensor, stride: int) -> tuple[int, int, int, int]:
    nodes, images, height, width = x.shape
    return nodes, images, (height - 1) // stride + 1, (width - 1) // stride + 1


def forward(
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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, gamma, beta, kernel = x.contiguous(), gamma.contiguous(), beta.contiguous(), kernel.contiguous()
    nodes, images, height, width = x.shape
    shape = out_shape(x, stride)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=x.device)
    pixels = images * height * width
    own = mean is None or var is None
    shares, parts = x.new_empty(0, dtype=torch.float32), 0
    if own:
        mean, var = (torch.empty(nodes, dtype=torch.float32, device=x.device) for _ in range(2))
        each, parts = _plan(nodes, pixels, _TILE)
        shares = torch.empty((nodes, parts, 2), dtype=torch.float32, device=x.device)
    else:
        mean, var = (t.to(torch.float32, copy=True) for t in (mean, var))  # an operator must not return its inputs
    launch = _launcher(x, gamma, kernel, out, rest=("batch", own, eps, relu, stride))
    with on_device_of(x):
        if own:
            launch(_add_up, nodes * parts, 4, x, shares, pixels, each, parts, _TILE)
        *plan, programs = _columns(nodes, images, shape[2], shape[3], _COLUMNS)
        tensors = (x, gamma, beta, kernel, mean, var, shares, out)
        numbers = (images, *plan, programs, parts)
        padded = triton.next_power_of_2(max(parts, 1))
        constants = (eps, relu, stride, height, width, shape[2], shape[3], own, padded, _COLUMNS)
        launch(_map, nodes * programs, 4, *tensors, *numbers, *constants)
    return out, mean, var


def backward(
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
    _, _, out_height, out_width = out_shape(x, stride)
    pixels = images * height * width
    dx = torch.empty_like(x)
    dgamma, dbeta, dkernel = torch.empty_like(gamma), torch.empty_like(beta), torch.empty_like(kernel)
    # With a stride of 2, rows are processed in pairs.
    *plan, parts = _columns(nodes, images, out_height, width, _BACK_COLUMNS)
    shares = torch.empty((nodes, parts, _SUMS), dtype=torch.float32, device=x.device)
    last_each, last_parts = _plan(nodes, pixels, _TILE)
    launch = _launcher(x, gamma, kernel, grad, rest=("batch backward", own, eps, relu, stride))
    with on_device_of(x):
        tensors = (x, gamma, beta, kernel, mean, var, grad, dx, shares)
        constants = (eps, relu, stride, height, width, out_height, out_width, _SUMS, _BACK_COLUMNS)
        launch(_unmap, nodes * parts, 4, *tensors, images, *plan, parts, *constants)
        tensors = (x, gamma, mean, var, dx, shares, dgamma, dbeta, dkernel)
        padded = triton.next_power_of_2(parts)
        launch(_finish, nodes * last_parts, 4, *tensors, pixels, last_each, last_parts, parts, eps, own, padded, _SUMS,
               _TILE)  # fmt: skip
    return dx, dgamma, dbeta, dkernel


for _key in ("CUDA", "CPU"):  # CPU for Triton's interpreter
    _library.impl("batch_map", forward, _key)
    _library.impl("batch_map_backward", backward, _key)


@torch.library.register_fake("wirings::batch_map", lib=_library)
def _(x, gamma, beta, mean, var, kernel, eps, relu, stride, out_dtype):
    number = [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2)]
    return x.new_empty(out_shape(x, stride), dtype=out_dtype), *number


@torch.library.register_fake("wirings::batch_map_backward", lib=_library)
def _(grad, x, gamma, beta, mean, var, kernel, eps, relu, stride, own):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gamma, beta, kernel))


def _remember(ctx, inputs, output):
    x, gamma, beta, mean, _, kernel, ctx.eps, ctx.relu, ctx.stride, ctx.dtype = inputs
    ctx.own = mean is None
    ctx.save_for_backward(x, gamma, beta, output[1], output[2], kernel)
    ctx.mark_non_differentiable(output[1], output[2])


def _gradients(ctx, grad, _mean, _var, run=torch.ops.wirings.batch_map_backward):
    dx, dgamma, dbeta, dkernel = run(grad.to(ctx.dtype), *ctx.saved_tensors, ctx.eps, ctx.relu, ctx.stride, ctx.own)
    return dx, dgamma, dbeta, None, None, dkernel, None, None, None, None


torch.library.register_autograd("wirings::batch_map", _gradients, setup_context=_remember, lib=_library)


class _BatchMap(torch.autograd.Function):
    """The same without the dispatcher, which would cost the host several times as much as a launch."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        _remember(ctx, inputs, output)
        ctx.set_materialize_grads(False)  # the statistics have none, which would each be filled with zeros
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, mean, var):
        return (None,) * 10 if grad is None else _gradients(ctx, grad, mean, var, backward)


# ---- the kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _add_up(x, shares, pixels, tiles, parts, TILE: tl.constexpr):
    """A part of a node's sum and sum of squares, of differences from its first pixel to avoid cancellation."""
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
def _map(x, gamma, beta, kernel, mean, var, shares, out, images, strips, rows, pieces, each, programs, parts,
         EPS: tl.constexpr, RELU: tl.constexpr, STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
         OUT_H: tl.constexpr, OUT_W: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
         COLUMNS: tl.constexpr):  # fmt: skip
    """Forward: one node, ``each`` pieces of the columns of its output."""
    node, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    x += node.to(tl.int64) * images * (H * W)
    out += node.to(tl.int64) * images * (OUT_H * OUT_W)
    if OWN:
        place = tl.arange(0, PARTS)
        shares += 2 * (node * parts + place)
        pixels = images * (H * W)
        shift = tl.sum(tl.load(shares, mask=place < parts, other=0)) / pixels
        squares = tl.sum(tl.load(shares + 1, mask=place < parts, other=0)) / pixels
        m, v = tl.load(x).to(tl.float32) + shift, tl.maximum(squares - shift * shift, 0.0)
        if program == 0:
            tl.store(mean + node, m)
            tl.store(var + node, v)
    else:
        m, v = tl.load(mean + node), tl.load(var + node)
    scale = tl.load(gamma + node).to(tl.float32) * tl.rsqrt(v + EPS)
    shift = tl.load(beta + node).to(tl.float32) - m * scale
    k0, k1, k2 = _weights(kernel + node * 9)
    k3, k4, k5 = _weights(kernel + node * 9 + 3)
    k6, k7, k8 = _weights(kernel + node * 9 + 6)
    for piece in range(program * each, tl.minimum(program * each + each, pieces)):
        image, column, real = _place(piece % strips, images, OUT_W, COLUMNS)
        to = out + image * (OUT_H * OUT_W) + column
        column *= STRIDE
        start = x + image * (H * W) + column
        left, right = real & (column > 0), real & (column < W - 1)
        begin = piece // strips * rows
        end = tl.minimum(begin + rows, OUT_H)
        if STRIDE == 1:
            # Partial outputs at the current row and at the one below, from the rows read so far. A row is loaded while
            # the one before is computed: waiting for memory would otherwise take most of the time.
            here, below = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
            p, q, r = _row_of(start + (begin - 1) * W, left, real, right, begin > 0)
            for row in range(begin - 1, end + 1):
                p1, q1, r1 = _row_of(start + (row + 1) * W, left, real, right, (row + 1 < H) & (row < end))
                inside = (row >= 0) & (row < H)
                a = _norm_one(p, left & inside, scale, shift, RELU)
                b = _norm_one(q, real & inside, scale, shift, RELU)
                c = _norm_one(r, right & inside, scale, shift, RELU)
                y = here + (k6 * a + k7 * b + k8 * c)
                tl.store(to + (row - 1) * OUT_W, y.to(out.dtype.element_ty), mask=real & (row > begin))
                here = below + (k3 * a + k4 * b + k5 * c)
                below = k0 * a + k1 * b + k2 * c
                p, q, r = p1, q1, r1
        else:
            a, b, c = _normed(start + (2 * begin - 1) * W, left, real, right, begin > 0, scale, shift, RELU)
            below = k0 * a + k1 * b + k2 * c
            for row in range(begin, end):
                a, b, c = _normed(start + 2 * row * W, left, real, right, row < OUT_H, scale, shift, RELU)
                y = below + (k3 * a + k4 * b + k5 * c)
                a, b, c = _normed(start + (2 * row + 1) * W, left, real, right, 2 * row + 1 < H, scale, shift, RELU)
                y += k6 * a + k7 * b + k8 * c
                tl.store(to + row * OUT_W, y.to(out.dtype.element_ty), mask=real)
                below = k0 * a + k1 * b + k2 * c


@triton.jit
def _weights(kernel):
    """A row of a kernel."""
    return tl.load(kernel).to(tl.float32), tl.load(kernel + 1).to(tl.float32), tl.load(kernel + 2).to(tl.float32)


@triton.jit
def _place(strip, images, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a strip: their image, their position in it, and whether they exist."""
    # Adjacent columns go to different threads: loads at an offset of one pixel could not be vectorized anyway.
    at = tl.max_contiguous(strip * COLUMNS + tl.arange(0, COLUMNS), 1)
    return at // WIDTH, at % WIDTH, at < images * WIDTH


@triton.jit
def _normed(at, left, real, right, there, scale, shift, RELU: tl.constexpr):
    """The pixels to the left, at and to the right of given pixels, after norm and ReLU; zero beyond the map."""
    return (
        _one_normed(at - 1, left & there, scale, shift, RELU),
        _one_normed(at, real & there, scale, shift, RELU),
        _one_normed(at + 1, right & there, scale, shift, RELU),
    )


@triton.jit
def _row_of(at, left, real, right, there):
    """The pixels to the left, at and to the right of given pixels; zero beyond the map."""
    return (
        tl.load(at - 1, mask=left & there, other=0),
        tl.load(at, mask=real & there, other=0),
        tl.load(at + 1, mask=right & there, other=0),
    )


@triton.jit
def _one_normed(at, inside, scale, shift, RELU: tl.constexpr):
    return _norm_one(tl.load(at, mask=inside, other=0), inside, scale, shift, RELU)


@triton.jit
def _norm_one(value, inside, scale, shift, RELU: tl.constexpr):
    y = value.to(tl.float32) * scale + shift
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps NaN, unlike tl.maximum
    return tl.where(inside, y, 0.0)


@triton.jit
def _unmap(x, gamma, beta, kernel, mean, var, grad, dx, shares, images, strips, rows, pieces, each, programs,
           EPS: tl.constexpr, RELU: tl.constexpr, STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
           OUT_H: tl.constexpr, OUT_W: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Backward through convolution and ReLU: one node, ``each`` pieces of its input columns; and its share of sums."""
    node, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    x += node.to(tl.int64) * images * (H * W)
    dx += node.to(tl.int64) * images * (H * W)
    grad += node.to(tl.int64) * images * (OUT_H * OUT_W)
    m, inverse = tl.load(mean + node), tl.rsqrt(tl.load(var + node) + EPS)
    g, b = tl.load(gamma + node).to(tl.float32), tl.load(beta + node).to(tl.float32)
    k0, k1, k2 = _weights(kernel + node * 9)
    k3, k4, k5 = _weights(kernel + node * 9 + 3)
    k6, k7, k8 = _weights(kernel + node * 9 + 6)
    shares += tl.program_id(0) * SUMS
    # A sum for each of the nine taps, kept per column until the end: summing over columns at every row would be slow.
    none = tl.zeros([COLUMNS], tl.float32)
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = none, none, none, none, none, none, none, none, none
    by_shift, by_scale = none, none
    for piece in range(program * each, tl.minimum(program * each + each, pieces)):
        image, column, real = _place(piece % strips, images, W, COLUMNS)
        start, to = x + image * (H * W) + column, dx + image * (H * W) + column
        begin = piece // strips * rows
        end = tl.minimum(begin + rows, OUT_H)
        if STRIDE == 1:
            # Through the three taps of a kernel row, a pixel contributes to its right neighbour, itself and its left
            # neighbour.
            behind = grad + image * (OUT_H * OUT_W) + column
            right, left = real & (column < W - 1), real & (column > 0)
            a8, a7, a6 = _row_of(behind + (begin - 1) * W, left, real, right, begin > 0)
            a5, a4, a3 = _row_of(behind + begin * W, left, real, right, begin < H)
            a6, a7, a8 = a6.to(tl.float32), a7.to(tl.float32), a8.to(tl.float32)
            a3, a4, a5 = a3.to(tl.float32), a4.to(tl.float32), a5.to(tl.float32)
            # Rows are loaded one ahead, as in the forward pass.
            q2, q1, q0 = _row_of(behind + (begin + 1) * W, left, real, right, begin + 1 < H)
            pixel = tl.load(start + begin * W, mask=real, other=0)
            for row in range(begin, end):
                n2, n1, n0 = _row_of(behind + (row + 2) * W, left, real, right, (row + 2 < H) & (row + 1 < end))
                following = tl.load(start + (row + 1) * W, mask=real & (row + 1 < end), other=0)
                a0, a1, a2 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32)
                standard, y, after = _standard(pixel, m, inverse, g, b, RELU)
                d = (k0 * a0 + k1 * a1 + k2 * a2) + (k3 * a3 + k4 * a4 + k5 * a5) + (k6 * a6 + k7 * a7 + k8 * a8)
                if RELU:
                    d = tl.where(y <= 0, 0.0, d)
                tl.store(to + row * W, d.to(dx.dtype.element_ty), mask=real)
                by_shift += d
                by_scale += d * standard
                s0 += a0 * after
                s1 += a1 * after
                s2 += a2 * after
                s3 += a3 * after
                s4 += a4 * after
                s5 += a5 * after
                s6 += a6 * after
                s7 += a7 * after
                s8 += a8 * after
                a6, a7, a8 = a3, a4, a5
                a3, a4, a5 = a0, a1, a2
                q0, q1, q2, pixel = n0, n1, n2, following
        else:
            # A pixel in an even column contributes to one pixel of an output row, through the middle tap; one in an odd
            # column to two: to the right through the first tap, and to the left through the last. Likewise for rows.
            odd = column % 2 == 1
            behind = grad + image * (OUT_H * OUT_W) + (column + 1) // 2
            right, left = real & ((column + 1) // 2 < OUT_W), real & odd
            first, middle, last = tl.where(odd, k0, k1), tl.where(odd, k3, k4), tl.where(odd, k6, k7)
            near, far = _two(behind + begin * OUT_W, right, left, begin < OUT_H)
            t0, t3, t6 = none, none, none  # the next piece may have other odd and even columns
            for row in range(begin, end):
                standard, y, after = _at(start + 2 * row * W, real, m, inverse, g, b, RELU)
                d = middle * near + k5 * far
                if RELU:
                    d = tl.where(y <= 0, 0.0, d)
                tl.store(to + 2 * row * W, d.to(dx.dtype.element_ty), mask=real)
                by_shift += d
                by_scale += d * standard
                t3 += near * after
                s5 += far * after
                next_near, next_far = _two(behind + (row + 1) * OUT_W, right, left, row < OUT_H - 1)
                there = real & (2 * row + 1 < H)
                standard, y, after = _at(start + (2 * row + 1) * W, there, m, inverse, g, b, RELU)
                d = (first * next_near + k2 * next_far) + (last * near + k8 * far)
                if RELU:
                    d = tl.where(y <= 0, 0.0, d)
                d, after = tl.where(there, d, 0.0), tl.where(there, after, 0.0)
                tl.store(to + (2 * row + 1) * W, d.to(dx.dtype.element_ty), mask=there)
                by_shift += d
                by_scale += d * standard
                t0 += next_near * after
                s2 += next_far * after
                t6 += near * after
                s8 += far * after
                near, far = next_near, next_far
            s0 += tl.where(odd, t0, 0.0)
            s1 += tl.where(odd, 0.0, t0)
            s3 += tl.where(odd, t3, 0.0)
            s4 += tl.where(odd, 0.0, t3)
            s6 += tl.where(odd, t6, 0.0)
            s7 += tl.where(odd, 0.0, t6)
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
def _at(at, real, mean, inverse, gamma, beta, RELU: tl.constexpr):
    return _standard(tl.load(at, mask=real, other=0), mean, inverse, gamma, beta, RELU)


@triton.jit
def _standard(pixel, mean, inverse, gamma, beta, RELU: tl.constexpr):
    """The standardised pixels, and the input and output of the ReLU."""
    standard = (pixel.to(tl.float32) - mean) * inverse
    y = standard * gamma + beta
    if RELU:
        return standard, y, tl.where(y <= 0, 0.0, y)
    else:
        return standard, y, y


@triton.jit
def _two(at, here, before, there):
    """The gradient at given pixels and to the left of them, where it is needed."""
    return (
        tl.load(at, mask=here & there, other=0).to(tl.float32),
        tl.load(at - 1, mask=before & there, other=0).to(tl.float32),
    )


@triton.jit
def _finish(x, gamma, mean, var, dx, shares, dgamma, dbeta, dkernel, pixels, tiles, last_parts, parts,
            EPS: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """Finish the backward pass through the norm, in place; the first program of a node stores its sums."""
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
