"""Shards: tar files of many images each, in WebDataset's layout, for disks that are slow with many small files.

``directory/train-000.tar``, …, and ``val-000.tar`` (or ``test-``), …. They contain ``key.jpg`` (or .png, …) beside
``key.cls``, the label in decimal digits. The file ``sizes.json`` in the folder, such as {"train-000.tar": 1000}, gives
the number of examples of each shard. Without it, the headers of all shards are read once when the data set is loaded.

An epoch is all examples, shard by shard, with the shards in random order. Every rank, and every worker of a rank, reads
one contiguous part of it and shuffles it with a buffer. So every example is seen by exactly one rank, but a rank's
batch is not a slice of the batch that a single process would see, and the order also depends on ``workers``.

The shards are read with Python's tarfile. The webdataset package splits by whole shards, which would give ranks unequal
numbers of batches.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from wirings.errors import WiringError
from wirings.train.data.augment import IMAGENET_MEAN, IMAGENET_STD, centre_crop
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.decode import DecodedBatch, DecodingLoader, EncodedExample, assemble
from wirings.train.data.folder import IMAGE_SUFFIXES
from wirings.train.data.sampling import BUFFER, EXAMPLE, random_stream, rank_slices
from wirings.utils.files import read_regular_text
from wirings.utils.text import brief

if TYPE_CHECKING:
    from PIL.Image import Image

BUFFER_SIZE = 1000
"""Default number of encoded images in each worker's shuffle buffer."""

_DAMAGE = (tarfile.TarError, OSError, ValueError, EOFError)
"""What tarfile raises for damaged files; ValueError for sizes that do not fit 64 bits."""


class Shard(NamedTuple):
    """A tar file."""

    path: Path
    size: int
    """Number of examples."""
    first: int
    """Number of its first example, counted over all shards in the order of their names."""


class RawExample(NamedTuple):
    """An example as read from its shard. If it could not be read, ``image`` is None, for a ``reason``."""

    number: int
    name: str
    image: bytes | None
    label: int = -1
    reason: str = ""


def members(tar: tarfile.TarFile) -> Iterator[dict[str, tarfile.TarInfo]]:
    """Yield the examples of a shard: consecutive files with the same key, by suffix.

    Groups without an image are skipped.
    """
    key, group = None, dict[str, tarfile.TarInfo]()
    for member in tar:
        folder, _, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        if (folder, stem) != key:
            if any(f".{e}" in IMAGE_SUFFIXES for e in group):
                yield group
            key, group = (folder, stem), {}
        if member.isfile():
            group[ending.lower()] = member
    if any(f".{e}" in IMAGE_SUFFIXES for e in group):
        yield group


def read_shard(shard: Shard, start: int, stop: int) -> Iterator[RawExample]:
    """Yield examples ``start`` to ``stop`` of a shard: always that many, some perhaps marked as unreadable."""
    at = start
    reason = f"the shard ends before its example {{}} of {shard.size}. Is it complete, and is sizes.json correct?"
    try:
        with tarfile.open(shard.path, "r:") as tar:
            for position, group in enumerate(members(tar)):
                if position >= stop:
                    break
                if position >= start:
                    yield _read(tar, group, shard, position)
                    at = position + 1
    except _DAMAGE as error:
        reason = f"the shard is damaged before its example {{}}: {error}"
    for position in range(at, stop):
        yield RawExample(
            shard.first + position, f"{shard.path}: example {position}", None, reason=reason.format(position)
        )


def _read(tar: tarfile.TarFile, group: dict[str, tarfile.TarInfo], shard: Shard, position: int) -> RawExample:
    member = next(member for ending, member in group.items() if f".{ending}" in IMAGE_SUFFIXES)
    number, name = shard.first + position, f"{shard.path}: {member.name}"
    if "cls" not in group:
        return RawExample(number, name, None, reason="there is no .cls file for it")
    if member.issparse() or group["cls"].issparse():  # a few bytes that stand for any number of zeros
        return RawExample(number, name, None, reason="sparse files are not supported")
    image, label = (tar.extractfile(which) for which in (member, group["cls"]))
    assert image is not None
    assert label is not None
    text = label.read()
    try:
        return RawExample(number, name, image.read(), int(text))
    except ValueError:
        return RawExample(number, name, None, reason=f"its .cls file must hold a number, got {text[:20]!r}")


