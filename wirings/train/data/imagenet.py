"""ImageNet (ILSVRC 2012): 1.28 M images to train on, 50,000 to test on, 1,000 classes.

It cannot be downloaded without an account, so it is read from your folder: either ``train`` and ``val`` with a folder
for each class (see `wirings.train.data.folder`), or shards (see `wirings.train.data.shards`).
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wirings.errors import WiringError
from wirings.train.data.augment import IMAGENET_MEAN, IMAGENET_STD, centre_crop
from wirings.train.data.base import Data, ImageDataset, LoadOptions, register_dataset
from wirings.train.data.folder import load_folder
from wirings.train.data.shards import load_shards, write_sample_shards

if TYPE_CHECKING:
    from PIL.Image import Image


@register_dataset("imagenet")
class ImageNet(ImageDataset):
    """ImageNet, from folders or shards. Images are cropped to ``image_size``, 224 pixels by default."""

    title = "ImageNet"
    classes: int = 1000
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    held_out = MappingProxyType({"holdout": 0.02})

    def load(self, options: LoadOptions, *, holdout: float | None = None) -> Data:
        """Load the folder of each class; or the shards, if there are ``train-*.tar`` files and no folder ``train``.

        Args:
            options: Options of every data set.
            holdout: Test on so many training images instead of on the test set; below 1, a fraction of them. Not with
                shards.
        """
        root = options.directory
        if root is not None and not (root / "train").is_dir() and any(root.glob("train-*.tar")):
            if holdout is not None:
                raise WiringError(
                    f"data.options.holdout takes images of class folders, but {root} has shards. Leave out some of the "
                    "train-*.tar files, give them as val-*.tar, and set data.options.holdout=null."
                )
            return load_shards(self, options, self.classes)
        return load_folder(self, options, holdout)

    def square(self, image: Image, side: int) -> Image:
        """A user's image as it is tested, whatever its size."""
        return centre_crop(image, side)

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write shards of a few images."""
        write_sample_shards(folder)
        return {"directory": folder, "image_size": 8, "workers": 0}
