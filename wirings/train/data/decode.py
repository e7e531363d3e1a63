"""Base of loaders that decode images: worker processes decode and crop, the device normalises."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from wirings.errors import WiringError
from wirings.train.data.augment import (
    DEFAULT_IMAGE_SIZE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageCrop,
    Normalise,
    decode,
    need_pillow,
)
from wirings.train.data.base import Loader, LoadOptions
from wirings.utils.signals import outlast_signals

DEFAULT_CROP = ImageCrop()


class EncodedExample(NamedTuple):
    """An encoded image."""

    name: str
    """Where it comes from, for error messages."""
    source: Path | bytes | None
    """The file or its bytes; None if it could not be read, for a ``reason``."""
    label: int
    random: np.random.Generator | None
    """Random numbers for augmentation; None for an image that is not augmented."""
    reason: str = ""


class DecodedBatch(NamedTuple):
    """What a worker sends. Errors are sent as values, since an exception in a worker is buried in tracebacks."""

    images: Tensor
    labels: Tensor
    corrupt: list[tuple[str, str]]
    """Images that could not be decoded, and why."""
    bad_label: tuple[str, int] | None
    """An image whose label is out of range, and the label."""


def assemble(
    examples: Iterable[EncodedExample], size: int, classes: int, crop: ImageCrop = DEFAULT_CROP
) -> DecodedBatch:
    """Decode a batch into uint8 images (n, 3, size, size) and labels (n,), without the images that are corrupt."""
    images: list[Tensor] = []
    labels: list[int] = []
    corrupt: list[tuple[str, str]] = []
    bad_label = None
    for name, source, label, random, reason in examples:
        if source is None:
            corrupt.append((name, reason))
            continue
        try:
            image = decode(source)
            image = crop.square(image, size) if random is None else crop.draw(image, size, random)
        except Exception as error:  # Pillow raises exceptions of many types for damaged images
            corrupt.append((name, str(error).rstrip(".") or type(error).__name__))
            continue
        if not 0 <= label < classes:
            bad_label = (name, label)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        labels.append(label)
    stacked = torch.stack(images) if images else torch.zeros(0, 3, size, size, dtype=torch.uint8)
    return DecodedBatch(stacked, torch.tensor(labels, dtype=torch.int64), corrupt, bad_label)


def identity(batch: Any) -> Any:
    """Return a batch unchanged: a `collate_fn` for `DataLoader`, whose own would stack the examples again."""
    return batch


class DecodingLoader(Loader):
    """A loader whose images are decoded by worker processes.

    An image that cannot be decoded raises an error that names it. With ``options.skip_corrupt`` it is left out of its
    batch instead, which becomes smaller, and listed in ``skipped``.

    Args:
        examples: Number of examples, over all ranks.
        classes: Number of classes, which labels are checked against.
        train: Whether this is the training set, which is shuffled and may be augmented.
        options: What `wirings.train.data.load` was called with.
        mean: Mean of each channel, where pixels range from 0 to 1.
        std: Standard deviation of each channel.
        crop: How images are cropped.
    """

    def __init__(
        self,
        examples: int,
        classes: int,
        train: bool,
        options: LoadOptions,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        crop: ImageCrop = DEFAULT_CROP,
    ) -> None:
        super().__init__(examples, options.batch, options.rank, options.world)
        need_pillow()
        self.classes, self.train, self.options, self.mean, self.std = classes, train, options, mean, std
        self.size = options.image_size or DEFAULT_IMAGE_SIZE
        self.augment, self.crop = train and options.augment, crop
        self.skipped: list[str] = []

    def _deliver(self, **source: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a `DataLoader` that is created with these arguments and ours, and move its batches to the device."""
        device, on_gpu = self.options.device, self.options.device.type == "cuda"
        # Not an attribute: the loader may be sent to workers, which must not hold tensors of the device.
        normalise = Normalise(self.mean, self.std, device)
        for images, labels in self.decoded(**source):
            images = images.to(device, non_blocking=on_gpu)
            yield normalise(images), labels.to(device, non_blocking=on_gpu)

    def decoded(self, **source: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a `DataLoader` that is created with these arguments and ours: uint8 images and their labels."""
        with warnings.catch_warnings():
            # Four workers are our default, even on machines with fewer cores, so that is not the user's mistake. And
            # Python warns of forks in general; the children that PyTorch starts here start no threads.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")
            loader = DataLoader(
                num_workers=self.options.workers,
                collate_fn=identity,
                pin_memory=self.options.device.type == "cuda",
                worker_init_fn=outlast_signals,
                generator=torch.Generator(),  # so that the global generator is not advanced
                **source,
            )
            batches = iter(loader)
        for images, labels, corrupt, bad_label in batches:
            self._report(corrupt, bad_label)
            yield images, labels

    def _report(self, corrupt: list[tuple[str, str]], bad_label: tuple[str, int] | None) -> None:
        if bad_label is not None:
            name, label = bad_label
            raise WiringError(f"labels must be from 0 to {self.classes - 1}, got {label} for {name}.")
        if corrupt and not self.options.skip_corrupt:
            name, reason = corrupt[0]
            raise WiringError(
                f"{name} cannot be decoded ({reason}). Replace or remove it, or skip such images with "
                "skip_corrupt=True."
            )
        self.skipped += [name for name, _ in corrupt if name not in self.skipped]
        if corrupt and len(self.skipped) == self.examples:
            name, reason = corrupt[0]
            raise WiringError(
                f"none of the {self.examples:,} images can be decoded, such as {name} ({reason}). Replace them, or "
                "give another folder."
            )
