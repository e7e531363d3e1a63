"""Files of `torch.save`: those that would take memory or time out of proportion to their size are refused."""

import io
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from wirings.utils.torch_files import MAX_TUPLE, load_torch_file

STATE = {
    "weight": torch.arange(6.0).view(2, 3),
    "bias": torch.zeros(3, dtype=torch.bfloat16),
    "epoch": 3,
    "t": (1, (2,)),
}


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ"
"""The opcodes of a storage, which PyTorch prints value by value if it complains about it."""

REBUILT = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n%sR."
"""A pickle that calls the first argument, as those of tensors with attributes do."""


def archive(state: Any = STATE, content: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """What `torch.save` writes, with another pickle in it, or compressed."""
    written, changed = io.BytesIO(), io.BytesIO()
    torch.save(state, written)
    with zipfile.ZipFile(written) as given, zipfile.ZipFile(changed, "w", compression) as out:
        for name in given.namelist():
            out.writestr(name, given.read(name) if content is None or not name.endswith("data.pkl") else content)
    return changed.getvalue()


def overlapping() -> bytes:
    """An archive in which several names stand for the same bytes."""
    raw = bytearray(archive({f"x{n}": torch.full((1000,), float(n)) for n in range(4)}))
    with zipfile.ZipFile(io.BytesIO(raw)) as given:
        members = [member for member in given.infolist() if "/data/" in member.filename]
        place = given.start_dir
    while (place := raw.find(b"PK\x01\x02", place)) != -1:
        size = int.from_bytes(raw[place + 28 : place + 30], "little")
        if b"/data/" in raw[place + 46 : place + 46 + size]:
            raw[place + 42 : place + 46] = members[0].header_offset.to_bytes(4, "little")
            raw[place + 24 : place + 28] = raw[place + 20 : place + 24] = (20_000).to_bytes(4, "little")
        place += 46
    return bytes(raw)


def with_folder() -> bytes:
    """An archive whose first file has the attribute of a folder: PyTorch would not read it."""
    raw = bytearray(archive())
    raw[raw.index(b"PK\x01\x02") + 38] |= 0x10
    return bytes(raw)


def two_directories(large: bool) -> bytes:
    """An archive with a harmless directory before its end, which says that a directory with another pickle is earlier.

    Args:
        large: whether it ends as those of PyTorch do, which may have more than 4 GiB.
    """
    hidden, shown = archive(content=nested(64, key=True)), archive(content=nested(1, key=True))
    length, place = (int.from_bytes(hidden[start : start + 4], "little") for start in (-10, -6))
    directory = bytearray(shown[-22 - length : -22])
    before, at = len(hidden) - 22 + len(shown) - 22 - length, 0
    while at < len(directory):
        start = int.from_bytes(directory[at + 42 : at + 46], "little") + len(hidden) - 22 - (before - place)
        directory[at + 42 : at + 46] = (start % 2**32).to_bytes(4, "little")
        at += 46 + sum(int.from_bytes(directory[at + n : at + n + 2], "little") for n in (28, 30, 32))
    found = hidden[:-22] + shown[: -22 - length] + bytes(directory)
    if large:
        count = int.from_bytes(hidden[-12:-10], "little")
        record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, place)
        found += record + struct.pack("<4sIQI", b"PK\x06\x07", 0, len(found), 1)
    return found + hidden[-22:]


