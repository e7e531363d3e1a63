"""What a network is made of, before and after compaction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from wirings.compaction.fold import each_sum
from wirings.compaction.operations import Conv
from wirings.compaction.program import Program


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
    """Of all tensors with their zeros."""


def count(program: Program) -> Counts:
    """A program in numbers."""
    shapes = program.shapes()
    nodes = sum(shape[0] if shape else 1 for shape in program.inputs.values())
    edges = live = dense = 0
    for operation in each_sum(program):
        pixels = math.prod(shapes[operation.output][1:])
        nonzero = int(operation.weight.count_nonzero())
        live += nonzero * pixels
        dense += operation.weight.numel() * pixels
        if not (isinstance(operation, Conv) and operation.depthwise):
            nodes += operation.weight.shape[0]
            edges += nonzero
    floats = [x for _, x in program.tensors() if x.is_floating_point()]
    parameters = sum(int(x.count_nonzero()) for x in floats)
    size = sum(x.numel() * x.element_size() for _, x in program.tensors())
    return Counts(nodes, edges, parameters, live, dense, size)


def count_model(program: Program, model: nn.Module) -> Counts:
    """A model in numbers: those of its program, but with the parameters and bytes that the model itself has."""
    counts = count(program)
    parameters = sum(int(p.count_nonzero()) for p in model.parameters())
    size = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    return Counts(counts.nodes, counts.edges, parameters, counts.mult_adds, counts.dense_mult_adds, size)


@dataclass(frozen=True)
class Report:
    """What compaction did; print it for a table."""

    before: Counts
    after: Counts
    difference: float
    """The largest difference between the outputs for the example, as a share of the largest output."""

    def __str__(self) -> str:
        names = {
            "nodes": "nodes", "edges": "edges", "parameters": "parameters", "mult_adds": "multiply-adds",
            "dense_mult_adds": "the same, zeros too", "bytes": "bytes",
        }  # fmt: skip
        lines = [f"{'':20}{'before':>15}{'after':>15}{'':>9}"]
        for name, shown in names.items():
            before, after = getattr(self.before, name), getattr(self.after, name)
            share = f"{100 * after / before:.3g} %" if before else ""
            lines.append(f"{shown:20}{before:>15,}{after:>15,}{share:>9}")
        lines.append(f"outputs for the example differ by {self.difference:.1e} of the largest")
        return "\n".join(lines)
