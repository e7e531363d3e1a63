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
from wirings.compaction.operations.crop import Crop
from wirings.compaction.operations.reshape import Reshape
from wirings.compaction.operations.select_channels import SelectChannels

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
    """A recurrent layer over the tokens in the last dimension: the state after each token.

    Its inputs are the tokens and, unless it starts with zeros, the states and then an LSTM's cells before the first.
    """

    input_count = None
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
    cell: bool = False
    """Whether an LSTM's last cells follow the states, as those of one more token."""

    @property
    def units(self) -> int:
        return int(self.recurrent.shape[1])

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x, *first = inputs
        if x.is_meta or 0 in x.shape:  # not every PyTorch has these layers there
            return x.new_empty(x.shape[0], self.units, x.shape[2] + self.cell)
        x = x.movedim(2, 1)
        x = x.flip(1) if self.reverse else x
        biases = own["bias"] is not None
        given = [own[name] for name in (self.weights if biases else self.weights[:2])]
        states: Any = [state[None].contiguous() for state in first] or [x.new_zeros(1, x.shape[0], self.units)] * 2
        layer = getattr(torch, self.kind)
        states = states if self.kind == "lstm" else states[0]
        made, *last = layer(x, states, given, biases, 1, 0.0, False, False, True)
        found: Tensor = (made.flip(1) if self.reverse else made).movedim(1, 2)
        return torch.cat([found, last[1][0][..., None]], 2) if self.cell else found

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(self.kind in GATES, f"a layer among {', '.join(GATES)}")
        expect(inputs[0].dim() == 3, "tokens")
        expect(not self.cell or self.kind == "lstm", "an LSTM, for cells")
        expect(len(inputs) in (1, 3 if self.kind == "lstm" else 2), "tokens, and no first states or all of them")
        expect(self.recurrent.dim() == 2 and self.units > 0, "a matrix for the states")
        rows = GATES[self.kind] * self.units
        expect_size(self.weight, (rows, inputs[0].shape[1]))
        expect_size(self.recurrent, (rows, self.units))
        expect((self.bias is None) == (self.recurrent_bias is None), "two biases or none")
        expect_size(self.bias, (rows,))
        expect_size(self.recurrent_bias, (rows,))
        for state in inputs[1:]:
            expect(tuple(state.shape[1:]) == (self.units,), f"first states of {self.units} units")

    def counts(self, shape: Shape, inputs: Sequence[Shape]) -> OperationCounts:
        edges = int(self.weight.count_nonzero() + self.recurrent.count_nonzero())
        entries = self.weight.numel() + self.recurrent.numel()
        tokens = inputs[0][-1]
        return OperationCounts(self.units, edges, edges * tokens, entries * tokens)

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
        units = self._units_behind(needed)
        return self._by_unit(self.weight)[units].any(0) if number == 0 else units

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        units = self._units_behind(needed)
        used = self._by_unit(self.weight)[units].any(0) & ~pruner.constants_of(self.inputs[0]).zero
        if not used.any():
            used[0] = True  # tensors need a channel
        rows, taken = units.repeat(GATES[self.kind]), used.nonzero().squeeze(1)
        changed = {"weight": self.weight[rows][:, taken], "recurrent": self.recurrent[rows][:, units]}
        changed |= {name: x[rows] for name, x in self.tensors().items() if x is not None and x.dim() == 1}
        kept = units.nonzero().squeeze(1)
        states = [pruner.with_constants(name, kept) for name in self.inputs[1:]]
        pruner.emit(self, (pruner.with_constants(self.inputs[0], taken), *states), kept, **changed)

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
        else:
            names.append("")
        axis = writer.integers([0], f"{out}.axis")
        states = [writer.node("Unsqueeze", [x, axis], f"{out}.first{i}") for i, x in enumerate(self.inputs[1:])]
        names += ["", *states] if states else []  # between them, the lengths of sequences
        while not names[-1]:
            names.pop()
        x = writer.node("Transpose", [self.inputs[0]], f"{out}.tokens", perm=[2, 0, 1])
        direction = "reverse" if self.reverse else "forward"
        sizes: dict[str, Any] = {"hidden_size": self.units, "direction": direction, **attributes}
        cells = ["", f"{out}.cells"] if self.cell else []  # (1, batch, units)
        x = writer.node(operator, [x, *names], f"{out}.states", *cells, **sizes)  # (tokens, 1, batch, units)
        x = writer.node("Squeeze", [x, writer.integers([1], f"{out}.direction")], f"{out}.squeezed")
        if self.cell:
            x = writer.node("Concat", [x, cells[-1]], f"{out}.both", axis=0)
        writer.node("Transpose", [x], out, perm=[1, 2, 0])


