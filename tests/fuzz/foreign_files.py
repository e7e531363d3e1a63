"""Damaged and crafted files of other programs: CIFAR-10, CIFAR-100, the authors' checkpoints, Hugging Face folders.

Each must raise a `WiringError` that names the file or its folder, or be read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import wirings
from tests.fuzz.readers import MEMORY, Kind, craft_image, craft_json, flipped, of_folder, prepared, spliced, tried
from tests.fuzz.runner import Fuzzer
from wirings.models import authors
from wirings.models.tiny import NODES
from wirings.train.data import cifar10, cifar100
from wirings.train.data.cifar10_layouts import BATCHES, LABELS
from wirings.train.data.cifar_files import RECORD
from wirings.wire.pretrained import _with_final_weights

# ---- CIFAR-10 -------------------------------------------------------------------------------------------------------


def batches() -> list[np.ndarray]:
    """Six files of two records each."""
    found = np.random.default_rng(0).integers(0, 256, (len(BATCHES), 2, RECORD), dtype=np.uint8)
    found[..., 0] %= 10
    return list(found)


SUMS = [hashlib.md5(batch.tobytes()).hexdigest() for batch in batches()]


def read_cifar(folder: Path) -> None:
    """Read the records, as the data set does, into a cache that holds none."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        cifar10._prepared(folder, Path(cache), lambda _: None, SUMS)


