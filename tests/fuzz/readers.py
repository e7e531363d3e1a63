"""Damaged and crafted files that are read: histories, text, shards, images, settings, recipes and results.

Each must raise a `WiringError` that names the file, or be read. A damaged history that is read must be a prefix of the
intact one.
"""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import random
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

import wirings
from tests.fuzz.files import ODD, crafted, spliced, truncated
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError
from wirings.draw.html import page
from wirings.history import History, Recorder, file_format
from wirings.train import data, recipes, results
from wirings.train.data.base import get
from wirings.train.sweep.plan import read_sweep_file
from wirings.train.tables.leaderboard import step_costs
from wirings.wire.sparse_state import is_sparse_file

MEMORY = 3 * 2**29
"""Bytes that reading may take beyond those of a process with PyTorch."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        path: where the file is in a folder of its own.
        write: writes a valid file, and others beside it, into a folder.
        read: reads the folder completely, as users do.
        craft: makes an invalid file in which all checksums and containers are valid.
        folder: whether an error may name the folder instead of the file, since the folder is what is read.
        holds: whether what was read from a damaged file may follow from what the intact one holds. None if the format
            has no checksum.
    """

    path: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    craft: Callable[[bytes, random.Random], bytes]
    folder: bool = False
    holds: Callable[[Any, Any], bool] | None = None


def flipped(raw: bytearray, draw: random.Random) -> None:
    """Flip a few bits."""
    for _ in range(draw.choice((1, 1, 2, 8))):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)


def inserted(raw: bytearray, draw: random.Random) -> None:
    """Insert bytes that mean something in some format."""
    odd = (
        b"\0",
        b"\xff" * 9,
        b"[" * 2000,
        b"9" * 5000,
        b"&a [*a]",
        b"!!python/object:os.system ",
        b"\n",
        b"NaN",
        b"-1",
    )
    place = draw.randrange(len(raw))
    raw[place:place] = draw.choice(odd)


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flipped, truncated, spliced, inserted)


def changed(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value in which some entries are others, or missing."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 2, 4))):
        inner = value
        while True:
            if not isinstance(inner, dict | list) or not inner:
                break
            key = draw.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
            if draw.random() < 0.35 or not isinstance(inner[key], dict | list):
                if draw.random() < 0.15:
                    del inner[key]
                else:
                    inner[key] = json.loads(json.dumps(draw.choice(ODD)))
                break
            inner = inner[key]
    return value


# ---- histories ------------------------------------------------------------------------------------------------------


def write_history(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    wiring = wirings.wire_(model, "dnw", density=0.3)
    recorder = Recorder(wiring, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 1, 4, 4)).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
        recorder.record(loss=1.0)
    recorder.save(folder / "history.wirings")


def read_history(folder: Path) -> list[Any]:
    """The head of a history, then its records and notes in their order."""
    history = History.load(folder / "history.wirings")
    records = []
    for state in history.states():
        state.degrees(), state.alive, state.counts()
        records.append((state.step, state.indices.tolist(), state.weights.tolist()))
    page(history, "title")
    _ = history.births, history.sound(10**9), history.structure.transformer
    parts = {file_format.STEP: iter(records), file_format.NOTE: iter(history.notes)}
    return [(history.structure.to_json(), history.about), *(next(parts[chunk.kind]) for chunk in history.chunks)]


def is_prefix(found: list[Any], intact: list[Any]) -> bool:
    """Whether a history is the other one, perhaps without records and notes at its end."""
    return found == intact[: len(found)]


def craft_history(raw: bytes, draw: random.Random) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".wirings") as file:
        file.write(raw)
        file.flush()
        chunks, _ = file_format.read_chunks(Path(file.name))
    for _ in range(draw.choice((1, 1, 2))):
        place = draw.choice((0, 0, draw.randrange(len(chunks))))
        chunk = chunks[place]
        content = bytearray(zlib.decompress(chunk.content))
        if chunk.kind == file_format.STEP:
            draw.choice((flipped, truncated, spliced))(content, draw)
        else:
            content = bytearray(json.dumps(changed(json.loads(content), draw)).encode())
        chunks[place] = file_format.pack(chunk.kind, bytes(content))
        if draw.random() < 0.1:
            chunks.insert(draw.randrange(len(chunks)), draw.choice(chunks))
    return file_format.MAGIC + b"".join(chunk.framed() for chunk in chunks)


# ---- data -----------------------------------------------------------------------------------------------------------


