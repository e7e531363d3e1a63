"""Random images, for tests and for measuring speed: any shape, any number of classes and examples.

Every class has a random image of its own, and an example is the image of its class plus noise, so a model can learn
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.device import device_loaders

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 2**28
"""Bytes of images that are generated. If there are more examples than fit, images repeat, at no cost in memory."""


def noisy_examples(count: int, classes: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` uint8 examples, spread evenly over the classes, from the classes' images (classes, …)."""
    count = max(1, min(count, MAX_BYTES // max(1, classes[0].numel())))
    labels = torch.from_numpy(random.permutation(np.arange(count) % len(classes)))
    noise = torch.from_numpy(random.integers(-64, 65, (count, *classes.shape[1:]), dtype=np.int8))
    return (classes[labels] + noise).to(torch.uint8), labels


@register_dataset("synthetic")
class Synthetic(ImageDataset):
    """Random images, fixed by the seed. Augmentation flips them and shifts them by up to an eighth of their height."""

    title = "synthetic images"
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
    reads_files = False

    def load(
        self,
        options: LoadOptions,
        *,
        examples: int = 2048,
        test_examples: int | None = None,
        classes: int = 10,
        shape: Sequence[int] = (3, 32, 32),
    ) -> Data:
        """Generate the images.

        Args:
            options: Options of every data set. ``image_size`` replaces the last two numbers of ``shape``.
            examples: Number of training images.
            test_examples: Number of test images; a quarter of ``examples`` by default.
            classes: Number of classes.
            shape: Channels, height and width.
        """
        tests = max(1, examples // 4) if test_examples is None else test_examples
        if len(shape) != 3 or min(*shape, examples, tests, classes) < 1:
            raise WiringError(
                "synthetic data needs a shape of channels, height and width, and at least one class and example, got "
                f"shape = {tuple(shape)}, classes = {classes}, examples = {examples} and test_examples = {tests}."
            )
        channels, height, width = shape
        if options.image_size is not None:
            height = width = options.image_size
        random = np.random.default_rng(options.seed)
        # The noise reaches neither 0 nor 255, so nothing is clipped. int16 holds the sum.
        own = torch.from_numpy(random.integers(64, 192, (classes, channels, height, width), dtype=np.int16))
        train, test = (noisy_examples(count, own, random) for count in (examples, tests))
        loaders = device_loaders(
            options, train, test, mean=self.mean[:1] * channels, std=self.std[:1] * channels,
            padding=height // 8, flip=True, examples=(examples, tests),
        )  # fmt: skip
        return Data(self.name, classes, (channels, height, width), *loaders)

    def prepare_image(self, image: Image, image_size: int | None = None) -> Tensor:
        """Prepare an image as colour images of the default shape are; see `ImageDataset.prepare_image`."""
        return super().prepare_image(image, image_size or 32)
