"""Recurrent layers: LSTM, GRU and plain ones, one layer and direction each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, BatchConstant, ProgramTensor, converts_views, view_of, viewed
from wirings.compaction.axes import Axes
from wirings.compaction.batch_value import BatchValue
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants, all_varying
from wirings.compaction.operation import Operation, OperationCounts, Shape, Tensors, expect, expect_size
from wirings.compaction.operations.arrange import stored_with_channels
from wirings.compaction.operations.concat import Concat

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Rows of the weights for each unit."""
_ONNX: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    # the operator, the order of its gates as numbers of PyTorch's, and attributes
    "lstm": ("LSTM", (0, 3, 1, 2), {}),
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "rnn_tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", (0,), {"activations": ["Relu"]}),
}


@dataclass(frozen=True, eq=False)
class Recurrent(Operation):
    """A recurrent layer over the tokens in the last dimension, which starts with zeros: the state after each token."""

    weights = ("weight", "recurrent", "bias", "recurrent_bias")
    weight: Tensor
    """(gates · units, channels), with all units of one gate after the other, in PyTorch's order of gates."""
    recurrent: Tensor
    """(gates · units, units)."""
    bias: Tensor | None = None
    recurrent_bias: Tensor | None = None
    kind: str = "lstm"
    """One of `GATES`."""
    reverse: bool = False
    """Whether it starts at the last token."""

    @property
    def units(self) -> int:
        return int(self.recurrent.shape[1])

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        if x.is_meta or 0 in x.shape:  # not every PyTorch has these layers there
            return x.new_empty(x.shape[0], self.units, x.shape[2])
        x = x.movedim(2, 1)
        x = x.flip(1) if self.reverse else x
        biases = own["bias"] is not None
        given = [own[name] for name in (self.weights if biases else self.weights[:2])]
        state = x.new_zeros(1, x.shape[0], self.units)
        states: Any = (state, state) if self.kind == "lstm" else state
        layer = getattr(torch, self.kind)
        made: Tensor = layer(x, states, given, biases, 1, 0.0, False, False, True)[0]
        return (made.flip(1) if self.reverse else made).movedim(1, 2)

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(self.kind in GATES, f"a layer among {', '.join(GATES)}")
        expect(inputs[0].dim() == 3, "tokens")
        expect(self.recurrent.dim() == 2 and self.units > 0, "a matrix for the states")
        rows = GATES[self.kind] * self.units
        expect_size(self.weight, (rows, inputs[0].shape[1]))
        expect_size(self.recurrent, (rows, self.units))
        expect((self.bias is None) == (self.recurrent_bias is None), "two biases or none")
        expect_size(self.bias, (rows,))
        expect_size(self.recurrent_bias, (rows,))

    def counts(self, shape: Shape, inputs: Sequence[Shape]) -> OperationCounts:
        edges = int(self.weight.count_nonzero() + self.recurrent.count_nonzero())
        entries = self.weight.numel() + self.recurrent.numel()
        return OperationCounts(self.units, edges, edges * shape[-1], entries * shape[-1])

    # ---- channels ---------------------------------------------------------------------------------------------------

    def constants(self, inputs: Sequence[ChannelConstants], shape: Shape) -> ChannelConstants:
        return all_varying(shape)

    def _by_unit(self, x: Tensor) -> Tensor:
        """Which columns the rows of each unit use: (units, columns)."""
        return x.view(GATES[self.kind], self.units, -1).ne(0).any(0)

    def _units_behind(self, needed: Tensor) -> Tensor:
        """The units that the needed ones depend on, over time."""
        uses, found = self._by_unit(self.recurrent), needed.clone()
        while True:
            more = found | uses[found].any(0)
            if torch.equal(more, found):
                return found
            found = more

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return self._by_unit(self.weight)[self._units_behind(needed)].any(0)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        units = self._units_behind(needed)
        used = self._by_unit(self.weight)[units].any(0) & ~pruner.constants_of(self.inputs[0]).zero
        if not used.any():
            used[0] = True  # tensors need a channel
        rows, taken = units.repeat(GATES[self.kind]), used.nonzero().squeeze(1)
        changed = {"weight": self.weight[rows][:, taken], "recurrent": self.recurrent[rows][:, units]}
        changed |= {name: x[rows] for name, x in self.tensors().items() if x is not None and x.dim() == 1}
        pruner.emit(self, (pruner.with_constants(self.inputs[0], taken),), units.nonzero().squeeze(1), **changed)

    # ---- export -----------------------------------------------------------------------------------------------------

    def to_onnx(self, writer: OnnxWriter) -> None:
        operator, order, attributes = _ONNX[self.kind]
        out = self.output

        def ordered(x: Tensor) -> Tensor:
            return x.view(len(order), self.units, *x.shape[1:])[list(order)].reshape(1, *x.shape)

        names = [writer.tensor(ordered(x), f"{out}.matrix") for x in (self.weight, self.recurrent)]
        if self.bias is not None and self.recurrent_bias is not None:
            biases = torch.cat([ordered(self.bias), ordered(self.recurrent_bias)], 1)
            names.append(writer.tensor(biases, f"{out}.biases"))
        x = writer.node("Transpose", [self.inputs[0]], f"{out}.tokens", perm=[2, 0, 1])
        direction = "reverse" if self.reverse else "forward"
        sizes: dict[str, Any] = {"hidden_size": self.units, "direction": direction, **attributes}
        x = writer.node(operator, [x, *names], f"{out}.states", **sizes)  # (tokens, 1, batch, units)
        x = writer.node("Squeeze", [x, writer.integers([1], f"{out}.axis")], f"{out}.squeezed")
        writer.node("Transpose", [x], out, perm=[1, 2, 0])


@converts_views(*GATES)
def _recurrent(builder: ProgramBuilder, operator: str, a: Arguments) -> Any:
    """All layers and directions. Their last states are not converted."""
    x, states, params = a.get("input"), a.get("hx"), a.get("params")
    if not isinstance(x, ProgramTensor) or params is None or a.get("used") != {0}:
        return None
    axes, each = view_of(builder, x), 4 if a["has_biases"] else 2
    if axes is None or not all(map(_is_zero, states if isinstance(states, (tuple, list)) else (states,))):
        return None
    directions, layers = 2 if a["bidirectional"] else 1, a["num_layers"]
    if len(params) != each * directions * layers or not all(isinstance(p, Tensor) for p in params):
        return None  # projections have another matrix each
    found = stored_with_channels(builder, x.name, axes, -1, operator)
    if found is None or len(found[1].stored) != 3 or not _tokens_last(found[1], 1 if a["batch_first"] else 0):
        return None
    name, axes = found
    for layer in range(layers):
        made = []
        for reverse in range(directions):
            start = each * (directions * layer + reverse)
            own = dict(zip(Recurrent.weights, params[start : start + each], strict=False))
            made.append(builder.add(Recurrent, (name,), operator, **own, kind=operator, reverse=bool(reverse)))
        name = made[0] if directions == 1 else builder.add(Concat, made, operator)
    return viewed(builder, name, axes, channels=-1), None, None


def _tokens_last(axes: Axes, tokens: int) -> bool:
    """Whether a dimension of the model's tensor is that of the tokens, which are stored last."""
    return len(axes.dims) == 3 and axes.dims[tokens] == Axes.plain(axes.stored).dims[2]


def _is_zero(state: Any) -> bool:
    """Whether a state at the start is zero for every batch size."""
    if isinstance(state, BatchValue):
        state = state.call(2)
    state = state.value if isinstance(state, BatchConstant) else state
    return isinstance(state, Tensor) and not bool(state.any())