class _Lanes(IterableDataset[DecodedBatch]):
    """The batches of one epoch on one rank. Worker j of w assembles batches j, j + w, … from its own part of it."""

    def __init__(self, loader: ShardLoader, epoch: int, start: int) -> None:
        self.loader, self.epoch, self.start = loader, epoch, start

    def __iter__(self) -> Iterator[DecodedBatch]:
        loader, worker = self.loader, get_worker_info()
        workers = max(1, loader.options.workers)
        # DataLoader takes batches from the workers in turn, starting with worker 0, which must have the first batch.
        lane = (self.start + (worker.id if worker else 0)) % workers
        sizes = loader.sizes()
        raw = self.mixed(lane, workers)
        for which in range(lane, len(sizes), workers):
            examples = [next(raw) for _ in range(sizes[which])]
            if which >= self.start:
                yield assemble(map(self.example, examples), loader.size, loader.classes)

    def example(self, raw: RawExample) -> EncodedExample:
        random = (
            random_stream(self.loader.options.seed, self.epoch, EXAMPLE, raw.number) if self.loader.augment else None
        )
        return EncodedExample(raw.name, raw.image, raw.label, random, raw.reason)

    def mixed(self, lane: int, workers: int) -> Iterator[RawExample]:
        """Yield a worker's part through the shuffle buffer, where each new example replaces the one that is drawn."""
        raw, size = self.part(lane, workers), self.loader.buffer if self.loader.train else 0
        random = random_stream(self.loader.options.seed, self.epoch, BUFFER, self.loader.rank * workers + lane)
        held: list[RawExample] = []
        for example in raw:
            if len(held) < size:
                held.append(example)
            elif size:
                drawn = int(random.integers(size))
                yield held[drawn]
                held[drawn] = example
            else:
                yield example
        for drawn in random.permutation(len(held)):
            yield held[drawn]

    def part(self, lane: int, workers: int) -> Iterator[RawExample]:
        """Yield a worker's contiguous part of the epoch, as many examples as its batches have."""
        loader = self.loader
        start = 0
        for rank in range(loader.rank + 1):
            sizes = [len(mine) for mine in rank_slices(loader.examples, loader.batch, rank, loader.world)]
            parts = [sum(sizes[other::workers]) for other in range(workers)]
            start += sum(parts if rank < loader.rank else parts[:lane])
        stop = start + parts[lane]
        count = len(loader.shards)
        order = random_stream(loader.options.seed, self.epoch).permutation(count) if loader.train else np.arange(count)
        before = 0
        for shard in (loader.shards[which] for which in order):
            first, last = max(start - before, 0), min(stop - before, shard.size)
            if first < last:
                yield from read_shard(shard, first, last)
            before += shard.size


