"""Choosing the edges of one weight: exactly k by magnitude, with a gradient that reaches all the others.

`choose` returns the wiring: a boolean mask with exactly ``k`` true entries, those of largest magnitude.
`real_edges` returns the weights of the forward pass: the real edges unchanged, zeros elsewhere, with the gradient of
the paper's Algorithm 1: it flows *to* every allowed edge and *through* real ones only.

How ties are broken: edges are ordered by magnitude, equal magnitudes by position (row-major; the earlier edge wins),
and NaN comes above infinity, so that a NaN always shows in the loss. This order is total, so the choice is a pure
function of the weights, whatever the device, memory format or number of threads. Magnitudes are ranked as integers: the
bits of a float without its sign order like its magnitude.

Both are custom operators (``torch.ops.wirings``), so that `torch.compile`, CUDA graphs and `torch.func` see one opaque,
pure step. (Forward-mode differentiation is left out: torch.compile accepts no function that has it.) ``k`` may be a
tensor, whose value can change between two replays of a captured step. On a GPU nothing is read back to the host.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.selection import cpu as _select_cpu
from wirings.selection import sharded
from wirings.selection.cpu import KEYS, out_of_range
from wirings.selection.shrink import shrunk
from wirings.utils.text import brief
from wirings.utils.transforms import is_plain


def choose(weight: Tensor, k: int | Tensor, allowed: Tensor | None = None) -> Tensor:
    """Mark the ``k`` edges of largest magnitude: a boolean mask of ``weight``'s shape.

    Args:
        weight: weights (or any scores) in float16, bfloat16, float32 or float64; any shape and memory format.
        k: the number of edges, from 0 to the number of allowed ones; an int or an integer scalar tensor (on a GPU
            assumed to be in range, since reading it would make the host wait).
        allowed: a boolean mask of ``weight``'s shape; edges outside it are never chosen.

    >>> choose(torch.tensor([[3.0, -1.0], [-2.0, 2.0]]), 2)
    tensor([[ True, False],
            [ True, False]])
    """
    k = _count(weight, k, allowed)
    if sharded.is_sharded(weight):
        return sharded.choose(weight, k, allowed)
    return torch.ops.wirings.choose(weight.detach(), k, allowed)


def real_edges(weight: Tensor, k: int | Tensor, allowed: Tensor | None = None) -> Tensor:
    """Return the weights of the forward pass: the ``k`` real edges, zeros elsewhere. Arguments as for `choose`.

    The gradient is passed straight through to every allowed edge, real or hallucinated.

    >>> w = torch.tensor([3.0, -1.0, 2.0], requires_grad=True)
    >>> real_edges(w, 2).detach()
    tensor([3., 0., 2.])
    >>> real_edges(w, 2).sum().backward(); w.grad
    tensor([1., 1., 1.])
    """
    k = _count(weight, k, allowed)
    if sharded.is_sharded(weight):
        return straight_through(weight, sharded.choose(weight, k, allowed), allowed)
    return _RealEdges.apply(weight, k, allowed)


def scaled_through(
    weight: Tensor, value: Tensor, real: Tensor | None, factor: float | Tensor, allowed: Tensor | None = None
) -> Tensor:
    """Return ``value``, with its gradient passed to ``weight``: unchanged where ``real``, elsewhere times ``factor``.

    Args:
        weight: the weight that gets the gradient.
        value: anything computed from the weight; no gradient flows through the computation.
        real: a boolean mask of the real edges; None for all.
        factor: the factor for other edges. A tensor may change between two replays of a captured step.
        allowed: edges outside this mask get no gradient; None for all.

    >>> w, real = torch.tensor([3.0, -1.0, 2.0], requires_grad=True), torch.tensor([True, False, True])
    >>> scaled_through(w, torch.where(real, 2 * w, 0.0), real, 0.5).sum().backward(); w.grad
    tensor([1.0000, 0.5000, 1.0000])
    """
    return _ScaledThrough.apply(weight, value.detach(), real, factor, allowed)


def passed_on(grad: Tensor, real: Tensor | None, factor: float | Tensor, allowed: Tensor | None) -> Tensor:
    """The gradient that `scaled_through` passes on."""
    if real is not None:
        none = isinstance(factor, float) and factor == 0.0
        grad = torch.where(real, grad, _zero_like(grad) if none else grad * factor)
    return grad if allowed is None else torch.where(allowed, grad, _zero_like(grad))


def pass_shrunk(weight: Tensor, used: Tensor, real: Tensor, threshold: Tensor, change: Tensor) -> Tensor:
    """Return ``used``, real edges of ``weight`` shrunk by ``threshold``, with a gradient that goes to both.

    It goes to real edges, and through them to the logarithm of the threshold: an edge changes by -sign(w) · t with it.

    Args:
        weight: the weight that gets the gradient.
        used: the shrunk edges, each with the sign of its weight, also where it is zero; zeros elsewhere. May be of a
            lower precision than the weight.
        real: a boolean mask of the real edges.
        threshold: the threshold, a scalar, without a gradient.
        change: the logarithm of the threshold, up to a constant: a scalar that gets a gradient.

    >>> w, v = torch.tensor([3.0, -1.0, 0.5], requires_grad=True), torch.zeros((), requires_grad=True)
    >>> used, real = torch.tensor([2.5, -0.5, 0.0]), torch.tensor([True, True, False])
    >>> (pass_shrunk(w, used, real, torch.tensor(0.5), v) * torch.tensor([1.0, 3.0, 9.0])).sum().backward()
    >>> w.grad, v.grad
    (tensor([1., 3., 0.]), tensor(1.))
    """
    return _ShrunkThrough.apply(weight, change, used.detach(), real, threshold)


def through_shrunk(grad: Tensor, real: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of shrunk edges: that of the weight, and that of the amount by which all of them are shrunk."""
    grad = torch.where(real, grad, _zero_like(grad))
    amount = torch.where(used.signbit(), grad, -grad).sum(dtype=torch.promote_types(grad.dtype, torch.float32))
    return grad, amount


