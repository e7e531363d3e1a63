"""What a network is made of, before and after compaction."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wirings.compaction.operations import Conv, Linear
from wirings.compaction.program import Program, stored
from wirings.errors import WiringError


@dataclass(frozen=True)
class Counts:
    """A network in numbers, for one image of the example's size."""

    nodes: int
    """Channels and neurons that sums over edges give, and those of the input."""
    edges: int
    """Weights between nodes that are not zero."""
    parameters: int
    """All weights that are not zero: edges, kernels of single nodes, norms, biases, constant maps."""
    mult_adds: int
    """Multiply-adds of weights that are not zero; norms, activations and biases are not counted."""
    dense_mult_adds: int
    """The same if zeros are multiplied by, too."""
    bytes: int
    """Of all tensors as they are saved: places and values of those that are mostly zeros."""
    dense_bytes: int
    """The same with all zeros."""


def count(program: Program) -> Counts:
    """A program in numbers."""
    shapes = program.shapes()
    nodes = sum(shape[0] if shape else 1 for shape in program.inputs.values())
    edges = live = dense = 0
    for operation in program.operations:
        if not isinstance(operation, (Conv, Linear)):
            continue
        pixels = math.prod(shapes[operation.output][1:])
        nonzero = int(operation.weight.count_nonzero())
        live += nonzero * pixels
        dense += operation.weight.numel() * pixels
        if not (isinstance(operation, Conv) and operation.depthwise):
            nodes += operation.weight.shape[0]
            edges += nonzero
    tensors = [x for _, x in program.tensors()]
    return Counts(nodes, edges, _numbers(tensors), live, dense, *_sizes(tensors))


def count_model(program: Program, model: nn.Module) -> Counts:
    """A model in numbers: those of its program, but with the parameters and bytes that the model itself has."""
    tensors = list(model.state_dict().values())
    sizes = dict(zip(("bytes", "dense_bytes"), _sizes(tensors), strict=True))
    return dataclasses.replace(count(program), parameters=_numbers(list(model.parameters())), **sizes)


def _numbers(tensors: list[Tensor]) -> int:
    """The numbers that are not zero; of maps that repeat themselves, those that differ."""
    floating = [stored(x.detach()) for x in tensors if x.is_floating_point()]
    return sum(int(parts[key].count_nonzero()) for parts in floating for key in ("", "few", "values") if key in parts)


def _sizes(tensors: list[Tensor]) -> tuple[int, int]:
    saved = sum(part.numel() * part.element_size() for x in tensors for part in stored(x.detach()).values())
    return saved, sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class Report:
    """What compaction did; print it for a table."""

    before: Counts
    after: Counts
    difference: float
    """The largest difference between the outputs for the example, as a share of the largest output."""

    def as_mapping(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Report:
        """The other way; raises if a number is missing or none."""
        before, after = (Counts(**mapping[key]) for key in ("before", "after"))
        numbers = [*dataclasses.astuple(before), *dataclasses.astuple(after)]
        difference = mapping["difference"]
        if not all(type(x) is int for x in numbers) or not isinstance(difference, float):
            raise WiringError("expected a report in numbers")
        return cls(before, after, difference)

    def __str__(self) -> str:
        names = {
            "nodes": "nodes", "edges": "edges", "parameters": "parameters", "mult_adds": "multiply-adds",
            "dense_mult_adds": "the same, zeros too", "bytes": "bytes", "dense_bytes": "the same, zeros too",
        }  # fmt: skip
        lines = [f"{'':20}{'before':>15}{'after':>15}{'':>9}"]
        for name, shown in names.items():
            before, after = getattr(self.before, name), getattr(self.after, name)
            share = f"{100 * after / before:.3g} %" if before else ""
            lines.append(f"{shown:20}{before:>15,}{after:>15,}{share:>9}")
        lines.append(f"outputs for the example differ by {self.difference:.1e} of the largest")
        return "\n".join(lines)
