"""Norms over the channels of each pixel or token: layer norm and RMS norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, converts_views, view_of, viewed
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Shape, Tensors, by_channel, expect
from wirings.compaction.operations.affine import Affine, ScaledChannels
from wirings.compaction.operations.arrange import stored_with_channels
from wirings.compaction.operations.select_channels import SelectChannels
from wirings.compaction.operations.weighted_sum import WeightedSum

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class ChannelNorm(ScaledChannels):
    """At each pixel, the channels divided by their root mean square; minus their mean first if ``centered``.

    Channels that are always zero may be missing: ``features`` counts them.
    """

    epsilon: float = 1e-5
    centered: bool = True
    """Whether it is a layer norm; otherwise an RMS norm."""
    features: int = 0
    """The number of channels of the norm, those that are missing included."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        squares: Tensor | float = 0.0
        if self.centered:
            mean = x.sum(1, keepdim=True) / self.features
            squares = (self.features - x.shape[1]) * mean.square()
            x = x - mean
        variance = (x.square().sum(1, keepdim=True) + squares) / self.features
        normed = x * (variance + self.epsilon).rsqrt()
        return normed * by_channel(own["scale"], x) + by_channel(own["shift"], x)

    def check(self, inputs: Sequence[Tensor]) -> None:
        super().check(inputs)
        expect(self.features >= max(inputs[0].shape[1], 1), "a number of features of at least its channels")
        expect(self.epsilon >= 0, "an epsilon of 0 or more")

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        everything = inputs[0].constant.all().expand(len(self.scale)) | (self.scale == 0)
        return everything if self.centered else everything | inputs[0].zero

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: Shape) -> Tensor:
        if bool(inputs[0].constant.all()):
            return super().constant_maps(inputs, mask, shape)
        shift = torch.where(mask, self.shift, 0.0).double()
        return shift.view(-1, *[1] * (len(shape) - 1)).expand(shape)

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return needed.any().expand(len(needed))

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        source = pruner.constants_of(self.inputs[0])
        # If it is centered, a channel that is always zero gives a number that varies, as the mean does.
        taken = (~source.zero | (needed & self.centered)).nonzero().squeeze(1)
        inside = pruner.with_constants(self.inputs[0], taken)
        changed = {"scale": self.scale[taken], "shift": self.shift[taken]}
        varies = ~pruner.constants_of(self.output).constant[taken]
        pruner.emit(self, (inside,), taken[varies], **changed)
        if not varies.all():
            name = (pruner.names[self.output],)
            index = varies.nonzero().squeeze(1)
            pruner.names[self.output] = pruner.builder.add(SelectChannels, name, f"{self.output}.some", index=index)

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        """Leave the scale and the shift to the sums that follow, if nothing else reads the result."""
        ones, zeros = torch.ones_like(self.scale), torch.zeros_like(self.shift)
        if torch.equal(self.scale, ones) and torch.equal(self.shift, zeros):
            return False
        if not self._only_sums_follow(rewriter, self.output) or self._would_enlarge(rewriter):
            return False
        name = rewriter.new_name(f"{self.output}.normed")
        rewriter.insert(self.output, dataclasses.replace(self, output=name, scale=ones, shift=zeros))
        rewriter.replace(Affine(self.output, (name,), self.scale, self.shift))
        return True

    def _would_enlarge(self, rewriter: ProgramRewriter) -> bool:
        """Whether sums would get more biases than the norm has numbers, or weights that are no longer tied."""
        readers = [reader for reader in rewriter.readers(self.output) if isinstance(reader, WeightedSum)]
        own = int(self.scale.count_nonzero() + self.shift.count_nonzero())
        new = sum(len(reader.weight) for reader in readers if reader.bias is None) if self.shift.any() else 0
        return new > own or any(map(rewriter.is_tied, readers))

    @staticmethod
    def _only_sums_follow(rewriter: ProgramRewriter, name: str) -> bool:
        readers = rewriter.readers(name)
        return bool(readers) and all(isinstance(reader, WeightedSum) for reader in readers)

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return True

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        tied = any(map(rewriter.is_tied, rewriter.readers(affine.output)))
        if self._only_sums_follow(rewriter, affine.output) and not tied:
            return False
        shift = self.shift * affine.scale + affine.shift
        rewriter.replace(dataclasses.replace(self, scale=self.scale * affine.scale, shift=shift))
        rewriter.remove(affine.output, self.output)
        return True

    def to_onnx(self, writer: OnnxWriter) -> None:
        x, out = self.inputs[0], self.output
        own = len(self.scale)

        def number(value: float) -> str:
            return writer.tensor(torch.tensor(value), f"{out}.number")

        missing: str | None = None
        if self.centered:
            total = writer.node("ReduceMean", [x], f"{out}.mean", axes=[1], keepdims=1)
            mean = writer.node("Mul", [total, number(own / self.features)], f"{out}.all_mean")
            x = writer.node("Sub", [x, mean], f"{out}.centered")
            square = writer.node("Mul", [mean, mean], f"{out}.mean_square")
            missing = writer.node("Mul", [square, number(1 - own / self.features)], f"{out}.missing")
        squares = writer.node("Mul", [x, x], f"{out}.squares")
        variance = writer.node("ReduceMean", [squares], f"{out}.part", axes=[1], keepdims=1)
        variance = writer.node("Mul", [variance, number(own / self.features)], f"{out}.variance")
        if missing is not None:
            variance = writer.node("Add", [variance, missing], f"{out}.all_variance")
        root = writer.node("Sqrt", [writer.node("Add", [variance, number(self.epsilon)], f"{out}.sum")], f"{out}.root")
        normed = writer.node("Div", [x, root], f"{out}.normed")
        scaled = writer.node("Mul", [normed, writer.by_channel(self, self.scale, "scale")], f"{out}.scaled")
        writer.node("Add", [scaled, writer.by_channel(self, self.shift, "shift")], out)


@converts_views("layer_norm")
@converts_views("native_layer_norm", results=3)
@converts_views("rms_norm", centered=False)
def _norm(builder: ProgramBuilder, hint: str, a: Arguments, centered: bool = True, results: int = 1) -> Any:
    """A norm of the last dimension; the mean and the deviation, which are results two and three, are not computed."""
    x: Any = a["input"]
    axes = view_of(builder, x)
    weight, bias, shape = a.get("weight"), a.get("bias"), a.get("normalized_shape")
    if axes is None or shape is None or len(shape) != 1:
        return None
    if any(p is not None and not isinstance(p, Tensor) for p in (weight, bias)):
        return None
    found = stored_with_channels(builder, x.name, axes, -1, hint)
    if found is None:
        return None
    name, axes = found
    epsilon = a.get("eps")
    dtype = builder.values[name].dtype
    epsilon = torch.finfo(dtype).eps if epsilon is None else float(epsilon)
    scale = torch.ones(shape[0], dtype=dtype) if weight is None else weight.to(dtype)
    shift = torch.zeros(shape[0], dtype=dtype) if bias is None else bias.to(dtype)
    fields = {"epsilon": epsilon, "centered": centered, "features": int(shape[0])}
    result = viewed(builder, builder.add(ChannelNorm, (name,), hint, scale=scale, shift=shift, **fields), axes)
    return result if results == 1 else (result, None, None)
