"""Experts: layers of which each token takes the few that a router chooses for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, converts_views, view_of, viewed
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants, all_varying
from wirings.compaction.operation import Operation, OperationCounts, Shape, Tensors, expect, expect_size
from wirings.compaction.operations.activation import ACTIVATIONS, Activation
from wirings.compaction.operations.arrange import stored_with_channels

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner

EXPERT_ACTIVATIONS = (
    "relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "hardswish", "hardsigmoid", "softplus", "mish"
)  # fmt: skip
"""Activations of experts; they have no parameters."""


@dataclass(frozen=True, eq=False)
class TopShares(Operation):
    """The ``count`` largest channels of each token, and zeros in place of the others: (batch, channels, tokens)."""

    count: int = 1
    softmax: bool = False
    """Whether the softmax of all channels is taken first."""
    normalized: bool = False
    """Whether those that are kept are divided by their sum."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        # Of equal channels, the first ones are kept, as in the kernel: `topk` leaves open which.
        index = inputs[0].sort(dim=1, descending=True, stable=True).indices[:, : self.count]
        x = inputs[0].softmax(1) if self.softmax else inputs[0]
        values = x.gather(1, index)
        if self.normalized:
            values = values / values.sum(1, keepdim=True)
        return torch.zeros_like(x).scatter(1, index, values)

    @property
    def opaque(self) -> bool:
        return True

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(inputs[0].dim() == 3, "tokens")
        expect(type(self.count) is int and 1 <= self.count <= inputs[0].shape[1], "some of the channels")

    def to_onnx(self, writer: OnnxWriter) -> None:
        out, x = self.output, self.inputs[0]
        if self.softmax:
            x = writer.node("Softmax", [x], f"{out}.softmax", axis=1)
        count = writer.integers([self.count], f"{out}.count")
        values = writer.node("TopK", [x, count], f"{out}.values", f"{out}.index", axis=1)
        if self.normalized:
            total = writer.node("ReduceSum", [values, writer.integers([1], f"{out}.axis")], f"{out}.total")
            values = writer.node("Div", [values, total], f"{out}.normalized")
        sizes = writer.node("Shape", [x], f"{out}.sizes")
        zeros = writer.node("ConstantOfShape", [sizes], f"{out}.zeros")
        writer.node("ScatterElements", [zeros, f"{out}.index", values], out, axis=1)


