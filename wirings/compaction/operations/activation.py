"""Activations: functions of single numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Tensors, UnsupportedByOnnxError, expect
from wirings.compaction.operations.add import Add
from wirings.compaction.operations.affine import Affine

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "clamp": torch.clamp,  # (lowest, highest); 0 and 6 for ReLU6
    "leaky_relu": F.leaky_relu,  # (slope)
    "elu": F.elu,  # (alpha)
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
}
"""Functions of single numbers, with the parameters that they take after the tensor."""

_PARAMETERS = {"clamp": (2, 2), "leaky_relu": (0, 1), "elu": (0, 1), "softplus": (0, 2)}
"""The smallest and largest number of parameters; functions that are not listed take none."""

_ONNX = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "hardswish": "HardSwish", "softplus": "Softplus"}


@dataclass(frozen=True, eq=False)
class Activation(Operation):
    """A function of single numbers, one of `ACTIVATIONS`."""

    kind: str = "relu"
    values: tuple[float, ...] = ()
    """The function's parameters."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return ACTIVATIONS[self.kind](inputs[0], *self.values)

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(self.kind in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")
        least, most = _PARAMETERS.get(self.kind, (0, 0))
        expect(least <= len(self.values) <= most, f"{least} to {most} parameters of {self.kind}")

    def scattered_weights(self, index: Tensor, channels: int) -> dict[str, Any] | None:
        keeps_zero = float(ACTIVATIONS[self.kind](torch.zeros(1), *self.values)) == 0
        return {} if keeps_zero else None

    def to_onnx(self, writer: OnnxWriter) -> None:
        x, out = self.inputs[0], self.output
        if self.kind in _ONNX and (self.kind != "softplus" or self.values[:1] in ((), (1.0,))):
            writer.node(_ONNX[self.kind], [x], out)
        elif self.kind == "leaky_relu":
            writer.node("LeakyRelu", [x], out, alpha=self.values[0])
        elif self.kind == "elu":
            writer.node("Elu", [x], out, alpha=self.values[0])
        elif self.kind == "hardsigmoid":
            writer.node("HardSigmoid", [x], out, alpha=1 / 6, beta=0.5)
        elif self.kind == "clamp":
            limits = [writer.tensor(torch.tensor(v), f"{out}.limit") if math.isfinite(v) else "" for v in self.values]
            writer.node("Clip", [x, *limits], out)
        elif self.kind == "silu":
            writer.node("Mul", [x, writer.node("Sigmoid", [x], f"{out}.gate")], out)
        elif self.kind == "mish":
            gate = writer.node("Tanh", [writer.node("Softplus", [x], f"{out}.plus")], f"{out}.gate")
            writer.node("Mul", [x, gate], out)
        elif self.kind in ("gelu", "gelu_tanh"):
            _gelu_to_onnx(writer, x, out, self.kind == "gelu_tanh")
        else:
            raise UnsupportedByOnnxError(self.kind)


def _gelu_to_onnx(w: OnnxWriter, x: str, out: str, by_tanh: bool) -> None:
    def number(value: float) -> str:
        return w.tensor(torch.tensor(value), f"{out}.number")

    if by_tanh:
        square = w.node("Mul", [x, x], f"{out}.square")
        inner = w.node("Add", [w.node("Mul", [square, number(0.044715)], f"{out}.small"), number(1.0)], f"{out}.inner")
        inner = w.node("Mul", [w.node("Mul", [x, inner], f"{out}.cube"), number(math.sqrt(2 / math.pi))], f"{out}.in")
        gate = w.node("Tanh", [inner], f"{out}.tanh")
    else:
        gate = w.node("Erf", [w.node("Mul", [x, number(math.sqrt(0.5))], f"{out}.in")], f"{out}.erf")
    half = w.node("Mul", [x, number(0.5)], f"{out}.half")
    w.node("Mul", [half, w.node("Add", [gate, number(1.0)], f"{out}.gate")], out)


@converts("relu", kind="relu")
@converts("tanh", kind="tanh")
@converts("sigmoid", kind="sigmoid")
@converts("silu", kind="silu")
@converts("hardswish", kind="hardswish")
@converts("hardsigmoid", kind="hardsigmoid")
@converts("mish", kind="mish")
def _plain(builder: ProgramBuilder, hint: str, a: Arguments, kind: str) -> Any:
    return _activation(builder, hint, a, kind)


def _activation(builder: ProgramBuilder, hint: str, a: Arguments, kind: str, *values: float) -> Any:
    x: Any = next(iter(a.values()))
    if not has_channels(builder, x):
        return None
    numbers = tuple(float(v) for v in values)
    return ProgramTensor(builder.add(Activation, (x.name,), hint, kind=kind, values=numbers))


@converts("gelu")
def _gelu(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    return _activation(builder, hint, a, "gelu_tanh" if a.get("approximate") == "tanh" else "gelu")


@converts("clamp", "clamp_min", "clamp_max")
@converts("hardtanh", low=-1.0, high=1.0)
@converts("relu6", low=0.0, high=6.0)
def _clamp(builder: ProgramBuilder, hint: str, a: Arguments, low: float = -math.inf, high: float = math.inf) -> Any:
    """A clamp to the limits among the arguments; ``low`` and ``high`` are those that are missing there."""
    lowest, highest = a.get("min_val", a.get("min")), a.get("max_val", a.get("max"))
    lowest, highest = low if lowest is None else lowest, high if highest is None else highest
    if not all(isinstance(limit, (int, float)) for limit in (lowest, highest)):
        return None
    if (lowest, highest) == (0, math.inf):
        return _activation(builder, hint, a, "relu")
    return _activation(builder, hint, a, "clamp", lowest, highest)


@converts("leaky_relu")
def _leaky_relu(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    return _activation(builder, hint, a, "leaky_relu", a.get("negative_slope", 0.01))


@converts("elu")
def _elu(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    plain = (a.get("scale", 1), a.get("input_scale", 1)) == (1, 1)
    return _activation(builder, hint, a, "elu", a.get("alpha", 1.0)) if plain else None


@converts("softplus")
def _softplus(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    return _activation(builder, hint, a, "softplus", a.get("beta", 1.0), a.get("threshold", 20.0))


@converts("prelu")
def _prelu(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    """With one slope per channel: relu(x) - slope · relu(-x)."""
    x, slope = a["self"], a["weight"]
    if not isinstance(slope, Tensor) or not has_channels(builder, x):
        return None
    if slope.numel() == 1:
        return _activation(builder, hint, a, "leaky_relu", slope.item())
    zero = torch.zeros_like(slope)
    positive = builder.add(Activation, (x.name,), hint, kind="relu")
    negated = builder.add(Affine, (x.name,), hint, scale=-torch.ones_like(slope), shift=zero)
    negative = builder.add(Activation, (negated,), hint, kind="relu")
    negative = builder.add(Affine, (negative,), hint, scale=-slope, shift=zero)
    return ProgramTensor(builder.add(Add, (positive, negative), hint))
