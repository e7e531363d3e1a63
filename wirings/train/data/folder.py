"""Folders of images, one for each class.

``directory/train/<class>/*`` and ``directory/val/<class>/*`` (or ``test``). Classes are numbered by their sorted names.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from wirings.errors import WiringError
from wirings.train.data.augment import IMAGENET_MEAN, IMAGENET_STD, ImageCrop, read_image
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.decode import DEFAULT_CROP, DecodedBatch, DecodingLoader, EncodedExample, assemble
from wirings.train.data.device import Split, device_loaders
from wirings.train.data.sampling import EXAMPLE, hold_out, hold_out_of_each, random_stream, rank_slices
from wirings.utils.checks import is_number
from wirings.utils.text import brief

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class _Files(Dataset[DecodedBatch]):
    """What the workers of one epoch need to know. Indexed with several examples at once, it returns a batch."""

    def __init__(self, loader: FolderLoader, epoch: int) -> None:
        self.files, self.labels = loader.files, loader.labels
        self.seed, self.epoch = loader.options.seed, epoch
        self.size, self.classes, self.augment, self.crop = loader.size, loader.classes, loader.augment, loader.crop

    def __getitems__(self, indices: Sequence[int]) -> DecodedBatch:
        return assemble((self.example(int(index)) for index in indices), self.size, self.classes, self.crop)

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

    def read(self) -> Split:
        """Decode all images once, without augmentation."""
        parts = [range(start, min(start + 256, self.examples)) for start in range(0, self.examples, 256)]
        plain = _Files(self, 0)
        plain.augment = False
        images, labels = zip(*self.decoded(dataset=plain, batch_sampler=[list(part) for part in parts]), strict=True)
        return torch.cat(images), torch.cat(labels)


_CROP_OF = {"padding": "padded", "scale": "resized"}
"""The kind of crop that an option belongs to."""
ON_DEVICE = 2**32
"""The most bytes of images that are kept on the device."""


@register_dataset("folder")
class ImageFolder(ImageDataset):
    """Your own images, of any size, in one folder for each class.

    They are cropped to ``image_size`` (224 pixels by default), for training at random, and normalised as ImageNet's.
    Small images that are cropped by padding are decoded once and kept on the device, up to 4 GiB.
    """

    title = "a folder of images"
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    crop = ImageCrop()
    held_out = MappingProxyType({"holdout": 0.1})

    def load(
        self,
        options: LoadOptions,
        *,
        crop: str = "resized",
        padding: int | None = None,
        scale: Sequence[float] | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        holdout: float | None = None,
    ) -> Data:
        """Find the classes and their images.

        Args:
            options: Options of every data set.
            crop: ``"resized"``, a random part of an image is resized, or ``"padded"``, an image is padded and cropped
                to its own size. Both flip half of the images.
            padding: With ``"padded"``, the black pixels on each side, 4 by default.
            scale: With ``"resized"``, the range of the part's area relative to the image's, by default 0.08 to 1.
            mean: Mean of each channel, where pixels range from 0 to 1.
            std: Standard deviation of each channel.
            holdout: Test on so many training images instead of on the test set; below 1, a fraction of them.
        """
        given = {"crop": crop, "padding": padding, "scale": scale, "mean": mean, "std": std}
        return load_folder(self.with_options(given), options, holdout)

    def with_options(self, options: Mapping[str, Any]) -> ImageFolder:
        """This data set with options of `load`."""
        chosen, kind = copy.copy(self), options.get("crop", "resized")
        given = {name: options[name] for name in _CROP_OF if options.get(name) is not None}
        chosen.crop = ImageCrop(kind, **given)
        for name in given:
            if kind != _CROP_OF[name]:
                raise WiringError(
                    f"data.options.{name} changes nothing with data.options.crop = {kind!r}. Drop it, or set "
                    f"data.options.crop={_CROP_OF[name]}."
                )
        chosen.mean = _channels("mean", options.get("mean", self.mean), 0)
        chosen.std = _channels("std", options.get("std", self.std), 1e-6)
        return chosen

    def square(self, image: Image, side: int) -> Image:
        """A user's image as it is tested."""
        return self.crop.square(image, side)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write two classes of three training images and one test image each."""
        from PIL.Image import new

        for split, count in (("train", 3), ("val", 1)):
            for number, label in enumerate(("cat", "dog")):
                (folder / split / label).mkdir(parents=True)
                for image in range(count):
                    colour = (100 * number, 40 * image, 200)
                    new("RGB", (12, 10), colour).save(folder / split / label / f"{image}.png")
        return {"directory": folder, "image_size": 8, "workers": 0}


def load_folder(dataset: ImageDataset, options: LoadOptions, holdout: float | None = None) -> Data:
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
    crop = getattr(dataset, "crop", DEFAULT_CROP)
    parts = [_labelled(folder, classes) for folder in (train, val)]
    if holdout is not None:
        parts = _held_out(*parts[0], holdout, classes)
    loaders: list[FolderLoader] = []
    for files, labels in parts:
        loaders.append(
            FolderLoader(
                files,
                labels,
                classes=len(classes),
                train=not loaders,
                options=options,
                mean=dataset.mean,
                std=dataset.std,
                crop=crop,
            )
        )
    if crop.kind == "padded" and options.image_size is None:
        raise WiringError(_needs_size(loaders[0].files[0]))
    size = loaders[0].size
    padded = 3 * (size + 2 * crop.padding) ** 2 * sum(loader.examples for loader in loaders)
    if crop.kind == "padded" and padded <= ON_DEVICE:
        kept = device_loaders(
            options, loaders[0].read(), loaders[1].read(),
            mean=dataset.mean, std=dataset.std, padding=crop.padding, flip=True,
        )  # fmt: skip
        for loader, reader in zip(kept, loaders, strict=True):
            loader.skipped = reader.skipped  # type: ignore[attr-defined]
        return Data(dataset.name, len(classes), (3, size, size), *kept, names=tuple(classes))
    return Data(dataset.name, len(classes), (3, size, size), loaders[0], loaders[1], names=tuple(classes))


def _labelled(folder: Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """The images of all classes, and their labels."""
    of_classes = [image_files(folder / label) for label in classes]
    return [path for files in of_classes for path in files], [
        number for number, files in enumerate(of_classes) for _ in files
    ]


def _held_out(
    files: list[str], labels: list[int], holdout: Any, classes: Sequence[str]
) -> list[tuple[list[str], list[int]]]:
    """Training images in two parts: those to train on, and those to test on, of every class alike.

    A number is divided among the classes equally, a fraction is taken of each class, and at least one image.
    """
    if is_number(holdout) and 0 < holdout < 1:
        parts = _fraction_of_each(np.array(labels), holdout, classes)
    else:
        parts = hold_out(np.array(labels), holdout)
    return [([files[i] for i in part], [labels[i] for i in part]) for part in parts]


def _fraction_of_each(labels: np.ndarray, fraction: float, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the images to train on and of those to hold out, both sorted; the same for every seed."""
    sizes = np.bincount(labels).tolist()
    for name, size in zip(classes, sizes, strict=True):
        if size < 2:
            raise WiringError(
                f"holdout = {fraction:g} takes an image of every class, but class {name!r} has only one, so that none "
                "would be left to train on. Add images of it."
            )
    return hold_out_of_each(labels, [min(max(round(fraction * size), 1), size - 1) for size in sizes])


def _needs_size(path: str) -> str:
    """Why images that are not resized need a size."""
    width, height = read_image(Path(path)).size
    return (
        "with data.options.crop = 'padded' images keep their own size, so set data.image_size, such as "
        f"data.image_size={min(width, height)}: {path} has {width:,} × {height:,} pixels."
    )


def _channels(name: str, values: Any, least: float) -> tuple[float, float, float]:
    """Check the mean or the deviation of three channels."""
    fine = isinstance(values, Sequence) and len(values) == 3 and all(map(is_number, values))
    if not fine or not all(least <= value <= 1 for value in values):
        expected = f"data.options.{name} must be a number for each of three channels, where pixels range from 0 to 1"
        raise WiringError(f"{expected}, got {brief(values)}.")
    first, second, third = (float(value) for value in values)
    return first, second, third


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
