"""Reading files of `torch.save` from strangers: nothing in them is executed, and they take what their size justifies.

PyTorch's ``weights_only=True`` rules out code. It does not compare checksums, unpacks compressed archives of any size,
and lets a few bytes of a pickle ask for any memory or time, so these are checked before.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wirings.utils.text import shortened

MAX_TUPLE = 1000
"""The most values in a tuple, those in tuples within it included. A pickle can name the same tuple again and again, and
a tuple is walked through whenever it becomes the key of a dictionary."""
_COSTLY = {"builtins bytearray", "__builtin__ bytearray", "_codecs encode"}
"""Functions that PyTorch allows, and whose results or time may be out of proportion to their arguments."""
_UNUSED = {"DUP", "POP", "POP_MARK", "MEMOIZE", "STACK_GLOBAL"}
"""Opcodes that PyTorch neither writes nor reads."""
_PICKLES = 5
"""In a file that PyTorch wrote before version 1.6: three of constants, the object, and the names of its storages."""

_FOLDER = 0x10
"""The attribute of folders in zip archives."""

_END, _LONG_END, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
"""The records at the end of a zip archive: the end of the directory, that of a large one, and where the latter is."""


def load_torch_file(path: Path) -> Any:
    """Read a file of `torch.save` on the CPU. Raises exceptions of many types for files that are not."""
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # what PyTorch goes by
        if not zipped:
            file.seek(0)
            for _ in range(_PICKLES):
                _check_pickle(file)
    if zipped:
        _check_archive(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_archive(path: Path) -> None:
    """Raise unless an archive is stored as PyTorch does, uncompressed and in full, and its checksums are right."""
    _check_directory(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("the archive is compressed, which those of PyTorch are not.")
        if any(member.is_dir() or member.external_attr & _FOLDER for member in members):
            raise ValueError("a file in the archive is said to be a folder.")  # PyTorch would leave its tensor unread
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("the files in the archive overlap.")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {shortened(damaged, 100)} in it is wrong.")
        for member in members:
            if member.filename.lower().endswith(".pkl"):
                with archive.open(member) as pickle:
                    _check_pickle(pickle)


def _check_directory(path: Path) -> None:
    """Raise unless the archive ends with its directory, and says that it is there.

    Python reads what precedes the end, whatever the end says of its place. PyTorch goes by the place: it might read
    another directory than the one whose files were checked.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - _LONG_END.size - _LOCATOR.size - _END.size))
        last = file.read()
    signature, _, _, _, _, length, place, comment = _END.unpack(last[-_END.size :].rjust(_END.size, b"\0"))
    end = size - _END.size
    if signature == b"PK\x05\x06" and last[-_END.size - _LOCATOR.size :][:4] == b"PK\x06\x07":
        _, _, where, _ = _LOCATOR.unpack(last[-_END.size - _LOCATOR.size : -_END.size])
        end -= _LOCATOR.size + _LONG_END.size
        signature, length, place = b"", 0, 0
        if where == end >= 0:
            signature, *_, length, place = _LONG_END.unpack(last[: _LONG_END.size])
    if signature not in (b"PK\x05\x06", b"PK\x06\x06") or comment or place + length != end:
        raise ValueError("the archive does not end with its directory.")


class _Value(NamedTuple):
    """What is known about a value while a pickle is followed."""

    size: int = 1
    """How many values a tuple holds, those in tuples within it included."""
    kind: str = ""
    """``function``, ``class`` of tensors, or ``storage`` for the values of a tensor and for tuples that hold them."""


def _check_pickle(file: Any) -> None:
    """Raise if a pickle, which is read up to its end, would take much memory or time. It is followed, not loaded."""
    stack: list[_Value] = []
    marks: list[int] = []  # how many values were there
    memo: dict[Any, _Value] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name, before = opcode.name, opcode.stack_before
        if name in _UNUSED or (name == "GLOBAL" and argument in _COSTLY):
            raise ValueError(f"a file of weights needs no {str(argument or name).replace(' ', '.')}.")
        taken, above = len(before), list[_Value]()
        if pickletools.markobject in before:
            taken, start = before.index(pickletools.markobject), marks.pop()
            above = stack[start:]
            del stack[start:]
        if len(stack) - taken < (marks[-1] if marks else 0):
            raise ValueError(f"{name} takes values that are not there.")
        values = stack[len(stack) - taken :] + above
        del stack[len(stack) - taken :]
        first = values[:1] if "TUPLE" in name else values
        if any(value.kind == "class" for value in first):  # what is called, or a function's argument that it calls
            raise ValueError("a tensor is made of whatever is in memory.")
        if name in ("REDUCE", "NEWOBJ") and values[0].kind != "function":
            raise ValueError("a value is called that is no function.")  # PyTorch would print it in full
        if "PUT" in name:
            memo[argument] = stack[-1]
        elif "GET" in name:
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif "TUPLE" in name:
            kind = "storage" if any(value.kind == "storage" for value in values) else ""
            stack.append(_Value(1 + sum(value.size for value in values), kind))
            if stack[-1].size > MAX_TUPLE:
                raise ValueError(f"a tuple has more than {MAX_TUPLE:,} values.")
        elif name != "REDUCE" and any(value.kind == "storage" for value in values):
            raise ValueError("there is a storage outside of a tensor.")  # as above
        else:
            kind = {"GLOBAL": "function", "BINPERSID": "storage"}.get(name, "")
            if name == "GLOBAL" and str(argument).endswith("Tensor"):
                kind = "class"
            stack += [_Value(kind=kind)] * len(opcode.stack_after)
