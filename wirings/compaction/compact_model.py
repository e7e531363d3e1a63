"""A compact model, which `wirings.compact` returns and `wirings.load_compact` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.export import export_program
from wirings.compaction.file_format import file_errors
from wirings.compaction.program import Program, bind_inputs, check_batch
from wirings.compaction.program_module import ProgramModule
from wirings.compaction.report import CompactionReport
from wirings.errors import WiringError


class CompactModel(ProgramModule):
    """A network without dead and constant nodes. It takes and returns what the original network does in evaluation.

    Attributes:
        program: the network as a list of operations.
        report: what compaction did; print it for a table.
        notes: what is saved with the model.
    """

    def __init__(self, program: Program, report: CompactionReport | None = None) -> None:
        super().__init__(program)
        self._one_size = program.one_size
        self.report = report

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The outputs for a batch. Inputs may be given by keyword, by the names in ``program.inputs``."""
        inputs = bind_inputs(list(self._inputs), args, kwargs)
        self._check(inputs)
        return super().forward(*inputs)

    def _check(self, inputs: list[Tensor]) -> None:
        for (name, shape), x in zip(self._inputs.items(), inputs, strict=True):
            same = tuple(x.shape[1:]) == shape
            fits = x.dim() == len(shape) + 1 and x.shape[1:2] == torch.Size(shape[:1])
            if not fits or (self._one_size and not same):
                why = "" if not fits else (
                    " The model is valid for this size only, since its constant maps or traced operators depend on it: "
                    "compact it again with an example of the other size."
                )  # fmt: skip
                expected = ", ".join(map(str, ("batch", *shape)))
                raise WiringError(f"{name}: this compact model expects shape ({expected}), got {tuple(x.shape)}.{why}")
            check_batch(self.notes, x.shape[0])

    def save(self, path: str | Path, dtype: str | torch.dtype | None = None) -> Path:
        """Write the model to a ``.safetensors``, ``.onnx`` or ``.pt2`` file; see `wirings.compaction.export`.

        Args:
            path: the file.
            dtype: for a ``.safetensors`` file, what weights are rounded to in it: ``"float16"``, ``"bfloat16"``, or
                ``"int8"`` with a scale for every row. A loaded model computes in its own type with rounded weights, so
                its outputs differ a little. Vectors, such as biases and norms, are not rounded. By default, nothing
                is, and a loaded model is the same bit for bit.

        Returns:
            The path.
        """
        return export_program(self.program, path, dtype)


def load_compact(path: str | Path, *, max_bytes: float | None = None) -> CompactModel:
    """Load a compact model from a ``.safetensors`` file. Nothing in the file is executed.

    Args:
        path: a file that `CompactModel.save` wrote.
        max_bytes: the most memory that its weights, and the maps of one image, may take. By default, weights may take
            64 MiB or 256 times the size of the file, whichever is more, and maps 4 GiB.

    Raises:
        WiringError: if the file is damaged, or asks for something that is not allowed: see
            `wirings.compaction.file_format`.
    """
    program = Program.load(path, max_bytes)
    with file_errors(path):
        report = program.notes.get("report")
        return CompactModel(program, None if report is None else CompactionReport.from_mapping(report)).eval()
