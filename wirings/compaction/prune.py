"""Remove every channel of a program that is dead or constant, without changing its outputs.

What constant channels contribute to a sum goes into its bias or, where borders make it differ from pixel to pixel, into
a constant map that is added. Where an operation has to see constant channels (an output, or an operator that nothing is
known about), they are inserted again. How each kind of operation is pruned is defined by its ``prune`` method.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants, find_constants
from wirings.compaction.constant_maps import remove_noise, uniform_values
from wirings.compaction.liveness import needed_channels
from wirings.compaction.operation import Operation
from wirings.compaction.operations import AddMap, Affine, Constant, ScatterChannels, SelectChannels
from wirings.compaction.program import Program
from wirings.errors import WiringError


def prune(program: Program) -> Program:
    """The program without dead and constant channels. Its weights must be in double precision."""
    constants = find_constants(program)
    outputs = [constants.get(name) for name in program.outputs]
    if all(x is not None and bool(x.constant.all()) for x in outputs):
        raise WiringError(
            "no path of edges leads from the input to the output, so every output is constant. The wiring is broken: "
            "its budget is too small, or a layer has no real edge. Give it more edges, or at least one per layer."
        )
    return Pruner(program, constants, *needed_channels(program, constants)).run()


class Pruner:
    """Writes the pruned program, operation by operation."""

    def __init__(
        self,
        program: Program,
        constants: dict[str, ChannelConstants | None],
        needed: dict[str, Tensor],
        used: set[str],
    ) -> None:
        self.program, self.constants, self.needed, self.used = program, constants, needed, used
        self.builder = ProgramBuilder(names=list(program.inputs))
        self.names = {name: name for name in program.inputs}
        """The name of each tensor in the pruned program."""
        self.kept = {name: torch.arange(shape[0]) for name, shape in program.inputs.items() if shape}
        """The channels that each tensor of the pruned program still has, in ascending order."""
        self._made: dict[Any, str] = {}  # selections that several operations share

    def run(self) -> Program:
        for operation in self.program.operations:
            needed = self.needed.get(operation.output)
            if not (operation.output in self.used if needed is None else needed.any()):
                continue
            if operation.opaque:
                inputs = tuple(self.with_constants(name, None) for name in operation.inputs)
                self.emit(operation, inputs, None if needed is None else needed.nonzero().squeeze(1))
            else:
                assert needed is not None
                operation.prune(self, needed)
        outputs = [self.with_constants(name, None) for name in self.program.outputs]
        return Program(dict(self.program.inputs), self.builder.operations, tuple(outputs), self.program.notes)

    def constants_of(self, name: str) -> ChannelConstants:
        """The constants of a tensor that has channels."""
        found = self.constants[name]
        assert found is not None
        return found

    def emit(self, operation: Operation, inputs: tuple[str, ...], kept: Tensor | None, **changes: Any) -> None:
        """Add an operation with other inputs and fields; ``kept`` are the channels that its result still has."""
        new = dataclasses.replace(operation, inputs=inputs, output=self.builder.name(operation.output), **changes)
        self.builder.operations.append(new)
        self.builder.values[new.output] = None
        self.alias(operation.output, new.output, kept)

    def alias(self, name: str, new: str, kept: Tensor | None) -> None:
        """Map a tensor to one that the pruned program already has."""
        self.names[name] = new
        if kept is not None:
            self.kept[name] = kept

    def add_maps(self, name: str, maps: Tensor | None) -> str:
        """Add constant maps, or a number per channel, to a tensor of the pruned program."""
        if maps is None or not maps.any():
            return name
        values = maps if maps.dim() == 1 else uniform_values(maps)
        if values is None:
            return self.builder.add(AddMap, (name,), f"{name}.map", map=remove_noise(maps))
        return self.builder.add(Affine, (name,), f"{name}.shift", scale=torch.ones_like(values), shift=values)

    def select(self, name: str, wanted: Tensor) -> str:
        """A tensor reduced to some channels, all of which vary."""
        kept = self.kept[name]
        if torch.equal(kept, wanted):
            return self.names[name]
        key = (self.names[name], tuple(wanted.tolist()))
        if key not in self._made:
            index = torch.searchsorted(kept, wanted)
            self._made[key] = self.builder.add(SelectChannels, (self.names[name],), f"{name}.some", index=index)
        return self._made[key]

    def scatter(self, name: str, varies: Tensor, source: str) -> str:
        """A tensor of which only the channels that vary are left, with zeros in place of the others."""
        if varies.all():
            return source
        index = varies.nonzero().squeeze(1)
        return self.builder.add(ScatterChannels, (source,), f"{name}.placed", index=index, channels=len(varies))

    def with_constants(self, name: str, wanted: Tensor | None) -> str:
        """A tensor reduced to some channels, or with all of them (None), constant ones included."""
        constants = self.constants[name]
        if constants is None:
            return self.names[name]
        wanted = torch.arange(len(constants.constant)) if wanted is None else wanted
        key = ("whole", name, tuple(wanted.tolist()))
        if key in self._made:
            return self._made[key]
        varies = ~constants.constant[wanted]
        if not varies.any():
            source = next(iter(self.program.inputs))
            made = self.builder.add(Constant, (source,), f"{name}.constant", map=constants.maps[wanted].contiguous())
        else:
            made = self.scatter(name, varies, self.select(name, wanted[varies]))
            if not varies.all():
                made = self.add_maps(made, constants.maps[wanted])
        self._made[key] = made
        return made
