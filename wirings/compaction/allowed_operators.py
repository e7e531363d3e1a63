"""The operators that a file may contain, and what is checked before one of them runs.

The file of a compact model names PyTorch's operators, and whoever wrote the file chose them and their arguments. Not
every operator validates its arguments: `as_strided`, `_unsafe_…`, `…_backward` and the constructors of sparse tensors
read and write at any address they are given. So a file may only contain operators in `ALLOWED_OPERATORS`. Compaction
runs any other operator in memory, but `save` rejects it.

An operator may be added if it

- computes a new tensor or a view from its arguments: it changes none of them, reads no file and draws no random number;
- returns no uninitialized memory: no `empty`, no `resize`;
- raises for invalid sizes, indices and numbers on the CPU, and supports the meta device, on which the shapes of a file
  are checked before anything is computed. Operators that take indices belong in the test that passes them indices out
  of range. Where PyTorch does not check, a guard in `ARGUMENT_CHECKS` does, on every call;
- returns tensors whose sizes do not depend on values, within a time that the sizes of its arguments bound.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wirings.errors import WiringError

_NAMES = """
# elementwise functions
__and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar __xor__.Tensor
abs acos acosh add.Scalar add.Tensor addcdiv addcmul asin asinh atan atan2 atanh bitwise_and.Scalar
bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_not bitwise_or.Scalar bitwise_or.Scalar_Tensor
bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor ceil celu clamp clamp.Tensor
clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor copysign.Scalar copysign.Tensor cos cosh deg2rad div.Scalar
div.Scalar_mode div.Tensor div.Tensor_mode elu eq.Scalar eq.Tensor erf erfc exp exp2 expm1 floor floor_divide
floor_divide.Scalar fmax fmin fmod.Scalar fmod.Tensor frac ge.Scalar ge.Tensor gelu glu gt.Scalar gt.Tensor
hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose isfinite isinf isnan le.Scalar le.Tensor
leaky_relu lerp.Scalar lerp.Tensor lgamma log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not
logical_or logical_xor logit lt.Scalar lt.Tensor maximum minimum mish mul.Scalar mul.Tensor nan_to_num ne.Scalar
ne.Tensor neg pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu rad2deg reciprocal relu relu6 remainder.Scalar
remainder.Scalar_Tensor remainder.Tensor round round.decimals rsqrt rsub.Scalar rsub.Tensor selu sgn sigmoid sign
silu sin sinc sinh softplus softshrink sqrt square sub.Scalar sub.Tensor tan tanh threshold true_divide.Scalar
true_divide.Tensor trunc where.Scalar where.ScalarOther where.ScalarSelf where.self xlogy.Scalar_Other
xlogy.Scalar_Self xlogy.Tensor
# products
addbmm addmm addmv baddbmm bilinear bmm cdist dot einsum inner linear matmul mm mv outer
scaled_dot_product_attention tensordot
# layers
_log_softmax _native_batch_norm_legit_no_training _softmax batch_norm channel_shuffle conv1d conv1d.padding conv2d
conv2d.padding conv3d conv3d.padding conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution
cosine_similarity group_norm instance_norm layer_norm log_softmax.int native_layer_norm
pixel_shuffle pixel_unshuffle rms_norm softmax.int
# pooling and resizing
_upsample_nearest_exact1d _upsample_nearest_exact1d.vec _upsample_nearest_exact2d _upsample_nearest_exact2d.vec
_upsample_nearest_exact3d _upsample_nearest_exact3d.vec adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d col2im grid_sampler
im2col max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
max_unpool2d max_unpool3d upsample_bicubic2d upsample_bicubic2d.vec upsample_bilinear2d upsample_bilinear2d.vec
upsample_linear1d upsample_linear1d.vec upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d
upsample_nearest2d.vec upsample_nearest3d upsample_nearest3d.vec upsample_trilinear3d upsample_trilinear3d.vec
# shapes and copies
_to_copy alias atleast_1d atleast_1d.Sequence atleast_2d atleast_2d.Sequence atleast_3d atleast_3d.Sequence
broadcast_tensors broadcast_to cat chunk clone concat constant_pad_nd contiguous detach diag_embed diagonal expand
expand_as flatten.using_ints flip fliplr flipud hsplit.array hsplit.int hstack movedim.int movedim.intlist narrow
pad permute reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d
replication_pad3d reshape reshape_as roll rot90 select.int slice.Tensor split.Tensor split.sizes split_with_sizes
squeeze squeeze.dim squeeze.dims stack swapaxes t tensor_split.indices tensor_split.sections tile to.device to.dtype
to.dtype_layout to.other transpose.int tril triu type_as unbind.int unflatten.int unfold unsqueeze view_as
vsplit.array vsplit.int vstack
# indexing
embedding gather index.Tensor index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_put
index_select masked_fill.Scalar masked_fill.Tensor masked_scatter repeat_interleave.self_int scatter.reduce scatter.src
scatter.value scatter.value_reduce scatter_add select_scatter slice_scatter take
# reductions and sorting
all all.dim all.dims amax amin any any.dim any.dims argmax argmin argsort argsort.stable count_nonzero
count_nonzero.dim_IntList cummax cummin cumprod cumsum kthvalue linalg_norm linalg_norm.ord_str linalg_vector_norm
logcumsumexp logsumexp max max.dim max.other mean mean.dim median median.dim min min.dim min.other msort nansum
norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype prod prod.dim_int sort sort.stable std
std.correction std.dim std_mean std_mean.correction std_mean.dim sum sum.dim_IntList topk var var.correction var.dim
var_mean var_mean.correction var_mean.dim
# new tensors
arange arange.start arange.start_step fill.Scalar fill.Tensor full full_like lift_fresh_copy linspace meshgrid
meshgrid.indexing new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like
# sizes
numel sym_numel sym_size sym_size.int
"""
ALLOWED_OPERATORS = frozenset(
    f"aten::{name}" for line in _NAMES.splitlines() if not line.startswith("#") for name in line.split()
)
"""PyTorch's operators that a file may contain."""

