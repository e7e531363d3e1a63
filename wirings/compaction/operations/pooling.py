"""Pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.allowed_operators import MAX_WINDOW
from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels, per_dimension
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Shape, Tensors, UnsupportedByOnnxError, expect
from wirings.compaction.operations.mean import Mean

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter

_FUNCTIONS: dict[tuple[str, int], Callable[..., Tensor]] = {
    ("max", 1): F.max_pool1d, ("max", 2): F.max_pool2d, ("max", 3): F.max_pool3d,
    ("avg", 1): F.avg_pool1d, ("avg", 2): F.avg_pool2d, ("avg", 3): F.avg_pool3d,
    ("adaptive_avg", 1): F.adaptive_avg_pool1d, ("adaptive_avg", 2): F.adaptive_avg_pool2d,
    ("adaptive_avg", 3): F.adaptive_avg_pool3d,
    ("adaptive_max", 1): F.adaptive_max_pool1d, ("adaptive_max", 2): F.adaptive_max_pool2d,
    ("adaptive_max", 3): F.adaptive_max_pool3d,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Pooling(Operation):
    """Max or average pooling of each channel."""

    kind: str = "max"
    """``max``, ``avg``, ``adaptive_avg`` or ``adaptive_max``."""
    kernel: tuple[int, ...] = (2, 2)
    """For adaptive pooling, the size of the output."""
    stride: tuple[int, ...] = (2, 2)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    ceil: bool = False
    count_padding: bool = True

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x, pool = inputs[0], _FUNCTIONS[self.kind, len(self.kernel)]
        if self.kind == "max":
            return pool(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil)
        if self.kind == "avg":
            return pool(x, self.kernel, self.stride, self.padding, self.ceil, self.count_padding)
        return pool(x, self.kernel)

    def check(self, inputs: Sequence[Tensor]) -> None:
        maps = inputs[0].dim() - 2
        known = (self.kind, len(self.kernel)) in _FUNCTIONS
        expect(known and len(self.kernel) == maps, "a kind of pooling, and a kernel size for every dimension")
        expect(all(1 <= n <= MAX_WINDOW for n in self.kernel), f"a kernel from 1 to {MAX_WINDOW}")
        if not self.kind.startswith("adaptive"):
            sizes = len(self.stride) == len(self.padding) == len(self.dilation) == maps
            expect(sizes, "a stride, a padding and a dilation for every dimension")
            steps = (*self.stride, *self.dilation)
            expect(all(1 <= n <= MAX_WINDOW for n in steps), "a stride and a dilation of 1 or more")
            half = all(0 <= 2 * pad <= kernel for pad, kernel in zip(self.padding, self.kernel, strict=True))
            expect(half, "a padding of at most half the kernel")

    def affine_repeats(self, shape: Shape) -> int:
        """Averages over full windows commute with an affine operation."""
        return int(self.kind == "adaptive_avg" or (self.kind == "avg" and not any(self.padding) and not self.ceil))

    def to_onnx(self, writer: OnnxWriter) -> None:
        kernel, stride = self.kernel, self.stride
        if self.kind == "adaptive_avg":
            size = writer.shapes[self.inputs[0]][1:]
            if any(big % small for big, small in zip(size, self.kernel, strict=True)):
                raise UnsupportedByOnnxError("adaptive pooling with windows of different sizes")
            kernel = stride = tuple(big // small for big, small in zip(size, self.kernel, strict=True))
        sizes = {"kernel_shape": list(kernel), "strides": list(stride), "ceil_mode": int(self.ceil)}
        sizes["pads"] = [*self.padding, *self.padding]
        if self.kind == "max":
            writer.node("MaxPool", list(self.inputs), self.output, dilations=list(self.dilation), **sizes)
        elif self.kind in ("avg", "adaptive_avg"):
            count = int(self.count_padding)
            writer.node("AveragePool", list(self.inputs), self.output, count_include_pad=count, **sizes)
        else:
            raise UnsupportedByOnnxError(self.kind)


@converts("max_pool1d", kind="max", dims=1)
@converts("max_pool2d", kind="max", dims=2)
@converts("max_pool3d", kind="max", dims=3)
@converts("avg_pool1d", kind="avg", dims=1)
@converts("avg_pool2d", kind="avg", dims=2)
@converts("avg_pool3d", kind="avg", dims=3)
def _pool(builder: ProgramBuilder, hint: str, a: Arguments, kind: str, dims: int) -> Any:
    x: Any = a["self"]
    if not has_channels(builder, x) or builder.values[x.name].dim() != dims + 2 or a.get("divisor_override"):
        return None
    kernel = per_dimension(a["kernel_size"], dims)
    settings = {
        "kind": kind,
        "kernel": kernel,
        "stride": per_dimension(a.get("stride") or kernel, dims),
        "padding": per_dimension(a.get("padding", 0), dims),
        "dilation": per_dimension(a.get("dilation", 1), dims),
        "ceil": bool(a.get("ceil_mode", False)),
        "count_padding": bool(a.get("count_include_pad", True)),
    }
    return ProgramTensor(builder.add(Pooling, (x.name,), hint, **settings))


@converts("adaptive_avg_pool1d", dims=1)
@converts("adaptive_avg_pool2d", dims=2)
@converts("adaptive_avg_pool3d", dims=3)
def _adaptive_pool(builder: ProgramBuilder, hint: str, a: Arguments, dims: int) -> Any:
    x: Any = a["self"]
    if not has_channels(builder, x) or builder.values[x.name].dim() != dims + 2:
        return None
    size = per_dimension(a["output_size"], dims)
    if set(size) == {1}:
        return ProgramTensor(builder.add(Mean, (x.name,), hint, keep=True))
    return ProgramTensor(builder.add(Pooling, (x.name,), hint, kind="adaptive_avg", kernel=size, stride=size))
