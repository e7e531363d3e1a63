"""Zero padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.allowed_operators import MAX_WINDOW
from wirings.compaction.aten import Arguments, ProgramTensor, converts, converts_views, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Shape, Tensors, expect

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter


@dataclass(frozen=True, eq=False)
class Pad(Operation):
    """Zeros around the maps: ``before`` and ``after`` have one number for every dimension of the maps."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        pairs = list(zip(self.before, self.after, strict=True))
        return F.pad(inputs[0], [side for pair in reversed(pairs) for side in pair])

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(len(self.before) == len(self.after) == inputs[0].dim() - 2, "a padding on both sides of each dimension")
        expect(all(abs(n) <= MAX_WINDOW for n in (*self.before, *self.after)), f"a padding of at most {MAX_WINDOW}")

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return not any((*self.before, *self.after))

    def to_onnx(self, writer: OnnxWriter) -> None:
        sides = writer.integers([0, 0, *self.before, 0, 0, *self.after], f"{self.output}.sides")
        writer.node("Pad", [self.inputs[0], sides], self.output)


@converts("pad", "constant_pad_nd")
def _pad(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, sides = a["self"], list(a["pad"])
    if a.get("mode", "constant") != "constant" or a.get("value") not in (None, 0) or not has_channels(builder, x):
        return None
    dims = builder.values[x.name].dim() - 2
    if len(sides) > 2 * dims or min(sides, default=0) < 0:
        return None
    sides += [0] * (2 * dims - len(sides))
    before, after = tuple(sides[::2][::-1]), tuple(sides[1::2][::-1])
    return ProgramTensor(builder.add(Pad, (x.name,), hint, before=before, after=after))


@converts_views("pad", "constant_pad_nd")
def _pad_nothing(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    """A padding of zero on all sides, which models compute for other image sizes."""
    return a["self"] if not any(a["pad"]) else None
