"""Damaged and crafted files of models: each must raise WiringError, or return what the intact file returns."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, compact, engine, load_compact, load_sparse, save_sparse
from wirings.utils.memory import is_out_of_memory
from wirings.utils.tensor_files import NO_MEMORY, checksum, read_tensors

MOST = 2**30
"""Bytes that a file may ask for, which is less than a case may take."""


class Mixed(nn.Module):
    """Convolutions, maps with repeated rows, and other PyTorch operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2)
        self.norm, self.group = nn.BatchNorm2d(6), nn.GroupNorm(2, 6)
        self.head = nn.Linear(4, 3)
        self.table = nn.Embedding(5, 4)
        self.wide = nn.Linear(400, 3)
        with torch.no_grad():
            self.first.weight[:, :, 0] = 0
            self.second.weight[:, 1:] = 0
            self.wide.weight *= torch.rand(3, 400) < 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(torch.relu(self.norm(self.first(x))))
        x = nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear").roll(1, 2)
        x = nn.functional.max_pool2d(self.second(x), 2)
        y = x.flatten(2).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y).mean(1)
        return (self.head(y + self.table(y.argmax(1))) + self.wide(y.repeat(1, 100))).softmax(1)


ROUNDED = {"compact": None, "int8": "int8", "bfloat16": "bfloat16", "sparse": "int8", "sparse bfloat16": "bfloat16"}
"""The kinds of files but those of engines, and how their weights are rounded."""


def sound(folder: Path, kind: str) -> tuple[Path, Tensor, Tensor]:
    """A valid file, an input, and the network's output for it."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 10, 10)
    model = Mixed().eval()
    path = folder / "sound.safetensors"
    if kind.startswith("sparse"):
        save_sparse(model, path, ROUNDED[kind])
    elif kind == "engine":
        engine.compile(compact(model, x), engine="sparse", threads=2).save(path)
    else:
        compact(model, x).save(path, ROUNDED[kind])
    with torch.no_grad():
        return path, x, loaded(kind, path)(x)


def loaded(kind: str, path: Path) -> Any:
    """The network in a file."""
    if kind.startswith("sparse"):
        return load_sparse(Mixed().eval(), path)
    return engine.load(path, max_bytes=MOST) if kind == "engine" else load_compact(path, max_bytes=MOST)


# ---- how files are changed ------------------------------------------------------------------------------------------


def flipped(raw: bytearray, draw: random.Random) -> None:
    """Flip a few bits, anywhere or in the header."""
    end = len(raw) if draw.random() < 0.5 else 8 + int.from_bytes(raw[:8], "little")
    for _ in range(draw.choice((1, 1, 2, 8))):
        raw[draw.randrange(end)] ^= 1 << draw.randrange(8)


def truncated(raw: bytearray, draw: random.Random) -> None:
    """Truncate the file."""
    del raw[draw.randrange(len(raw)) :]


def spliced(raw: bytearray, draw: random.Random) -> None:
    """Copy, move or remove a piece of the file."""
    start, length = draw.randrange(len(raw)), draw.choice((1, 4, 64, 1024))
    piece = raw[start : start + length]
    place = draw.randrange(len(raw))
    match draw.randrange(3):
        case 0:
            raw[place : place + len(piece)] = piece
        case 1:
            raw[place:place] = piece
        case _:
            del raw[start : start + length]


def bytes_with(tensors: dict[str, Tensor], about: Any, schema: str = "4") -> bytes:
    """A file with these tensors and this program, and their checksum."""
    header = {"format": "wirings program", "schema": schema, "program": json.dumps(about)}
    return save(tensors, {**header, "checksum": checksum(tensors, header)})


def opened(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the program, or state, of a file."""
    tensors, header = read_tensors(path, lambda header: None)
    return tensors, json.loads(header.get("program") or header["state"])


