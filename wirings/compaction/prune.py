"""Taking out of a program every channel that is dead or constant; outputs stay as they are.

What constant channels bring to a sum goes into its bias, or, where borders make it differ from pixel to pixel, into a
map that is added. Channels that an operation must see although they are constant (an output, an operator that nothing
is known of) are put back in.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.builder import Builder
from wirings.compaction.constants import Known, brought, find, rows_and_columns
from wirings.compaction.liveness import needed
from wirings.compaction.maps import tidied, uniform
from wirings.compaction.operations import (
    Add,
    AddMap,
    Affine,
    Concat,
    Constant,
    Conv,
    Flatten,
    InstanceNorm,
    Linear,
    Multiply,
    Opaque,
    Operation,
    Place,
    Select,
)
from wirings.compaction.program import Program
from wirings.errors import WiringError


def pruned(program: Program) -> Program:
    """The program without dead and constant channels; its weights must be in double precision."""
    known = find(program)
    if all(name in known and (x := known[name]) is not None and bool(x.constant.all()) for name in program.outputs):
        raise WiringError(
            "no path of edges leads from the input to the output: every output is a constant, whatever comes in. The "
            "wiring is broken (a budget that is too small, or a layer without any real edge); give it more edges, or "
            "at least one to each layer."
        )
    return _Pruner(program, known, needed(program, known)).run()


class _Pruner:
    def __init__(self, program: Program, known: dict[str, Known | None], live: dict[str, Tensor]) -> None:
        self.program, self.live = program, live
        self.known: dict[str, Any] = dict(known)
        self.made = Builder(inputs=list(program.inputs))
        self.name = {name: name for name in program.inputs}  # of each tensor in the new program
        self.kept = {name: torch.arange(shape[0]) for name, shape in program.inputs.items() if shape}
        self.done: dict[Any, str] = {}  # tensors put together once, for all that take them

    def run(self) -> Program:
        for operation in self.program.operations:
            mask = self.live.get(operation.output)
            if mask is not None and not mask.any():
                continue
            if mask is None and not self._used(operation.output):
                continue
            self._rewrite(operation, mask)
        outputs = [self._with_constants(name, None) for name in self.program.outputs]
        notes = self.program.notes
        return Program(dict(self.program.inputs), self.made.operations, tuple(outputs), notes)

    def _used(self, name: str) -> bool:
        return any(name in o.inputs for o in self.program.operations) or name in self.program.outputs

    def _put(self, operation: Operation, inputs: tuple[str, ...], kept: Tensor | None, **changes: Any) -> None:
        """Take an operation over with other inputs and fields."""
        new = dataclasses.replace(operation, inputs=inputs, output=self.made.name(operation.output), **changes)
        self.made.operations.append(new)
        self.made.values[new.output] = None
        self._is(operation.output, new.output, kept)

    def _is(self, name: str, new: str, kept: Tensor | None) -> None:
        self.name[name] = new
        if kept is not None:
            self.kept[name] = kept

    def _rewrite(self, operation: Operation, mask: Tensor | None) -> None:
        wanted = None if mask is None else mask.nonzero().squeeze(1)
        if isinstance(operation, Opaque) and not operation.channelwise:
            inputs = tuple(self._with_constants(name, None) for name in operation.inputs)
            self._put(operation, inputs, wanted)
            return
        assert wanted is not None
        assert mask is not None
        if isinstance(operation, Linear):
            self._linear(operation, wanted)
        elif isinstance(operation, Conv):
            self._conv(operation, wanted)
        elif isinstance(operation, Add):
            self._add(operation, wanted)
        elif isinstance(operation, Multiply):
            inputs = tuple(self._with_constants(name, wanted) for name in operation.inputs)
            self._put(operation, inputs, wanted)
        elif isinstance(operation, Concat):
            self._concat(operation, mask)
        elif isinstance(operation, Select):
            source = operation.inputs[0]
            index = torch.searchsorted(self.kept[source], operation.index[wanted])
            self._put(operation, (self.name[source],), wanted, index=index)
        elif isinstance(operation, Place):
            source = self._taken(operation.inputs[0], mask[operation.index].nonzero().squeeze(1))
            index = torch.searchsorted(wanted, operation.index[mask[operation.index]])
            self._put(operation, (source,), wanted, index=index, channels=len(wanted))
        elif isinstance(operation, Flatten):
            channels = mask.view(len(self.live[operation.inputs[0]]), -1).any(1).nonzero().squeeze(1)
            self._put(operation, (self._taken(operation.inputs[0], channels),), wanted)
        else:
            self._alone(operation, wanted)

    def _alone(self, operation: Operation, wanted: Tensor) -> None:
        """What acts on every channel alone, on the wanted ones, or on all where leaving some out would cost a copy."""
        source = operation.inputs[0]
        here = self.kept[source]
        spare = not self.known[operation.output].constant[here].any() and len(here) <= 2 * len(wanted)
        wanted = here if spare else wanted
        own: dict[str, Any] = {}
        if isinstance(operation, (Affine, InstanceNorm, AddMap)):
            own = {name: x[wanted] for name, x in operation.tensors().items() if x is not None}
        self._put(operation, (self._taken(source, wanted),), wanted, **own)

    # ---- sums -------------------------------------------------------------------------------------------------------

    def _brought(self, operation: Conv | Linear, wanted: Tensor) -> Tensor | None:
        """What constant inputs and the bias bring to the wanted channels: maps, (wanted, …); None for nothing."""
        source = self.known[operation.inputs[0]]
        if not source.constant.any() or not source.maps.any():
            return None if operation.bias is None else operation.bias[wanted].clone()
        return brought(operation, source, wanted)

    def _finish_sum(self, operation: Operation, source: str, wanted: Tensor, added: Tensor | None, **own: Any) -> None:
        bias = added if added is None or added.dim() == 1 else uniform(added)
        self._put(operation, (source,), wanted, bias=bias, **own)
        if added is not None and bias is None:
            map_added = self.made.add(
                AddMap, (self.name[operation.output],), f"{operation.output}.map", map=tidied(added)
            )
            self.name[operation.output] = map_added

    def _linear(self, operation: Linear, wanted: Tensor) -> None:
        source = operation.inputs[0]
        weight = rows_and_columns(operation.weight, wanted, self.kept[source])
        self._finish_sum(operation, self.name[source], wanted, self._brought(operation, wanted), weight=weight)

    def _conv(self, operation: Conv, wanted: Tensor) -> None:
        source, added = operation.inputs[0], self._brought(operation, wanted)
        here = self.kept[source]
        if operation.groups == 1:
            weight = rows_and_columns(operation.weight, wanted, here)
            self._finish_sum(operation, self.name[source], wanted, added, weight=weight)
            return
        outs, ins = operation.weight.shape[0] // operation.groups, operation.weight.shape[1]
        if len(wanted) == len(operation.weight) and len(here) == operation.groups * ins:
            self._finish_sum(operation, self.name[source], wanted, added)
        elif ins == 1:  # depthwise: a channel for each that comes out, one of them several times if need be
            weight = operation.weight[wanted]
            taken = self._taken(source, wanted // outs)
            self._finish_sum(operation, taken, wanted, added, weight=weight, groups=len(wanted))
        else:
            self._grouped(operation, wanted, added, outs, ins)

    def _grouped(self, operation: Conv, wanted: Tensor, added: Tensor | None, outs: int, ins: int) -> None:
        """Groups of which different numbers of channels are left: filled up to the largest, with weights of zero."""
        source = operation.inputs[0]
        here = self.kept[source]
        groups = [g for g in range(operation.groups) if ((wanted // outs) == g).any()]
        rows = [wanted[wanted // outs == g] for g in groups]
        columns = [here[here // ins == g] for g in groups]
        most_rows, most = max(map(len, rows)), max(map(len, columns))
        if most == 1:  # what is left of it is depthwise
            own = torch.cat([operation.weight[r][:, c % ins] for r, c in zip(rows, columns, strict=True)])
            sources = torch.cat([c.expand(len(r)) for r, c in zip(rows, columns, strict=True)])
            inside = self._taken(source, sources)
            self._finish_sum(operation, inside, wanted, added, weight=own, groups=len(wanted))
            return
        weight = operation.weight.new_zeros(len(groups) * most_rows, most, *operation.weight.shape[2:])
        taken: list[int] = []
        places: list[int] = []
        for number, (row, column) in enumerate(zip(rows, columns, strict=True)):
            first = number * most_rows
            weight[first : first + len(row), : len(column)] = operation.weight[row][:, column % ins]
            taken += column.tolist() + [int(column[0])] * (most - len(column))
            places += range(first, first + len(row))
        inside = self._taken(source, torch.tensor(taken))
        whole = len(places) == len(weight)
        if whole:
            self._finish_sum(operation, inside, wanted, added, weight=weight, groups=len(groups))
            return
        self._put(operation, (inside,), None, weight=weight, groups=len(groups), bias=None)
        chosen = self.made.add(Select, (self.name[operation.output],), operation.output, index=torch.tensor(places))
        self._is(operation.output, self._plus(chosen, added), wanted)

    def _add(self, operation: Add, wanted: Tensor) -> None:
        parts, total = [], None
        for name in operation.inputs:
            known = self.known[name]
            maps = known.maps[wanted] if known.constant[wanted].any() else None
            total = maps if total is None else total if maps is None else total + maps
            varies = ~known.constant[wanted]
            if not varies.any():
                continue
            part = self._taken(name, wanted[varies])
            if not varies.all():
                index = varies.nonzero().squeeze(1)
                part = self.made.add(Place, (part,), f"{name}.placed", index=index, channels=len(wanted))
            parts.append(part)
        if len(parts) == 1:
            self._is(operation.output, parts[0], wanted)
        else:
            self._put(operation, tuple(parts), wanted)
        self.name[operation.output] = self._plus(self.name[operation.output], total)

    def _plus(self, name: str, maps: Tensor | None) -> str:
        """A tensor plus maps or numbers for its channels."""
        if maps is None or not maps.any():
            return name
        same = maps if maps.dim() == 1 else uniform(maps)
        if same is None:
            return self.made.add(AddMap, (name,), f"{name}.map", map=tidied(maps))
        return self.made.add(Affine, (name,), f"{name}.shift", scale=torch.ones_like(same), shift=same)

    def _concat(self, operation: Concat, mask: Tensor) -> None:
        """Whole parts, or none of them: a sum that does not want a channel has a weight of zero for it."""
        parts, kept, start = [], [], 0
        for name, own in zip(operation.inputs, mask.split([len(self.live[n]) for n in operation.inputs]), strict=True):
            if own.any():
                parts.append(self.name[name])
                kept.append(start + self.kept[name])
            start += len(own)
        if len(parts) == 1:
            self._is(operation.output, parts[0], kept[0])
        else:
            self._put(operation, tuple(parts), torch.cat(kept))

    # ---- channels ---------------------------------------------------------------------------------------------------

    def _taken(self, name: str, wanted: Tensor) -> str:
        """A tensor with these channels alone, all of which vary."""
        here = self.kept[name]
        if torch.equal(here, wanted):
            return self.name[name]
        key = (self.name[name], tuple(wanted.tolist()))
        if key not in self.done:
            index = torch.searchsorted(here, wanted)
            self.done[key] = self.made.add(Select, (self.name[name],), f"{name}.some", index=index)
        return self.done[key]

    def _with_constants(self, name: str, wanted: Tensor | None) -> str:
        """A tensor with these channels, all for None, whether they vary or not."""
        known = self.known[name]
        if known is None:
            return self.name[name]
        wanted = torch.arange(len(known.constant)) if wanted is None else wanted
        key = ("whole", name, tuple(wanted.tolist()))
        if key in self.done:
            return self.done[key]
        varies = ~known.constant[wanted]
        if not varies.any():
            source = next(iter(self.program.inputs))
            made = self.made.add(Constant, (source,), f"{name}.constant", map=known.maps[wanted].contiguous())
        else:
            made = self._taken(name, wanted[varies])
            if not varies.all():
                index = varies.nonzero().squeeze(1)
                made = self.made.add(Place, (made,), f"{name}.placed", index=index, channels=len(wanted))
                made = self._plus(made, known.maps[wanted])
        self.done[key] = made
        return made
