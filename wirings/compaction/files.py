"""Programs as files: one safetensors file each, whose header describes the operations in JSON.

Whoever reads a file need not trust it:

- **Damage.** A checksum (SHA-256) covers everything that is read: each tensor's name, type, shape and bytes, and the
  header. It tells a damaged file from a sound one, not who wrote it, so all that follows holds without it, too.
- **Operators.** A file may only name the operators in `wirings.compaction.allowed`.
- **Sizes.** Weights that are mostly zeros are saved as places and values, so that a small file may claim any size. The
  size in memory of all weights is recorded, must be what their shapes come to, and is compared with a limit before
  memory is taken: 64 MiB, or 256 times the file's size if that is more. That leaves room for weights of which one in
  128 is not zero, and a file cannot take much more memory than it takes to hand it over. All maps that one image makes
  may take 4 GiB. ``max_bytes`` replaces both.
- **Fields.** Each is checked by type and range, and all shapes are worked out, before anything is computed: see
  `wirings.compaction.check`.

Every file that is damaged, or that says something wrong, raises one class, `WiringError`.
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

from wirings.compaction.check import check_target, checked, expect, fields_of, fits
from wirings.compaction.operations import KINDS, Held, Opaque, Operation, Taken
from wirings.compaction.program import NAMED, Program, stored
from wirings.errors import WiringError
from wirings.utils.files import whole_file

FORMAT, SCHEMA = "wirings program", "2"
LEAST_BYTES, RATIO = 64 * 2**20, 256
"""What the weights of any file may take in memory, and how many times its size those of a large one may."""
MAP_BYTES = 4 * 2**30
"""What the maps that one image makes may take."""
_TYPES = frozenset(x for x in NAMED.values() if isinstance(x, torch.dtype))


def save(program: Program, path: str | Path) -> None:
    """Write a program to a file.

    Raises:
        WiringError: it has an operator that no file may name.
    """
    _need_safetensors()
    from safetensors.torch import save_file

    for o in program.operations:
        if isinstance(o, Opaque):
            try:
                check_target(o.target)
            except WiringError as error:
                raise WiringError(
                    f"the model cannot be saved as .safetensors: {error}. It can be run as it is, or saved as .pt2."
                ) from None
    tensors: dict[str, Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for name, value in program.tensors():
        parts = stored(value.detach().cpu())
        tensors |= {f"{name}.{part}" if part else name: x for part, x in parts.items()}
        if "places" in parts:
            sparse[name] = list(value.shape)
    about = {
        "inputs": {name: list(shape) for name, shape in program.inputs.items()},
        "operations": [_described(operation) for operation in program.operations],
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
    """Read what `save` wrote. Nothing in the file can execute, and no damaged file is read.

    Args:
        path: the file.
        max_bytes: the most that its weights, and the maps of one image, may take in memory; None: see above.
    """
    if not Path(path).is_file():
        raise WiringError(f"there is no file {path}; expected a .safetensors file that was saved by wirings.")
    _need_safetensors()
    from safetensors import SafetensorError, safe_open

    with readable(path):
        try:
            with safe_open(str(path), framework="pt") as file:
                header = dict(file.metadata() or {})
                _check_header(header, path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (SafetensorError, OSError) as error:
            raise WiringError(f"damaged or no safetensors file ({error})") from error
        expect(checksum(tensors, header) == header.get("checksum"), "another checksum: the file is damaged")
        about = json.loads(header["program"])
        limit = max(LEAST_BYTES, RATIO * Path(path).stat().st_size) if max_bytes is None else max_bytes
        program = _program(about, tensors, limit)
        return checked(program, MAP_BYTES if max_bytes is None else max_bytes)


class _OtherFileError(WiringError):
    """The file is sound, but not one of these; the message says all."""


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into a `WiringError` that names it and says what to do."""
    try:
        yield
    except _OtherFileError as error:
        raise WiringError(str(error)) from error.__cause__
    except Exception as error:  # a damaged file may break anything on the way
        text = " ".join(str(error).split())[:300] if isinstance(error, WiringError) else repr(error)[:200]
        raise WiringError(f"{path} cannot be read: {text.rstrip('.')}. Export the model again.") from error


def checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    """SHA-256 of a file's content: its header but for the checksum, and each tensor's name, type, shape and bytes."""
    made = hashlib.sha256()
    texts: list[Any] = [sorted((key, value) for key, value in header.items() if key != "checksum")]
    for name in sorted(tensors):
        x = tensors[name]
        texts.append([name, str(x.dtype), list(x.shape)])
    text = json.dumps(texts).encode()
    made.update(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        flat: Any = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        made.update(flat)
    return made.hexdigest()


def _need_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise WiringError("files of compact models need the package safetensors: pip install safetensors.")


def _check_header(header: dict[str, str], path: str | Path) -> None:
    if header.get("format") != FORMAT:
        raise _OtherFileError(
            f"{path} holds no compact model: expected a file that a compact model's save() wrote. A checkpoint of "
            "a run is made compact by `wirings compact RUN`."
        )
    if header.get("schema") != SCHEMA:
        raise _OtherFileError(
            f"{path} has schema {header.get('schema', '')[:20]!r}, this version reads {SCHEMA!r}, which has a "
            "checksum. Export the model again."
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
    operations = [_made(one, dense) for one in about["operations"]]
    expect(not dense, f"an operation for the tensor {next(iter(dense), '')[:60]!r}")
    return Program(inputs, operations, tuple(about["outputs"]), about["notes"])


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 2**31 for n in x) and math.prod(x) < 2**48


def _dense(tensors: dict[str, Tensor], sparse: dict[str, list[int]], claimed: Any, limit: float) -> dict[str, Tensor]:
    """All weights as they are in memory; their sizes are looked at first."""
    expect(all(x.dtype in _TYPES for x in tensors.values()), "tensors of types that programs have")
    few = [name.removesuffix(".few") for name in tensors if name.endswith(".few")]
    along = {name: [f"{name}.along{dim}" for dim in range(1, tensors[f"{name}.few"].dim())] for name in few}
    parts = {f"{name}.{part}" for name in sparse for part in ("places", "values")}
    parts |= {f"{name}.few" for name in few} | {part for names in along.values() for part in names}
    expect(parts <= set(tensors), "all the tensors that it names")
    whole = 0
    for name, shape in sparse.items():
        whole += math.prod(shape) * tensors[f"{name}.values"].element_size()
    for name in few:
        x, counts = tensors[f"{name}.few"], [tensors[part].numel() for part in along[name]]
        expect(x.dim() > 0, "maps that repeat themselves")
        whole += math.prod([x.shape[0], *counts]) * x.element_size()
    made = {name: x for name, x in tensors.items() if name not in parts}
    whole += sum(x.numel() * x.element_size() for x in made.values())
    expect(type(claimed) is int and claimed == whole, f"weights of {whole:,} bytes, as they are recorded")
    expect(whole <= limit, f"weights of at most {limit:,} bytes, got {whole:,}; give max_bytes to allow more")
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
    expect(x.dtype == torch.int32 and x.dim() == 1, "places as whole numbers")
    expect(not len(x) or 0 <= int(x.min()) <= int(x.max()) < size, f"places from 0 to {size - 1}")
    return x.long()


def _made(about: Any, tensors: dict[str, Tensor]) -> Operation:
    """An operation with its tensors, which are taken out of ``tensors``."""
    expect(isinstance(about, dict), "operations as mappings")
    name = about.get("operation")
    if not isinstance(name, str) or name not in KINDS:
        raise WiringError(f"unknown operation {str(name)[:60]!r}; a later version of wirings may know it")
    kind, hints = KINDS[name], fields_of(name)
    fields = {key: _back(value) for key, value in about.items() if key != "operation"}
    expect(set(fields) == set(hints), f"{name} with {', '.join(hints)}")
    for key, hint in hints.items():
        expect(fits(fields[key], hint), f"{name}.{key} as {hint}, got {str(fields[key])[:60]}")
    output = fields["output"]
    if kind is Opaque:
        held: list[Tensor] = []
        while f"{output}.held{len(held)}" in tensors:
            held.append(tensors.pop(f"{output}.held{len(held)}"))
        return Opaque(**fields, held=tuple(held))
    own: dict[str, Any] = {key: tensors.pop(f"{output}.{key}", None) for key in kind.weights}
    expect(all(x is not None or key == "bias" for key, x in own.items()), f"the weights of {output[:60]!r}")
    return kind(**fields, **own)


# ---- as JSON --------------------------------------------------------------------------------------------------------


def _described(operation: Operation) -> dict[str, Any]:
    """An operation without its tensors, as JSON can hold it."""
    return {
        "operation": type(operation).__name__,
        **{name: _plain(getattr(operation, name)) for name in fields_of(type(operation).__name__)},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Taken | Held):
        return {type(value).__name__: value.number}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if str(value) in NAMED and not isinstance(value, str):
        return {"named": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_back(item) for item in value)
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        kinds: dict[str, Any] = {
            "Taken": Taken, "Held": Held, "device": _device, "named": NAMED.__getitem__, "float": float,
        }  # fmt: skip
        return kinds[kind](inner)
    return value


def _device(name: Any) -> torch.device:
    expect(name == "cpu", "operators on the CPU")  # a program is saved as it runs there
    return torch.device("cpu")
