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
import io
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.compare import check_outputs
from wirings.compaction.file_format import write_program
from wirings.compaction.operation import UnsupportedByOnnxError
from wirings.compaction.program import Program
from wirings.compaction.program_module import ProgramModule
from wirings.compaction.tensor_storage import rounded
from wirings.errors import WiringError
from wirings.utils.encoded_tensors import rounding_type
from wirings.utils.files import check_path, disk_errors, whole_file


def export_program(program: Program, path: str | Path, dtype: str | torch.dtype | None = None) -> Path:
    """Write a program to a ``.onnx``, ``.pt2`` or ``.safetensors`` file; returns the path.

    Args:
        program: the program.
        path: the file.
        dtype: the type that weights are rounded to in a ``.safetensors`` file.
    """
    checked, rounding = check_export_path(path), rounding_type(dtype)
    if rounding is not None and checked.suffix != ".safetensors":
        raise WiringError(f"dtype={rounding!r} is for .safetensors files, got {path}. Drop dtype, or change the name.")
    on_cpu = program.to("cpu")
    with disk_errors(checked), whole_file(checked) as part:
        if rounding is None:
            _WRITERS[checked.suffix](on_cpu, part)
        else:
            _write_safetensors(on_cpu, part, rounding)
    return checked


def check_export_path(path: str | Path) -> Path:
    """Raise unless the suffix is known and the folder exists, before any work is done."""
    checked = check_path(path, "a file")
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


def _write_safetensors(program: Program, path: Path, dtype: str | None = None) -> None:
    write_program(program, path, dtype)
    stored = program if dtype is None else program.map_tensors(lambda x: rounded(x, dtype))
    _compare(Program.load(path, math.inf), "the file", stored.run)


def _with_flat_outputs(program: Program) -> Program:
    """The program, with a tuple of all tensors instead of nested outputs and dictionaries, which traces cannot have."""
    structure = program.notes.get("outputs", 0)
    parts = structure if isinstance(structure, int) else structure.get("tuple") or structure.get("list")
    if isinstance(parts, int) or (parts and all(isinstance(part, int) for part in parts)):
        return program
    notes = {key: value for key, value in program.notes.items() if key != "outputs"}
    return Program(program.inputs, program.operations, program.outputs, notes)


def _write_exported_program(program: Program, path: Path) -> None:
    program = _with_flat_outputs(program)
    example = tuple(program.example(2))
    batches = tuple({} if "batch" in program.notes else {0: torch.export.Dim.AUTO} for _ in example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about its own internals
        exported = torch.export.export(ProgramModule(program).eval(), example, dynamic_shapes=(batches,), strict=False)
        contents = io.BytesIO()  # PyTorch's writer aborts the process if the disk is full
        torch.export.save(exported, contents)
        path.write_bytes(contents.getbuffer())
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
    program = _with_flat_outputs(program)
    operations = [operation.spelled_out() for operation in program.operations]
    program = Program(program.inputs, operations, program.outputs, program.notes)
    example = tuple(program.example(2))
    batches = None if "batch" in program.notes else (tuple({0: torch.export.Dim.AUTO} for _ in example),)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(ProgramModule(program).eval(), example, dynamic_shapes=batches, dynamo=True,
                                     input_names=list(program.inputs), verbose=False)  # fmt: skip
        assert made is not None
        contents = made.model_proto.SerializeToString()
    except Exception as error:
        reason = _reason(error)
        if (found := re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", reason)) is not None:
            name = found[1].replace(".", "::", 1)
            raise WiringError(f"ONNX has no operator for {name}, which the model uses. Save it as .pt2.") from error
        raise WiringError(
            f"the model has {unsupported}, which cannot be exported to ONNX ({reason}). Save the model as .pt2 or "
            ".safetensors."
        ) from error
    path.write_bytes(contents)


def _reason(error: BaseException) -> str:
    """The first line of what caused an error of PyTorch's exporter, without colors."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
    return text.splitlines()[0].rstrip(".")[:150] if text else type(error).__name__


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise WiringError(f'exporting to ONNX needs the package {package!r}: pip install "wirings[export]".')


_WRITERS: dict[str, Callable[[Program, Path], None]] = {
    ".onnx": _write_onnx,
    ".pt2": _write_exported_program,
    ".safetensors": _write_safetensors,
}
