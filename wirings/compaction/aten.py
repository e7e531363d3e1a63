"""PyTorch's operators as operations of a program. What is not here, or not understood, becomes an opaque operation.
Layers, functions of single numbers and sums are here, one after the other, which makes the file long; what changes maps
and channels is in `aten_maps`.

Each function takes the builder, a hint for a name, and the operator's arguments by name: tensors of the program
(`Value`), constant tensors (weights), and plain Python. It gives a value, several, or None for "not understood".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.builder import Builder
from wirings.compaction.operations import (
    Activation,
    Add,
    AddMap,
    Affine,
    Concat,
    Conv,
    InstanceNorm,
    Linear,
    Multiply,
    Pad,
)


@dataclass(frozen=True)
class Value:
    """A tensor of the program."""

    name: str


Arguments = dict[str, Any]
Lowering = Callable[[Builder, str, Arguments], Any]
TABLE: dict[str, Lowering] = {}
"""By the operator's name without its overload; all overloads of a name are tried by the same function."""

CHANNELWISE = {
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "hardshrink", "log1p", "log_sigmoid", "logit",
    "pow", "reciprocal", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "round",
    "rsqrt", "selu", "celu", "sign", "sin", "softshrink", "softsign", "sqrt", "square", "threshold", "trunc",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "lp_pool2d",
}  # fmt: skip
"""Operators that do the same to every channel alone, where the one tensor that they take has channels."""


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Put a function into the table."""

    def put(function: Lowering) -> Lowering:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return put


def has_channels(builder: Builder, x: Any) -> bool:
    if not isinstance(x, Value):
        return False
    value = builder.values[x.name]
    return isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point()


def spread(value: Any, dims: int) -> tuple[int, ...]:
    """One number for all dimensions, or one for each, as one for each."""
    numbers = [value] if isinstance(value, int) else list(value)
    return tuple(int(x) for x in (numbers * dims if len(numbers) == 1 else numbers))


# ---- layers ---------------------------------------------------------------------------------------------------------


@lowers("conv1d", "conv2d", "conv3d")
def _convolution(builder: Builder, hint: str, a: Arguments) -> Any:
    weight, bias = a["weight"], a.get("bias")
    x: Any = a["input"]
    if not isinstance(weight, Tensor) or isinstance(bias, Value) or not has_channels(builder, x):
        return None
    dims = weight.dim() - 2
    if builder.values[x.name].dim() != dims + 2:
        return None  # an image without a batch
    stride, dilation = spread(a.get("stride", 1), dims), spread(a.get("dilation", 1), dims)
    padding, name = a.get("padding", 0), x.name
    if isinstance(padding, str):
        whole = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [w // 2 for w in whole]
        if any(w % 2 for w in whole):  # an even kernel has one zero more on one side
            before, after = tuple(w // 2 for w in whole), tuple(w - w // 2 for w in whole)
            name, padding = builder.add(Pad, (name,), "pad", before=before, after=after), 0
    settings = {"stride": stride, "padding": spread(padding, dims), "dilation": dilation, "groups": a.get("groups", 1)}
    return Value(builder.add(Conv, (name,), hint, weight=weight, bias=bias, **settings))


@lowers("linear")
def _linear(builder: Builder, hint: str, a: Arguments) -> Any:
    weight, bias = a["weight"], a.get("bias")
    x: Any = a["input"]
    if not isinstance(weight, Tensor) or isinstance(bias, Value) or weight.dim() != 2:
        return None
    if not has_channels(builder, x) or builder.values[x.name].dim() != 2:
        return None
    return Value(builder.add(Linear, (x.name,), hint, weight=weight, bias=bias))


@lowers("mm", "matmul")
def _product(builder: Builder, hint: str, a: Arguments) -> Any:
    x, weight = list(a.values())[:2]
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return _linear(builder, hint, {"input": x, "weight": weight.t().contiguous()})


@lowers("addmm")
def _product_and_bias(builder: Builder, hint: str, a: Arguments) -> Any:
    weight, bias = a["mat2"], a["self"]
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or {a.get("alpha", 1), a.get("beta", 1)} != {1}:
        return None
    bias = bias.expand(weight.shape[1]).clone() if bias.dim() < 2 else None
    return None if bias is None else _linear(
        builder, hint, {"input": a["mat1"], "weight": weight.t().contiguous(), "bias": bias})  # fmt: skip


@lowers("_native_batch_norm_legit_no_training", "batch_norm")
def _batch_norm(builder: Builder, hint: str, a: Arguments) -> Any:
    x: Any = a["input"]
    mean, var = a.get("running_mean"), a.get("running_var")
    fixed = all(p is None or isinstance(p, Tensor) for p in (a.get("weight"), a.get("bias")))
    if a.get("training") or not isinstance(mean, Tensor) or not isinstance(var, Tensor) or not fixed:
        return None
    if not has_channels(builder, x):
        return None
    scale, shift = norm_as_affine(mean, var, a.get("weight"), a.get("bias"), a["eps"])
    done = Value(builder.add(Affine, (x.name,), hint, scale=scale, shift=shift))
    return done if "training" in a else (done, None, None)


def norm_as_affine(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Scale and shift of a norm whose statistics are fixed."""
    scale = (var.double() + epsilon).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    return scale.to(mean.dtype), shift.to(mean.dtype)


