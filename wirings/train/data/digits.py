"""The 8×8 handwritten digits that come with the package. Source and licence: DIGITS.md beside this file."""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor


def load() -> tuple[Tensor, Tensor]:
    """All 1,797 images, float32 in [0, 1] of shape (1797, 1, 8, 8), and their labels, int64 from 0 to 9."""
    with (files("wirings.train.data") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return torch.from_numpy(images).float().div_(16).unsqueeze(1), torch.from_numpy(labels).long()