PYTHON_OPERATORS = ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow")
"""Python's operators that a trace may contain, on sizes and on tuples of tensors."""

MAX_INTEGER = 2**63 - 1
"""The largest integer that an operator takes or returns, as in PyTorch."""
MAX_PARTS = 2**16
"""The most tensors that one operator may return."""
MAX_WINDOW = 2**16
"""The largest kernel, stride, padding and dilation of a layer."""
_MAX_EXPONENT = 64


def python_operator(name: str) -> Callable[..., Any]:
    """One of `PYTHON_OPERATORS` for tensors and bounded numbers only: with others, ``pow`` could run for days."""
    function = getattr(operator, name)

    def bounded(*arguments: Any) -> Any:
        if name == "getitem":
            if not isinstance(arguments[0], (tuple, list, torch.Size)) or type(arguments[1]) is not int:
                raise WiringError("getitem expects a tuple and an integer.")
            return arguments[0][arguments[1]]
        for x in arguments:
            if not isinstance(x, (int, float, Tensor, torch.SymInt, torch.SymFloat)):
                raise WiringError(f"{name} expects numbers, got {type(x).__name__}.")
        if name == "pow" and type(arguments[1]) in (int, float) and abs(arguments[1]) > _MAX_EXPONENT:
            raise WiringError(f"pow expects an exponent of at most {_MAX_EXPONENT}, got {arguments[1]:.3g}.")
        for x in arguments:
            _within(name, x)
        return _within(name, function(*arguments))

    return bounded


def _within(name: str, x: Any) -> Any:
    if type(x) is int and abs(x) > MAX_INTEGER:
        raise WiringError(f"{name} expects and returns integers of at most 63 bits.")
    return x


def has_check(target: str) -> bool:
    """Whether `check_operator_arguments` checks anything of an operator."""
    return target.partition(".")[0].removeprefix("aten::") in ARGUMENT_CHECKS