@lowers("instance_norm")
def _instance_norm(builder: Builder, hint: str, a: Arguments) -> Any:
    x: Any = a["input"]
    if not has_channels(builder, x) or not a["use_input_stats"]:
        fixed = {**a, "training": False}
        return _batch_norm(builder, hint, fixed) if has_channels(builder, x) else None
    scale, shift = a.get("weight"), a.get("bias")
    if isinstance(scale, Value) or isinstance(shift, Value):
        return None
    scale = builder.ones(x.name) if scale is None else scale
    shift = torch.zeros_like(scale) if shift is None else shift
    return Value(builder.add(InstanceNorm, (x.name,), hint, scale=scale, shift=shift, epsilon=a["eps"]))


# ---- functions of single numbers ------------------------------------------------------------------------------------


@lowers("relu", "tanh", "sigmoid", "silu", "hardswish", "hardsigmoid", "mish")
def _activation(builder: Builder, hint: str, a: Arguments) -> Any:
    return _act(builder, hint, a, hint.split("_")[0])


def _act(builder: Builder, hint: str, a: Arguments, kind: str, *values: float) -> Any:
    x: Any = next(iter(a.values()))
    if not has_channels(builder, x):
        return None
    return Value(builder.add(Activation, (x.name,), hint, kind=kind, values=tuple(float(v) for v in values)))


@lowers("gelu")
def _gelu(builder: Builder, hint: str, a: Arguments) -> Any:
    return _act(builder, hint, a, "gelu_tanh" if a.get("approximate") == "tanh" else "gelu")


@lowers("hardtanh", "relu6", "clamp", "clamp_min", "clamp_max")
def _clamp(builder: Builder, hint: str, a: Arguments) -> Any:
    lowest, highest = a.get("min_val", a.get("min")), a.get("max_val", a.get("max"))
    if hint.startswith("relu6"):
        lowest, highest = 0.0, 6.0
    elif hint.startswith("hardtanh"):
        lowest, highest = -1.0 if lowest is None else lowest, 1.0 if highest is None else highest
    lowest, highest = -math.inf if lowest is None else lowest, math.inf if highest is None else highest
    if not all(isinstance(limit, (int, float)) for limit in (lowest, highest)):
        return None
    if (lowest, highest) == (0, math.inf):
        return _act(builder, hint, a, "relu")
    return _act(builder, hint, a, "clamp", lowest, highest)


@lowers("leaky_relu")
def _leaky_relu(builder: Builder, hint: str, a: Arguments) -> Any:
    return _act(builder, hint, a, "leaky_relu", a.get("negative_slope", 0.01))


@lowers("elu")
def _elu(builder: Builder, hint: str, a: Arguments) -> Any:
    plain = (a.get("scale", 1), a.get("input_scale", 1)) == (1, 1)
    return _act(builder, hint, a, "elu", a.get("alpha", 1.0)) if plain else None


@lowers("softplus")
def _softplus(builder: Builder, hint: str, a: Arguments) -> Any:
    return _act(builder, hint, a, "softplus", a.get("beta", 1.0), a.get("threshold", 20.0))


@lowers("prelu")
def _prelu(builder: Builder, hint: str, a: Arguments) -> Any:
    x, weight = a["self"], a["weight"]
    if not isinstance(weight, Tensor) or not has_channels(builder, x):
        return None
    if weight.numel() == 1:
        return _act(builder, hint, a, "leaky_relu", weight.item())
    zero = torch.zeros_like(weight)
    above = builder.add(Activation, (x.name,), hint, kind="relu")
    turned = builder.add(Affine, (x.name,), hint, scale=-torch.ones_like(weight), shift=zero)
    below = builder.add(Activation, (turned,), hint, kind="relu")
    below = builder.add(Affine, (below,), hint, scale=-weight, shift=zero)
    return Value(builder.add(Add, (above, below), hint))