class ShardLoader(DecodingLoader):
    """Batches from shards. See `DecodingLoader` for its other arguments.

    Args:
        shards: The shards to read.
        buffer: Number of encoded images that each worker shuffles among.
        settings: Arguments of `DecodingLoader` other than ``examples``.
    """

    def __init__(self, shards: list[Shard], buffer: int, **settings: Any) -> None:
        super().__init__(sum(shard.size for shard in shards), **settings)
        self.shards, self.buffer = shards, buffer

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader.epoch`, and the module's docstring for what a rank sees.

        Batches before ``start`` are read, too, and thrown away.
        """
        self.check_epoch(number, start)
        return self._deliver(dataset=_Lanes(self, number, start), batch_size=None)


@register_dataset("shards")
class Shards(ImageDataset):
    """Your own images in shards; cropped and normalised as `wirings.train.data.folder.ImageFolder` does."""

    title = "shards of images"
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def load(self, options: LoadOptions, *, classes: int | None = None, buffer: int = BUFFER_SIZE) -> Data:
        """Find the shards.

        Args:
            options: Options of every data set.
            classes: Number of classes, which shards do not store. Required.
            buffer: Number of encoded images that each worker shuffles among.
        """
        if options.directory is None:
            raise WiringError("data set 'shards' needs directory=, the folder that contains train-*.tar and val-*.tar.")
        if classes is None or classes < 1 or buffer < 0:
            raise WiringError(
                f"data set 'shards' needs classes= of at least 1 and a buffer of at least 0, got classes = {classes} "
                f"and buffer = {buffer}. On the command line: --set data.options.classes=1000."
            )
        return load_shards(self, options, classes, buffer)

    def square(self, image: Image, side: int) -> Image:
        """A user's image as it is tested, whatever its size."""
        return centre_crop(image, side)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write two shards to train on and one to test on."""
        write_sample_shards(folder)
        return {"directory": folder, "classes": 3, "image_size": 8, "workers": 0}


def load_shards(dataset: ImageDataset, options: LoadOptions, classes: int, buffer: int = BUFFER_SIZE) -> Data:
    """Load a data set from the shards of a folder."""
    assert options.directory is not None
    train, val = find_shards(options.directory, "train"), find_shards(options.directory, "val", "test")
    loaders = [
        ShardLoader(
            which,
            buffer,
            classes=classes,
            train=which is train,
            options=options,
            mean=dataset.mean,
            std=dataset.std,
        )
        for which in (train, val)
    ]
    size = loaders[0].size
    return Data(dataset.name, classes, (3, size, size), loaders[0], loaders[1])


def write_sample_shards(folder: Path) -> None:
    """Write ``train-000.tar``, ``train-001.tar`` and ``val-000.tar``, of four images each, with labels from 0 to 2."""
    from PIL import Image

    for name in ("train-000", "train-001", "val-000"):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for number in range(4):
                file = BytesIO()
                Image.new("RGB", (12, 10), (60 * number, 100, 30)).save(file, "png")
                for suffix, content in (("png", file.getvalue()), ("cls", b"%d" % (number % 3))):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))


def find_shards(folder: Path, *parts: str) -> list[Shard]:
    """Find the shards of the first of these parts that exists, with their sizes."""
    paths = next((found for part in parts if (found := sorted(folder.glob(f"{part}-*.tar")))), [])
    if not paths:
        raise WiringError(
            f"{folder} must contain shards named {' or '.join(f'{part}-*.tar' for part in parts)}, but it has none."
        )
    noted = folder / "sizes.json"
    try:
        sizes = dict(json.loads(read_regular_text(noted))) if noted.is_file() else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise WiringError(f"{noted} is damaged ({error}). Fix or remove it.") from error
    shards, first = [], 0
    for path in paths:
        size = sizes.get(path.name)
        shards.append(Shard(path, count_examples(path) if size is None else _noted_size(noted, path, size), first))
        first += shards[-1].size
    if not first:
        source = f", according to {noted}" if noted.is_file() else ""
        raise WiringError(f"the shards {paths[0]}, … must have at least one example, got none{source}.")
    return shards


def _noted_size(noted: Path, path: Path, size: Any) -> int:
    """The number of examples of a shard according to ``sizes.json``, if the shard can have as many."""
    if type(size) is not int or size < 0:
        raise WiringError(f"{noted} must give the number of examples of {path.name}, got {brief(size)}.")
    try:
        most = path.stat().st_size // tarfile.BLOCKSIZE  # every file in a tar file has a header of one block
    except OSError as error:
        raise WiringError(f"{path} cannot be read: {error.strerror}.") from error
    if size > most:
        raise WiringError(
            f"{noted} gives {path.name} {brief(size)} examples, but a shard of its size has {most:,} at most. Fix the "
            "number, or remove it to have the examples counted."
        )
    return size


def count_examples(path: Path) -> int:
    """Count the examples of a shard by its headers."""
    try:
        with tarfile.open(path, "r:") as tar:
            count = sum(1 for _ in members(tar))
            # tarfile accepts any end; a complete file ends in blocks of zeros.
            if tar.offset + tarfile.BLOCKSIZE > path.stat().st_size:
                raise tarfile.ReadError("unexpected end of data")
        return count
    except _DAMAGE as error:
        raise WiringError(f"{path} is truncated or damaged ({error}). Download it again.") from error
