"""Making a program shorter without changing what it gives: norms go into their neighbours, what does nothing goes.

A batch norm in evaluation is an affine operation. It goes back into the sum that it follows, or forward into the sums
that follow it; a shift before a zero-padded convolution becomes a map, since the zeros around are not shifted. What has
neither, a norm between two activations say, stays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.affine import affine_back, affine_on
from wirings.compaction.chain import Folder
from wirings.compaction.maps import uniform
from wirings.compaction.operations import (
    ACTIVATIONS,
    Activation,
    Add,
    AddMap,
    Affine,
    Concat,
    Conv,
    Flatten,
    InstanceNorm,
    Linear,
    Mean,
    Operation,
    Pad,
    Place,
    Reshape,
    Select,
)
from wirings.compaction.program import Program


def folded(program: Program) -> Program:
    """The program with its affine operations folded where they can be; its weights must be in double precision."""
    return Folder(program).run(
        (_identity, _selected, _placed, _maps, _before_instance_norm, _means, affine_back, affine_on)
    )


def _identity(folder: Folder, o: Operation) -> bool:
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


def _selected(folder: Folder, o: Operation) -> bool:
    """Some channels of some channels."""
    before = folder.chain.get(o.inputs[0]) if isinstance(o, Select) else None
    if not isinstance(o, Select) or not isinstance(before, Select):
        return False
    folder.put(dataclasses.replace(o, inputs=before.inputs, index=before.index[o.index]))
    return True


def _placed(folder: Folder, o: Operation) -> bool:
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
    folder.swap(before, o, changes)
    return True


def _keeps_zero(o: Activation) -> bool:
    return float(ACTIVATIONS[o.kind](torch.zeros(1), *o.values)) == 0


def _maps(folder: Folder, o: Operation) -> bool:
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


def _before_instance_norm(folder: Folder, o: Operation) -> bool:
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


def _means(folder: Folder, o: Operation) -> bool:
    """A mean that keeps maps of one pixel, and these pixels as numbers: a mean that gives numbers."""
    if not isinstance(o, (Reshape, Flatten)) or len(folder.shapes[o.output]) != 1:
        return False
    before = folder.producer(o.inputs[0])
    if not isinstance(before, Mean) or not before.keep:
        return False
    folder.put(Mean(o.output, before.inputs, keep=False))
    folder.remove(before.output, before.inputs[0])
    return True
