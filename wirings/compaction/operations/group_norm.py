"""Group norms: norms over the channels of each group and all pixels."""

from __future__ import annotations

import dataclasses
import math
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

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class GroupNorm(ScaledChannels):
    """Each group of channels, minus its mean over channels and pixels, divided by its standard deviation.

    Channels that are always zero may be missing: ``features`` counts them.
    """

    sizes: tuple[int, ...] = ()
    """The number of channels of each group, one group after the other."""
    features: int = 0
    """The number of channels of every group, those that are missing included."""
    epsilon: float = 1e-5

    @property
    def whole(self) -> bool:
        """Whether no channel is missing."""
        return all(size == self.features for size in self.sizes)

    def groups(self) -> Tensor:
        """The group of each channel."""
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes, dtype=torch.int64))

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        if self.whole and x.shape[0]:
            return torch.group_norm(x, len(self.sizes), own["scale"], own["shift"], self.epsilon)
        flat, group = x.flatten(2) if x.dim() > 2 else x[..., None], self.groups().to(x.device)
        pixels = flat.shape[2]
        zeros = flat.new_zeros(flat.shape[0], len(self.sizes))
        mean = zeros.index_add(1, group, flat.sum(2)) / (self.features * pixels)
        flat = flat - mean[:, group, None]
        missing = torch.tensor([self.features - size for size in self.sizes], dtype=x.dtype, device=x.device)
        squares = zeros.index_add(1, group, flat.square().sum(2)) + missing * pixels * mean.square()
        factor = (squares / (self.features * pixels) + self.epsilon).rsqrt()
        normed = (flat * factor[:, group, None]).reshape(x.shape)
        return normed * by_channel(own["scale"], x) + by_channel(own["shift"], x)

    def check(self, inputs: Sequence[Tensor]) -> None:
        super().check(inputs)
        sizes = len(self.sizes) >= 1 and all(0 < size <= self.features for size in self.sizes)
        expect(sizes and sum(self.sizes) == inputs[0].shape[1], "groups of all channels")
        expect(self.epsilon >= 0, "an epsilon of 0 or more")

    # ---- channels ---------------------------------------------------------------------------------------------------

    def _of_groups(self, channels: Tensor, every: bool) -> Tensor:
        """For each channel, whether any channel of its group is marked, or every one."""
        parts = channels.split(list(self.sizes))
        return torch.cat([(part.all() if every else part.any()).expand(len(part)) for part in parts])

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return self._of_groups(inputs[0].constant, every=True) | (self.scale == 0)

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: Shape) -> Tensor:
        still = self._of_groups(inputs[0].constant, every=True)
        maps = super().constant_maps(inputs, mask & still, shape)
        shift = torch.where(mask & ~still, self.shift, 0.0).double()
        return maps + shift.view(-1, *[1] * (len(shape) - 1))

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return self._of_groups(needed, every=False)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        # A channel that is always zero gives a number that varies, as the mean of its group does.
        zero = pruner.constants_of(self.inputs[0]).zero
        taken = self._of_groups(needed, every=False) & (~zero | needed)
        sizes = [int(part.sum()) for part in taken.split(list(self.sizes))]
        index = taken.nonzero().squeeze(1)
        inside = pruner.with_constants(self.inputs[0], index)
        changed = {"scale": self.scale[index], "shift": self.shift[index], "sizes": tuple(n for n in sizes if n)}
        varies = ~pruner.constants_of(self.output).constant[index]
        pruner.emit(self, (inside,), index[varies], **changed)
        if not varies.all():
            name = (pruner.names[self.output],)
            some = varies.nonzero().squeeze(1)
            pruner.names[self.output] = pruner.builder.add(SelectChannels, name, f"{self.output}.some", index=some)

    # ---- simplifying ------------------------------------------------------------------------------------------------

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return True

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        shift = self.shift * affine.scale + affine.shift
        rewriter.replace(dataclasses.replace(self, scale=self.scale * affine.scale, shift=shift))
        rewriter.remove(affine.output, self.output)
        return True

    # ---- export -----------------------------------------------------------------------------------------------------

    def to_onnx(self, writer: OnnxWriter) -> None:
        """An instance norm of every group as one row of numbers, with zeros for missing channels."""
        x, out, count = self.inputs[0], self.output, len(self.sizes)
        maps = writer.shapes[out][1:]
        places = torch.cat([n * self.features + torch.arange(size) for n, size in enumerate(self.sizes)])
        if not self.whole:
            index = torch.full((count * self.features,), len(places))  # the channel that is padded
            index[places] = torch.arange(len(places))
            ends = writer.integers([*[0] * (3 + len(maps)), 1, *[0] * len(maps)], f"{out}.ends")
            x = writer.node("Pad", [x, ends], f"{out}.padded")
            x = writer.node("Gather", [x, writer.integers(index.tolist(), f"{out}.index")], f"{out}.all", axis=1)
        rows = writer.integers([0, count, self.features * math.prod(maps)], f"{out}.rows")
        x = writer.node("Reshape", [x, rows], f"{out}.groups")
        ones = [writer.tensor(fill(count), f"{out}.fill") for fill in (torch.ones, torch.zeros)]
        x = writer.node("InstanceNormalization", [x, *ones], f"{out}.normed", epsilon=self.epsilon)
        back = writer.integers([0, count * self.features, *maps], f"{out}.back")
        x = writer.node("Reshape", [x, back], f"{out}.channels")
        if not self.whole:
            x = writer.node("Gather", [x, writer.integers(places.tolist(), f"{out}.some")], f"{out}.taken", axis=1)
        x = writer.node("Mul", [x, writer.by_channel(self, self.scale, "scale")], f"{out}.scaled")
        writer.node("Add", [x, writer.by_channel(self, self.shift, "shift")], out)


@converts_views("group_norm")
def _group_norm(builder: ProgramBuilder, operator: str, a: Arguments) -> Any:
    x: Any = a["input"]
    axes = view_of(builder, x)
    weight, bias, count = a.get("weight"), a.get("bias"), a["num_groups"]
    if axes is None or not axes.batch_first or not isinstance(count, int):
        return None
    if any(p is not None and not isinstance(p, Tensor) for p in (weight, bias)):
        return None
    found = stored_with_channels(builder, x.name, axes, 1, operator)
    if found is None:
        return None
    name, axes = found
    channels, dtype = builder.channels(name), builder.values[name].dtype
    scale = torch.ones(channels, dtype=dtype) if weight is None else weight.to(dtype)
    shift = torch.zeros(channels, dtype=dtype) if bias is None else bias.to(dtype)
    fields = {
        "sizes": (channels // count,) * count,
        "features": channels // count,
        "epsilon": float(a.get("eps", 1e-5)),
    }
    return viewed(builder, builder.add(GroupNorm, (name,), operator, scale=scale, shift=shift, **fields), axes)
