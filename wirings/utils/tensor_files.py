"""Safetensors files with a checksum: nothing in them is executed, and damaged ones are rejected."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.utils.memory import is_out_of_memory
from wirings.utils.text import printable

NO_MEMORY = "cannot be read: there is not enough memory for it"
"""What is said of a file that asks for more memory than there is."""


class OtherFileError(WiringError):
    """The file is intact, but it is another kind of file, or of another version; the message is complete."""


def require_safetensors(what: str) -> None:
    """Raise if the package is missing; ``what`` needs it."""
    if importlib.util.find_spec("safetensors") is None:
        raise WiringError(f"{what} need the package safetensors: pip install safetensors.")


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a file with this header and its checksum."""
    from safetensors.torch import save_file

    save_file(tensors, str(path), {**header, "checksum": checksum(tensors, header)})


def read_tensors(
    path: str | Path, check_header: Callable[[dict[str, str]], None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the header of a file, whose checksum was compared.

    Args:
        path: the file.
        check_header: raises an `OtherFileError` if this is another kind of file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = dict(file.metadata() or {})
            check_header(header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise WiringError(f"damaged, or not a safetensors file ({error})") from error
    if checksum(tensors, header) != header.get("checksum"):
        raise WiringError("expected another checksum: the file is damaged")
    return tensors, header


@contextlib.contextmanager
def file_errors(path: str | Path, remedy: str = "Export the model again.") -> Iterator[None]:
    """Turn any error while a file is read into a `WiringError` that names the file and says what to do."""
    try:
        yield
    except OtherFileError as error:
        raise WiringError(str(error)) from error.__cause__
    except Exception as error:  # a damaged file may cause any error
        if is_out_of_memory(error):
            raise WiringError(f"{path} {NO_MEMORY}: {printable(repr(error)[:200])}.") from error
        text = " ".join(str(error).split())[:300] if isinstance(error, WiringError) else repr(error)[:200]
        raise WiringError(f"{path} cannot be read: {printable(text.rstrip('.'))}. {remedy}") from error


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
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