@converts_views(*GATES)
def _recurrent(builder: ProgramBuilder, operator: str, a: Arguments) -> Any:
    """All layers and directions, and their last states."""
    x, params, used = a.get("input"), a.get("params"), a.get("used") or set()
    if not isinstance(x, ProgramTensor) or params is None:
        return None
    axes, each = view_of(builder, x), 4 if a["has_biases"] else 2
    directions = 2 if a["bidirectional"] else 1
    count = a["num_layers"] * directions
    if axes is None or len(params) != each * count or not all(isinstance(p, Tensor) for p in params):
        return None  # projections have another matrix each
    found = stored_with_channels(builder, x.name, axes, -1, operator)
    if found is None or len(found[1].stored) != 3 or not _tokens_last(found[1], 1 if a["batch_first"] else 0):
        return None
    units = int(params[1].shape[1])
    first = _first_states(builder, a["hx"], count, units, builder.values[x.name].shape[0])
    if first is None:
        return None
    name, axes = found
    cell = 2 in used
    states: list[str] = []
    cells: list[str] = []
    for layer in range(a["num_layers"]):
        made = []
        for reverse in range(directions):
            number = directions * layer + reverse
            own = dict(zip(Recurrent.weights, params[each * number : each * (number + 1)], strict=False))
            given = (name, *(state[number] for state in first))
            kind = {"kind": operator, "reverse": bool(reverse), "cell": cell}
            made.append(builder.add(Recurrent, given, operator, **own, **kind))
            tokens = axes.stored[2]
            if cell:
                cells.append(_token(builder, made[-1], tokens))
                limits = {"starts": (0,), "stops": (tokens,), "steps": (1,)}
                made[-1] = builder.add(Crop, made[-1:], operator, **limits)
            if 1 in used:
                states.append(_token(builder, made[-1], 0 if reverse else tokens - 1))
        name = made[0] if directions == 1 else builder.add(Concat, made, operator)
    last = (_stacked(builder, own, operator) if own else None for own in (states, cells))
    return (viewed(builder, name, axes, channels=-1), *last)


def _token(builder: ProgramBuilder, name: str, token: int) -> str:
    """What a layer returns for one token, as single numbers."""
    limits = {"starts": (token,), "stops": (token + 1,), "steps": (1,)}
    return builder.add(Reshape, (builder.add(Crop, (name,), f"{name}.last", **limits),), f"{name}.state")


def _stacked(builder: ProgramBuilder, names: list[str], hint: str) -> ProgramTensor:
    """Single numbers of several layers as (layers, batch, units)."""
    name = names[0] if len(names) == 1 else builder.add(Concat, names, hint)
    stored = tuple(builder.values[name].shape)
    parts = Axes.plain(stored).reshaped((stored[0], len(names), stored[1] // len(names)))
    assert parts is not None
    return ProgramTensor(name, parts.permuted((1, 0, 2)))


def _first_states(builder: ProgramBuilder, given: Any, count: int, units: int, batch: int) -> list[list[str]] | None:
    """The names of the states, then the cells, of each layer before the first token; [] if all are zero.

    None if they are neither zero nor (layers, batch, units).
    """
    given = given if isinstance(given, (tuple, list)) else (given,)
    if all(map(_is_zero, given)):
        return []
    found = []
    for state in given:
        axes = view_of(builder, state)
        if axes is None or axes.shape != (count, batch, units) or axes.dims[1] != Axes.plain(axes.stored).dims[0]:
            return None
        moved = axes.permuted((1, 0, 2)).reshaped((batch, count * units))
        whole = None if moved is None else stored_with_channels(builder, state.name, moved, 1, "states")
        if whole is None:
            return None
        index = torch.arange(count * units).view(count, units)
        own = [whole[0]] if count == 1 else [builder.add(SelectChannels, whole[:1], "state", index=i) for i in index]
        found.append(own)
    return found


def _tokens_last(axes: Axes, tokens: int) -> bool:
    """Whether a dimension of the model's tensor is that of the tokens, which are stored last."""
    return len(axes.dims) == 3 and axes.dims[tokens] == Axes.plain(axes.stored).dims[2]


def _is_zero(state: Any) -> bool:
    """Whether a state at the start is zero for every batch size."""
    if isinstance(state, BatchValue):
        state = state.call(2)
    state = state.value if isinstance(state, BatchConstant) else state
    return isinstance(state, Tensor) and not bool(state.any())