def grow(threshold: Tensor, change: Tensor) -> Tensor:
    """The thresholds as functions of their logarithms, which second derivatives need. Their values are unchanged."""
    return threshold * (change - change.detach()).exp() if torch.is_grad_enabled() else threshold


def _zero_like(grad: Tensor) -> float | Tensor:
    """A zero for `torch.where`: one that lies on the GPU already, since a number would be moved there every time."""
    if not grad.is_cuda or not is_plain(grad) or torch.cuda.is_current_stream_capturing():
        return 0.0
    return _zero_on(grad.get_device(), grad.dtype)


@functools.cache
def _zero_on(device: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def straight_through(weight: Tensor, real: Tensor, reach: Tensor | None = None) -> Tensor:
    """Return ``weight`` where ``real``, zero elsewhere; the gradient goes to all edges, or to those in ``reach``.

    >>> w = torch.tensor([3.0, -1.0, 2.0], requires_grad=True)
    >>> real, reach = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    >>> straight_through(w, real, reach).sum().backward(); w.grad
    tensor([1., 1., 0.])
    """
    return _StraightThrough.apply(weight, real, reach)


def rank_scores(weight: Tensor, factor: Tensor | None) -> Tensor:
    """What the edges of a weight are ranked by among those of other weights: the weight itself, or times ``factor``.

    A product is in float32 at least, where it is the same on every device. ``weight`` may be sharded.

    >>> rank_scores(torch.tensor([3.0, -1.0]), torch.tensor(2.0))
    tensor([ 6., -2.])
    """
    if factor is None:
        return weight
    precise = torch.promote_types(weight.dtype, torch.float32)
    return sharded.by_rows(lambda part: part.to(precise) * factor, weight.detach())


def next_magnitude(weight: Tensor, real: Tensor, within: Tensor | None) -> Tensor:
    """The magnitude of the strongest edge of a weight (among those ``within``) that is not real; 0 if all are."""
    size = weight.detach().abs().masked_fill(real, 0.0)
    return (size if within is None else size.masked_fill(~within, 0.0)).amax()


def shrunk_edges(weight: Tensor, real: Tensor, threshold: Tensor, power: float) -> Tensor:
    """The real edges of a weight with `shrunk` magnitudes, zeros elsewhere.

    In float32 at least: in half precision the difference of two powers has no digits left.
    """
    size = weight.abs().to(torch.promote_types(weight.dtype, torch.float32))
    used = torch.where(real, shrunk(size, threshold.to(size.dtype), power), 0.0)
    return used.to(weight.dtype).copysign(weight)


def _count(weight: Tensor, k: int | Tensor, allowed: Tensor | None) -> Tensor:
    """Check the arguments as far as possible without reading data; return ``k`` as a tensor on the weight's device."""
    if weight.dtype not in KEYS:
        raise WiringError(
            f"edges can be ranked in float16, bfloat16, float32 or float64, got {weight.dtype}; convert it first."
        )
    if weight.layout != torch.strided or weight.is_nested:
        kind = "nested" if weight.is_nested else str(weight.layout).removeprefix("torch.")
        raise WiringError(f"edges can be ranked in dense tensors, got a {kind} one; convert it first.")
    if allowed is not None and (allowed.shape != weight.shape or allowed.dtype != torch.bool):
        raise WiringError(
            f"`allowed` must be a boolean mask of the weight's shape {tuple(weight.shape)}, "
            f"got {allowed.dtype} of shape {tuple(allowed.shape)}."
        )
    if isinstance(k, Tensor):
        if k.dim() or k.is_floating_point():
            raise WiringError(f"k must be an int or an integer scalar tensor, got {k.dtype} with {k.dim()} dimensions.")
        return k
    # Not `is_int`: compilers pass symbolic integers.
    if isinstance(k, float | complex | bool | str | bytes | list | tuple | dict | None):
        raise WiringError(f"k must be an int or an integer scalar tensor, got {brief(k)}.")
    if not 0 <= k <= weight.numel():
        raise out_of_range(weight, k)
    return torch.full((), k, dtype=torch.int64, device=weight.device)


class _ToEdgesWithin(torch.autograd.Function):
    """The gradient of these functions: unchanged, to every edge in the mask that is their last argument, or to all."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (reach,) = ctx.saved_tensors
        return grad if reach is None else torch.where(reach, grad, 0.0), None, None


class _RealEdges(_ToEdgesWithin):
    @staticmethod
    def forward(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        return torch.ops.wirings.real_edges(weight, k, allowed)


class _StraightThrough(_ToEdgesWithin):
    @staticmethod
    def forward(weight: Tensor, real: Tensor, reach: Tensor | None) -> Tensor:
        return torch.where(real, weight, 0.0)


class _ScaledThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, value: Tensor, real: Tensor | None, factor: Any, allowed: Tensor | None) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, real, factor, allowed = inputs
        tensor = isinstance(factor, Tensor)
        ctx.save_for_backward(real, allowed, factor if tensor else None)
        ctx.factor = None if tensor else factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        real, allowed, factor = ctx.saved_tensors
        return passed_on(grad, real, ctx.factor if factor is None else factor, allowed), None, None, None, None


class _ShrunkThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, change: Tensor, used: Tensor, real: Tensor, threshold: Tensor) -> Tensor:
        return used.view_as(used)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, change, used, real, threshold = inputs
        ctx.save_for_backward(change, used, real, threshold)
        ctx.dtype = weight.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        change, used, real, threshold = ctx.saved_tensors
        passed, amount = through_shrunk(grad, real, used)
        return passed.to(ctx.dtype), (amount * grow(threshold, change)).to(change.dtype), None, None, None


# ---- the operators --------------------------------------------------------------------------------------------

_library = torch.library.Library("wirings", "DEF")
for _name in ("choose", "real_edges"):
    _library.define(f"{_name}(Tensor weight, Tensor k, Tensor? allowed) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _choose_device(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Choose on any device with PyTorch's own operators, without reading anything back to the host."""
    keys = _select_cpu.keys_of(weight, allowed).reshape(-1)
    k = k.to(weight.device)
    least = keys.sort(descending=True).values.gather(0, (k - 1).clamp(min=0).reshape(1))
    above, equal = keys > least, keys == least
    real = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return torch.empty_like(weight, dtype=torch.bool).copy_(real.view(weight.shape))


def _real_edges_device(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    return torch.where(_choose_device(weight, k, allowed), weight, 0.0)


@functools.cache
def _kernels() -> Any:
    """The Triton kernels for CUDA, or None if Triton is not installed."""
    try:
        from wirings.selection import _select_cuda
    except ImportError:
        return None
    return _select_cuda


def _choose_cuda(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    kernels = _kernels()
    if kernels is None or not kernels.supports(weight):
        return _choose_device(weight, k, allowed)
    return kernels.choose(weight, k.to(weight.device), allowed)


def _real_edges_cuda(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    kernels = _kernels()
    if kernels is None or not kernels.supports(weight):
        return _real_edges_device(weight, k, allowed)
    return kernels.real_edges(weight, k.to(weight.device), allowed)


_library.impl("choose", _choose_cuda, "CUDA")
_library.impl("real_edges", _real_edges_cuda, "CUDA")
_library.impl("choose", _select_cpu.choose, "CPU")
_library.impl("real_edges", _select_cpu.real_edges, "CPU")
_library.impl("choose", _choose_device, "CompositeExplicitAutograd")
_library.impl("real_edges", _real_edges_device, "CompositeExplicitAutograd")


@torch.library.register_fake("wirings::choose", lib=_library)
def _(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    return torch.empty_like(weight, dtype=torch.bool)


@torch.library.register_fake("wirings::real_edges", lib=_library)
def _(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    return torch.empty_like(weight)


def _over_batch(operator: Any) -> Any:
    """Under `torch.vmap` every member of the batch has k edges of its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        members = [
            operator(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return torch.stack(members), 0

    return rule


torch.library.register_vmap("wirings::choose", _over_batch(torch.ops.wirings.choose), lib=_library)
torch.library.register_vmap("wirings::real_edges", _over_batch(torch.ops.wirings.real_edges), lib=_library)
