"""The size of a network before and after compaction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wirings.compaction.program import Program
from wirings.compaction.tensor_storage import stored_parts
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
    """Bytes of all tensors in a file, where mostly zero tensors are stored as places and values."""
    dense_bytes: int
    """Bytes of all tensors, zeros included."""


def program_size(program: Program) -> ProgramSize:
    """The size of a program."""
    shapes = program.shapes()
    counts = [o.counts(shapes.get(o.output, ())) for o in program.operations]
    nodes = sum(shape[0] if shape else 1 for shape in program.inputs.values())
    tensors = [x for _, x in program.tensors()]
    return ProgramSize(
        nodes + sum(c.nodes for c in counts),
        sum(c.edges for c in counts),
        _count_parameters(tensors),
        sum(c.mult_adds for c in counts),
        sum(c.dense_mult_adds for c in counts),
        *_count_bytes(tensors),
    )


def model_size(program: Program, model: nn.Module) -> ProgramSize:
    """The size of a model: that of its program, but with the parameters and bytes of the model itself."""
    size, dense = _count_bytes(list(model.state_dict().values()))
    parameters = _count_parameters(list(model.parameters()))
    return dataclasses.replace(program_size(program), parameters=parameters, bytes=size, dense_bytes=dense)


def _count_parameters(tensors: list[Tensor]) -> int:
    """Nonzero entries; repeated rows and columns of maps count once."""
    floating = [stored_parts(x.detach()) for x in tensors if x.is_floating_point()]
    return sum(int(parts[key].count_nonzero()) for parts in floating for key in ("", "few", "values") if key in parts)


def _count_bytes(tensors: list[Tensor]) -> tuple[int, int]:
    stored = sum(part.numel() * part.element_size() for x in tensors for part in stored_parts(x.detach()).values())
    return stored, sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class CompactionReport:
    """What compaction did. Print it for a table."""

    before: ProgramSize
    after: ProgramSize
    difference: float
    """The largest difference between the outputs for the example, as a share of the largest output."""

    def as_mapping(self) -> dict[str, Any]:
        """The report as plain Python values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> CompactionReport:
        """The report from `as_mapping`; raises if a number is missing or has another type."""
        before, after = (ProgramSize(**mapping[key]) for key in ("before", "after"))
        numbers = [*dataclasses.astuple(before), *dataclasses.astuple(after)]
        difference = mapping["difference"]
        if not all(type(x) is int for x in numbers) or not isinstance(difference, float):
            raise WiringError("expected a report of numbers")
        return cls(before, after, difference)

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
        return "\n".join([*lines, f"largest difference of the outputs: {self.difference:.1e} of the largest output"])
