"""Made-up images, for tests and for measuring speed: any shape, any number of classes and examples, fixed by the seed.

Every class has an image of its own, and an example is its class's image with noise, so that a model can learn them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.data.base import Data, Options, register
from wirings.train.data.device import DeviceLoader, test_batch

MOST = 2**28
"""Bytes of images that are made. More examples than these hold repeat them, which costs no memory."""


def examples_of(count: int, classes: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Up to ``count`` uint8 examples, whose classes are spread evenly, of the classes' images (classes, …)."""
    count = max(1, min(count, MOST // max(1, classes[0].numel())))
    labels = torch.from_numpy(random.permutation(np.arange(count) % len(classes)))
    noise = torch.from_numpy(random.integers(-64, 65, (count, *classes.shape[1:]), dtype=np.int8))
    return (classes[labels] + noise).to(torch.uint8), labels


@register("synthetic")
def make(
    options: Options,
    *,
    examples: int = 2048,
    test_examples: int | None = None,
    classes: int = 10,
    shape: Sequence[int] = (3, 32, 32),
) -> Data:
    """Settings: ``examples`` to train on, ``test_examples`` (a quarter as many), ``classes``, and ``shape``.

    ``shape`` is channels, height and width; ``image_size`` is another way to say the last two. Augmentation mirrors
    images and moves them by up to an eighth of their height.
    """
    options.refuse("synthetic", directory=True)
    tests = max(1, examples // 4) if test_examples is None else test_examples
    if len(shape) != 3 or min(*shape, examples, tests, classes) < 1:
        raise WiringError(
            "synthetic data need a shape of channels, height and width, and at least one class and example, "
            f"but shape is {tuple(shape)}, classes {classes}, examples {examples} and test_examples {tests}."
        )
    channels, height, width = shape
    if options.image_size is not None:
        height = width = options.image_size
    random = np.random.default_rng(options.seed)
    # Halfway between black and white within the noise's reach, so that nothing has to be cut off. int16 holds the sum.
    own = torch.from_numpy(random.integers(64, 192, (classes, channels, height, width), dtype=np.int16))
    train, test = (examples_of(count, own, random) for count in (examples, tests))
    both: dict[str, Any] = {
        "mean": [0.5] * channels, "std": [0.2] * channels, "device": options.device, "seed": options.seed,
        "rank": options.rank, "world": options.world,
    }  # fmt: skip
    augment: dict[str, Any] = {"padding": height // 8, "flip": True} if options.augment else {}
    return Data(
        name="synthetic",
        classes=classes,
        shape=(channels, height, width),
        train=DeviceLoader(train[0], train[1], batch=options.batch, examples=examples, shuffle=True, **augment, **both),
        test=DeviceLoader(
            test[0],
            test[1],
            batch=test_batch(options.batch, options.world, (channels, height, width)),
            examples=tests,
            **both,
        ),
    )
