"""The C interface of an exported network: its functions, the names and sizes of its tensors, and an example program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from string import Template

from wirings.compaction.program import Program

TEMPLATES = Path(__file__).parent / "source"


@dataclass(frozen=True)
class CallerTensor:
    """A tensor that the caller of an exported network passes."""

    tensor: str
    """Its name in the program."""
    name: str
    """Its name in C."""
    shape: tuple[int, ...]
    """Without the batch dimension."""
    tokens: int = 0
    """The number of different tokens; 0 for floats."""

    @property
    def type(self) -> str:
        return "int64_t" if self.tokens else "float"

    @property
    def size(self) -> int:
        """Numbers per example."""
        return math.prod(self.shape)

    @property
    def floats(self) -> int:
        """Its size for the kernels, which count in floats."""
        return self.size * (2 if self.tokens else 1)


class Interface:
    """The tensors of a program as parameters of a C function.

    Args:
        program: the program.
        shapes: the shapes of its tensors, without the batch dimension.
        name: the prefix of all names.
    """

    def __init__(self, program: Program, shapes: dict[str, tuple[int, ...]], name: str) -> None:
        self.name, self._taken = name, set[str]()
        limits, self.indices = program.index_limits(), program.index_ranges()
        read = {name for o in program.operations for name in o.inputs}
        self.inputs = [
            CallerTensor(tensor, self._identifier(f"in_{tensor}"), shape, limits.get(tensor, 0))
            for tensor, shape in program.inputs.items()
            if tensor in read
        ]
        outputs = list(dict.fromkeys(program.outputs))
        keys = _keys_of_outputs(program)
        numbered = [f"out_{keys.get(program.outputs.index(tensor), i)}" for i, tensor in enumerate(outputs)]
        names = numbered if keys or len(outputs) > 1 else ["out"]
        self.outputs = [
            CallerTensor(tensor, self._identifier(name), shapes[tensor])
            for tensor, name in zip(outputs, names, strict=True)
        ]

    def size_of(self, tensor: str) -> int:
        """Numbers per example of a tensor of the program."""
        return next(x.size for x in self.inputs if x.tensor == tensor)

    def _identifier(self, text: str) -> str:
        """A valid identifier that no other parameter has. Only letters, digits and underscores get into the source."""
        base = re.sub(r"_{2,}", "_", re.sub(r"[^A-Za-z0-9]", "_", text))[:60].rstrip("_")
        name, number = base, 2
        while name.lower() in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name.lower())
        return name

    def size_macro(self, tensor: CallerTensor) -> str:
        return f"{self.name}_{tensor.name}_SIZE".upper()

    @property
    def parameters(self) -> str:
        """The parameters of the function that runs the network."""
        inputs = [f"const {x.type} *{x.name}" for x in self.inputs]
        outputs = [f"{x.type} *{x.name}" for x in self.outputs]
        return ", ".join([f"{self.name}_handle *handle", "int64_t batch", *inputs, *outputs])

    def fill(self, template: str, **more: str) -> str:
        """One of the templates with the names and sizes of this network."""
        tensors = [*self.inputs, *self.outputs]
        return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(
            name=self.name,
            upper=self.name.upper(),
            parameters=self.parameters,
            arguments=", ".join(x.name for x in tensors),
            input_pointers=", ".join(x.name for x in self.inputs) or "nullptr",
            output_pointers=", ".join(x.name for x in self.outputs),
            documentation=_lines(f" *   {x.name}: {self._about(x)}" for x in tensors),
            sizes=_lines(f"#define {self.size_macro(x)} {x.size}" for x in tensors),
            vectors=_lines(
                f"    std::vector<{x.type}> {x.name}(static_cast<size_t>(batch) * {self.size_macro(x)});"
                for x in tensors
            ),
            reads=_lines(f"    complete = complete && filled(input, {x.name});" for x in self.inputs),
            prints=_lines(f'    print("{x.name}", {x.name});' for x in self.outputs),
            writes=_lines(f"    complete = complete && written(output, {x.name});" for x in self.outputs),
            data=", ".join(f"{x.name}.data()" for x in tensors),
            **more,
        )

    def _about(self, tensor: CallerTensor) -> str:
        kind = f"tokens from 0 to {tensor.tokens - 1}, int64" if tensor.tokens else "float32"
        return f"({', '.join(map(str, ('batch', *tensor.shape)))}), {kind}"


def _keys_of_outputs(program: Program) -> dict[int, str]:
    """The keys of the dictionary that the model returns, if it does, by number of the output."""
    structure = program.notes.get("outputs")
    named = structure.get("dict", {}) if isinstance(structure, dict) else {}
    return {number: key for key, number in named.items() if isinstance(number, int)}


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
