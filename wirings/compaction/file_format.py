"""The file format of programs: one safetensors file, whose header describes the operations in JSON.

Files need not be trusted:

- **Damage.** A checksum (SHA-256) covers everything that is read: the name, type, shape and bytes of each tensor, and
  the header. It detects damage, not who wrote the file, so everything below holds without it, too.
- **Operators.** A file may only contain the operators in `wirings.compaction.allowed_operators`.
- **Sizes.** Weights that are mostly zero are stored as places and values, so that a small file may claim any size. The
  size of all weights in memory is recorded, must match their shapes, and is compared with a limit before memory is
  taken: 64 MiB, or 256 times the size of the file if that is more. This leaves room for weights of which one in 128 is
  not zero, while a file cannot take much more memory than it takes to transfer it. The maps of one image may take
  4 GiB. ``max_bytes`` replaces both limits.
- **Fields.** Types and ranges of all fields are checked, and all shapes are inferred, before anything is computed: see
  `wirings.compaction.check_program`.

Every file that is damaged or invalid raises `WiringError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.check_program import check_program, has_type, plain_fields
from wirings.compaction.operation import Operation, expect
from wirings.compaction.operations import OPERATIONS, InputRef, TorchOperator, WeightRef
from wirings.compaction.operations.torch_operator import check_allowed_operator
from wirings.compaction.program import TORCH_CONSTANTS, Program
from wirings.compaction.tensor_storage import stored_parts
from wirings.errors import WiringError
from wirings.utils.files import whole_file

FORMAT, SCHEMA = "wirings program", "3"
MIN_WEIGHT_BYTES, MAX_RATIO = 64 * 2**20, 256
"""What the weights of any file may take in memory, and those of a large file as a multiple of its size."""
MAP_BYTES = 4 * 2**30
"""What the maps of one image may take in memory."""
_DTYPES = frozenset(x for x in TORCH_CONSTANTS.values() if isinstance(x, torch.dtype))


def save(program: Program, path: str | Path) -> None:
    """Write a program to a file.

    Raises:
        WiringError: if it contains an operator that is not allowed in a file.
    """
    _require_safetensors()
    from safetensors.torch import save_file

    for o in program.operations:
        if isinstance(o, TorchOperator):
            try:
                check_allowed_operator(o.target)
            except WiringError as error:
                raise WiringError(
                    f"the model cannot be saved as .safetensors: {error}. Use it in memory, or save it as .pt2."
                ) from None
    tensors: dict[str, Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for name, value in program.tensors():
        parts = stored_parts(value.detach().cpu())
        tensors |= {f"{name}.{part}" if part else name: x for part, x in parts.items()}
        if "places" in parts:
            sparse[name] = list(value.shape)
    about = {
        "inputs": {name: list(shape) for name, shape in program.inputs.items()},
        "operations": [_describe(operation) for operation in program.operations],
        "outputs": list(program.outputs),
        "sparse": sparse,
        "bytes": sum(x.numel() * x.element_size() for _, x in program.tensors()),
        "notes": program.notes,
    }
    header = {"format": FORMAT, "schema": SCHEMA, "program": json.dumps(about)}
    header["checksum"] = checksum(tensors, header)
    with whole_file(Path(path)) as part:
        save_file(tensors, str(part), header)


def load(path: str | Path, max_bytes: float | None = None) -> Program:
    """Read a program that `save` wrote. Nothing in the file is executed, and damaged files are rejected.

    Args:
        path: the file.
        max_bytes: the most memory that the weights, and the maps of one image, may take; by default as above.
    """
    if not Path(path).is_file():
        raise WiringError(f"expected a .safetensors file that wirings saved, but {path} does not exist.")
    _require_safetensors()
    from safetensors import SafetensorError, safe_open

    with file_errors(path):
        try:
            with safe_open(str(path), framework="pt") as file:
                header = dict(file.metadata() or {})
                _check_header(header, path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise WiringError(f"damaged, or not a safetensors file ({error})") from error
        expect(checksum(tensors, header) == header.get("checksum"), "another checksum: the file is damaged")
        about = json.loads(header["program"])
        limit = max(MIN_WEIGHT_BYTES, MAX_RATIO * Path(path).stat().st_size) if max_bytes is None else max_bytes
        program = _program(about, tensors, limit)
        check_program(program, MAP_BYTES if max_bytes is None else max_bytes)
        return program


class _OtherFileError(WiringError):
    """The file is intact, but is not a program of this version; the message is complete."""


@contextlib.contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Turn any error while a file is read into a `WiringError` that names the file and says what to do."""
    try:
        yield
    except _OtherFileError as error:
        raise WiringError(str(error)) from error.__cause__
    except Exception as error:  # a damaged file may cause any error
        text = " ".join(str(error).split())[:300] if isinstance(error, WiringError) else repr(error)[:200]
        raise WiringError(f"{path} cannot be read: {text.rstrip('.')}. Export the model again.") from error


def checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    """SHA-256 of a file's content: its header without the checksum, and each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256()
    texts: list[Any] = [sorted((key, value) for key, value in header.items() if key != "checksum")]
    for name in sorted(tensors):
        x = tensors[name]
        texts.append([name, str(x.dtype), list(x.shape)])
    text = json.dumps(texts).encode()
    digest.update(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        flat: Any = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(flat)
    return digest.hexdigest()


def _require_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise WiringError("files of compact models need the package safetensors: pip install safetensors.")


def _check_header(header: dict[str, str], path: str | Path) -> None:
    if header.get("format") != FORMAT:
        raise _OtherFileError(
            f"expected a file that a compact model's save() wrote, but {path} does not contain a compact model. To "
            "compact a checkpoint of a run, use `wirings compact RUN`."
        )
    if header.get("schema") != SCHEMA:
        raise _OtherFileError(
            f"{path} has schema {header.get('schema', '')[:20]!r}, but this version reads {SCHEMA!r}. Export the model "
            "again."
        )


# ---- reading --------------------------------------------------------------------------------------------------------


def _program(about: Any, tensors: dict[str, Tensor], limit: float) -> Program:
    keys = {"inputs", "operations", "outputs", "sparse", "bytes", "notes"}
    expect(isinstance(about, dict) and set(about) == keys, f"a program with {', '.join(sorted(keys))}")
    expect(all(isinstance(about[key], dict) for key in ("inputs", "sparse", "notes")), "mappings by name")
    expect(all(isinstance(about[key], list) for key in ("operations", "outputs")), "lists of operations and outputs")
    expect(all(_is_shape(x) for x in (*about["inputs"].values(), *about["sparse"].values())), "sizes of 0 or more")
    expect(all(isinstance(name, str) for name in about["outputs"]), "names of outputs")
    expect(len(about["inputs"]) > 0, "an input")
    dense = _dense(tensors, about["sparse"], about["bytes"], limit)
    inputs = {name: tuple(shape) for name, shape in about["inputs"].items()}
    operations = [_operation(one, dense) for one in about["operations"]]
    expect(not dense, f"an operation for the tensor {next(iter(dense), '')[:60]!r}")
    return Program(inputs, operations, tuple(about["outputs"]), about["notes"])


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 2**31 for n in x) and math.prod(x) < 2**48


def _dense(tensors: dict[str, Tensor], sparse: dict[str, list[int]], claimed: Any, limit: float) -> dict[str, Tensor]:
    """All weights as they are in memory. Their sizes are checked first."""
    expect(all(x.dtype in _DTYPES for x in tensors.values()), "tensors of supported types")
    few = [name.removesuffix(".few") for name in tensors if name.endswith(".few")]
    along = {name: [f"{name}.along{dim}" for dim in range(1, tensors[f"{name}.few"].dim())] for name in few}
    parts = {f"{name}.{part}" for name in sparse for part in ("places", "values")}
    parts |= {f"{name}.few" for name in few} | {part for names in along.values() for part in names}
    expect(parts <= set(tensors), "all the tensors that it names")
    total = 0
    for name, shape in sparse.items():
        total += math.prod(shape) * tensors[f"{name}.values"].element_size()
    for name in few:
        x, counts = tensors[f"{name}.few"], [tensors[part].numel() for part in along[name]]
        expect(x.dim() > 0, "maps with repeated rows or columns")
        total += math.prod([x.shape[0], *counts]) * x.element_size()
    made = {name: x for name, x in tensors.items() if name not in parts}
    total += sum(x.numel() * x.element_size() for x in made.values())
    expect(type(claimed) is int and claimed == total, f"weights of {total:,} bytes, as recorded")
    expect(total <= limit, f"weights of at most {limit:,} bytes, got {total:,}; pass max_bytes to allow more")
    for name, shape in sparse.items():
        places, values = _indices(tensors[f"{name}.places"], math.prod(shape)), tensors[f"{name}.values"]
        expect(values.shape == places.shape and bool((places[1:] > places[:-1]).all()), "a value for each place")
        expect(name not in made, f"one tensor {name[:60]!r}")
        made[name] = values.new_zeros(math.prod(shape)).index_copy(0, places, values).view(shape)
    for name in few:
        value = tensors[f"{name}.few"]
        expect(name not in made, f"one tensor {name[:60]!r}")
        for dim, part in enumerate(along[name], 1):
            value = value.index_select(dim, _indices(tensors[part], value.shape[dim]))
        made[name] = value
    return made


def _indices(x: Tensor, size: int) -> Tensor:
    expect(x.dtype == torch.int32 and x.dim() == 1, "places as integers")
    expect(not len(x) or 0 <= int(x.min()) <= int(x.max()) < size, f"places from 0 to {size - 1}")
    return x.long()


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
    expect(all(x is not None or key == "bias" for key, x in own.items()), f"the weights of {output[:60]!r}")
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
