"""What loaders that decode images share: worker processes decode and crop, the device normalises."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from wirings.errors import WiringError
from wirings.train.data.augment import IMAGENET_MEAN, IMAGENET_STD, Normalise, centre_crop, decode, need_pillow
from wirings.train.data.augment import random_resized_crop as random_crop
from wirings.train.data.base import Loader, Options


class Example(NamedTuple):
    """An image that is still encoded."""

    name: str
    """Where it comes from, for errors."""
    source: Path | bytes | None
    """None where it could not even be read; then ``reason`` says why."""
    label: int
    random: np.random.Generator | None
    """For augmentation; None for none."""
    reason: str = ""


class Batch(NamedTuple):
    """What a worker sends: mistakes travel as values, since raising in a worker buries them in tracebacks."""

    images: Tensor
    labels: Tensor
    bad: list[tuple[str, str]]
    """Images that could not be decoded, and why."""
    label: tuple[str, int] | None
    """An image whose label is not a class."""


def assemble(examples: Iterable[Example], size: int, classes: int) -> Batch:
    """Decode a batch: uint8 images (n, 3, size, size) and labels (n,), without those that cannot be decoded."""
    images: list[Tensor] = []
    labels: list[int] = []
    bad: list[tuple[str, str]] = []
    wrong = None
    for name, source, label, random, reason in examples:
        if source is None:
            bad.append((name, reason))
            continue
        try:
            image = decode(source)
        except Exception as error:  # Pillow has many ways to say that an image is damaged
            bad.append((name, str(error) or type(error).__name__))
            continue
        if not 0 <= label < classes:
            wrong = (name, label)
        image = centre_crop(image, size) if random is None else random_crop(image, size, random)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        labels.append(label)
    stacked = torch.stack(images) if images else torch.zeros(0, 3, size, size, dtype=torch.uint8)
    return Batch(stacked, torch.tensor(labels, dtype=torch.int64), bad, wrong)


def as_it_is(batch: Any) -> Any:
    """For `DataLoader`, which would put batches together itself."""
    return batch


class DecodingLoader(Loader):
    """A loader whose images are decoded by worker processes.

    An image that cannot be decoded is an error that names it; with ``skip_corrupt`` it is left out of its batch, which
    is smaller by it, and named in ``skipped``.
    """

    def __init__(self, examples: int, classes: int, train: bool, options: Options) -> None:
        super().__init__(examples, options.batch, options.rank, options.world)
        need_pillow()
        self.classes, self.train, self.options = classes, train, options
        self.size = options.image_size or 224
        self.augment = train and options.augment
        self.skipped: list[str] = []

    def _deliver(self, **source: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a `DataLoader`, made with these arguments and ours, and put what it gives on the device."""
        device, on_gpu = self.options.device, self.options.device.type == "cuda"
        # Not kept: the loader may travel to workers, which must not have anything of the device's.
        normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD, device)
        with warnings.catch_warnings():
            # Four workers are our default, not the user's mistake, on machines with fewer cores as well. And Python
            # warns of forks in general; these children, which PyTorch starts in its own way, start no threads.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")
            loader = DataLoader(
                num_workers=self.options.workers,
                collate_fn=as_it_is,
                pin_memory=on_gpu,
                generator=torch.Generator(),  # one of its own: the global one is left as it is
                **source,
            )
            batches = iter(loader)
        for images, labels, bad, wrong in batches:
            self._report(bad, wrong)
            images = images.to(device, non_blocking=on_gpu)
            yield normalise(images), labels.to(device, non_blocking=on_gpu)

    def _report(self, bad: list[tuple[str, str]], wrong: tuple[str, int] | None) -> None:
        if wrong is not None:
            raise WiringError(f"labels must be from 0 to {self.classes - 1}, but that of {wrong[0]} is {wrong[1]}.")
        if bad and not self.options.skip_corrupt:
            name, reason = bad[0]
            raise WiringError(
                f"{name} cannot be decoded ({reason}). Replace or remove it, or leave such images out with "
                "skip_corrupt=True."
            )
        self.skipped += [name for name, _ in bad if name not in self.skipped]
