"""Write programs to files: ONNX, `torch.export`, or safetensors with the wiring described in JSON.

A file only gets its name once it has been read again and returns the same outputs as the model.

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

from wirings.compaction.compare import check_outputs
from wirings.compaction.operation import UnsupportedByOnnxError
from wirings.compaction.program import Program
from wirings.compaction.program_module import ProgramModule
from wirings.errors import WiringError
from wirings.utils.files import whole_file


def export_program(program: Program, path: str | Path) -> Path:
    """Write a program to a ``.onnx``, ``.pt2`` or ``.safetensors`` file; returns the path."""
    checked = check_export_path(path)
    on_cpu = program.to("cpu")
    with whole_file(checked) as part:
        _WRITERS[checked.suffix](on_cpu, part)
    return checked


def check_export_path(path: str | Path) -> Path:
    """Raise unless the suffix is known and the folder exists, before any work is done."""
    checked = Path(path)
    if checked.suffix not in _WRITERS:
        raise WiringError(f"expected a file name that ends in {', '.join(_WRITERS)}, got {path}.")
    if not checked.parent.is_dir():
        raise WiringError(f"the folder {checked.parent} of {path} does not exist. Create it first.")
    return checked


def _compare(program: Program, what: str, call: Callable[..., Any]) -> None:
    """Raise unless ``call`` returns the program's outputs for two images and, if any batch size works, for one."""
    example = program.example(2)
    for images in (example,) if "batch" in program.notes else (example, [x[:1] for x in example]):
        found = call(*images)
        found = (found,) if isinstance(found, Tensor) else tuple(found)
        with torch.no_grad():
            check_outputs(program, found, images, program.run(*images), what)


def _write_safetensors(program: Program, path: Path) -> None:
    program.save(path)
    _compare(Program.load(path, math.inf), "the file", program.run)


def _write_exported_program(program: Program, path: Path) -> None:
    example = tuple(program.example(2))
    batches = tuple({} if "batch" in program.notes else {0: torch.export.Dim.AUTO} for _ in example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about its own internals
        exported = torch.export.export(ProgramModule(program).eval(), example, dynamic_shapes=(batches,), strict=False)
        with path.open("wb") as file:  # a path would have to end in .pt2, and this is still the temporary file
            torch.export.save(exported, file)
        with path.open("rb") as file:
            again = torch.export.load(file).module()
        with torch.no_grad():
            _compare(program, "the exported program", again)


def _write_onnx(program: Program, path: Path) -> None:
    _require("onnx")
    _require("onnxruntime")
    import onnxruntime

    from wirings.compaction.onnx import onnx_model

    single = program.to(torch.float32)
    try:
        path.write_bytes(onnx_model(single).SerializeToString())
    except UnsupportedByOnnxError as error:
        _write_onnx_with_torch(single, path, str(error))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def call(*images: Tensor) -> tuple[Tensor, ...]:
        results = session.run(None, {name: x.numpy() for name, x in zip(names, images, strict=True)})
        return tuple(torch.from_numpy(x) for x in results)

    _compare(single, "ONNX Runtime", call)


def _write_onnx_with_torch(program: Program, path: Path, unsupported: str) -> None:
    """Write a program with PyTorch's exporter, which knows more operators."""
    if importlib.util.find_spec("onnxscript") is None:
        raise WiringError(
            f"exporting {unsupported} to ONNX requires PyTorch's exporter, which needs the package onnxscript: pip "
            "install onnxscript. Or save the model as .pt2."
        )
    example = tuple(program.example(2))
    batches = None if "batch" in program.notes else (tuple({0: torch.export.Dim.AUTO} for _ in example),)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(ProgramModule(program).eval(), example, dynamic_shapes=batches, dynamo=True,
                                     verbose=False)  # fmt: skip
        assert made is not None
        path.write_bytes(made.model_proto.SerializeToString())
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise WiringError(
            f"the model has {unsupported}, which cannot be exported to ONNX: {' '.join(lines[:2])[:300]} Save the "
            "model as .pt2 or .safetensors."
        ) from error


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise WiringError(f'exporting to ONNX needs the package {package!r}: pip install "wirings[export]".')


_WRITERS: dict[str, Callable[[Program, Path], None]] = {
    ".onnx": _write_onnx,
    ".pt2": _write_exported_program,
    ".safetensors": _write_safetensors,
}
