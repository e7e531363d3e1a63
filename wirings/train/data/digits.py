"""Handwritten digits that come with the package: 8 × 8 pixels, 10 classes. Source and licence: DIGITS.md.

1,400 of the 1,797 images are for training, the other 397 for testing.
"""

from __future__ import annotations

from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wirings.train.data.augment import Normalise
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.device import device_loaders
from wirings.train.data.sampling import hold_out

if TYPE_CHECKING:
    from PIL.Image import Image

PEAK = 16
"""The largest pixel value."""
TRAIN_IMAGES = 1400


def load() -> tuple[Tensor, Tensor]:
    """Return all 1,797 images, float32 (1797, 1, 8, 8) from 0 to 1, and their labels, int64 from 0 to 9."""
    with (files("wirings.train.data") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return torch.from_numpy(images).float().div_(PEAK).unsqueeze(1), torch.from_numpy(labels).long()


@register_dataset("digits")
class Digits(ImageDataset):
    """The embedded digits. Augmentation shifts them by up to one pixel; a flipped digit is not a digit."""

    title = "the embedded digits"
    classes: int = 10
    class_names = tuple("0123456789")
    image_size: int = 8
    mean, std = (0.305,), (0.376,)
    reads_files = False
    held_out = MappingProxyType({"holdout": 200})

    def load(self, options: LoadOptions, *, holdout: int | None = None) -> Data:
        """Load the digits.

        Args:
            options: Options of every data set.
            holdout: Hold out this many training images and test on them instead of on the test set.
        """
        images, labels = load()
        pixels = (images * PEAK).round().to(torch.uint8)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
        if holdout is not None:
            rest, held = (torch.from_numpy(places) for places in hold_out(labels[train].numpy(), holdout))
            train, test = train[rest], train[held]
        loaders = device_loaders(
            options, (pixels[train], labels[train]), (pixels[test], labels[test]),
            mean=self.mean, std=self.std, peak=PEAK, padding=1,
        )  # fmt: skip
        return Data(self.name, self.classes, (1, self.image_size, self.image_size), *loaders)

    def prepare_image(self, image: Image, image_size: int | None = None) -> Tensor:
        """Average the image over 8 × 8 areas and round it to the digits' 17 grey levels. Expects light on dark."""
        from PIL.Image import Resampling

        side = (self.image_size, self.image_size)
        grey = np.asarray(image.convert("L").resize(side, Resampling.BOX), dtype=np.float32) / 255
        pixels = torch.from_numpy((grey * PEAK).round().astype(np.uint8))[None]
        return Normalise(self.mean, self.std, peak=PEAK)(pixels[None])[0]
