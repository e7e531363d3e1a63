"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Tensors, expect, expect_size
from wirings.compaction.operations.weighted_sum import WeightedSum

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter


@dataclass(frozen=True, eq=False)
class Linear(WeightedSum):
    """A linear layer from (batch, in) to (batch, out), with a weight of shape (out, in)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return F.linear(inputs[0], own["weight"], own["bias"])

    @property
    def group_count(self) -> int:
        return 1

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(self.weight.dim() == 2 and inputs[0].dim() == 2, "a matrix, and an input of shape (batch, features)")
        expect(inputs[0].shape[1] == self.weight.shape[1], "as many inputs as its weight has")
        expect_size(self.bias, (self.weight.shape[0],))

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Gemm", self.onnx_inputs(writer), self.output, transB=1)


@converts("linear")
def _linear(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    weight, bias = a["weight"], a.get("bias")
    x: Any = a["input"]
    if not isinstance(weight, Tensor) or isinstance(bias, ProgramTensor) or weight.dim() != 2:
        return None
    if not has_channels(builder, x) or builder.values[x.name].dim() != 2:
        return None
    return ProgramTensor(builder.add(Linear, (x.name,), hint, weight=weight, bias=bias))


def product_as_linear(a: Arguments) -> Arguments | None:
    """The arguments of a linear layer for those of a matrix product, or None."""
    x, weight = list(a.values())[:2]
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return {"input": x, "weight": weight.t().contiguous()}


def product_and_bias_as_linear(a: Arguments) -> Arguments | None:
    """The arguments of a linear layer for those of ``addmm``, or None."""
    weight, bias = a["mat2"], a["self"]
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or {a.get("alpha", 1), a.get("beta", 1)} != {1}:
        return None
    if bias.dim() > 1:
        return None
    return {"input": a["mat1"], "weight": weight.t().contiguous(), "bias": bias.expand(weight.shape[1]).clone()}


@converts("mm", "matmul", arguments=product_as_linear)
@converts("addmm", arguments=product_and_bias_as_linear)
def _product(
    builder: ProgramBuilder, hint: str, a: Arguments, arguments: Callable[[Arguments], Arguments | None]
) -> Any:
    own = arguments(a)
    return None if own is None else _linear(builder, hint, own)