def write_python(folder: Path) -> None:
    for name, batch in zip(BATCHES, batches(), strict=True):
        content = {b"labels": batch[:, 0].tolist(), b"data": np.ascontiguousarray(batch[:, 1:]), b"filenames": [b"a"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def write_png(folder: Path) -> None:
    from PIL import Image

    found = batches()
    for name, batch in zip(BATCHES, found, strict=True):
        Image.fromarray(batch[:, 1:].reshape(2, 3, 1024).transpose(0, 2, 1).copy()).save(folder / f"{name}.png")
    labels = [int(label) for batch in found for label in batch[:, 0]]
    for name, part in zip(LABELS, (labels[:-2], labels[-2:]), strict=True):
        (folder / name).write_text(json.dumps(part))


def write_archive(folder: Path) -> None:
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, batch in zip(BATCHES, batches(), strict=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = batch.nbytes
            tar.addfile(member, BytesIO(batch.tobytes()))


def write_prepared(folder: Path) -> None:
    np.save(folder / cifar10.PREPARED, np.concatenate(batches()))


def craft_pickle(raw: bytes, draw: random.Random) -> bytes:
    """Pickles of other values, that call functions, that repeat themselves, or with any opcode."""
    values = (7, None, [], {}, {b"labels": 3, b"data": b"x"}, {b"labels": [3] * 2, b"data": np.zeros((2, RECORD - 1))})
    opcodes = bytes(draw.choices(b"().0125BFIJKLMNPQRSTUVXabcdeghijlopqrstu}\x80\x81\x85\x86\x87\x8a\x8b\x94", k=20))
    match draw.randrange(6):
        case 0:
            return pickle.dumps(draw.choice(values))
        case 1:
            return b"\x80\x02cos\nsystem\nU\x04exit\x85R."
        case 2:  # an entry of the memo that would need the memory of all those before it
            return b"\x80\x02}r" + draw.choice((2**31 - 1, 2**30, 10**6)).to_bytes(4, "little") + b"."
        case 3:  # a key that takes exponential time to hash
            return b"\x80\x02})" + draw.choice((b"2\x86", b"q\x00h\x00\x86")) * draw.choice((5, 64)) + b"K\x01s."
        case 4:
            return b"\x80\x02" + opcodes + b"."
        case _:
            place = draw.randrange(len(raw))
            return raw[:place] + opcodes[:3] + raw[place:]


def craft_archive(raw: bytes, draw: random.Random) -> bytes:
    """Damage the tar file in a valid gzip file."""
    content = bytearray(gzip.decompress(raw))
    draw.choice((flipped, spliced))(content, draw)
    return gzip.compress(bytes(content), 1)


def craft_array(raw: bytes, draw: random.Random) -> bytes:
    """A header with another shape or dtype."""
    shapes = ("(10000000000, 3073)", "(12, 3073, 1)", "(-1, 3073)", "()", "(2**70,)", "(" * 200, "(1e9, 3073)")
    dtypes = ("|u1", "|O", "<f8", "<M8[s]", "|V3073", "x", "|S" + "9" * 18)
    text = f"{{'descr': {draw.choice(dtypes)!r}, 'fortran_order': False, 'shape': {draw.choice(shapes)}, }}"
    header = (text.ljust(118) + "\n").encode()
    return raw[:8] + len(header).to_bytes(2, "little") + header + raw[128:]


# ---- CIFAR-100 ------------------------------------------------------------------------------------------------------


def hundred() -> np.ndarray:
    """A training and a test image of every class."""
    found = np.random.default_rng(0).integers(0, 256, (200, RECORD), dtype=np.uint8)
    found[:, 0] = np.tile(np.arange(100), 2)
    return found


def read_hundred(folder: Path) -> np.ndarray:
    """Read the records, as the data set does, beside a cache that holds none."""
    return cifar100._read(folder, folder.parent / "none", lambda _: None, (1, 1))


def write_hundred_python(folder: Path) -> None:
    for name, part in zip(cifar100.PARTS, np.split(hundred(), 2), strict=True):
        content = {b"fine_labels": part[:, 0].tolist(), b"data": part[:, 1:].copy(), b"coarse_labels": [0]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def craft_hundred_pickle(raw: bytes, draw: random.Random) -> bytes:
    """Pickles as of CIFAR-10, or with odd labels and arrays."""
    if draw.random() < 0.5:
        return craft_pickle(raw, draw)
    labels = [draw.choice((0, 99, 100, -1, "a", None, [], 2**70, True, 0.5)) for _ in range(draw.choice((99, 100)))]
    shape = draw.choice(((100, RECORD - 1), (100,), (), (0, RECORD - 1), (100, 3, 1024)))
    return pickle.dumps({b"fine_labels": labels, b"data": np.zeros(shape, np.uint8)}, protocol=2)


def write_hundred(folder: Path) -> None:
    cifar100.save(folder / cifar100.PREPARED, hundred())


def craft_hundred(raw: bytes, draw: random.Random) -> bytes:
    """Another header, or a file of another kind, with a valid checksum."""
    content, file = raw[:-32], BytesIO()
    np.savez(file, records=np.zeros(3, np.uint8))
    others = (craft_array(content, draw), craft_array(content, draw), file.getvalue(), b"", content[:-1])
    return cifar100.with_md5(draw.choice(others))


# ---- checkpoints of the authors -------------------------------------------------------------------------------------


def write_authors(folder: Path) -> None:
    torch.manual_seed(0)
    state: dict[str, Any] = {"graph.weight": torch.zeros(NODES, NODES, 1, 1), "conv.weight": torch.ones(NODES, 1, 3, 3)}
    state |= {"norm.weight": torch.ones(NODES), "norm.bias": torch.zeros(NODES)}
    for number, shape in {0: (16, 3, 3, 3), 3: (16, 1, 3, 3), 4: (32, 16, 1, 1)}.items():
        state |= {f"downsample.{number}.weight": torch.randn(shape), f"downsample.{number}.bias": torch.zeros(shape[0])}
    for number, size in {1: 16, 5: 32}.items():
        names = ("weight", "bias", "running_mean", "running_var")
        state |= {f"downsample.{number}.{name}": torch.ones(size) for name in names}
    state |= {"fc.weight": torch.zeros(10, 100), "fc.bias": torch.zeros(10)}
    torch.save({"state_dict": state}, folder / "tiny.pt")


def read_authors(folder: Path) -> dict[str, torch.Tensor]:
    return authors.load(folder / "tiny.pt").model.state_dict()


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def craft_torch(raw: bytes, draw: random.Random) -> bytes:
    """An archive with a damaged or crafted pickle, which may be compressed."""
    file = BytesIO()
    pack = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(BytesIO(raw)) as given, zipfile.ZipFile(file, "w", pack) as out:
        for name in given.namelist():
            content = bytearray(given.read(name))
            if name.endswith("data.pkl"):
                if draw.random() < 0.3:
                    content = bytearray(craft_pickle(bytes(content), draw))
                else:
                    draw.choice((flipped, spliced))(content, draw)
            out.writestr(name, bytes(content))
    return file.getvalue()


def craft_authors(raw: bytes, draw: random.Random) -> bytes:
    """Other tensors under the same names, dictionaries that contain themselves, odd values, and other pickles."""
    if draw.random() < 0.5:
        return craft_torch(raw, draw)
    state = torch.load(BytesIO(raw), weights_only=True)["state_dict"]
    name = draw.choice(sorted(state))
    x, loop = state[name], dict[str, Any]()
    loop["state_dict"] = loop
    huge = torch.zeros(1).expand(10**12)
    odd = (x.flatten(), x[:0], x.double(), x.to_sparse(), huge, x.to("meta"), x.bool(), x * float("nan"), None, 3, "x")
    state[name] = draw.choice(odd)
    if draw.random() < 0.2:
        state[draw.choice(("x", 3, "downsample.x.weight", "downsample.", "downsample.9.weight"))] = state.pop(name)
    file = BytesIO()
    torch.save(draw.choice((state, {"state_dict": state}, loop, [state], {"net": {"net": state}})), file)
    return file.getvalue()


# ---- folders that transformers writes -------------------------------------------------------------------------------


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def write_pretrained(folder: Path) -> None:
    """What ``save_pretrained`` of a wired model writes, in two files with an index."""
    torch.manual_seed(0)
    model = plain()
    wiring = wirings.wire_(model, "rigl", density=0.5, structure="4x2")
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "wirings": [wiring.describe()]}))
    state = {name: x.clone() for name, x in _with_final_weights(model, model.state_dict()).items()}
    names = {name: "a.safetensors" if "all_edges" in name else "b.safetensors" for name in state}
    for file in set(names.values()):
        save_file({name: x for name, x in state.items() if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def write_pretrained_bin(folder: Path) -> None:
    """The same in PyTorch's own format, as earlier versions of transformers wrote it."""
    write_pretrained(folder)
    state = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    torch.save(state, folder / "pytorch_model.bin")


def read_pretrained(folder: Path) -> dict[str, torch.Tensor]:
    model = plain()
    wirings.rewire_(model, folder)
    return model.state_dict()


def cifar(path: str, write: Callable[[Path], object], craft: Any) -> Kind:
    return of_folder(path, write, read_cifar, craft)


KINDS = {
    "cifar": cifar("data_batch_2", write_python, craft_pickle),
    "cifar.png": cifar("data_batch_2.png", write_png, craft_image),
    "cifar labels": cifar(LABELS[0], write_png, craft_json),
    "cifar.tar.gz": cifar("cifar-10-binary.tar.gz", write_archive, craft_archive),
    "cifar.npy": cifar(cifar10.PREPARED, write_prepared, craft_array),
    "cifar100": of_folder("test", write_hundred_python, read_hundred, craft_hundred_pickle),
    "cifar100.npy": Kind(cifar100.PREPARED, write_hundred, read_hundred, craft_hundred, holds=np.array_equal),
    "authors": Kind("tiny.pt", write_authors, read_authors, craft_authors, holds=same_state),
    "pretrained": of_folder("config.json", write_pretrained, read_pretrained, craft_json),
    "pretrained index": of_folder("model.safetensors.index.json", write_pretrained, read_pretrained, craft_json),
    "pretrained bin": Kind(
        "pytorch_model.bin", write_pretrained_bin, read_pretrained, craft_torch, folder=True, holds=same_state
    ),
    "pretrained weights": of_folder("a.safetensors", write_pretrained, read_pretrained, lambda raw, draw: raw[::-1]),
}
FUZZERS = {
    name: Fuzzer(partial(prepared, kind), partial(tried, kind), MEMORY, short=60) for name, kind in KINDS.items()
}
