"""Making a program shorter without changing what it gives: norms go into their neighbours, what does nothing goes.

A batch norm in evaluation is an affine operation. It goes back into the sum that it follows, or forward into the sums
that follow it; a shift before a zero-padded convolution becomes a map, since the zeros around are not shifted. What has
neither, a norm between two activations say, stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operations import (
    ACTIVATIONS,
    Activation,
    Add,
    AddMap,
    Affine,
    Concat,
    Conv,
    Crop,
    Flatten,
    InstanceNorm,
    Linear,
    Mean,
    Operation,
    Pad,
    Place,
    Pool,
    Reshape,
    Select,
)
from wirings.compaction.program import Program
from wirings.compaction.prune import tidied, uniform

Sum = (Conv, Linear)


def folded(program: Program) -> Program:
    """The program with its affine operations folded where they can be; its weights must be in double precision."""
    return _Folder(program).run()


class _Folder:
    """A program as a chain of operations by name; rules change it in place until none applies."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.shapes = program.shapes()
        self.outputs = list(program.outputs)
        self.chain: dict[str, Operation] = {o.output: o for o in program.operations}
        self.users: dict[str, list[str]] = {}

    def run(self) -> Program:
        rules = (_identity, _placed, _maps, _before_instance_norm, _means, _affine_back, _affine_on)
        changed = True
        while changed:
            changed = False
            for rule in rules:
                for name in list(self.chain):
                    self._see()
                    operation = self.chain.get(name)
                    changed = (operation is not None and rule(self, operation)) or changed
        self._drop_unused()
        return Program(dict(self.program.inputs), list(self.chain.values()), tuple(self.outputs), self.program.notes)

    def _see(self) -> None:
        if self.users:
            return
        self.users = {name: [] for name in (*self.program.inputs, *self.chain)}
        for operation in self.chain.values():
            for name in operation.inputs:
                self.users[name].append(operation.output)

    def producer(self, name: str, alone: bool = True) -> Operation | None:
        """What makes a tensor, if (with ``alone``) only one operation takes it."""
        if alone and (len(self.users[name]) != 1 or name in self.outputs):
            return None
        return self.chain.get(name)

    def takers(self, name: str) -> list[Operation] | None:
        """The operations that take a tensor; None if it is an output, too."""
        return None if name in self.outputs else [self.chain[user] for user in dict.fromkeys(self.users[name])]

    def put(self, operation: Operation) -> None:
        """Change an operation that keeps its name and its shape."""
        self.chain[operation.output] = operation
        self.users = {}

    def insert(self, before: str, operation: Operation) -> None:
        """Put a new operation right before another one."""
        self.shapes[operation.output] = self.shapes[operation.inputs[0]]
        chain: dict[str, Operation] = {}
        for name, other in self.chain.items():
            if name == before:
                chain[operation.output] = operation
            chain[name] = other
        self.chain, self.users = chain, {}

    def remove(self, name: str, instead: str) -> None:
        """Take an operation out; what it gave is ``instead`` from now on."""
        del self.chain[name]
        self.outputs = [instead if output == name else output for output in self.outputs]
        for other in list(self.chain.values()):
            if name in other.inputs:
                inputs = tuple(instead if x == name else x for x in other.inputs)
                self.chain[other.output] = dataclasses.replace(other, inputs=inputs)
        self.users = {}

    def fresh(self, hint: str) -> str:
        name, number = hint, 0
        while name in self.chain or name in self.program.inputs:
            number += 1
            name = f"{hint}_{number}"
        return name

    def _drop_unused(self) -> None:
        wanted = set(self.outputs)
        for operation in reversed(list(self.chain.values())):
            if operation.output in wanted:
                wanted.update(operation.inputs)
            else:
                del self.chain[operation.output]


Rule = Callable[[_Folder, Any], bool]


def _identity(folder: _Folder, o: Operation) -> bool:
    """Operations that do nothing."""
    nothing = (
        (isinstance(o, Affine) and bool((o.scale == 1).all() and (o.shift == 0).all()))
        or (isinstance(o, AddMap) and not o.map.any())
        or (isinstance(o, (Add, Concat)) and len(o.inputs) == 1)
        or (isinstance(o, Select) and torch.equal(o.index, torch.arange(folder.shapes[o.inputs[0]][0])))
        or (isinstance(o, Place) and torch.equal(o.index, torch.arange(o.channels)))
        or (isinstance(o, Pad) and not any((*o.before, *o.after)))
        or (isinstance(o, Reshape) and o.shape == folder.shapes[o.inputs[0]][1:])
    )
    if nothing and not (o.output in folder.outputs and o.inputs[0] in folder.program.inputs):
        folder.remove(o.output, o.inputs[0])
        return True
    return False