def write_sample(name: str) -> Callable[[Path], object]:
    return lambda folder: get(name).write_sample(folder)


def read_sample(name: str) -> Callable[[Path], object]:
    """Read a data set's own sample, with the options that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        options = {key: x for key, x in get(name).write_sample(Path(folder)).items() if key != "directory"}
    return read_data(name, **options)


def read_data(name: str, **options: Any) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        loaded = data.load(name, directory=folder, batch=4, workers=0, **options)
        for loader in (loaded.train, loaded.test):
            for _ in loader.epoch(0):
                pass

    return read


def write_text(ending: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        text = random.Random(0).randbytes(2000) + b"Colourless green ideas sleep furiously. " * 50
        pack: Any = gzip.compress if ending == "gz" else lzma.compress
        bomb(ending)
        (folder / f"train.txt.{ending}").write_bytes(pack(text))
        (folder / "val.txt").write_bytes(text[-500:])

    return write


@functools.cache
def bomb(ending: str) -> bytes:
    """A small file that unpacks to 300 MB."""
    return gzip.compress(bytes(3 * 10**8), 1) if ending == "gz" else lzma.compress(bytes(10**6)) * 300


def craft_packed(ending: str) -> Callable[[bytes, random.Random], bytes]:
    def craft(raw: bytes, draw: random.Random) -> bytes:
        """More streams, very long ones, none, or padding."""
        pack: Any = gzip.compress if ending == "gz" else lzma.compress
        parts = [raw, pack(b""), pack(bytes(10**6)), b"\0" * 8, b"", draw.randbytes(9)]
        parts += [bomb(ending)] if draw.random() < 0.05 else []
        return b"".join(draw.sample(parts, draw.randrange(1, 4)))

    return craft


def craft_shard(raw: bytes, draw: random.Random) -> bytes:
    """Change fields of the headers, with valid checksums."""
    content = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2))):
        place = 512 * draw.randrange(len(content) // 512)
        fields = ((0, 100), (100, 8), (124, 12), (156, 1), (257, 8), (345, 155), (386, 12), (482, 1), (483, 12))
        start, size = draw.choice(fields)
        odd = (b"\0" * size, b"7" * (size - 1) + b"\0", b"\x80" + b"\xff" * (size - 1), b"S", b"x", b"L", b"g", b"1")
        content[place + start : place + start + size] = (draw.choice(odd) + b"\0" * size)[:size]
        header = content[place : place + 512]
        header[148:156] = b" " * 8
        content[place + 148 : place + 156] = b"%06o\0 " % sum(header)
    return bytes(content)


def write_sizes(folder: Path) -> None:
    get("shards").write_sample(folder)
    (folder / "sizes.json").write_text(json.dumps({path.name: 4 for path in sorted(folder.glob("*.tar"))}))


def craft_image(raw: bytes, draw: random.Random) -> bytes:
    """Images of odd sizes and kinds, and other formats."""
    from PIL import Image

    sizes = ((1, 1), (1, 60_000), (60_000, 1), (3, 5000), (8, 8))
    file = BytesIO()
    image = Image.new(draw.choice(("1", "L", "P", "RGB", "RGBA", "I;16")), draw.choice(sizes))
    image.save(file, draw.choice(("PNG", "TIFF", "PNG")))
    content = bytearray(file.getvalue())
    if draw.random() < 0.5:  # another size in the header, with a valid checksum
        content[16:24] = b"".join(draw.choice((0, 1, 7, 2**14, 2**31 - 1)).to_bytes(4, "big") for _ in range(2))
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return draw.choice((bytes(content), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n", raw + raw))


def craft_text(raw: bytes, draw: random.Random) -> bytes:
    """Lines that are empty, very long, missing, or not UTF-8."""
    lines = raw.split(b"\n")
    odd = (b"", b"a" * 10**5, b"\xff\xfe", b"\0", "\u2028é".encode(), b"\r", b"<pad>", b" " * 100)
    for _ in range(draw.choice((1, 2, 5))):
        lines[draw.randrange(len(lines))] = draw.choice(odd)
    return b"\n".join(lines[: draw.choice((0, 1, len(lines), len(lines)))])


# ---- settings, recipes and results ----------------------------------------------------------------------------------


def craft_yaml(raw: bytes, draw: random.Random) -> bytes:
    return yaml.safe_dump(changed(yaml.safe_load(raw), draw)).encode()


def craft_json(raw: bytes, draw: random.Random) -> bytes:
    return json.dumps(changed(json.loads(raw), draw)).encode()


def write_settings(folder: Path) -> None:
    recipe = recipes.get("digits/static-dnw")
    results.save_settings(folder / "settings.yaml", recipe.name, recipe.settings, {"epochs": 2})


def write_recipe(folder: Path) -> None:
    text = "base: digits/static-dnw\nepochs: 3\noptimizer: {lr: 0.1}\nmodel: {options: {density: 0.1}}\n"
    (folder / "mine.yaml").write_text(text)


def write_benchmark(folder: Path) -> None:
    row = {"recipe": "ste/dnw-2", "ratio": 1.5}
    (folder / "benchmarks").mkdir()
    record = {"date": "2026-01-01", "networks": [{"rows": [row, row]}, {"rows": []}]}
    (folder / "benchmarks" / "rules-x.json").write_text(json.dumps(record))


def write_sweep(folder: Path) -> None:
    text = "recipes: [digits/static-dnw]\nseeds: [0, 1]\nvariants: [{epochs: 1}]\nsettings: {batch: [10, 20]}\n"
    (folder / "sweep.yaml").write_text(text)


def write_result(folder: Path) -> None:
    found = next(Path(results.__file__).parents[2].glob("results/**/seed0.json"))
    (folder / "result.json").write_bytes(found.read_bytes())


def write_structured_hub(folder: Path) -> None:
    torch.manual_seed(0)
    options = {"layers": 1, "width": 16, "heads": 2, "context": 8, "classes": 11, "density": 0.5, "structure": "4x4"}
    wirings.hub.save_pretrained(wirings.models.get("gpt", rule="rigl", **options), folder, card=False)


def write_hub(folder: Path) -> None:
    torch.manual_seed(0)
    wirings.hub.save_pretrained(wirings.models.get("digits_static", rule="rigl", edges=500), folder, card=False)


def write_sparse_hub(folder: Path) -> None:
    """A finalized network with tied weights, of which only the edges are stored."""
    torch.manual_seed(0)
    options = {"layers": 1, "width": 32, "heads": 2, "context": 8, "classes": 65, "density": 0.05}
    model = wirings.finalize_(wirings.models.get("gpt", rule="dnw", **options))
    wirings.hub.save_pretrained(model, folder, card=False)
    assert is_sparse_file(folder / "model.safetensors")


def same_state(found: nn.Module, intact: nn.Module) -> bool:
    one, other = found.state_dict(), intact.state_dict()
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def craft_sparse_weights(raw: bytes, draw: random.Random) -> bytes:
    """Other descriptions and parts, with a valid checksum."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(raw)
        return crafted(path, draw)


