"""Compact models as files: ONNX, `torch.export`, or safetensors with the wiring described in JSON.

Every file is tried before it gets its name: it is read again and must give the outputs that the model gives.

| file | read by | needs |
|---|---|---|
| ``.onnx`` | ``onnxruntime.InferenceSession(path)`` | ONNX Runtime alone |
| ``.pt2`` | ``torch.export.load(path).module()`` | PyTorch alone |
| ``.safetensors`` | ``wirings.load_compact(path)`` | wirings |
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.compact import check_outputs
from wirings.compaction.files import readable
from wirings.compaction.module import CompactModel
from wirings.compaction.program import Program
from wirings.compaction.report import Report
from wirings.errors import WiringError
from wirings.utils.files import whole_file


def export(small: CompactModel, path: str | Path) -> Path:
    """Write a compact model to a file; its ending says how: ``.onnx``, ``.pt2`` or ``.safetensors``."""
    if not isinstance(small, CompactModel):
        raise WiringError(
            f"export takes what wirings.compact(model, example_input) gives, not {type(small).__name__}; compact it "
            "first."
        )
    place = check_path(path)
    program = small.program.to("cpu")
    with whole_file(place) as part:
        _WRITERS[place.suffix](program, part)
    return place


def check_path(path: str | Path) -> Path:
    """Raise unless the ending is known and the folder is there, before any work is done."""
    place = Path(path)
    if place.suffix not in _WRITERS:
        raise WiringError(f"{path} must end in {', '.join(_WRITERS)}, which says what kind of file it is to be.")
    if not place.parent.is_dir():
        raise WiringError(f"the folder {place.parent} of {path} does not exist; make it first.")
    return place


def load_compact(path: str | Path, *, max_bytes: float | None = None) -> CompactModel:
    """A compact model from a ``.safetensors`` file that `export` wrote. Nothing in the file can execute.

    A file that is damaged, or that asks for more than it may, raises `WiringError`: see `wirings.compaction.files`.

    Args:
        path: the file.
        max_bytes: the most that its weights, and the maps of one image, may take in memory. None: 64 MiB or 256 times
            the file's size for the weights, whichever is more, and 4 GiB for the maps.
    """
    program = Program.load(path, max_bytes)
    with readable(path):
        report = program.notes.get("report")
        return CompactModel(program, None if report is None else Report.from_mapping(report)).eval()


def _compare(program: Program, what: str, call: Callable[..., Any]) -> None:
    """Raise unless ``call`` gives what the program gives, for two images, and for one where it takes any number."""
    example = program.example(2)
    for images in (example,) if "batch" in program.notes else (example, [x[:1] for x in example]):
        found = call(*images)
        found = (found,) if isinstance(found, Tensor) else tuple(found)
        with torch.no_grad():
            check_outputs(program, found, images, program.run(*images), what)


def _write_program(program: Program, path: Path) -> None:
    program.save(path)
    _compare(Program.load(path, math.inf), "the file", program.run)


def _write_exported(program: Program, path: Path) -> None:
    example = tuple(program.example(2))
    batches = tuple({} if "batch" in program.notes else {0: torch.export.Dim.AUTO} for _ in example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about itself
        exported = torch.export.export(CompactModel(program).eval(), example, dynamic_shapes=(batches,), strict=False)
        with path.open("wb") as file:  # a path must end in .pt2, and this one has its name only when all is well
            torch.export.save(exported, file)
        with path.open("rb") as file:
            again = torch.export.load(file).module()
        with torch.no_grad():
            _compare(program, "the exported program", again)


def _write_onnx(program: Program, path: Path) -> None:
    _need("onnx")
    _need("onnxruntime")
    import onnxruntime

    from wirings.compaction.onnx import UntoldError, model_of

    single = program.to(torch.float32)
    try:
        path.write_bytes(model_of(single).SerializeToString())
    except UntoldError as error:
        _traced_onnx(single, path, str(error))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def call(*images: Tensor) -> tuple[Tensor, ...]:
        results = session.run(None, {name: x.numpy() for name, x in zip(names, images, strict=True)})
        return tuple(torch.from_numpy(x) for x in results)

    _compare(single, "ONNX Runtime", call)


def _traced_onnx(program: Program, path: Path, why: str) -> None:
    """Operators that a program only passes on are put into ONNX by PyTorch, which knows more of them."""
    if importlib.util.find_spec("onnxscript") is None:
        raise WiringError(
            f"the model has {why}, which is put into ONNX by PyTorch's own exporter, and that needs the package "
            "onnxscript: pip install onnxscript. Or take .pt2."
        )
    example = tuple(program.example(2))
    batches = None if "batch" in program.notes else (tuple({0: torch.export.Dim.AUTO} for _ in example),)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(CompactModel(program).eval(), example, dynamic_shapes=batches, dynamo=True,
                                     verbose=False)  # fmt: skip
        assert made is not None
        path.write_bytes(made.model_proto.SerializeToString())
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise WiringError(
            f"the model has {why}, which cannot be put into ONNX: {' '.join(lines[:2])[:300]} Take .pt2 or "
            ".safetensors."
        ) from error


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise WiringError(f'this file needs the package {package!r}: pip install "wirings[export]" or {package}.')


_WRITERS: dict[str, Callable[[Program, Path], None]] = {
    ".onnx": _write_onnx,
    ".pt2": _write_exported,
    ".safetensors": _write_program,
}
