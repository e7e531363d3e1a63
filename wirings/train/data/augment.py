"""Image operations: Pillow decodes, crops, flips and resizes on the host; the device normalises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError, unknown
from wirings.utils.checks import is_int, is_number
from wirings.utils.text import brief

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
DEFAULT_IMAGE_SIZE = 224
"""Height and width in pixels of images that are resized, unless the user chooses another size."""
CROPS = ("resized", "padded")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
"""What images are decoded from, whatever their names say. Pillow starts other programs for some others, such as EPS."""
MOST_PIXELS = 2**26
"""The most pixels that an image may be enlarged to; takes 256 MiB. A row of pixels would become a very large square."""


class Normalise:
    """Convert uint8 images, (n, channels, height, width) with any strides, to contiguous normalised float32 images.

    Args:
        mean: Mean of each channel, where pixels from 0 to ``peak`` are scaled to the range from 0 to 1.
        std: Standard deviation of each channel, on the same scale.
        device: Device of the images.
        peak: The largest pixel value.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu", peak: int = 255
    ) -> None:
        if len(mean) != len(std) or min(std) <= 0:
            raise WiringError(
                f"expected a mean and a positive standard deviation for every channel, got {mean} and {std}."
            )
        middle, width = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
        # Folded into one factor and one summand: the first pass converts and scales, the second one adds.
        self.factor = (1 / (width * peak)).float().to(device)
        self.summand = (-middle / width).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        return torch.mul(images, self.factor, out=out).add_(self.summand)


def need_pillow() -> None:
    """Raise an error if Pillow, which decodes images, is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise WiringError("decoding images needs Pillow, which is not installed: pip install pillow.") from error


def decode(source: Path | bytes) -> Image:
    """Decode an image, from a file or from its bytes, as RGB. Pillow raises exceptions of many types if it cannot."""
    from PIL import Image

    with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
        return image.convert("RGB")


def read_image(path: Path) -> Image:
    """Read a user's image file as RGB."""
    need_pillow()
    try:
        return decode(path)
    except FileNotFoundError as error:
        raise WiringError(f"there is no image {path}.") from error
    except Exception as error:  # Pillow raises exceptions of many types for damaged images
        raise WiringError(f"{path} cannot be read as an image: {error}.") from error


def centre_crop(image: Image, size: int) -> Image:
    """Resize the shorter side to 256/224 of ``size`` and crop the centre, as is usual for evaluation.

    Raises:
        WiringError: if a long, thin image would become larger than `MOST_PIXELS`.
    """
    from PIL.Image import Resampling

    scale = round(size * 256 / 224) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    if width * height > max(MOST_PIXELS, image.size[0] * image.size[1]):
        raise WiringError(
            f"an image of {image.size[0]:,} × {image.size[1]:,} pixels is too thin: resized, it would have {width:,} × "
            f"{height:,}. Crop it."
        )
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
    """Crop a random rectangle, resize it, and flip it horizontally half the time, as is usual for training.

    Args:
        image: The image.
        size: Height and width of the result in pixels.
        random: Source of random numbers.
        scale: Range of the rectangle's area relative to the image's; drawn uniformly.
        ratio: Range of the rectangle's width over its height; its logarithm is drawn uniformly.
    """
    from PIL.Image import Resampling, Transpose

    left, top, width, height = crop_box(image.size, random, scale, ratio)
    image = image.crop((left, top, left + width, top + height)).resize((size, size), Resampling.BILINEAR)
    return image.transpose(Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


@dataclass(frozen=True)
class ImageCrop:
    """How an image becomes a square: at random for training, always in the same way for testing."""

    kind: str = "resized"
    """``"resized"``: a random part of the image, resized, as is usual for ImageNet. ``"padded"``: the image with black
    pixels around it, cropped to its own size, as is usual for small images; those of the right size are not resized."""
    padding: int = 4
    """Black pixels on each side, for ``"padded"``."""
    scale: tuple[float, float] = (0.08, 1.0)
    """The range of the part's area relative to the image's, for ``"resized"``."""

    def __post_init__(self) -> None:
        if self.kind not in CROPS:
            raise unknown("data.options.crop", str(self.kind), CROPS)
        if not is_int(self.padding) or not 0 <= self.padding <= 2**10:
            raise WiringError(f"data.options.padding must be an integer from 0 to 1,024, got {brief(self.padding)}.")
        scale = self.scale
        two = isinstance(scale, Sequence) and len(scale) == 2 and all(map(is_number, scale))
        if not two or not 0 < scale[0] <= scale[1] <= 1:
            raise WiringError(
                "data.options.scale must be the smallest and the largest area of a crop, two numbers above 0 and up to "
                f"1, got {brief(scale)}."
            )

    def square(self, image: Image, size: int) -> Image:
        """The image as it is tested."""
        return image if self.kind == "padded" and image.size == (size, size) else centre_crop(image, size)

    def draw(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """The image as it is trained on: cropped and flipped at random."""
        if self.kind == "resized":
            return random_resized_crop(image, size, random, (self.scale[0], self.scale[1]))
        from PIL.Image import Transpose

        left, top = (int(n) - self.padding for n in random.integers(0, 2 * self.padding + 1, 2))
        image = self.square(image, size).crop((left, top, left + size, top + size))  # black outside of the image
        return image.transpose(Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def crop_box(
    full: tuple[int, int], random: np.random.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Draw the left, top, width and height of a random rectangle within an image of ``full`` width and height.

    A rectangle that does not fit is drawn again. After ten attempts, the largest centred one within ``ratio`` is taken.
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