def nested(levels: int, key: bool) -> bytes:
    """A tuple of two equal tuples of two equal ones, and so on, which is the key of a dictionary, or its value."""
    tuples = b")" + b"q\x00h\x00\x86" * levels
    return b"\x80\x02}" + (tuples + b"K\x01s." if key else b"K\x01" + tuples + b"s.")


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_what_pytorch_saves(zipped: bool, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = load_torch_file(tmp_path / "a.pt")
    assert found.keys() == STATE.keys()
    assert torch.equal(found["weight"], STATE["weight"])  # type: ignore[arg-type]
    assert found["t"] == (1, (2,))


def test_reads_optimizers_and_many_tensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(300)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    found = load_torch_file(tmp_path / "a.pt")
    assert torch.equal(found["model"]["299.bias"], model[299].bias)
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive({"x": torch.zeros(10**7)}, compression=zipfile.ZIP_DEFLATED), "compressed"),
        (overlapping(), "overlap"),
        (with_folder(), "said to be a folder"),
        (archive() + b" ", "does not end with its directory"),
        (two_directories(large=False), "does not end with its directory"),
        (two_directories(large=True), "does not end with its directory"),
        (archive(content=nested(64, key=True)), f"a tuple has more than {MAX_TUPLE:,} values"),
        (archive(content=nested(64, key=False)), f"a tuple has more than {MAX_TUPLE:,} values"),
        (archive(content=b"\x80\x02((" + b"K\x01" * MAX_TUPLE + b"tt."), "a tuple has more"),
        (archive(content=b"\x80\x02cbuiltins\nbytearray\nM\xff\xff\x85R."), "needs no builtins.bytearray"),
        (archive(content=b"\x80\x02c__builtin__\nbytearray\nM\xff\xff\x85R."), "needs no __builtin__.bytearray"),
        (archive(content=b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x04\0\0\0idna\x86R."), "needs no _codecs.encode"),
        (archive(content=b"\x80\x02ctorch\nTensor\nK\x0a\x85R."), "in memory"),
        (archive(content=b"\x80\x02ctorch\nFloatTensor\nK\x0a\x85\x81."), "in memory"),
        (archive(content=REBUILT % b"(ctorch\nTensor\nctorch\nTensor\nK\x0a\x85}t"), "in memory"),
        (archive(content=REBUILT % b"](ctorch\nTensor\nctorch\nTensor\nK\x0a\x85}e"), "in memory"),
        (archive(content=b"\x80\x02K\x012\x86."), "needs no DUP"),
        (archive(content=b"\x80\x02)(\x85."), "values that are not there"),
        (archive(content=b"\x80\x02h\x07."), "7"),
        (archive(content=b"\x80\x02" + STORAGE + b")R."), "no function"),
        (archive(content=b"\x80\x02" + STORAGE + b")\x81."), "no function"),
        (archive(content=b"\x80\x02" + STORAGE + b"\x85\x85Q."), "a storage outside of a tensor"),
        (archive(content=b"\x80\x02](" + STORAGE + b"e\x85Q."), "a storage outside of a tensor"),
        (archive(content=b"\x80\x02}t."), "pop from empty list"),
        (pickle.dumps(1, protocol=2) * 3 + nested(64, key=True), f"a tuple has more than {MAX_TUPLE:,} values"),
        (b"PK\x03\x04 and something else", "does not end with its directory"),
        (b"", "exhausted"),
    ],
)
def test_refuses(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    begun = time.perf_counter()
    with pytest.raises(Exception, match=message) as caught:
        load_torch_file(path)
    assert not isinstance(caught.value, MemoryError)
    assert time.perf_counter() - begun < 5


def test_reads_tensors_with_attributes(tmp_path: Path) -> None:
    """Their pickles name the class of tensors, but do not call it."""
    x = torch.arange(3.0)
    x.note = "mine"  # type: ignore[attr-defined]
    torch.save({"x": x}, tmp_path / "a.pt")
    found = load_torch_file(tmp_path / "a.pt")["x"]
    assert torch.equal(found, x)
    assert found.note == "mine"


def test_names_of_pickles_in_capitals_are_checked(tmp_path: Path) -> None:
    """PyTorch finds them, too."""
    content = archive(content=nested(64, key=True)).replace(b"data.pkl", b"DATA.PKL")
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match="a tuple has more"):
        load_torch_file(tmp_path / "a.pt")


def test_checksums_are_compared(tmp_path: Path) -> None:
    content = bytearray(archive({"x": torch.zeros(1000)}))
    content[len(content) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        load_torch_file(tmp_path / "a.pt")