def _placed(folder: _Folder, o: Operation) -> bool:
    """Channels of zeros beside a sum's: rows of zeros in its weight. Past what leaves zeros as they are."""
    if not isinstance(o, Place) or (before := folder.producer(o.inputs[0])) is None:
        return False

    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros(o.channels, *x.shape[1:]).index_copy(0, o.index, x)

    if (isinstance(before, Conv) and before.groups == 1) or isinstance(before, Linear):
        folder.shapes[before.output] = folder.shapes[o.output]
        folder.put(dataclasses.replace(before, weight=spread(before.weight), bias=spread(before.bias)))  # type: ignore[arg-type]
        folder.remove(o.output, before.output)
        return True
    changes: dict[str, Any] = {}
    if isinstance(before, AddMap):
        changes = {"map": spread(before.map)}
    elif isinstance(before, Affine):
        changes = {"scale": spread(before.scale), "shift": spread(before.shift)}
    elif not (isinstance(before, Activation) and _keeps_zero(before)):
        return False
    _swap(folder, before, o, changes)
    return True


def _keeps_zero(o: Activation) -> bool:
    return float(ACTIVATIONS[o.kind](torch.zeros(1), *o.values)) == 0


def _swap(folder: _Folder, first: Operation, second: Operation, changes: dict[str, Any]) -> None:
    """Let ``second``, which alone takes what ``first`` gives, come before it; ``changes`` are to ``first``."""
    moved = dataclasses.replace(second, output=first.output, inputs=first.inputs)
    folder.shapes[first.output] = folder.shapes[second.output]
    follows = dataclasses.replace(first, output=second.output, inputs=(first.output,), **changes)
    folder.put(moved)
    folder.put(follows)


def _maps(folder: _Folder, o: Operation) -> bool:
    """Maps that are the same everywhere are shifts; two maps are one; a bias before a map is part of it."""
    if not isinstance(o, AddMap):
        return False
    if (same := uniform(o.map)) is not None:
        folder.put(Affine(o.output, o.inputs, torch.ones_like(same), same))
        return True
    before = folder.producer(o.inputs[0])
    if isinstance(before, AddMap):
        folder.put(dataclasses.replace(o, inputs=before.inputs, map=o.map + before.map))
        folder.remove(before.output, before.inputs[0])
        return True
    if isinstance(before, Conv) and before.bias is not None:
        bias = before.bias.view(-1, *[1] * (o.map.dim() - 1))
        folder.put(dataclasses.replace(before, bias=None))
        folder.put(dataclasses.replace(o, map=o.map + bias))
        return True
    return False


def _before_instance_norm(folder: _Folder, o: Operation) -> bool:
    """A norm of each map takes its mean away, so a shift right before it does nothing."""
    if not isinstance(o, InstanceNorm) or (before := folder.producer(o.inputs[0])) is None:
        return False
    if isinstance(before, Conv) and before.bias is not None:
        folder.put(dataclasses.replace(before, bias=None))
        return True
    if isinstance(before, Affine) and bool(before.shift.any()):
        folder.put(dataclasses.replace(before, shift=torch.zeros_like(before.shift)))
        return True
    return False


def _means(folder: _Folder, o: Operation) -> bool:
    """A mean that keeps maps of one pixel, and these pixels as numbers: a mean that gives numbers."""
    if not isinstance(o, (Reshape, Flatten)) or len(folder.shapes[o.output]) != 1:
        return False
    before = folder.producer(o.inputs[0])
    if not isinstance(before, Mean) or not before.keep:
        return False
    folder.put(Mean(o.output, before.inputs, keep=False))
    folder.remove(before.output, before.inputs[0])
    return True


# ---- affine operations ----------------------------------------------------------------------------------------------


def _absorbs(folder: _Folder, name: str) -> bool:
    """Whether a scale of each channel of a tensor can go into what makes it."""
    before = folder.producer(name)
    if isinstance(before, (AddMap, Add, Concat)):
        return all(_absorbs(folder, x) for x in before.inputs)
    return isinstance(before, (*Sum, Affine))


