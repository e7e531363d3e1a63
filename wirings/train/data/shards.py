"""Shards: tar files that each hold many images, in WebDataset's layout, for disks that are slow with many small files.

``directory/train-000.tar``, …, and ``val-000.tar`` (or ``test-``), …; in them ``key.jpg`` (or .png, …) beside
``key.cls``, the label in digits. A file ``sizes.json`` in the folder, such as {"train-000.tar": 1000}, tells how many
examples each shard has; without it the headers of all shards are read once, when the data set is loaded.

An epoch is all examples, shard after shard, the shards in a random order. Every rank, and every worker of a rank, takes
one contiguous part of that, and mixes it with a buffer. So ranks share the examples out among them, each exactly once,
but a rank's batch is not a slice of what one process's batch would be; and the order depends on ``workers`` too.

Python's tarfile does the reading. The webdataset package is not needed: the layout is plain tar, and whole shards, by
which it splits, would give ranks unequal shares, where all must have as many batches.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from wirings.errors import WiringError
from wirings.train.data.base import BUFFER, EXAMPLE, Data, Options, register, shares, stream
from wirings.train.data.decode import Batch, DecodingLoader, Example, assemble
from wirings.train.data.folder import ENDINGS

BUFFERED = 1000
"""Examples that a worker mixes what it reads with."""


class Shard(NamedTuple):
    """A tar file, how many examples it has, and the number of its first, counted over all shards in order of name."""

    path: Path
    size: int
    first: int


class Raw(NamedTuple):
    """An example as it is in its shard; without ``image`` it could not be read, for a ``reason``."""

    number: int
    name: str
    image: bytes | None
    label: int = -1
    reason: str = ""


def members(tar: tarfile.TarFile) -> Iterator[dict[str, tarfile.TarInfo]]:
    """The examples of a shard: neighbouring files with one key, by ending. A group without an image is none."""
    key, group = None, dict[str, tarfile.TarInfo]()
    for member in tar:
        folder, _, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        if (folder, stem) != key:
            if any(f".{e}" in ENDINGS for e in group):
                yield group
            key, group = (folder, stem), {}
        if member.isfile():
            group[ending.lower()] = member
    if any(f".{e}" in ENDINGS for e in group):
        yield group


def read_shard(shard: Shard, start: int, stop: int) -> Iterator[Raw]:
    """Examples ``start`` to ``stop`` of a shard: exactly as many, if need be as ones that could not be read."""
    at = start
    reason = f"the shard ends before its example {{}} of {shard.size}; is it whole, and sizes.json right?"
    try:
        with tarfile.open(shard.path, "r:") as tar:
            for position, group in enumerate(members(tar)):
                if position >= stop:
                    break
                if position >= start:
                    yield _read(tar, group, shard, position)
                    at = position + 1
    except (tarfile.TarError, OSError) as error:
        reason = f"the shard is damaged before its example {{}}: {error}"
    for position in range(at, stop):
        yield Raw(shard.first + position, f"{shard.path}: example {position}", None, reason=reason.format(position))


def _read(tar: tarfile.TarFile, group: dict[str, tarfile.TarInfo], shard: Shard, position: int) -> Raw:
    member = next(member for ending, member in group.items() if f".{ending}" in ENDINGS)
    number, name = shard.first + position, f"{shard.path}: {member.name}"
    if "cls" not in group:
        return Raw(number, name, None, reason="it has no .cls beside it")
    image, label = (tar.extractfile(which) for which in (member, group["cls"]))
    assert image is not None
    assert label is not None
    text = label.read()
    try:
        return Raw(number, name, image.read(), int(text))
    except ValueError:
        return Raw(number, name, None, reason=f"its .cls should be a number, but it is {text[:20]!r}")


class _Lanes(IterableDataset[Batch]):
    """The batches of one epoch on one rank. Worker j of w makes the batches j, j + w, …, from a part of its own."""

    def __init__(self, loader: ShardLoader, epoch: int, start: int) -> None:
        self.loader, self.epoch, self.start = loader, epoch, start

    def __iter__(self) -> Iterator[Batch]:
        loader, worker = self.loader, get_worker_info()
        workers = max(1, loader.options.workers)
        # Batches are taken from the workers in turn, beginning with the first one: it must have the first batch.
        lane = (self.start + (worker.id if worker else 0)) % workers
        sizes = loader.sizes()
        raw = self.mixed(lane, workers)
        for which in range(lane, len(sizes), workers):
            examples = [next(raw) for _ in range(sizes[which])]
            if which >= self.start:
                yield assemble(map(self.example, examples), loader.size, loader.classes)

    def example(self, raw: Raw) -> Example:
        random = stream(self.loader.options.seed, self.epoch, EXAMPLE, raw.number) if self.loader.augment else None
        return Example(raw.name, raw.image, raw.label, random, raw.reason)

    def mixed(self, lane: int, workers: int) -> Iterator[Raw]:
        """A worker's part, through the shuffle buffer: whoever comes in takes the place of whoever is drawn."""
        raw, size = self.part(lane, workers), self.loader.buffer if self.loader.train else 0
        random = stream(self.loader.options.seed, self.epoch, BUFFER, self.loader.rank * workers + lane)
        held: list[Raw] = []
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

    def part(self, lane: int, workers: int) -> Iterator[Raw]:
        """A worker's contiguous part of the epoch: as many examples as its batches have."""
        loader = self.loader
        start = 0
        for rank in range(loader.rank + 1):
            sizes = [len(mine) for mine in shares(loader.examples, loader.batch, rank, loader.world)]
            parts = [sum(sizes[other::workers]) for other in range(workers)]
            start += sum(parts if rank < loader.rank else parts[:lane])
        stop = start + parts[lane]
        count = len(loader.shards)
        order = stream(loader.options.seed, self.epoch).permutation(count) if loader.train else np.arange(count)
        before = 0
        for shard in (loader.shards[which] for which in order):
            first, last = max(start - before, 0), min(stop - before, shard.size)
            if first < last:
                yield from read_shard(shard, first, last)
            before += shard.size


