"""One image from a file, as a model that was trained on a data set wants to see it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.data import cifar10, embedded
from wirings.train.data.augment import IMAGENET_MEAN, IMAGENET_STD, Normalise, centre_crop, decode, need_pillow

NAMES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "digits": tuple("0123456789"),
}


def prepared(path: Path, name: str, image_size: int | None = None) -> tuple[Tensor, tuple[str, ...] | None]:
    """The image, (channels, height, width), normalised as the data set's, and its classes' names if known."""
    need_pillow()
    try:
        image = decode(path)
    except FileNotFoundError as error:
        raise WiringError(f"there is no image {path}.") from error
    except Exception as error:  # Pillow has many ways to say that an image is damaged
        raise WiringError(f"{path} is no image that can be read: {error}.") from error
    if name == "digits":  # light on dark, as the embedded ones are
        from PIL.Image import Resampling

        grey = np.asarray(image.convert("L").resize((8, 8), Resampling.BOX), dtype=np.float32) / 255
        pixels = torch.from_numpy((grey * embedded.PEAK).round().astype(np.uint8))[None]
        normalise = Normalise([embedded.MEAN], [embedded.STD], peak=embedded.PEAK)
    else:
        cifar = name == "cifar10"
        size = 32 if cifar else image_size or 224
        small = image if image.size == (size, size) else centre_crop(image, size)
        pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)
        mean, std = (cifar10.MEAN, cifar10.STD) if cifar else (IMAGENET_MEAN, IMAGENET_STD)
        normalise = Normalise(mean, std)
    return normalise(pixels[None])[0], NAMES.get(name)