def _affine_back(folder: _Folder, o: Operation) -> bool:
    """Into what comes before."""
    if not isinstance(o, Affine) or (before := folder.producer(o.inputs[0])) is None:
        return False
    if isinstance(before, Sum):
        scale = o.scale.view(-1, *[1] * (before.weight.dim() - 1))
        bias = o.shift if before.bias is None else before.bias * o.scale + o.shift
        bias_or_none = bias if before.bias is not None or bool(bias.any()) else None
        folder.put(dataclasses.replace(before, weight=before.weight * scale, bias=bias_or_none))
        folder.remove(o.output, before.output)
        return True
    if isinstance(before, Affine):
        shift = before.shift * o.scale + o.shift
        folder.put(dataclasses.replace(before, scale=before.scale * o.scale, shift=shift))
        folder.remove(o.output, before.output)
        return True
    only_shift = bool((o.scale == 1).all())
    if isinstance(before, AddMap) and (only_shift or _absorbs(folder, before.inputs[0])):
        scale, shift = (x.view(-1, *[1] * (before.map.dim() - 1)) for x in (o.scale, o.shift))
        folder.put(dataclasses.replace(before, map=before.map * scale + shift))
        if not only_shift:
            _scale_inputs(folder, before, [(o.scale, torch.zeros_like(o.shift))])
        folder.remove(o.output, before.output)
        return True
    if isinstance(before, Add):
        able = [_absorbs(folder, x) for x in before.inputs]
        if not (all(able) or (only_shift and any(able))):
            return False
        first = able.index(True)
        nothing = torch.zeros_like(o.shift)
        pairs = [(o.scale, o.shift if i == first else nothing) for i in range(len(able))]
        _scale_inputs(folder, before, pairs)
        folder.remove(o.output, before.output)
        return True
    if isinstance(before, Concat) and any(_absorbs(folder, x) for x in before.inputs):
        sizes = [folder.shapes[x][0] for x in before.inputs]
        _scale_inputs(folder, before, list(zip(o.scale.split(sizes), o.shift.split(sizes), strict=True)))
        folder.remove(o.output, before.output)
        return True
    return False


def _scale_inputs(folder: _Folder, o: Operation, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Put an affine operation on each input of an operation."""
    inputs = []
    for name, (scale, shift) in zip(o.inputs, pairs, strict=True):
        new = folder.fresh(f"{name}.scaled")
        folder.insert(o.output, Affine(new, (name,), scale.clone(), shift.clone()))
        inputs.append(new)
    folder.put(dataclasses.replace(folder.chain[o.output], inputs=tuple(inputs)))


def _affine_on(folder: _Folder, o: Operation) -> bool:
    """Into what comes after."""
    if not isinstance(o, Affine):
        return False
    takers = folder.takers(o.output)
    if not takers:
        return False
    if all(isinstance(taker, Sum) for taker in takers):
        for taker in takers:
            _into_sum(folder, o, taker)
        folder.remove(o.output, o.inputs[0])
        return True
    if len(takers) == 1 and (pixels := _repeats(folder, takers[0])):
        changes = {"scale": o.scale.repeat_interleave(pixels), "shift": o.shift.repeat_interleave(pixels)}
        _swap(folder, o, takers[0], changes)
        return True
    return False


def _repeats(folder: _Folder, o: Operation) -> int:
    """How many channels come of each, if an affine operation can come after this one instead of before; else 0."""
    if isinstance(o, Flatten):
        return int(torch.Size(folder.shapes[o.inputs[0]][1:]).numel())
    average = isinstance(o, Pool) and o.kind in ("avg", "adaptive_avg") and not any(o.padding) and not o.ceil
    return int(isinstance(o, (Mean, Crop, Reshape)) or average or (isinstance(o, Pool) and o.kind == "adaptive_avg"))


def _into_sum(folder: _Folder, o: Affine, taker: Any) -> None:
    """A scale and a shift of its inputs into a sum."""
    weight = taker.weight
    groups = taker.groups if isinstance(taker, Conv) else 1
    ins = weight.shape[1]
    outs = len(weight) // groups
    columns = (torch.arange(len(weight)) // outs)[:, None] * ins + torch.arange(ins)
    scale = o.scale[columns].view(len(weight), ins, *[1] * (weight.dim() - 2))
    changed = dataclasses.replace(taker, weight=weight * scale)
    if not o.shift.any():
        folder.put(changed)
        return
    maps = folder.shapes[o.inputs[0]][1:]
    shift = o.shift.view(-1, *[1] * len(maps)).expand(-1, *maps)
    with torch.no_grad():
        brought = dataclasses.replace(taker, bias=None).run(shift[None])[0]
    same = brought if brought.dim() == 1 else uniform(brought)
    if same is not None:
        folder.put(dataclasses.replace(changed, bias=same if taker.bias is None else taker.bias + same))
        return
    name = folder.fresh(f"{taker.output}.sum")
    if taker.bias is not None:
        brought = brought + taker.bias.view(-1, *[1] * len(maps))
    folder.shapes[name] = folder.shapes[taker.output]
    folder.insert(taker.output, dataclasses.replace(changed, output=name, bias=None))
    folder.shapes[name] = folder.shapes[taker.output]
    folder.put(AddMap(taker.output, (name,), tidied(brought)))


def each_sum(program: Program) -> Iterator[Conv | Linear]:
    """The convolutions and linear layers of a program."""
    for operation in program.operations:
        if isinstance(operation, Sum):
            yield operation
