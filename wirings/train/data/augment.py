"""What is done to images: cropping, flipping and resizing by Pillow on the host, normalising on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalise:
    """From uint8 images (n, channels, height, width), whatever their strides, to contiguous float32 ones.

    Pixels from 0 to ``peak`` stand for 0 to 1, from which the channel's mean is taken before its deviation divides.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu", peak: int = 255
    ) -> None:
        if len(mean) != len(std) or min(std) <= 0:
            raise WiringError(f"a mean and a positive deviation for every channel, but they are {mean} and {std}.")
        middle, width = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
        # Folded into one factor and one summand: one pass converts and scales, a second one adds.
        self.factor = (1 / (width * peak)).float().to(device)
        self.summand = (-middle / width).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """The images, normalised."""
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        return torch.mul(images, self.factor, out=out).add_(self.summand)


def need_pillow() -> None:
    """Raise where Pillow, which decodes images, is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise WiringError("decoding images needs Pillow, which is not installed: pip install pillow.") from error


def decode(source: Path | bytes) -> Image:
    """The image in a file, or in its bytes, as RGB. Whatever is wrong with it raises, in one of Pillow's many ways."""
    from PIL import Image

    with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
        return image.convert("RGB")


def centre_crop(image: Image, size: int) -> Image:
    """For evaluation: the shorter side resized to 256/224 of ``size``, the centre cut out."""
    from PIL.Image import Resampling

    scale = round(size * 256 / 224) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def random_resized_crop(
    image: Image,
    size: int,
    random: np.random.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Image:
    """For training: a random rectangle, resized, and in half the cases mirrored.

    Its area is uniform within ``scale`` of the image's; the logarithm of its width over its height is uniform too.
    """
    from PIL.Image import Resampling, Transpose

    left, top, width, height = crop_box(image.size, random, scale, ratio)
    image = image.crop((left, top, left + width, top + height)).resize((size, size), Resampling.BILINEAR)
    return image.transpose(Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def crop_box(
    full: tuple[int, int], random: np.random.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random rectangle within an image of ``full`` width and height.

    A rectangle that does not fit is drawn again. After ten, the largest one in the centre that keeps to ``ratio``.
    """
    wide, high = full
    for _ in range(10):
        area = wide * high * random.uniform(*scale)
        shape = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < width <= wide and 0 < height <= high:
            left, top = (int(random.integers(0, room + 1)) for room in (wide - width, high - height))
            return left, top, width, height
    width = min(wide, max(1, round(high * ratio[1])))
    height = min(high, max(1, round(wide / ratio[0])))
    return (wide - width) // 2, (high - height) // 2, width, height
