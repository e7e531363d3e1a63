"""Which layers of a network are computed in int8: chosen by what each loses on examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirings.compaction.operation import Operation
from wirings.compaction.operations import Conv, Linear
from wirings.compaction.program import Program, bind_inputs
from wirings.engine.int8_weights import MAX_EDGES, widened
from wirings.engine.quantized_layers import Ranges, int8_layer, quantized_program
from wirings.errors import WiringError

LAYER_LOSS = 0.05
"""A layer stays in float32 if int8 changes its result by more than this share, as the root of the mean square."""
NETWORK_LOSS = 0.03
"""Further layers stay in float32 if int8 changes the outputs of the network by more than this share."""
FEW_EDGES = 8
"""Layers with fewer edges per row gain nothing from int8."""
EXAMPLES, SAMPLE, BATCH = 512, 8, 8
"""The most examples that ranges are taken from, that losses are measured on, and that run at once."""

Supports = Callable[[Operation], bool]


@dataclass(frozen=True, eq=False)
class Quantization:
    """The layers that are computed in int8."""

    layers: frozenset[str]
    """Their outputs' names."""
    ranges: Ranges = field(default_factory=dict)
    """The ranges of tensors that are quantised channel by channel; all others are quantised pixel by pixel."""
    floats: Mapping[str, str] = field(default_factory=dict)
    """The layers that stay in float32, and why."""

    def without(self, layers: Mapping[str, str], program: Program) -> Quantization:
        """The same, except that some layers of the program stay in float32 for the reasons given."""
        left = self.layers - set(layers)
        read = {o.inputs[0] for o in program.operations if o.output in left}
        ranges = {name: own for name, own in self.ranges.items() if name in read}
        return Quantization(left, ranges, {**self.floats, **layers})

    def reference(self, program: Program) -> Program:
        """The network in int8 in plain PyTorch."""
        return quantized_program(program, set(self.layers), self.ranges)

    def as_mapping(self) -> dict[str, Any]:
        """Everything as plain Python values, for JSON."""
        ranges = {name: [low.tolist(), high.tolist()] for name, (low, high) in self.ranges.items()}
        return {"layers": sorted(self.layers), "ranges": ranges, "floats": dict(self.floats)}

    @staticmethod
    def from_mapping(saved: Any, program: Program) -> Quantization:
        """What `as_mapping` returned for this program; raises if it is anything else."""
        if not isinstance(saved, dict) or set(saved) != {"layers", "ranges", "floats"}:
            raise WiringError("expected the layers in int8, their ranges, and the layers in float32")
        layers, ranges, floats = saved["layers"], saved["ranges"], saved["floats"]
        own = {o.output: o for o in program.operations if isinstance(o, (Conv, Linear))}
        if not isinstance(layers, list) or not all(isinstance(name, str) and name in own for name in layers):
            raise WiringError("expected layers of the network in int8")
        texts = isinstance(floats, dict) and all(isinstance(reason, str) for reason in floats.values())
        if not texts or not isinstance(ranges, dict):
            raise WiringError("expected ranges of tensors, and reasons for layers in float32")
        read = {own[name].inputs[0]: own[name] for name in layers}
        found = {}
        for name, both in ranges.items():
            o = read.get(name)
            if not isinstance(o, Conv):
                raise WiringError("expected ranges of tensors that a convolution in int8 reads")
            found[name] = _checked_range(both, o.weight.shape[1] * o.groups)
        for name in layers:
            problem = _unsuitable(own[name]) or (
                "" if is_pointwise(own[name]) or own[name].inputs[0] in found else "none"
            )
            if problem:
                raise WiringError("expected ranges for all convolutions in int8, and layers that int8 can compute")
        return Quantization(frozenset(layers), found, dict(floats))


def _checked_range(both: Any, channels: int) -> tuple[np.ndarray, np.ndarray]:
    valid = isinstance(both, list) and len(both) == 2 and all(isinstance(part, list) for part in both)
    numbers = [x for part in both for x in part] if valid else []
    finite = all(type(x) in (int, float) and -3e38 < x < 3e38 for x in numbers)
    if not valid or not finite or any(len(part) != channels for part in both):
        raise WiringError("expected a smallest and a largest number for every channel")
    low, high = (np.array(part, np.float32) for part in both)
    return low, high


def is_pointwise(o: Operation) -> bool:
    """Whether each result of a layer reads one pixel, so that pixels may have scales of their own."""
    if not isinstance(o, Conv):
        return True
    return set(o.stride) == {1} and set(o.padding) == {0} and set(o.weight.shape[2:]) == {1}


def _unsuitable(o: Conv | Linear) -> str:
    """Why a layer is not worth computing in int8, or cannot be; empty if it is."""
    edges = (o.weight != 0).flatten(1).sum(1)
    if isinstance(o, Conv) and (o.depthwise or len(o.stride) > 2):
        return "depthwise" if o.depthwise else "in three dimensions"
    if float(edges.float().mean()) < FEW_EDGES:
        return "few edges per row"
    if int(edges.max()) > MAX_EDGES:
        return "too many edges per row"
    return "" if bool(torch.isfinite(o.weight).all()) else "weights that are not finite"


