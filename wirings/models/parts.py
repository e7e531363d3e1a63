"""Parts that several networks for images have."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from wirings.errors import WiringError

M = TypeVar("M", bound=nn.Module)
STRIDE = 32
"""What the networks of Table 3 divide an image's sides by."""


def conv_norm(before: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias that keeps a map's size, but for the stride, and a batch norm."""
    conv = nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels)]


def depthwise(channels: int, stride: int = 1) -> list[nn.Module]:
    """A 3 × 3 convolution of every channel by itself, and a batch norm."""
    return conv_norm(channels, channels, 3, stride, groups=channels)


def stem(channels: int) -> nn.Sequential:
    """Convolution and max pooling to a quarter of an image's sides."""
    return nn.Sequential(*conv_norm(3, channels, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))


def for_images(model: M, image_size: int) -> M:
    """A network with a stride of 32, marked as one for square images of this size."""
    if image_size < STRIDE:
        raise WiringError(
            f"image_size = {image_size} is too small: the network divides an image's sides by {STRIDE}, so it takes "
            f"{STRIDE} pixels a side at least."
        )
    model.input_shape = (3, image_size, image_size)  # type: ignore[assignment]
    return model


def check_width(width: float, smallest: float = 0.0) -> None:
    """Raise unless a network can be made of this width."""
    if not isinstance(width, (int, float)) or not smallest < width <= 8:
        raise WiringError(f"width must be a number above {smallest:g} and at most 8, but it is {width!r}.")
