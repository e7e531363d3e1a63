"""A folder of images, a folder for each class; ImageNet is one.

``directory/train/<class>/*`` and ``directory/val/<class>/*`` (or ``test``). Classes are numbered by their sorted names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from wirings.errors import WiringError
from wirings.train.data.base import EXAMPLE, Data, Options, register, shares, stream
from wirings.train.data.decode import Batch, DecodingLoader, Example, assemble

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
IMAGENET_CLASSES = 1000


class _Files(Dataset[Batch]):
    """What the workers of one epoch need to know. Asked for many examples at once, it gives a batch."""

    def __init__(self, loader: FolderLoader, epoch: int) -> None:
        self.files, self.labels = loader.files, loader.labels
        self.seed, self.epoch = loader.options.seed, epoch
        self.size, self.classes, self.augment = loader.size, loader.classes, loader.augment

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return assemble((self.example(int(index)) for index in indices), self.size, self.classes)

    def example(self, index: int) -> Example:
        # Its random numbers depend on the seed, the epoch and the example: not on its batch, rank or worker.
        random = stream(self.seed, self.epoch, EXAMPLE, index) if self.augment else None
        path = self.files[index]
        return Example(path, Path(path), self.labels[index], random)


class FolderLoader(DecodingLoader):
    """Batches of image files, decoded on the way. See `wirings.train.data.decode` for images that are corrupt."""

    def __init__(
        self, files: Sequence[str], labels: Sequence[int], classes: int, train: bool, options: Options
    ) -> None:
        super().__init__(len(files), classes, train, options)
        self.files, self.labels = files, labels

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader.epoch`. Each call has workers of its own."""
        self.check_epoch(number, start)
        count = self.examples
        order = stream(self.options.seed, number).permutation(count) if self.train else np.arange(count)
        mine = shares(count, self.batch, self.rank, self.world)[start:]
        return self._deliver(
            dataset=_Files(self, number), batch_sampler=[order[part.start : part.stop] for part in mine]
        )


@register("folder")
def make(options: Options) -> Data:
    """Images of any sizes: cut to ``image_size`` (224), for training at random, and normalised as ImageNet is."""
    return _make(options, "folder")


@register("imagenet")
def make_imagenet(options: Options) -> Data:
    """The same, with a check that all 1,000 classes are there; or shards, where the folder has ``train-*.tar``."""
    root = options.directory
    if root is not None and not (root / "train").is_dir() and any(root.glob("train-*.tar")):
        from wirings.train.data.shards import make_shards  # which needs this module

        return make_shards(options, "imagenet", IMAGENET_CLASSES)
    return _make(options, "imagenet")


def _make(options: Options, name: str) -> Data:
    if options.directory is None:
        raise WiringError(f"data set {name!r} needs directory=, the folder that has train and val in it.")
    root = options.directory
    train = root / "train"
    val = next((root / part for part in ("val", "test") if (root / part).is_dir()), None)
    if val is None or not train.is_dir():
        raise WiringError(f"{root} must have the folders train, and val or test; {_what_is_in(root)}.")
    classes, others = class_folders(train), class_folders(val)
    for here, these, there, those in ((val, others, train, classes), (train, classes, val, others)):
        extra = sorted(set(these) - set(those))
        if extra:
            raise WiringError(f"{here} has {len(extra)} classes that {there} has not: {_some(extra)}. They must agree.")
    if name == "imagenet" and len(classes) != IMAGENET_CLASSES:
        raise WiringError(
            f"ImageNet has {IMAGENET_CLASSES:,} classes, but {train} has {len(classes):,}. Unpack the rest, or load it "
            "as 'folder'."
        )
    loaders = []
    for folder in (train, val):
        found = [(path, number) for number, label in enumerate(classes) for path in image_files(folder / label)]
        files, labels = zip(*found, strict=True)
        loaders.append(FolderLoader(files, labels, len(classes), folder == train, options))
    size = loaders[0].size
    return Data(name, len(classes), (3, size, size), loaders[0], loaders[1], names=tuple(classes))


def class_folders(folder: Path) -> list[str]:
    """The classes in a folder, sorted."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise WiringError(f"{folder} must have a folder for each class, with its images; {_what_is_in(folder)}.")
    return names


def image_files(folder: Path) -> list[str]:
    """The images in a class's folder, sorted."""
    files = sorted(entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(ENDINGS))
    if not files:
        raise WiringError(f"{folder} must have images ({', '.join(ENDINGS)}); {_what_is_in(folder)}.")
    return files


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _what_is_in(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    names = sorted(entry.name for entry in os.scandir(folder))
    return f"it has {_some(names)}" if names else "it is empty"
