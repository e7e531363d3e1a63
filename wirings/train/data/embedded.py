"""The embedded digits as a data set to train on: 1,400 images of 8 × 8 to train, the other 397 to test."""

from __future__ import annotations

from typing import Any

import torch

from wirings.train.data import digits
from wirings.train.data.base import Data, Options, hold_out, register
from wirings.train.data.device import DeviceLoader, test_batch

SHAPE = (1, 8, 8)
PEAK = 16
MEAN, STD = 0.305, 0.376


@register("digits")
def make(options: Options, *, holdout: int | None = None) -> Data:
    """The same images as in the demo. Augmentation moves them by up to one pixel; a mirrored digit is not a digit.

    Settings: ``holdout``, of the training images, are tested on instead of the test set, and not trained on.
    """
    options.refuse("digits", directory=True, size=8)
    images, labels = digits.load()
    pixels = (images * PEAK).round().to(torch.uint8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    if holdout is not None:
        rest, held = (torch.from_numpy(places) for places in hold_out(labels[train].numpy(), holdout))
        train, test = train[rest], train[held]
    both: dict[str, Any] = {
        "mean": [MEAN], "std": [STD], "peak": PEAK, "device": options.device, "seed": options.seed,
        "rank": options.rank, "world": options.world,
    }  # fmt: skip
    padding = 1 if options.augment else 0
    return Data(
        name="digits",
        classes=10,
        shape=SHAPE,
        train=DeviceLoader(pixels[train], labels[train], batch=options.batch, padding=padding, shuffle=True, **both),
        test=DeviceLoader(pixels[test], labels[test], batch=test_batch(options.batch, options.world, SHAPE), **both),
    )
