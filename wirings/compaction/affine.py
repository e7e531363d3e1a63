"""Affine operations, batch norms in evaluation among them, into the sums before or after them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.chain import Folder
from wirings.compaction.maps import tidied, uniform
from wirings.compaction.operations import (
    Add,
    AddMap,
    Affine,
    Concat,
    Conv,
    Crop,
    Flatten,
    Linear,
    Mean,
    Operation,
    Pool,
    Reshape,
    Select,
)

Sum = (Conv, Linear)


def _absorbs(folder: Folder, name: str) -> bool:
    """Whether a scale of each channel of a tensor can go into what makes it."""
    before = folder.producer(name)
    if isinstance(before, (AddMap, Add, Concat)):
        return all(_absorbs(folder, x) for x in before.inputs)
    return isinstance(before, (*Sum, Affine))


def affine_back(folder: Folder, o: Operation) -> bool:
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
    if isinstance(before, Select) and _absorbs(folder, before.inputs[0]) and len(before.index.unique()) == len(o.scale):
        count = folder.shapes[before.inputs[0]][0]
        scale = torch.ones(count, dtype=o.scale.dtype).index_copy(0, before.index, o.scale)
        shift = torch.zeros(count, dtype=o.shift.dtype).index_copy(0, before.index, o.shift)
        _scale_inputs(folder, before, [(scale, shift)])
        folder.remove(o.output, before.output)
        return True
    if isinstance(before, Concat) and any(_absorbs(folder, x) for x in before.inputs):
        sizes = [folder.shapes[x][0] for x in before.inputs]
        _scale_inputs(folder, before, list(zip(o.scale.split(sizes), o.shift.split(sizes), strict=True)))
        folder.remove(o.output, before.output)
        return True
    return False


def _scale_inputs(folder: Folder, o: Operation, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Put an affine operation on each input of an operation."""
    inputs = []
    for name, (scale, shift) in zip(o.inputs, pairs, strict=True):
        new = folder.fresh(f"{name}.scaled")
        folder.insert(o.output, Affine(new, (name,), scale.clone(), shift.clone()))
        inputs.append(new)
    folder.put(dataclasses.replace(folder.chain[o.output], inputs=tuple(inputs)))


def affine_on(folder: Folder, o: Operation) -> bool:
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
        folder.swap(o, takers[0], changes)
        return True
    return False


def _repeats(folder: Folder, o: Operation) -> int:
    """How many channels come of each, if an affine operation can come after this one instead of before; else 0."""
    if isinstance(o, Flatten):
        return int(torch.Size(folder.shapes[o.inputs[0]][1:]).numel())
    if isinstance(o, Pool):
        return int(o.kind == "adaptive_avg" or (o.kind == "avg" and not any(o.padding) and not o.ceil))
    return int(isinstance(o, (Mean, Crop, Reshape)))


def _into_sum(folder: Folder, o: Affine, taker: Any) -> None:
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
    folder.insert(taker.output, dataclasses.replace(changed, output=name, bias=None))
    folder.shapes[name] = folder.shapes[taker.output]
    folder.put(AddMap(taker.output, (name,), tidied(brought)))