def read_batches(program: Program, batches: Iterable[Any]) -> list[list[Tensor]]:
    """The inputs of a network in calibration data, a list of tensors for each batch.

    Args:
        program: the network.
        batches: inputs: a tensor, a tuple of inputs or a dictionary of keyword inputs each, or pairs of inputs and
            labels.
    """
    names, shapes = list(program.inputs), list(program.inputs.values())
    found: list[list[Tensor]] = []
    examples = 0
    if not isinstance(batches, Iterable) or isinstance(batches, (Tensor, Mapping, str)):
        raise WiringError(
            f"calibrate expects batches of inputs, such as a DataLoader or a list of tensors, got "
            f"{type(batches).__name__}."
        )
    for batch in batches:
        tensors = _inputs_of(batch, names)
        for name, shape, x in zip(names, shapes, tensors, strict=True):
            if not isinstance(x, Tensor) or tuple(x.shape[1:]) != shape:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                expected = ", ".join(map(str, ("batch", *shape)))
                raise WiringError(f"calibrate expects inputs of shape ({expected}) for {name}, got {got}.")
        examples += len(tensors[0])
        found.append([x.detach().cpu() for x in tensors])
        if examples >= EXAMPLES:
            break
    if not examples:
        raise WiringError("calibrate expects at least one batch of inputs, got none. Give some examples of real data.")
    return found


def _inputs_of(batch: Any, names: Sequence[str]) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(bind_inputs(list(names), (), dict(batch)))
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2 and (len(names) == 1 or not isinstance(batch[0], Tensor)):
            return _inputs_of(batch[0], names)  # with labels
        return list(bind_inputs(list(names), tuple(batch), {}))
    return list(bind_inputs(list(names), (batch,), {}))


@torch.no_grad()
def choose_layers(
    program: Program, supports: Supports, examples: Sequence[Sequence[Tensor]], calibrated: bool
) -> Quantization:
    """Choose the layers that are computed in int8.

    Args:
        program: the network.
        supports: whether the kernels compute an operation.
        examples: batches of inputs, on which losses are measured.
        calibrated: whether they are real data, from which the ranges of maps may be taken.
    """
    floats: dict[str, str] = {}
    layers: list[Conv | Linear] = []
    made = {o.output for o in program.operations}
    for o in program.operations:
        if not isinstance(o, (Conv, Linear)):
            continue
        problem = _unsuitable(o) if supports(o) else "computed by PyTorch"
        if not problem and isinstance(o, Conv) and o.inputs[0] not in made:
            problem = "reads an input of the network"
        if not problem and not is_pointwise(o) and not calibrated:
            problem = "needs calibration data"
        if problem:
            floats[o.output] = problem
        else:
            layers.append(o)
    wanted = {o.inputs[0] for o in layers if calibrated and isinstance(o, Conv) and len(o.stride) == 2}
    wanted |= {o.inputs[0] for o in layers if not is_pointwise(o)}
    ranges = _ranges(program, wanted, examples)
    values = program.values(*_sample(examples, program.notes.get("batch")))
    losses = {o.output: _layer_loss(o, values, ranges) for o in layers}
    for name, loss in losses.items():
        if not loss <= LAYER_LOSS:
            floats[name] = f"loses {100 * loss:.1f} %"
    chosen = sorted((name for name in losses if name not in floats), key=lambda name: losses[name])
    while chosen:
        quantized = quantized_program(program, set(chosen), ranges)
        found = quantized.values(*_sample(examples, program.notes.get("batch")))
        loss = max(_loss(found[name], values[name]) for name in program.outputs)
        if loss <= NETWORK_LOSS:
            break
        for name in chosen[len(chosen) - -(-len(chosen) // 4) :]:
            floats[name] = f"loses {100 * losses[name]:.1f} %, and the network {100 * loss:.1f} % with it"
        chosen = [name for name in chosen if name not in floats]
    return Quantization(frozenset(losses), ranges).without(floats, program)


def _sample(examples: Sequence[Sequence[Tensor]], batch: int | None) -> list[Tensor]:
    if batch is not None:  # the network is for one batch size
        return list(examples[0])
    return [torch.cat(parts)[:SAMPLE] for parts in zip(*_first(examples), strict=True)]


def _first(examples: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    found, count = [], 0
    for batch in examples:
        found.append(batch)
        count += len(batch[0])
        if count >= SAMPLE:
            break
    return found


def _ranges(program: Program, wanted: set[str], examples: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}
    fixed = program.notes.get("batch")
    for batch in examples if wanted else []:
        for start in range(0, len(batch[0]), fixed or BATCH):
            values = program.values(*(x[start : start + (fixed or BATCH)] for x in batch))
            for name in wanted:
                x = values[name].float().transpose(0, 1).flatten(1)
                least, most = x.amin(1), x.amax(1)
                low[name] = torch.minimum(low.get(name, least), least)
                high[name] = torch.maximum(high.get(name, most), most)
    return {name: widened(low[name].numpy(), high[name].numpy()) for name in wanted}


def _layer_loss(o: Conv | Linear, values: Mapping[str, Tensor], ranges: Ranges) -> float:
    if o.inputs[0] in ranges and not all(np.isfinite(part).all() for part in ranges[o.inputs[0]]):
        return math.inf
    return _loss(int8_layer(o, ranges).run(values[o.inputs[0]]), values[o.output])


def _loss(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, as a share of that of what is expected."""
    wide = expected.double()
    size = float(wide.square().mean().sqrt())
    off = float((found.double() - wide).square().mean().sqrt())
    return off / size if size > 0 else (0.0 if off == 0 else math.inf)
