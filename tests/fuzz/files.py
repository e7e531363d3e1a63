"""Damaged and crafted files of compact models: each must raise WiringError, or return what the intact file returns.

``python -m tests.fuzz.files --cases 10000`` runs many. Cases run in chunks, each in a process of its own with bounded
memory and time, so that a crash or a hang is found and counted like any other mistake.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

import wirings
from wirings import WiringError, compact, engine, load_compact
from wirings.compaction.file_format import checksum

MEMORY = 3 * 2**30
"""Bytes that loading may take beyond those of a process with PyTorch."""
SECONDS = 20.0
"""The time limit of one case."""
CHUNK = 100


class Mixed(nn.Module):
    """Convolutions, maps with repeated rows, and other PyTorch operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2)
        self.norm, self.group = nn.BatchNorm2d(6), nn.GroupNorm(2, 6)
        self.head = nn.Linear(4, 3)
        self.table = nn.Embedding(5, 4)
        with torch.no_grad():
            self.first.weight[:, :, 0] = 0
            self.second.weight[:, 1:] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(torch.relu(self.norm(self.first(x))))
        x = nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear").roll(1, 2)
        x = nn.functional.max_pool2d(self.second(x), 2)
        y = x.flatten(2).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y).mean(1)
        return self.head(y + self.table(y.argmax(1))).softmax(1)


def sound(folder: Path, kind: str) -> tuple[Path, Tensor, Tensor]:
    """A valid file, an input, and the network's output for it."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 10, 10)
    small = compact(Mixed().eval(), x)
    path = folder / "sound.safetensors"
    made: Any = small if kind == "compact" else engine.compile(small, engine="sparse", threads=2)
    made.save(path)
    with torch.no_grad():
        return path, x, made(x)


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


def bytes_with(tensors: dict[str, Tensor], about: Any) -> bytes:
    """A file with these tensors and this program, and their checksum."""
    header = {"format": "wirings program", "schema": "3", "program": json.dumps(about)}
    return save(tensors, {**header, "checksum": checksum(tensors, header)})


def opened(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the program of a file."""
    with safe_open(str(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["program"])  # noqa: SIM118


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
            if type(about.get("bytes")) is int and not name.endswith(("places", "values", "few")):
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
    return bytes_with(tensors, about)


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
        made: Any = load_compact(path) if kind == "compact" else engine.load(path)
    except WiringError as error:
        named = str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        return "refused" if named else f"MISTAKE: {str(error)[:200]}"
    except BaseException as error:
        return f"MISTAKE: {type(error).__name__}: {str(error)[:200]}"
    try:
        with torch.no_grad():
            found = made(x)
    except Exception as error:  # a crafted network may be useless, as long as it raises
        return "other" if how == "crafted" else f"MISTAKE: it loads, then {error!r}"
    if isinstance(found, Tensor) and torch.equal(found, expected):
        return "same"
    return "other" if how == "crafted" else "MISTAKE: other outputs"


def _work(kind: str, folder: str, seeds: list[int], given: Any, results: Any) -> None:
    torch.set_num_threads(1)
    path, x, expected = given
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for seed in seeds:
        how, raw = case(path, seed)
        place = Path(folder) / f"case{seed}.safetensors"
        place.write_bytes(raw)
        results.put((seed, how, None))  # the case begins
        results.put((seed, how, outcome(kind, how, place, x, expected)))
        place.unlink()


def run(kind: str, seeds: range, show: bool = False) -> tuple[dict[str, int], list[str]]:
    """The number of each outcome, and the bugs."""
    counts: collections.Counter[str] = collections.Counter()
    mistakes: list[str] = []
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        given = sound(Path(folder), kind)
        left = list(seeds)
        while left:
            results = context.Queue()
            chunk, left = left[:CHUNK], left[CHUNK:]
            worker = context.Process(target=_work, args=(kind, folder, chunk, given, results))
            worker.start()
            done, begun = 0, chunk[0]
            while done < len(chunk):
                try:
                    seed, how, what = results.get(timeout=SECONDS)
                except Exception:  # it crashed or timed out; the next process continues after this case
                    worker.kill()
                    mistakes.append(f"{kind} {begun}: crashed or took more than {SECONDS} s")
                    counts["MISTAKE"] += 1
                    left = [s for s in chunk if s > begun] + left
                    break
                if what is None:
                    begun = seed
                    continue
                done += 1
                counts[f"{how}: {what.partition(':')[0]}"] += 1
                if what.startswith("MISTAKE"):
                    mistakes.append(f"{kind} {seed} ({how}): {what}")
            worker.join()
            if show:
                print(kind, dict(counts), *mistakes[-3:], sep="\n  ", flush=True)
    return dict(sorted(counts.items())), mistakes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many of each kind of file")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--kind", choices=("compact", "engine", "both"), default="both")
    given = parser.parse_args()
    failed = 0
    for kind in ("compact", "engine") if given.kind == "both" else (given.kind,):
        counts, mistakes = run(kind, range(given.seed, given.seed + given.cases))
        print(f"wirings {wirings.__version__}, {kind} files, {given.cases} cases: {counts}")
        print(*mistakes[:40], sep="\n")
        failed += len(mistakes)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