@dataclass(frozen=True, eq=False)
class Experts(Operation):
    """Experts of two layers without biases, each for the tokens that have a share of it: the sums of shares of results.

    The inputs are the tokens, (batch, channels, tokens), and their shares, (batch, experts, tokens), of which at most
    ``count`` of each token are not zero.
    """

    weights = ("into", "weight")
    input_count = 2
    into: Tensor
    """(experts, units, channels), or twice as many rows if they are ``gated``: the units, then their factors."""
    weight: Tensor
    """(experts, output channels, units)."""
    activation: str = "silu"
    """The function of the units, one of `EXPERT_ACTIVATIONS`."""
    gated: bool = False
    """Whether the units are multiplied by factors that are computed like them."""
    count: int = 1

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x, shares = inputs
        into, weight = own["into"], own["weight"]
        if x.is_meta or torch.compiler.is_compiling() or torch.compiler.is_exporting():  # sizes depend on no values
            found = weight @ self._activated((into @ x[:, None]).movedim(2, -1)).movedim(-1, 2)
            return (found * shares[:, :, None]).sum(1)
        tokens = x.movedim(1, 2).flatten(0, 1)
        own_shares = shares.movedim(1, 2).flatten(0, 1)
        sums = x.new_zeros(len(tokens), weight.shape[1])
        for number in range(len(into)):
            rows = own_shares[:, number].nonzero().squeeze(1)
            if len(rows):
                found = self._activated(tokens[rows] @ into[number].T) @ weight[number].T
                sums.index_add_(0, rows, found * own_shares[rows, number, None])
        return sums.view(x.shape[0], x.shape[2], weight.shape[1]).movedim(2, 1)

    def _activated(self, x: Tensor) -> Tensor:
        """The units, (…, units), from the results of the first layer."""
        function = ACTIVATIONS[self.activation]
        if not self.gated:
            return function(x)
        units, factors = x.chunk(2, -1)
        return function(units) * factors

    def check(self, inputs: Sequence[Tensor]) -> None:
        x, shares = inputs
        expect(self.activation in EXPERT_ACTIVATIONS, f"one of {', '.join(EXPERT_ACTIVATIONS)}")
        expect(x.dim() == shares.dim() == 3 and x.shape[2] == shares.shape[2], "tokens, and shares for each of them")
        expect(self.weight.dim() == 3 and self.weight.numel() > 0, "matrices for the results")
        experts, _, units = self.weight.shape
        expect(shares.shape[1] == experts, f"shares of {experts} experts")
        expect_size(self.into, (experts, units * (2 if self.gated else 1), x.shape[1]))
        expect(type(self.count) is int and 1 <= self.count <= experts, "some of the experts for each token")

    def counts(self, shape: Shape, inputs: Sequence[Shape]) -> OperationCounts:
        edges = int(self.into.count_nonzero() + self.weight.count_nonzero())
        entries = self.into.numel() + self.weight.numel()
        each = shape[-1] * self.count  # experts of all tokens
        units = self.weight.shape[2] * len(self.weight)
        return OperationCounts(units, edges, edges * each // len(self.weight), entries * each // len(self.weight))

    # ---- channels ---------------------------------------------------------------------------------------------------

    def constants(self, inputs: Sequence[ChannelConstants], shape: Shape) -> ChannelConstants:
        return all_varying(shape)

    def _used(self, needed: Tensor) -> Tensor:
        """The channels that the needed ones depend on."""
        units = self._units(needed)
        rows = units.repeat(2) if self.gated else units
        return self.into[:, rows].ne(0).any(1).any(0)

    def _units(self, needed: Tensor) -> Tensor:
        return self.weight[:, needed].ne(0).any(1).any(0)

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return self._used(needed) if number == 0 else needed.any().expand(len(self.weight))

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        used, units = self._used(needed) & ~pruner.constants_of(self.inputs[0]).zero, self._units(needed)
        for mask in (used, units):  # tensors need a channel
            if not mask.any():
                mask[0] = True
        rows, taken = units.repeat(2) if self.gated else units, used.nonzero().squeeze(1)
        inputs = pruner.with_constants(self.inputs[0], taken), pruner.with_constants(self.inputs[1], None)
        changed = {"into": self.into[:, rows][:, :, taken], "weight": self.weight[:, needed][:, :, units]}
        pruner.emit(self, inputs, needed.nonzero().squeeze(1), **changed)

    # ---- export -----------------------------------------------------------------------------------------------------

    def to_onnx(self, writer: OnnxWriter) -> None:
        """All experts for all tokens: runtimes cannot skip those whose share is zero."""
        out = self.output
        axes = [writer.integers([n], f"{out}.axis") for n in (1, 2)]
        x = writer.node("Unsqueeze", [self.inputs[0], axes[0]], f"{out}.tokens")
        x = writer.node("MatMul", [writer.tensor(self.into, f"{out}.into"), x], f"{out}.inside")
        factors = ""
        if self.gated:
            sizes = writer.integers([self.weight.shape[2]] * 2, f"{out}.parts")
            factors = f"{out}.factors"
            x = writer.node("Split", [x, sizes], f"{out}.units", factors, axis=2)
        writer.shapes[f"{out}.active"] = (len(self.weight), self.weight.shape[2], writer.shapes[out][-1])
        Activation(f"{out}.active", (x,), kind=self.activation).to_onnx(writer)
        x = f"{out}.active"
        if self.gated:
            x = writer.node("Mul", [x, factors], f"{out}.gated")
        x = writer.node("MatMul", [writer.tensor(self.weight, f"{out}.weight"), x], f"{out}.results")
        shares = writer.node("Unsqueeze", [self.inputs[1], axes[1]], f"{out}.shares")
        x = writer.node("Mul", [x, shares], f"{out}.shared")
        writer.node("ReduceSum", [x, axes[0]], out, keepdims=0)


@converts_views("experts")
def _experts(builder: ProgramBuilder, operator: str, a: Arguments) -> Any:
    """Experts that `wirings.compaction.recognize_experts` has found in a trace."""
    x, scores, into, weight = (a[name] for name in ("x", "scores", "into", "weight"))
    if not isinstance(into, Tensor) or not isinstance(weight, Tensor):
        return None
    stored = []
    for given in (x, scores):
        axes = view_of(builder, given)
        if axes is None or len(axes.dims) != 2:
            return None
        found = stored_with_channels(builder, given.name, axes, 1, operator)
        if found is None or len(found[1].stored) != 3:
            return None
        stored.append(found)
    (tokens, axes), (own, score_axes) = stored
    count, experts = a["count"], len(into)
    if axes.dims[0] != score_axes.dims[0] or score_axes.stored[1] != experts or not 1 <= count <= experts:
        return None
    shares = builder.add(TopShares, (own,), operator, count=count, softmax=a["softmax"], normalized=a["normalized"])
    fields = {"activation": a["activation"], "gated": a["gated"], "count": count}
    matrices = {"into": into.mT.contiguous(), "weight": weight.mT.contiguous()}
    made = builder.add(Experts, (tokens, shares), operator, **matrices, **fields)
    return viewed(builder, made, axes, channels=1)
