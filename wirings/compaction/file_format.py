"""The file format of programs: one safetensors file, whose header describes the operations in JSON.

Files need not be trusted:

- **Damage.** A checksum (SHA-256) covers everything that is read: the name, type, shape and bytes of each tensor, and
  the header. It detects damage, not who wrote the file, so everything below holds without it, too.
- **Operators.** A file may only contain the operators in `wirings.compaction.allowed_operators`.
- **Sizes.** Only the edges of weights with zeros are stored (`wirings.utils.encoded_tensors`), so that a small file may
  claim any size. The size of all weights in memory is recorded, must match their shapes, and is compared with a limit
  before memory is taken: 64 MiB, or 256 times the size of the file if that is more. This leaves room for weights of
  which one in 128 is not zero, also in int8, while a file cannot take much more memory than it takes to transfer it.
  The maps of one image may take 4 GiB. ``max_bytes`` replaces both limits.
- **Fields.** Types and ranges of all fields are checked, and all shapes are inferred, before anything is computed: see
  `wirings.compaction.check_program`.

Every file that is damaged or invalid raises `WiringError`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.check_program import check_program, has_type, plain_fields
from wirings.compaction.operation import Operation, expect
from wirings.compaction.operations import OPERATIONS, InputRef, TorchOperator, WeightRef
from wirings.compaction.operations.torch_operator import check_allowed_operator
from wirings.compaction.program import TORCH_CONSTANTS, Program
from wirings.compaction.tensor_storage import equal_tensors, is_constant, loaded_tensors, stored_parts
from wirings.errors import WiringError
from wirings.utils.checks import check_number
from wirings.utils.encoded_tensors import Description, rounding_type
from wirings.utils.files import check_file, check_path, disk_errors, whole_file
from wirings.utils.tensor_files import OtherFileError, read_tensors, require_safetensors, write_tensors
from wirings.utils.tensor_files import file_errors as file_errors

FORMAT, SCHEMA = "wirings program", "4"
READ = ("3", SCHEMA)
"""The schemas that can be read. In schema 3, the places of edges are 32-bit integers."""
MIN_WEIGHT_BYTES, MAX_RATIO = 64 * 2**20, 256
"""What the weights of any file may take in memory, and those of a large file as a multiple of its size."""
MAP_BYTES = 4 * 2**30
"""What the maps of one image may take in memory."""
_WHAT = "files of compact models"


def save(program: Program, path: str | Path, dtype: str | torch.dtype | None = None) -> None:
    """Write a program to a file, complete or not at all.

    Args:
        program: the program.
        path: the file.
        dtype: the type that weights are rounded to in the file: one of `wirings.utils.encoded_tensors.ROUNDED`. By
            default, they are not rounded.

    Raises:
        WiringError: if it contains an operator that is not allowed in a file, or the file cannot be written.
    """
    checked = check_file(path)
    with disk_errors(checked), whole_file(checked) as part:
        write_program(program, part, rounding_type(dtype))


def write_program(program: Program, path: Path, dtype: str | None = None) -> None:
    """Write a program to a file, as `save` does, but not atomically."""
    require_safetensors(_WHAT)
    for o in program.operations:
        if isinstance(o, TorchOperator):
            try:
                check_allowed_operator(o.target)
            except WiringError as error:
                raise WiringError(
                    f"the model cannot be saved as .safetensors: {error}. Use it in memory, or save it as .pt2."
                ) from None
    tensors: dict[str, Tensor] = {}
    encoded: dict[str, Description] = {}
    equal = equal_tensors(program.tensors())
    for name, value in program.tensors():
        if name in equal:
            continue
        parts, description = stored_parts(value.detach().cpu(), dtype, is_constant(name))
        tensors |= {f"{name}.{part}" if part else name: x for part, x in parts.items()}
        if description is not None:
            encoded[name] = description
    about = {
        "inputs": {name: list(shape) for name, shape in program.inputs.items()},
        "operations": [_describe(operation) for operation in program.operations],
        "outputs": list(program.outputs),
        "encoded": encoded,
        "same": {name: [equal[name], list(value.shape)] for name, value in program.tensors() if name in equal},
        "bytes": sum(x.numel() * x.element_size() for _, x in program.tensors()),
        "notes": program.notes,
    }
    write_tensors(path, tensors, {"format": FORMAT, "schema": SCHEMA, "program": json.dumps(about)})


def load(path: str | Path, max_bytes: float | None = None) -> Program:
    """Read a program that `save` wrote. Nothing in the file is executed, and damaged files are rejected.

    Args:
        path: the file.
        max_bytes: the most memory that the weights, and the maps of one image, may take; by default as above.
    """
    if max_bytes is not None and max_bytes != math.inf:
        max_bytes = check_number("load", "max_bytes", max_bytes, 0.0, math.inf)
    if not check_path(path).is_file():
        what = "is not a file" if Path(path).exists() else "does not exist"
        raise WiringError(f"expected a .safetensors file that wirings saved, but {path} {what}.")
    require_safetensors(_WHAT)
    with file_errors(path):
        tensors, header = read_tensors(path, lambda header: _check_header(header, path))
        about = json.loads(header["program"])
        limit = max(MIN_WEIGHT_BYTES, MAX_RATIO * Path(path).stat().st_size) if max_bytes is None else max_bytes
        program = _program(about, tensors, limit, header["schema"])
        check_program(program, MAP_BYTES if max_bytes is None else max_bytes)
        return program


def _check_header(header: dict[str, str], path: str | Path) -> None:
    if header.get("format") != FORMAT:
        raise OtherFileError(
            f"expected a file that a compact model's save() wrote, but {path} does not contain a compact model. To "
            "compact a checkpoint of a run, use `wirings compact RUN`."
        )
    if header.get("schema") not in READ:
        raise OtherFileError(
            f"{path} has schema {header.get('schema', '')[:20]!r}, but this version reads {' and '.join(READ)}. Export "
            "the model again."
        )


# ---- reading --------------------------------------------------------------------------------------------------------


def _program(about: Any, tensors: dict[str, Tensor], limit: float, schema: str) -> Program:
    encoded = "sparse" if schema == "3" else "encoded"
    keys = {"inputs", "operations", "outputs", encoded, "bytes", "notes"}
    expect(isinstance(about, dict) and {*about} - {"same"} == keys, f"a program with {', '.join(sorted(keys))}")
    same = about.get("same", {})
    expect(
        all(isinstance(x, dict) for x in (about["inputs"], about[encoded], about["notes"], same)), "mappings by name"
    )
    expect(all(isinstance(about[key], list) for key in ("operations", "outputs")), "lists of operations and outputs")
    expect(all(_is_shape(x) for x in about["inputs"].values()), "sizes of 0 or more")
    expect(all(isinstance(name, str) for name in about["outputs"]), "names of outputs")
    expect(len(about["inputs"]) > 0, "an input")
    dense = loaded_tensors(tensors, about[encoded], same, about["bytes"], limit, schema)
    inputs = {name: tuple(shape) for name, shape in about["inputs"].items()}
    operations = [_operation(one, dense) for one in about["operations"]]
    expect(not dense, f"an operation for the tensor {next(iter(dense), '')[:60]!r}")
    return Program(inputs, operations, tuple(about["outputs"]), about["notes"])


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 2**31 for n in x) and math.prod(x) < 2**48


def _operation(about: Any, tensors: dict[str, Tensor]) -> Operation:
    """An operation with its tensors, which are removed from ``tensors``."""
    expect(isinstance(about, dict), "operations as mappings")
    name = about.get("operation")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise WiringError(f"unknown operation {str(name)[:60]!r}; a later version of wirings may have it")
    kind, hints = OPERATIONS[name], plain_fields(name)
    fields = {key: _from_json(value) for key, value in about.items() if key != "operation"}
    expect(set(fields) == set(hints), f"{name} with {', '.join(hints)}")
    for key, hint in hints.items():
        expect(has_type(fields[key], hint), f"{name}.{key} as {hint}, got {str(fields[key])[:60]}")
    output = fields["output"]
    if kind is TorchOperator:
        held: list[Tensor] = []
        while f"{output}.held{len(held)}" in tensors:
            held.append(tensors.pop(f"{output}.held{len(held)}"))
        return TorchOperator(**fields, held=tuple(held))
    own: dict[str, Any] = {key: tensors.pop(f"{output}.{key}", None) for key in kind.weights}
    optional = {field.name for field in dataclasses.fields(kind) if field.default is None}
    expect(all(x is not None or key in optional for key, x in own.items()), f"the weights of {output[:60]!r}")
    return kind(**fields, **own)


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _describe(operation: Operation) -> dict[str, Any]:
    """An operation without its tensors, for JSON."""
    name = type(operation).__name__
    return {"operation": name, **{field: _to_json(getattr(operation, field)) for field in plain_fields(name)}}


def _to_json(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_json(item) for item in value]
    if isinstance(value, InputRef | WeightRef):
        return {type(value).__name__: value.number}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if str(value) in TORCH_CONSTANTS and not isinstance(value, str):
        return {"torch": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        kinds: dict[str, Any] = {
            "InputRef": InputRef, "WeightRef": WeightRef, "device": _device, "torch": TORCH_CONSTANTS.__getitem__,
            "float": float,
        }  # fmt: skip
        return kinds[kind](inner)
    return value


def _device(name: Any) -> torch.device:
    expect(name == "cpu", "operators on the CPU")  # programs are moved to the CPU before they are saved
    return torch.device("cpu")
