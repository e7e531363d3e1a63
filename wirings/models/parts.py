"""Building blocks that several networks for images share."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, cat, nn
from torch.nn.functional import avg_pool2d, relu

from wirings.errors import WiringError
from wirings.models.option_groups import NetworkSize

M = TypeVar("M", bound=nn.Module)
STRIDE = 32
"""Factor by which the networks of Table 3 divide an image's height and width."""
SMALL_IMAGE = 64
"""Up to this height and width in pixels, the first convolution of networks that adapt to the images has no stride."""


def conv_norm(before: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a padded convolution without bias and a batch norm."""
    conv = nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels)]


def depthwise(channels: int, stride: int = 1) -> list[nn.Module]:
    """Return a 3 × 3 depthwise convolution and a batch norm."""
    return conv_norm(channels, channels, 3, stride, groups=channels)


def stem(channels: int) -> nn.Sequential:
    """Return a convolution and a max pooling that divide an image's height and width by four."""
    return nn.Sequential(*conv_norm(3, channels, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))


class ShortcutUnit(nn.Module):
    """Base of units that join a branch to a shortcut, followed by a ReLU.

    With a stride of 2 the shortcut is pooled and concatenated, otherwise it is added.
    """

    def __init__(self, branch: nn.Module, stride: int) -> None:
        super().__init__()
        self.branch, self.stride = branch, stride

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 2:
            return relu(cat([avg_pool2d(x, 3, 2, padding=1), self.branch(x)], 1))
        return relu(x + self.branch(x))


class PooledClassifier(nn.Module):
    """Base of networks that are ``features`` with a stride of 32, average pooling, and a linear ``head``.

    Takes images, (batch, 3, height, width), and returns logits, (batch, classes).
    """

    def __init__(self, size: NetworkSize) -> None:
        super().__init__()
        check_width(size.width)
        self.features, channels = self.build_features(size.width)
        self.head = nn.Linear(channels, size.classes)
        for_images(self, size.image_size)

    def build_features(self, width: float) -> tuple[nn.Module, int]:
        """Return the layers before the pooling and their number of output channels."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((-2, -1)))


def for_images(model: M, image_size: int) -> M:
    """Mark a network with a stride of 32 as one for square images of this size, its ``input_shape``."""
    check_image_size(image_size, STRIDE)
    model.input_shape = (3, image_size, image_size)  # type: ignore[assignment]
    return model


def check_image_size(image_size: int, smallest: int) -> None:
    """Raise an error if a network with a stride of ``smallest`` leaves nothing of images of this size."""
    if image_size < smallest:
        raise WiringError(
            f"image_size = {image_size} is too small: the network divides an image's height and width by {smallest}, "
            f"so they must be at least {smallest} pixels."
        )


def check_images(images: Tensor, smallest: int) -> None:
    """Raise an error if images are not a batch, or smaller than a network's stride."""
    if images.dim() != 4 or min(images.shape[-2:]) < smallest:
        raise WiringError(
            f"expected images (batch, 3, height, width) of at least {smallest} × {smallest} pixels, got "
            f"{tuple(images.shape)}."
        )


def check_width(width: float) -> None:
    """Raise an error unless ``width`` is a valid width multiplier."""
    if not isinstance(width, (int, float)) or not 0 < width <= 8:
        raise WiringError(f"width must be a number above 0 and at most 8, got {width!r}.")