def bytes_like(path: Path, tensors: dict[str, Tensor], about: Any) -> bytes:
    """A file of the same kind as another, with these tensors and this program or state, and their checksum."""
    _, header = read_tensors(path, lambda header: None)
    header = {**header, "program" if "program" in header else "state": json.dumps(about)}
    return save(tensors, {**header, "checksum": checksum(tensors, header)})


ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 7, 63, 10**5, 10**9, -(10**9), 2**31, 2**63, 10**30, 0.5, -1e308, "", "x", "relu", []),
    *(
        [1],
        [0, 0],
        [-1, -1],
        [10**9, 10**9],
        [[1]],
        {},
        {"InputRef": 0},
        {"InputRef": -1},
        {"WeightRef": 9},
        {"float": "nan"},
    ),
    *({"torch": "torch.float16"}, {"device": "cuda"}, {"device": "meta"}, {"float": "9" * 5000}, "aten::as_strided"),
    *("aten::reshape", "aten::slice.Tensor", "aten::embedding", "aten::_sparse_coo_tensor_unsafe", "pow", "mul"),
)


def _places(x: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        found += _places(value, (*path, key))
    return found


def crafted(path: Path, draw: random.Random) -> bytes:
    """A file with a valid checksum, but an invalid program or invalid tensors."""
    tensors, about = opened(path)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if draw.random() < 0.25:
            name = draw.choice(sorted(tensors))
            made = _other(tensors[name], draw)
            if type(about.get("bytes")) is int and not name.endswith(("places", "values", "scales", "few")):
                about["bytes"] += made.nbytes - tensors[name].nbytes  # keep the recorded size consistent
            tensors[name] = made
            continue
        places = _places(about)
        if not places:
            break
        *outer, last = draw.choice(places)
        inner = about
        for key in outer:
            inner = inner[key]
        match draw.randrange(4):
            case 0:
                *other, key = draw.choice(places)
                value = about
                for step in (*other, key):
                    value = value[step]
                inner[last] = json.loads(json.dumps(value))
            case 1 if isinstance(inner, dict):
                del inner[last]
            case 1:
                inner.pop(last)
            case _:
                inner[last] = draw.choice(ODD)
    return bytes_like(path, tensors, about)


def _other(x: Tensor, draw: random.Random) -> Tensor:
    """A tensor of another size or type, or with other values."""
    match draw.randrange(4):
        case 0:
            return x.flatten()[: draw.randrange(x.numel() + 1)].clone()
        case 1:
            return x.to(draw.choice((torch.float64, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)))
        case 2:
            return torch.full_like(x, draw.choice((-1, 0, 1, 100)))
        case _:
            return torch.cat([x.flatten()] * 2)


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flipped, truncated, spliced)


def case(path: Path, seed: int) -> tuple[str, bytes]:
    """The file of a seed, and whether it is damaged or crafted."""
    draw = random.Random(seed)
    if seed % 2:
        return "crafted", crafted(path, draw)
    raw = bytearray(path.read_bytes())
    draw.choice(DAMAGES)(raw, draw)
    return "damaged", bytes(raw)


# ---- what happens then ----------------------------------------------------------------------------------------------


def outcome(kind: str, how: str, path: Path, x: Tensor, expected: Tensor) -> str:
    """The outcome of loading a file: "refused", "same", or "other" outputs of a crafted one; anything else is a bug."""
    try:
        made = loaded(kind, path)
    except WiringError as error:
        if NO_MEMORY in str(error):
            return f"MISTAKE: {str(error)[:200]}"
        named = str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        return "refused" if named else f"MISTAKE: {str(error)[:200]}"
    except BaseException as error:
        return f"MISTAKE: {type(error).__name__}: {str(error)[:200]}"
    try:
        with torch.no_grad():
            found = made(x)
    except Exception as error:  # a crafted network may be useless, as long as it raises
        if is_out_of_memory(error):
            return f"MISTAKE: it loads, then {error!r}"
        return "other" if how == "crafted" else f"MISTAKE: it loads, then {error!r}"
    if isinstance(found, Tensor) and torch.equal(found, expected):
        return "same"
    return "other" if how == "crafted" else "MISTAKE: other outputs"


def tried(kind: str) -> Callable[[Any, Path, int], str]:
    def case_of(given: tuple[Path, Tensor, Tensor], folder: Path, seed: int) -> str:
        path, x, expected = given
        how, raw = case(path, seed)
        place = folder / f"case{seed}.safetensors"
        place.write_bytes(raw)
        found = outcome(kind, how, place, x, expected)
        place.unlink()
        return found if found.startswith(MISTAKE) else f"{how}: {found}"

    return case_of


FUZZERS = {
    kind: Fuzzer(functools.partial(sound, kind=kind), tried(kind), short=short)
    for kind, short in dict.fromkeys((*ROUNDED, "engine"), 60).items()
}