# ---- sums and products ----------------------------------------------------------------------------------------------


@lowers("add", "sub", "rsub")
def _sum(builder: Builder, hint: str, a: Arguments) -> Any:
    x, y, alpha = a["self"], a["other"], a.get("alpha", 1)
    if hint.startswith("rsub"):
        x, y = y, x
    sign = 1 if hint.startswith("add") else -1
    if alpha != 1:
        return None
    if isinstance(x, Value) and isinstance(y, Value):
        if not _alike(builder, x, y):
            return None
        other = y.name if sign == 1 else _scaled(builder, hint, y, torch.tensor(-1.0), torch.tensor(0.0)).name
        return Value(builder.add(Add, (x.name, other), hint))
    if isinstance(x, Value):
        return _with_constant(builder, hint, x, 1, y, sign)
    return _with_constant(builder, hint, y, sign, x, 1)


def _alike(builder: Builder, x: Value, y: Value) -> bool:
    channels = has_channels(builder, x) and has_channels(builder, y)
    return channels and builder.values[x.name].shape == builder.values[y.name].shape


def _with_constant(builder: Builder, hint: str, x: Value, sign: int, constant: Any, times: int) -> Any:
    """The sum sign · x + times · constant."""
    values = _constant(builder, x, constant)
    if values is None:
        return None
    one, zero = torch.tensor(float(sign)), torch.tensor(0.0)
    if values.dim() == 1:
        return _scaled(builder, hint, x, one, times * values)
    turned = x if sign == 1 else _scaled(builder, hint, x, one, zero)
    return Value(builder.add(AddMap, (turned.name,), hint, map=times * values))


def _constant(builder: Builder, x: Value, constant: Any) -> Tensor | None:
    """A number or tensor that meets x: as one number a channel, or a map for each channel; None if it is neither."""
    if not has_channels(builder, x) or not isinstance(constant, (int, float, Tensor)):
        return None
    value = builder.values[x.name]
    given = torch.as_tensor(constant, dtype=value.dtype)
    if isinstance(constant, Tensor) and not torch.can_cast(constant.dtype, value.dtype):
        return None
    if given.dim() > value.dim() or (given.dim() == value.dim() and given.shape[0] != 1):
        return None
    given = given.reshape(*[1] * (value.dim() - given.dim()), *given.shape)[0]
    if torch.broadcast_shapes(given.shape, value.shape[1:]) != value.shape[1:]:
        return None
    if all(size == 1 for size in given.shape[1:]):
        return given.reshape(-1).expand(value.shape[1]).clone()
    return given.expand(value.shape[1:]).clone()


def _scaled(builder: Builder, hint: str, x: Value, scale: Tensor, shift: Tensor) -> Value:
    ones = builder.ones(x.name)
    return Value(builder.add(Affine, (x.name,), hint, scale=ones * scale, shift=ones * shift))


@lowers("mul", "div", "neg")
def _times(builder: Builder, hint: str, a: Arguments) -> Any:
    x, y = a["self"], a.get("other", -1)
    if a.get("rounding_mode") is not None:
        return None
    if isinstance(x, Value) and isinstance(y, Value):
        both = has_channels(builder, x) and has_channels(builder, y) and not hint.startswith("div")
        if not both:
            return None
        one, two = builder.values[x.name].shape, builder.values[y.name].shape
        fits = len(one) == len(two) and one[:2] == two[:2]
        ordered = (x.name, y.name) if one.numel() >= two.numel() else (y.name, x.name)  # maps first, then their gates
        return Value(builder.add(Multiply, ordered, hint)) if fits else None
    if hint.startswith("div"):
        if not isinstance(x, Value) or (values := _constant(builder, x, y)) is None:
            return None
        return _scaled(builder, hint, x, 1 / values, torch.tensor(0.0)) if values.dim() == 1 else None
    x, y = (x, y) if isinstance(x, Value) else (y, x)
    values = _constant(builder, x, y)
    return None if values is None or values.dim() > 1 else _scaled(builder, hint, x, values, torch.tensor(0.0))


@lowers("cat")
def _cat(builder: Builder, hint: str, a: Arguments) -> Any:
    parts, dim = a["tensors"], a.get("dim", 0)
    if not all(has_channels(builder, part) for part in parts):
        return None
    dims = builder.values[parts[0].name].dim()
    return Value(builder.add(Concat, [part.name for part in parts], hint)) if dim % dims == 1 else None