def craft_weights(raw: bytes, draw: random.Random) -> bytes:
    """Other tensors, with a valid checksum."""
    from wirings.train.run import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(raw)
        tensors, about = checkpoint.read(path)
        name = draw.choice(sorted(tensors))
        x = tensors.pop(name)
        others = (
            x.flatten(),
            x.flatten()[:0],
            x.double(),
            x.bool(),
            x * float("nan"),
            torch.ones_like(x),
            x[None].clone(),
        )
        if draw.random() < 0.9:
            tensors[draw.choice((name, name, name, "x", name + "x"))] = draw.choice(others)
        checkpoint.write_tensors(path, tensors, about)
        return path.read_bytes()


def craft_config(raw: bytes, draw: random.Random) -> bytes:
    """Change values of a description, or name another network of any size."""
    if draw.random() < 0.5:
        return craft_json(raw, draw)
    config = json.loads(raw)
    name = draw.choice(wirings.models.names())
    names = [key for key in wirings.models.options(name) if key != "rule"]
    sizes = (*ODD, 64, 512, 4096, 5000, 10**4, 8.0, 0.1, 1e-9)
    config["model"] = {"name": name, "options": {key: draw.choice(sizes) for key in draw.sample(names, 2)}}
    rules = [config.get("rule"), {"name": draw.choice(wirings.rules.names())}]
    config |= {"rule": rule} if (rule := draw.choice(rules)) is not None else {}
    return json.dumps(config).encode()


def of_folder(
    path: str, write: Callable[[Path], object], read: Callable[[Path], object], craft: Any, holds: Any = None
) -> Kind:
    """A kind of file in a folder that is read as a whole."""
    return Kind(path, write, read, craft, folder=True, holds=holds)


