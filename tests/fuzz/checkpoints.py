"""Damaged checkpoints: each must raise a `WiringError` or restore the same state."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError
from wirings.train import recipes
from wirings.train.build import build, load_data
from wirings.train.distributed import ProcessContext
from wirings.train.run import checkpoint, loop
from wirings.train.run.folder import LAST
from wirings.train.run.optimizer import make_optimizer
from wirings.train.run.progress import Progress
from wirings.train.run.saving import RunCheckpoints
from wirings.train.run.step import TrainingStep
from wirings.train.settings import with_overrides

RECIPE = "digits/static-dnw"
CHANGES = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 10}", "batch=20"]
CHANGES += ["epochs=2", "ema=0.9", "checkpoint_every=1", "optimizer.momentum=0.9", "history_every=0"]
SETTINGS = with_overrides(recipes.get(RECIPE).settings, CHANGES)[0]
PER_EPOCH = 3
CONTEXT = ProcessContext(0, 1, torch.device("cpu"))
ODD: tuple[Any, ...] = (None, True, -1, 0, 2**70, 1e308, float("nan"), "", "x", [], {}, [None], {"a": 1}, [[1]], 0.5)
DTYPES = ("BOOL", "U8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64", "F8_E4M3", "C64", "X")


def new_step() -> TrainingStep:
    """The step of a resumed run before its checkpoint is read."""
    torch.manual_seed(1)
    model, wiring = build(SETTINGS, 10, CONTEXT)
    assert wiring is not None
    wiring.plan(SETTINGS.epochs * PER_EPOCH)
    optimizer = make_optimizer(model, wiring, SETTINGS, CONTEXT.device)
    return TrainingStep(model, wiring, optimizer, SETTINGS, CONTEXT.device)


def good(folder: Path) -> bytes:
    """The checkpoint of a run before the last step of its last epoch."""
    assert len(load_data(SETTINGS, CONTEXT).train) == PER_EPOCH
    for _ in range(5):
        loop.train(RECIPE, SETTINGS, folder, device="cpu", resume=True, max_minutes=0)
    return (folder / LAST).read_bytes()


def state_of(step: TrainingStep, progress: Any = None) -> str:
    """A checksum of the state of training."""
    tensors, about = checkpoint.collect(step, {"progress": progress and vars(progress)})
    return checkpoint._checksum(tensors, json.dumps(about))


def resumed(step: TrainingStep, path: Path) -> Progress:
    """Resume from a checkpoint, as a run does."""
    return RunCheckpoints(path.parent, step, {}, CONTEXT).resume(RECIPE, SETTINGS, PER_EPOCH)


class Mutator:
    """Makes damaged files from a good one."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        (length,) = struct.unpack_from("<Q", data)
        self.body = 8 + length
        self.header: dict[str, Any] = json.loads(data[8 : self.body])
        self.kinds = {name[1:]: getattr(self, name) for name in dir(self) if name.startswith("_make_")}

    def __call__(self, number: int) -> tuple[str, bytes]:
        """Damaged file ``number``: how it was made, and its bytes."""
        draw = random.Random(number)
        kind = draw.choice(sorted(self.kinds))
        return kind.removeprefix("make_"), self.kinds[kind](draw)

    def _flipped(self, draw: random.Random, first: int, last: int) -> bytes:
        data = bytearray(self.data)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            data[draw.randrange(first, last)] ^= 1 << draw.randrange(8)
        return bytes(data)

    def _make_flip_anywhere(self, draw: random.Random) -> bytes:
        return self._flipped(draw, 0, len(self.data))

    def _make_flip_header(self, draw: random.Random) -> bytes:
        return self._flipped(draw, 0, self.body)

    def _make_truncated(self, draw: random.Random) -> bytes:
        return self.data[: draw.choice((draw.randrange(20), draw.randrange(self.body), draw.randrange(len(self.data))))]

    def _make_longer(self, draw: random.Random) -> bytes:
        return self.data + draw.randbytes(draw.randrange(1, 100))

    def _make_zeroed(self, draw: random.Random) -> bytes:
        first = draw.randrange(len(self.data))
        last = min(len(self.data), first + draw.choice((16, 512, 4096)))
        return self.data[:first] + bytes(last - first) + self.data[last:]

    def _make_header(self, draw: random.Random) -> bytes:
        """Change the table of tensors or the JSON, but not the checksum."""
        header = json.loads(json.dumps(self.header))
        names = [name for name in header if name != "__metadata__"]
        one, other = draw.sample(names, 2)
        how = draw.randrange(8)
        if how == 0:
            header[one], header[other] = header[other], header[one]
        elif how == 1:
            header[one]["dtype"] = draw.choice(DTYPES)
        elif how == 2:
            header[one]["shape"] = draw.choice(([], header[one]["shape"][::-1], [1, *header[one]["shape"]], [2**62, 0]))
        elif how == 3:
            header[one + draw.choice("x.\0é")] = header.pop(one)
        elif how == 4:
            header[one] = draw.choice(ODD)
        elif how == 5:
            header["__metadata__"]["about"] = json.dumps(self._other(draw, json.loads(header["__metadata__"]["about"])))
        elif how == 6:
            header["__metadata__"][draw.choice(("schema", "crc32", "about"))] = draw.choice(
                ("", "1", "[" * 99_999, "3")
            )
        else:
            header["__metadata__"] = draw.choice(ODD)
        return self._joined(header)

    def _make_forged(self, draw: random.Random) -> bytes:
        """Change tensors or the JSON, with a valid checksum."""
        tensors, about = self.read()
        if draw.random() < 0.6:
            about = self._other(draw, about)
        else:
            self._change(draw, tensors)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "forged.safetensors"
            checkpoint.write_tensors(path, tensors, about)
            return path.read_bytes()

    def read(self) -> tuple[dict[str, torch.Tensor], Any]:
        from safetensors.torch import load

        return load(self.data), json.loads(self.header["__metadata__"]["about"])

    def _joined(self, header: dict[str, Any]) -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + self.data[self.body :]

    def _other(self, draw: random.Random, about: Any) -> Any:
        """Remove or replace one entry, at any depth."""
        if not isinstance(about, dict | list) or not about or draw.random() < 0.1:
            return draw.choice(ODD)
        key = draw.choice(sorted(about) if isinstance(about, dict) else range(len(about)))
        if draw.random() < 0.15:
            del about[key]
        else:
            about[key] = self._other(draw, about[key])
        return about

    def _change(self, draw: random.Random, tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice(sorted(tensors))
        value = tensors[name]
        how = draw.randrange(6)
        if how == 0:
            del tensors[name]
        elif how == 1:
            tensors[name + "x"] = tensors.pop(name)
        elif how == 2:
            tensors[name] = value.to(draw.choice((torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8)))
        elif how == 3:
            tensors[name] = value.flatten()[: draw.randrange(3)].clone()
        elif how == 4:
            tensors[name] = value[None].clone()
        else:  # the same dtype and shape, other values
            tensors[name] = torch.zeros_like(value)


def prepare(folder: Path) -> tuple[Mutator, str]:
    """A good checkpoint to damage, and the state that it restores."""
    mutator = Mutator(good(folder / "run"))
    path = folder / LAST
    path.write_bytes(mutator.data)
    step = new_step()
    return mutator, state_of(step, resumed(step, path))


def tried(given: tuple[Mutator, str], folder: Path, seed: int) -> str:
    """Resume from a damaged checkpoint."""
    mutator, wanted = given
    path = folder / LAST
    kind, data = mutator(seed)
    path.write_bytes(data)
    step = new_step()
    before = state_of(step)
    try:
        progress = resumed(step, path)
    except WiringError as rejected:
        said = str(rejected)
        if str(path) not in said or len(said) >= 2000:
            return f"{MISTAKE}: {kind}: {said[:200]}"
        if state_of(step) != before:
            return f"{MISTAKE}: {kind}: rejected, but the model has changed ({said[:200]})"
        return f"{kind}: refused"
    if state_of(step, progress) == wanted:
        return f"{kind}: the same state"
    return f"{kind}: another state, with a valid checksum" if kind == "forged" else f"{MISTAKE}: {kind}: another state"


FUZZERS = {"checkpoint": Fuzzer(prepare, tried, short=120)}