def check_operator_arguments(target: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise for invalid arguments that PyTorch would accept."""
    check = ARGUMENT_CHECKS.get(target.partition(".")[0].removeprefix("aten::"))
    if check is not None:
        schema = getattr(torch.ops.aten, target.removeprefix("aten::").partition(".")[0])
        overload = getattr(schema, target.partition(".")[2] or "default")
        names = [argument.name for argument in overload._schema.arguments]
        check(target, dict(zip(names, arguments, strict=False)) | options)


def _expect(valid: bool, target: str, what: str) -> None:
    if not valid:
        raise WiringError(f"the operator {target} expects {what}.")


def _check_attention(target: str, a: dict[str, Any]) -> None:
    """PyTorch's CPU kernel reads as many values as there are keys."""
    query, key, value = a["query"], a["key"], a["value"]
    _expect(min(query.dim(), key.dim(), value.dim()) >= 2, target, "tensors with two dimensions or more")
    _expect(key.shape[-2] == value.shape[-2], target, "as many values as keys")
    _expect(query.shape[-1] == key.shape[-1], target, "queries as long as keys")


def _check_batch_norm(target: str, a: dict[str, Any]) -> None:
    """The operator behind `batch_norm` reads an entry for each channel without checking how many there are."""
    x = a["input"]
    _expect(x.dim() >= 2, target, "an input with two dimensions or more")
    for name in ("weight", "bias", "running_mean", "running_var"):
        entries = a.get(name)
        valid = entries is None or tuple(entries.shape) == (x.shape[1],)
        _expect(valid, target, f"{name} with an entry for each of {x.shape[1]} channels")


def _check_division(target: str, a: dict[str, Any]) -> None:
    """The smallest integer divided by -1 ends the process, if it is rounded toward zero."""
    integers = not any(_is_floating(a.get(name)) for name in ("self", "other"))
    _expect(a.get("rounding_mode") != "trunc" or not integers, target, "floating-point numbers to round toward zero")


def _is_floating(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else type(x) is float


def _check_scales(target: str, a: dict[str, Any]) -> None:
    """A scale close to zero makes indices overflow."""
    for value in a.values():
        for scale in value if isinstance(value, (tuple, list)) else (value,):
            valid = type(scale) is not float or (math.isfinite(scale) and 1e-4 <= scale <= 1e4)
            _expect(valid, target, "scales from 0.0001 to 10000")


def _check_windows(target: str, a: dict[str, Any]) -> None:
    """Some kinds of pooling iterate over their padding pixel by pixel."""
    for name, value in a.items():
        if name != "output_size":
            for size in value if isinstance(value, (tuple, list)) else (value,):
                valid = type(size) is not int or abs(size) <= MAX_WINDOW
                _expect(valid, target, f"kernels, strides, padding and dilation of at most {MAX_WINDOW}")


def _check_parts(target: str, a: dict[str, Any]) -> None:
    """Splitting a tensor creates an object for each part."""
    x, dim = a["self"], a.get("dim", 0)
    _expect(type(dim) is int and -x.dim() <= dim < x.dim(), target, "a dimension of its tensor")
    size = x.shape[dim]
    if "unbind" not in target:
        count = a.get("split_size", a.get("sections", a.get("chunks", 1)))
        if type(count) is not int:
            return  # a list of sizes, whose length the size of the file bounds
        _expect(count >= 1, target, "a number of at least 1")
        size = -(-size // count) if "split_size" in a else min(count, size) if "chunks" in a else count
    _expect(type(size) is not int or size <= MAX_PARTS, target, f"at most {MAX_PARTS} parts")


ARGUMENT_CHECKS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "scaled_dot_product_attention": _check_attention,
    "_native_batch_norm_legit_no_training": _check_batch_norm,
    "div": _check_division,
}
"""Checks of arguments that PyTorch does not check, by the operator's name without its overload."""
for _name in {name.removeprefix("aten::").partition(".")[0] for name in ALLOWED_OPERATORS}:
    if "upsample" in _name:
        ARGUMENT_CHECKS[_name] = _check_scales
    elif "pool" in _name or _name.startswith("conv") or _name in ("im2col", "col2im"):
        ARGUMENT_CHECKS[_name] = _check_windows
    elif _name in ("unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit"):
        ARGUMENT_CHECKS[_name] = _check_parts