read_shards = read_data("shards", classes=3, image_size=8)
read_text = read_data("text", context=8, epoch_steps=2)
KINDS = {
    "hub": of_folder("config.json", write_hub, wirings.hub.from_pretrained, craft_config),
    "hub structure": of_folder("config.json", write_structured_hub, wirings.hub.from_pretrained, craft_config),
    "hub weights": of_folder("model.safetensors", write_structured_hub, wirings.hub.from_pretrained, craft_weights),
    "hub sparse": of_folder("config.json", write_sparse_hub, wirings.hub.from_pretrained, craft_config),
    "hub sparse weights": of_folder(
        "model.safetensors", write_sparse_hub, wirings.hub.from_pretrained, craft_sparse_weights, same_state
    ),
    "history": Kind("history.wirings", write_history, read_history, craft_history, holds=is_prefix),
    "text.gz": of_folder("train.txt.gz", write_text("gz"), read_text, craft_packed("gz")),
    "text.xz": of_folder("train.txt.xz", write_text("xz"), read_text, craft_packed("xz")),
    "text": of_folder("input.txt", write_sample("shakespeare"), read_sample("shakespeare"), craft_text),
    "pairs": of_folder("train.de", write_sample("multi30k"), read_sample("multi30k"), craft_text),
    "benchmark": Kind("benchmarks/rules-x.json", write_benchmark, step_costs, craft_json),
    "sweep": Kind("sweep.yaml", write_sweep, lambda folder: read_sweep_file(folder / "sweep.yaml").runs(), craft_yaml),
    "shards": Kind("train-000.tar", write_sample("shards"), read_shards, craft_shard),
    "sizes": of_folder("sizes.json", write_sizes, read_shards, craft_json),
    "images": Kind("", write_sample("folder"), read_data("folder", image_size=8), craft_image),
    "settings": Kind(
        "settings.yaml", write_settings, lambda folder: results.load_settings(folder / "settings.yaml"), craft_yaml
    ),
    "recipe": Kind("mine.yaml", write_recipe, lambda folder: recipes.get(str(folder / "mine.yaml")), craft_yaml),
    "result": Kind("result.json", write_result, lambda folder: results.read(folder / "result.json"), craft_json),
}


def outcome(kind: Kind, path: Path, folder: Path, intact: Any = None) -> str:
    """How reading ended: "refused" or "read"; anything else is a mistake.

    Args:
        kind: the kind of the file.
        path: the file.
        folder: the folder to read.
        intact: what the intact file holds, if the file is damaged and has a checksum.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow and torch warn of odd images
            found = kind.read(folder)
    except WiringError as error:
        said = str(error)
        problem = "unnamed" if str(folder if kind.folder else path) not in said else "long" if len(said) > 2000 else ""
        return f"MISTAKE: {problem}: {said[:300]}" if problem else "refused"
    except BaseException as error:
        return f"MISTAKE: {type(error).__name__}: {str(error)[:200]}"
    if intact is not None and kind.holds is not None and not kind.holds(found, intact):
        return f"{MISTAKE}: other contents"
    return "read"


def damaged(kind: Kind, raw: bytes, seed: int) -> tuple[str, bytes]:
    """The file of a seed, and whether it is damaged or crafted."""
    draw = random.Random(seed)
    if seed % 2:
        return "crafted", kind.craft(raw, draw)
    content = bytearray(raw)
    draw.choice(DAMAGES)(content, draw)
    return "damaged", bytes(content)


def prepared(kind: Kind, folder: Path) -> tuple[Path, bytes, Any]:
    """Write the valid files. Returns the one to damage, its bytes, and what it holds."""
    kind.write(folder)
    path = folder / kind.path if kind.path else next(folder.rglob("train/**/*.png"))
    assert outcome(kind, path, folder) == "read", "the file is not valid to begin with"
    return path, path.read_bytes(), kind.read(folder) if kind.holds is not None else None


def tried(kind: Kind, given: tuple[Path, bytes, Any], folder: Path, seed: int) -> str:
    """Damage the file, and read it."""
    path, raw, intact = given
    how, content = damaged(kind, raw, seed)
    path.write_bytes(content)
    found = outcome(kind, path, folder, intact if how == "damaged" else None)
    return found if found.startswith(MISTAKE) else f"{how}: {found}"


SHORT = {"history": 60, "text.gz": 40, "text.xz": 40, "images": 60}
FUZZERS = {
    name: Fuzzer(partial(prepared, kind), partial(tried, kind), MEMORY, short=SHORT.get(name, 100))
    for name, kind in KINDS.items()
}
