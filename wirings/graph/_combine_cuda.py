"""The sum at the end of every solver step, y + sum of c_j k_j, on a GPU: one Triton kernel for each direction."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wirings.utils.triton_launch import KernelLauncher, on_device_of

_MOST = 7  # the largest number of terms
_BLOCK = 1024  # elements per program: eight per thread


def combine(y: Tensor | None, ks: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """``y`` plus the sum of ``coefficients[j] * ks[j]``; differentiable once with respect to all tensors.

    ``y``: any shape, any float dtype; None counts as zeros.
    ``ks``: at most seven, of ``y``'s shape, each of any float dtype.
    ``coefficients``: one number for each of ``ks``; new values do not recompile the kernel.

    Computed in float32 (float64 if the result is), in the order given. The result is contiguous and has the dtype of
    ``y``; without ``y``, that of ``ks[0]``, but at least float32.
    """
    tensors = [*([] if y is None else [y]), *ks]
    if len(ks) != len(coefficients) or len(ks) > _MOST or not tensors:
        raise ValueError(f"{len(ks)} tensors for {len(coefficients)} coefficients: give as many of both, 1 to {_MOST}")
    if any(t.shape != tensors[0].shape for t in tensors):
        raise ValueError(f"tensors of one shape are needed, not {[tuple(t.shape) for t in tensors]}")
    if torch.compiler.is_compiling():  # the compiler fuses the plain sum with the operations around it
        return _plain(y, ks, coefficients)
    return _Combine.apply(tuple(map(float, coefficients)), y, *ks)


def _plain(y: Tensor | None, ks: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    dtype = torch.promote_types(ks[0].dtype, torch.float32) if y is None else y.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    terms = [k.to(wide) * c for k, c in zip(ks, coefficients, strict=True)]
    total = terms.pop(0) if y is None else y.to(wide)
    for term in terms:
        total = total + term
    return total.to(dtype).contiguous()


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, coefficients, y, *ks):
        ctx.coefficients, ctx.dtypes = coefficients, [k.dtype for k in ks]
        y, *ks = (t if t is None else t.contiguous() for t in (y, *ks))
        # Without y it is an error estimate, which must not be rounded to half precision.
        wide = torch.promote_types(ks[0].dtype, torch.float32) if y is None else y.dtype
        out = torch.empty_like(ks[0] if y is None else y, dtype=wide)
        _launch(_sum, (out, y), ks, coefficients)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        _, needed, *each = ctx.needs_input_grad
        dks = [torch.empty(grad.shape, dtype=dtype, device=grad.device) if need else None
               for dtype, need in zip(ctx.dtypes, each, strict=True)]  # fmt: skip
        if any(each):
            _launch(_spread, (grad.contiguous(),), dks, ctx.coefficients)
        return None, grad if needed else None, *dks


def _launch(kernel, first, ks, coefficients) -> None:
    """Launch a kernel on whole tensors: ``first``, then ``ks`` with their coefficients; any of them may be None."""
    tensors, n = (*first, *ks, *[None] * (_MOST - len(ks))), first[0].numel()
    if n == 0:
        return
    like = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    launch = KernelLauncher((first[0].device, kernel.__name__, n, *like))
    with on_device_of(first[0]):
        launch(kernel, -(-n // _BLOCK), 4, *tensors, *coefficients, *[0.0] * (_MOST - len(ks)), n, _BLOCK)


@triton.jit
def _places(n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < n


@triton.jit
def _plus(total, k, c, at, real):
    """``total + c * k`` if there is a k; c is float64, since Triton kernels take Python floats as float32."""
    if k is not None:
        total += tl.full([1], c, tl.float64).to(total.dtype) * tl.load(k + at, mask=real).to(total.dtype)
    return total


@triton.jit
def _sum(out, y, k0, k1, k2, k3, k4, k5, k6,
         c0: tl.float64, c1: tl.float64, c2: tl.float64, c3: tl.float64, c4: tl.float64, c5: tl.float64, c6: tl.float64,
         n, BLOCK: tl.constexpr):  # fmt: skip
    """Forward."""
    at, real = _places(n, BLOCK)
    total = tl.zeros([BLOCK], tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32)
    if y is not None:
        total += tl.load(y + at, mask=real).to(total.dtype)
    total = _plus(total, k0, c0, at, real)
    total = _plus(total, k1, c1, at, real)
    total = _plus(total, k2, c2, at, real)
    total = _plus(total, k3, c3, at, real)
    total = _plus(total, k4, c4, at, real)
    total = _plus(total, k5, c5, at, real)
    total = _plus(total, k6, c6, at, real)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _part(d, k, c, at, real):
    """Write ``c * d`` if it is needed."""
    if k is not None:
        tl.store(k + at, (tl.full([1], c, tl.float64).to(d.dtype) * d).to(k.dtype.element_ty), mask=real)


@triton.jit
def _spread(grad, k0, k1, k2, k3, k4, k5, k6,
            c0: tl.float64, c1: tl.float64, c2: tl.float64, c3: tl.float64, c4: tl.float64, c5: tl.float64,
            c6: tl.float64, n, BLOCK: tl.constexpr):  # fmt: skip
    """Backward: the gradients of the ks."""
    at, real = _places(n, BLOCK)
    d = tl.load(grad + at, mask=real)
    d = d.to(tl.float64 if grad.dtype.element_ty == tl.float64 else tl.float32)
    _part(d, k0, c0, at, real)
    _part(d, k1, c1, at, real)
    _part(d, k2, c2, at, real)
    _part(d, k3, c3, at, real)
    _part(d, k4, c4, at, real)
    _part(d, k5, c5, at, real)
    _part(d, k6, c6, at, real)
