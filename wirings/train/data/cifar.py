"""What CIFAR-10 and CIFAR-100 have in common once their records are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from wirings.errors import WiringError
from wirings.train.data.base import Data, ImageDataset, LoadOptions
from wirings.train.data.device import device_loaders
from wirings.train.data.sampling import hold_out
from wirings.utils.checks import is_int


class CIFAR(ImageDataset):
    """Images of 32 × 32 pixels that are kept on the device. Augmentation flips and shifts them by up to four pixels."""

    classes: int
    image_size: int = 32
    can_fetch = True
    held_out = MappingProxyType({"holdout": 5000})

    def load_records(
        self, options: LoadOptions, read: Callable[[], tuple[np.ndarray, int]], *, holdout: int | None, cutout: int
    ) -> Data:
        """Load the data set from its records.

        Args:
            options: Options of every data set.
            read: Returns the records, uint8 (n, 3073), and how many at their end are test images.
            holdout: Hold out this many training images and test on them instead of on the test set.
            cutout: Side in pixels of a square that augmentation hides at a random place of every image; 0 for none.
        """
        if not is_int(cutout) or not 0 <= cutout <= self.image_size:
            raise WiringError(f"data.options.cutout must be an integer from 0 to {self.image_size}, got {cutout!r}.")
        records, tests = read()
        train: Any = slice(None, -tests)
        test: Any = slice(-tests, None)
        if holdout is not None:
            train, test = hold_out(records[train, 0], holdout)
        shape = (3, self.image_size, self.image_size)
        pixels = torch.from_numpy(records[:, 1:].reshape(-1, *shape))
        labels = torch.from_numpy(records[:, 0].astype(np.int64))
        loaders = device_loaders(
            options, (pixels[train], labels[train]), (pixels[test], labels[test]),
            mean=self.mean, std=self.std, padding=4, flip=True, cutout=cutout,
        )  # fmt: skip
        return Data(self.name, self.classes, shape, *loaders, md5=hashlib.md5(records.data).hexdigest())