class ShardLoader(DecodingLoader):
    """Batches from shards; ``buffer`` is the number of encoded images among which each worker shuffles."""

    def __init__(self, shards: list[Shard], classes: int, buffer: int, train: bool, options: Options) -> None:
        super().__init__(sum(shard.size for shard in shards), classes, train, options)
        self.shards, self.buffer = shards, buffer

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader.epoch`, and this module's text for what a rank sees. What comes before ``start`` is read too."""
        self.check_epoch(number, start)
        return self._deliver(dataset=_Lanes(self, number, start), batch_size=None)


@register("shards")
def make(options: Options, *, classes: int | None = None, buffer: int = BUFFERED) -> Data:
    """Settings: ``classes``, which the shards do not tell; ``buffer``, see `ShardLoader`. Images as in a folder."""
    if options.directory is None:
        raise WiringError("data set 'shards' needs directory=, the folder that has train-*.tar and val-*.tar in it.")
    if classes is None or classes < 1 or buffer < 0:
        raise WiringError(
            f"data set 'shards' needs classes=, a number above 0, and a buffer of 0 or more, but they are {classes} "
            f"and {buffer}. On the command line: --set data.options.classes=1000."
        )
    return make_shards(options, "shards", classes, buffer)


def make_shards(options: Options, name: str, classes: int, buffer: int = BUFFERED) -> Data:
    """The shards of a folder as a data set of that name."""
    assert options.directory is not None
    train, val = find_shards(options.directory, "train"), find_shards(options.directory, "val", "test")
    loaders = [ShardLoader(which, classes, buffer, which is train, options) for which in (train, val)]
    size = loaders[0].size
    return Data(name, classes, (3, size, size), loaders[0], loaders[1])


def find_shards(folder: Path, *parts: str) -> list[Shard]:
    """The shards of the first of these parts that there is, with their sizes."""
    paths = next((found for part in parts if (found := sorted(folder.glob(f"{part}-*.tar")))), [])
    if not paths:
        raise WiringError(
            f"{folder} must have shards named {' or '.join(f'{part}-*.tar' for part in parts)}; it has none."
        )
    noted = folder / "sizes.json"
    try:
        sizes = dict(json.loads(noted.read_text())) if noted.is_file() else {}
    except (ValueError, TypeError) as error:
        raise WiringError(f"{noted} is damaged ({error}). Remove it, or write it again.") from error
    shards, first = [], 0
    for path in paths:
        size = sizes.get(path.name)
        if size is not None and (type(size) is not int or size < 0):
            raise WiringError(f"{noted} should say how many examples {path.name} has, but it says {size!r}.")
        shards.append(Shard(path, count_examples(path) if size is None else size, first))
        first += shards[-1].size
    return shards


def count_examples(path: Path) -> int:
    """How many examples a shard has, by its headers."""
    try:
        with tarfile.open(path, "r:") as tar:
            count = sum(1 for _ in members(tar))
            # Any end will do for tarfile; a whole file has blocks of zeros there.
            if tar.offset + tarfile.BLOCKSIZE > path.stat().st_size:
                raise tarfile.ReadError("unexpected end of data")
        return count
    except (tarfile.TarError, OSError) as error:
        raise WiringError(f"{path} is truncated or damaged ({error}). Fetch it again.") from error
