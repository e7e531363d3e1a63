"""The size of a network before and after compaction."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wirings.compaction.operation import Operation, OperationCounts, Shape
from wirings.compaction.operations.torch_operator import TorchOperator
from wirings.compaction.program import Program
from wirings.compaction.tensor_storage import equal_tensors, is_constant, stored_parts
from wirings.errors import WiringError
from wirings.utils.tables import text_table


@dataclass(frozen=True)
class ProgramSize:
    """The size of a network, for one image of the example's size."""

    nodes: int
    """Channels and neurons that are sums over edges, and those of the input."""
    edges: int
    """Nonzero weights between nodes."""
    parameters: int
    """All nonzero weights: edges, kernels of single nodes, norms, biases, constant maps."""
    mult_adds: int
    """Multiply-adds with nonzero weights, not counting norms, activations and biases."""
    dense_mult_adds: int
    """Multiply-adds with all weights, zeros included."""
    bytes: int
    """Bytes of all tensors in a file, where only the edges of tensors with zeros are stored."""
    dense_bytes: int
    """Bytes of all tensors, zeros included."""
    constant_bytes: int = 0
    """Bytes, among `bytes`, of maps and masks. Some of them, such as positions, a model may compute in every call."""


def operation_counts(operation: Operation, shapes: Mapping[str, Shape]) -> OperationCounts:
    """What an operation contributes, given the shapes of all tensors."""
    return operation.counts(shapes.get(operation.output, ()), [shapes.get(name, ()) for name in operation.inputs])


def program_size(program: Program) -> ProgramSize:
    """The size of a program."""
    shapes = program.shapes()
    counts = [operation_counts(o, shapes) for o in program.operations]
    nodes = sum(shape[0] if shape else 1 for shape in program.inputs.values())
    tensors = dict(program.tensors())
    return ProgramSize(
        nodes + sum(c.nodes for c in counts),
        sum(c.edges for c in counts),
        _count_parameters(tensors),
        sum(c.mult_adds for c in counts),
        sum(c.dense_mult_adds for c in counts),
        *_count_bytes(tensors),
        _count_bytes({name: x for name, x in tensors.items() if is_constant(name)})[0],
    )


def uncounted_operators(program: Program) -> tuple[str, ...]:
    """The operators of a program that multiply, but are not counted, and how many there are of each."""
    found = Counter(o.target for o in program.operations if isinstance(o, TorchOperator) and o.multiplies)
    return tuple(f"{name} × {count}" for name, count in found.items())


def model_size(program: Program, model: nn.Module) -> ProgramSize:
    """The size of a model: that of its program, but with the parameters and bytes of the model itself."""
    size, dense = _count_bytes(dict(model.state_dict()))
    parameters = _count_parameters(dict(model.named_parameters()))
    return dataclasses.replace(
        program_size(program), parameters=parameters, bytes=size, dense_bytes=dense, constant_bytes=0
    )


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What a file stores of each tensor; of equal ones, such as tied weights, only the first."""
    equal = equal_tensors(tensors.items())
    for name, x in tensors.items():
        if name not in equal:
            yield stored_parts(x.detach(), None, is_constant(name))[0]


def _count_parameters(tensors: Mapping[str, Tensor]) -> int:
    """Nonzero entries; repeated rows, columns and numbers of maps count once."""
    floating = {name: x for name, x in tensors.items() if x.is_floating_point()}
    kinds = ("", "few", "values", "table")
    return sum(int(parts[key].count_nonzero()) for parts in _parts(floating) for key in kinds if key in parts)


def _count_bytes(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    stored = sum(part.numel() * part.element_size() for parts in _parts(tensors) for part in parts.values())
    return stored, sum(x.numel() * x.element_size() for x in tensors.values())


@dataclass(frozen=True)
class CompactionReport:
    """What compaction did. Print it for a table."""

    before: ProgramSize
    after: ProgramSize
    difference: float
    """The largest difference between the outputs for the example, as a share of the largest output."""
    uncounted: tuple[str, ...] = ()
    """Operators that run on PyTorch and whose multiply-adds are in neither size."""

    def as_mapping(self) -> dict[str, Any]:
        """The report as plain Python values, for JSON."""
        return {**dataclasses.asdict(self), "uncounted": list(self.uncounted)}

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> CompactionReport:
        """The report from `as_mapping`; raises if a number is missing or has another type."""
        before, after = (ProgramSize(**mapping[key]) for key in ("before", "after"))
        numbers = [*dataclasses.astuple(before), *dataclasses.astuple(after)]
        difference, uncounted = mapping["difference"], tuple(mapping.get("uncounted", ()))
        if not all(type(x) is int for x in numbers) or not isinstance(difference, float):
            raise WiringError("expected a report of numbers")
        if not all(isinstance(name, str) for name in uncounted):
            raise WiringError("expected names of operators")
        return cls(before, after, difference, uncounted)

    def __str__(self) -> str:
        names = {
            "nodes": "nodes", "edges": "edges", "parameters": "parameters", "mult_adds": "multiply-adds",
            "dense_mult_adds": "multiply-adds, with zeros", "bytes": "bytes", "dense_bytes": "bytes, with zeros",
        }  # fmt: skip
        rows = []
        for name, shown in names.items():
            before, after = getattr(self.before, name), getattr(self.after, name)
            rows.append([shown, before, after, f"{100 * after / before:.3g} %" if before else ""])
        lines = text_table(["", "before", "after", ""], rows, align="lrrr", rule=False)
        if self.after.bytes > self.before.bytes:
            share = f"{self.after.constant_bytes:,} bytes are maps and masks"
            lines.append(f"larger than before: {share}, some of which the model computes in every call")
        if self.uncounted:
            lines.append(f"multiply-adds that are not counted, since PyTorch runs them: {', '.join(self.uncounted)}")
        return "\n".join([*lines, f"largest difference of the outputs: {self.difference:.1e} of the largest output"])
