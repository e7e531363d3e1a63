"""The contract of a data set: what a training loop is given, whatever the images come from; and the registry.

A loader's batches are a pure function of the seed, the epoch and the batch they start from, so that a run that is
resumed in the middle of an epoch sees what it would have seen. With several processes (ranks) each takes its slice of
every batch: what they see together is what one process would see.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError, unknown

ORDER, EXAMPLE, BUFFER, HOLDOUT = range(4)
"""What random numbers are for: each purpose has a stream of its own (`stream`)."""


class Loader(ABC):
    """Batches of images and labels, epoch by epoch.

    ``examples`` and ``batch`` count over all ranks: ``batch`` is the global batch, of which this rank sees its share.
    """

    def __init__(self, examples: int, batch: int, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise WiringError(f"a rank is from 0 to world - 1, but rank is {rank} and world is {world}.")
        if batch < 1 or batch % world:
            raise WiringError(
                f"batch is the number of examples over all ranks and must divide by their number, "
                f"but batch is {batch} and world is {world}."
            )
        if examples < 1:
            raise WiringError(f"a data set needs at least one example, but it has {examples}.")
        self.examples, self.batch, self.rank, self.world = examples, batch, rank, world

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank; the last may be a smaller one."""
        return -(-self.examples // self.batch)

    def sizes(self) -> list[int]:
        """This rank's batch sizes, in order, over an epoch.

        The last batch is split as evenly as possible: where it does not divide, later ranks get one example less, which
        may be none.
        """
        return [len(mine) for mine in shares(self.examples, self.batch, self.rank, self.world)]

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number`` from batch ``start`` on, as this rank sees them.

        Images are float32 (n, channels, height, width), normalised; labels are int64 (n,); both on the device.
        """

    def check_epoch(self, number: int, start: int) -> None:
        """Raise unless there is such an epoch and such a batch in it (or the end)."""
        if number < 0 or not 0 <= start <= len(self):
            raise WiringError(
                f"epochs are numbered from 0 and begin at a batch from 0 to {len(self)}, "
                f"but epoch {number} was to begin at batch {start}."
            )


@dataclass(frozen=True)
class Data:
    """A data set, ready to train on."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    """Channels, height and width of what the model sees."""
    train: Loader
    test: Loader
    """Never shuffled, never augmented. With a holdout these are training images, which are then not trained on."""
    md5: str | None = None
    """Of the data, where a checksum is kept of them."""
    names: tuple[str, ...] | None = None
    """Of the classes, by number, where the files tell them."""


@dataclass(frozen=True)
class Options:
    """What `load` was asked for: every data set is made from these."""

    directory: Path | None
    batch: int
    device: torch.device
    seed: int
    rank: int
    world: int
    augment: bool
    workers: int
    image_size: int | None
    skip_corrupt: bool

    def refuse(self, name: str, *, directory: bool = False, size: int | None = None) -> None:
        """Raise if a folder was given to a data set that reads none, or a size to one that has its own."""
        if directory and self.directory is not None:
            raise WiringError(f"data set {name!r} reads no files; leave directory out (it is {self.directory}).")
        if size is not None and self.image_size not in (None, size):
            raise WiringError(
                f"the images of {name!r} have {size} × {size} pixels; image_size is {self.image_size}, leave it out."
            )


def share(count: int, rank: int, world: int) -> range:
    """Which of ``count`` examples are this rank's: contiguous, as even as possible, the first ranks get the most."""
    each, extra = divmod(count, world)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def shares(examples: int, batch: int, rank: int, world: int) -> list[range]:
    """This rank's part of every batch of an epoch: positions in the epoch's order, from 0 to ``examples`` - 1."""
    parts = []
    for start in range(0, examples, batch):
        mine = share(min(batch, examples - start), rank, world)
        parts.append(range(start + mine.start, start + mine.stop))
    return parts


def stream(seed: int, epoch: int, purpose: int = ORDER, number: int = 0) -> np.random.Generator:
    """Random numbers that depend on these alone: on no state, and so on nothing that happened before."""
    return np.random.default_rng([seed, epoch, purpose, number])


def hold_out(labels: np.ndarray, count: Any) -> tuple[np.ndarray, np.ndarray]:
    """Split a training set in two, for settings to be chosen without a look at the test set.

    The split depends on the labels and the count alone, not on a run's seed: what is compared is compared on the same
    images. Every class gives as many, or where ``count`` does not divide, the first ones give one more.

    Args:
        labels: of all training images.
        count: how many images to hold out.

    Returns:
        The places of the images to train on and of those held out, each in increasing order.
    """
    classes = np.unique(labels)
    if isinstance(count, bool) or not isinstance(count, int) or count < len(classes):
        raise WiringError(
            f"holdout is a number of training images, at least one for each of {len(classes)} classes, but it is "
            f"{count!r}. For none, leave it out."
        )
    held = []
    for number, label in enumerate(classes):
        places, part = np.flatnonzero(labels == label), len(share(count, number, len(classes)))
        if part >= len(places):
            raise WiringError(
                f"holdout = {count} takes {part} images of class {label}, which has {len(places)}: none would be left "
                "to train on. Hold out fewer."
            )
        held.append(stream(0, 0, HOLDOUT, number).permutation(places)[:part])
    chosen = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


_homes = {
    "cifar10": "cifar10",
    "digits": "embedded",
    "folder": "folder",
    "imagenet": "folder",
    "shards": "shards",
    "synthetic": "synthetic",
}
"""The modules of our own data sets, imported when they are asked for: some need Pillow."""
NO_FILES = ("digits", "synthetic")
"""Data that reads no files, and so takes no folder."""
_registry: dict[str, Callable[..., Data]] = {}
M = TypeVar("M", bound=Callable[..., Data])


def register(name: str) -> Callable[[M], M]:
    """Make a data set available by name: a function of `Options` and of keyword settings of its own."""

    def add(make: M) -> M:
        _registry[name] = make
        return make

    return add


def names() -> list[str]:
    """The names that `load` knows."""
    return sorted({*_homes, *_registry})


def load(
    name: str,
    *,
    directory: Path | str | None = None,
    batch: int = 512,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    augment: bool = True,
    workers: int = 4,
    image_size: int | None = None,
    skip_corrupt: bool = False,
    **more: Any,
) -> Data:
    """The data set of that name.

    Args:
        name: one of `names`.
        directory: where its files are; for CIFAR-10, where to look before it is downloaded.
        batch: examples a batch, over all ranks.
        device: where batches, and small data sets whole, are to lie.
        seed: fixes the order and the augmentation of every epoch (and the examples of synthetic data).
        rank: which process this is, from 0.
        world: how many processes there are.
        augment: random crops and flips of the images trained on.
        workers: processes that decode images; 0 for none. Data that lie on the device whole have nothing to decode.
        image_size: height and width, in pixels, for data sets that have no size of their own.
        skip_corrupt: leave out images that cannot be decoded and name them in ``loader.skipped``; else they are errors.
        more: settings of this data set alone, see its file.
    """
    if name not in _registry and name in _homes:
        importlib.import_module(f"wirings.train.data.{_homes[name]}")
    if name not in _registry:
        raise unknown("data set", name, names())
    make = _registry[name]
    choices = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in more:
        if key not in choices:
            if not choices:
                raise WiringError(f"data set {name!r} takes no settings of its own, but {key!r} was given.")
            raise unknown(f"setting of data set {name!r}", key, choices)
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise WiringError(f"device is {str(place)!r}, but PyTorch sees no CUDA device here; use device='cpu'.")
    for what, value, least in (("seed", seed, 0), ("workers", workers, 0), ("image_size", image_size, 1)):
        if value is not None and value < least:
            raise WiringError(f"{what} must be at least {least}, but it is {value}.")
    folder = None if directory is None else Path(directory)
    options = Options(folder, batch, place, seed, rank, world, augment, workers, image_size, skip_corrupt)
    return make(options, **more)
