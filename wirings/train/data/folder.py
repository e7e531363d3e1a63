"""Folders of images, one for each class.

``directory/train/<class>/*`` and ``directory/val/<class>/*`` (or ``test``). Classes are numbered by their sorted names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from wirings.errors import WiringError
from wirings.train.data.augment import IMAGENET_MEAN, IMAGENET_STD
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.decode import DecodedBatch, DecodingLoader, EncodedExample, assemble
from wirings.train.data.sampling import EXAMPLE, random_stream, rank_slices

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class _Files(Dataset[DecodedBatch]):
    """What the workers of one epoch need to know. Indexed with several examples at once, it returns a batch."""

    def __init__(self, loader: FolderLoader, epoch: int) -> None:
        self.files, self.labels = loader.files, loader.labels
        self.seed, self.epoch = loader.options.seed, epoch
        self.size, self.classes, self.augment = loader.size, loader.classes, loader.augment

    def __getitems__(self, indices: Sequence[int]) -> DecodedBatch:
        return assemble((self.example(int(index)) for index in indices), self.size, self.classes)

    def example(self, index: int) -> EncodedExample:
        # Its random numbers depend on the seed, the epoch and the example, but not on its batch, rank or worker.
        random = random_stream(self.seed, self.epoch, EXAMPLE, index) if self.augment else None
        path = self.files[index]
        return EncodedExample(path, Path(path), self.labels[index], random)


class FolderLoader(DecodingLoader):
    """Batches of image files. See `DecodingLoader` for its other arguments and for corrupt images.

    Args:
        files: Paths of the images.
        labels: Their labels.
        settings: Arguments of `DecodingLoader` other than ``examples``.
    """

    def __init__(self, files: Sequence[str], labels: Sequence[int], **settings: Any) -> None:
        super().__init__(len(files), **settings)
        self.files, self.labels = files, labels

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader.epoch`. Each call starts its own workers."""
        self.check_epoch(number, start)
        count = self.examples
        order = random_stream(self.options.seed, number).permutation(count) if self.train else np.arange(count)
        mine = rank_slices(count, self.batch, self.rank, self.world)[start:]
        return self._deliver(
            dataset=_Files(self, number), batch_sampler=[order[part.start : part.stop] for part in mine]
        )


@register_dataset("folder")
class ImageFolder(ImageDataset):
    """Your own images, of any size, in one folder for each class.

    They are cropped to ``image_size`` (224 pixels by default), for training at random, and normalised as ImageNet's.
    """

    title = "a folder of images"
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def load(self, options: LoadOptions) -> Data:
        """Find the classes and their images."""
        return load_folder(self, options)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write two classes of three training images and one test image each."""
        from PIL import Image

        for split, count in (("train", 3), ("val", 1)):
            for number, label in enumerate(("cat", "dog")):
                (folder / split / label).mkdir(parents=True)
                for image in range(count):
                    colour = (100 * number, 40 * image, 200)
                    Image.new("RGB", (12, 10), colour).save(folder / split / label / f"{image}.png")
        return {"directory": folder, "image_size": 8, "workers": 0}


def load_folder(dataset: ImageDataset, options: LoadOptions) -> Data:
    """Load a data set from ``train`` and ``val`` (or ``test``) with a folder for each class."""
    if options.directory is None:
        raise WiringError(f"data set {dataset.name!r} needs directory=, the folder that contains train and val.")
    root = options.directory
    train = root / "train"
    val = next((root / part for part in ("val", "test") if (root / part).is_dir()), None)
    if val is None or not train.is_dir():
        raise WiringError(f"{root} must contain the folders train, and val or test; {_contents(root)}.")
    classes, others = class_folders(train), class_folders(val)
    for here, these, there, those in ((val, others, train, classes), (train, classes, val, others)):
        extra = sorted(set(these) - set(those))
        if extra:
            raise WiringError(f"{here} has {len(extra)} classes that {there} lacks: {_first_few(extra)}. Fix either.")
    if dataset.classes is not None and len(classes) != dataset.classes:
        raise WiringError(
            f"{dataset.title} has {dataset.classes:,} classes, but {train} has {len(classes):,}. Unpack the rest, or "
            "load it as 'folder'."
        )
    loaders = []
    for folder in (train, val):
        found = [(path, number) for number, label in enumerate(classes) for path in image_files(folder / label)]
        files, labels = zip(*found, strict=True)
        loaders.append(
            FolderLoader(
                files,
                labels,
                classes=len(classes),
                train=folder == train,
                options=options,
                mean=dataset.mean,
                std=dataset.std,
            )
        )
    size = loaders[0].size
    return Data(dataset.name, len(classes), (3, size, size), loaders[0], loaders[1], names=tuple(classes))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the classes in a folder, sorted."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise WiringError(f"{folder} must contain a folder of images for each class; {_contents(folder)}.")
    return names


def image_files(folder: Path) -> list[str]:
    """Return the paths of the images in a class's folder, sorted."""
    files = sorted(entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(IMAGE_SUFFIXES))
    if not files:
        raise WiringError(f"{folder} must contain images ({', '.join(IMAGE_SUFFIXES)}); {_contents(folder)}.")
    return files


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    names = sorted(entry.name for entry in os.scandir(folder))
    return f"it contains {_first_few(names)}" if names else "it is empty"
