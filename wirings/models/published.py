"""Published networks of Table 3 that torchvision has: MobileNetV2, ShuffleNetV2 and MnasNet. All take images,
(batch, 3, size, size).
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from wirings.errors import WiringError
from wirings.models.parts import check_width, for_images
from wirings.models.registry import register, wired
from wirings.rules import Rule

SHUFFLENETV2 = {
    0.5: (24, 48, 96, 192, 1024),
    1.0: (24, 116, 232, 464, 1024),
    1.5: (24, 176, 352, 704, 1024),
    2.0: (24, 244, 488, 976, 2048),
}
"""The channels of the stem, the stages and the last convolution, by width."""


def _torchvision(what: str) -> Any:
    try:
        return importlib.import_module("torchvision").models
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit the installed PyTorch
        raise WiringError(
            f"{what} is torchvision's, which cannot be imported ({error}). Install the one that goes with your "
            "PyTorch: pip install torchvision."
        ) from error


@register
def mobilenetv2(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
) -> nn.Module:
    """MobileNetV2 × ``width`` (Sandler and others, 2018); with a ``density``, wired but for first layer and classifier.

    Channels are rounded to multiples of eight, as its authors do.
    """
    check_width(width)
    made = _torchvision("MobileNetV2").MobileNetV2(num_classes=classes, width_mult=width)
    return wired(for_images(made, image_size), rule, density, skip=["features.0", "classifier"])


@register
def shufflenetv2(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
) -> nn.Module:
    """ShuffleNetV2 × ``width`` (Ma and others, 2018); with a ``density``, wired but for first layer and classifier."""
    if width not in SHUFFLENETV2:
        known = ", ".join(f"{choice:g}" for choice in SHUFFLENETV2)
        raise WiringError(f"ShuffleNetV2 has widths of its own, {known}, but width is {width!r}.")
    module = _torchvision("ShuffleNetV2").shufflenetv2
    made = module.ShuffleNetV2([4, 8, 4], list(SHUFFLENETV2[width]), num_classes=classes)
    return wired(for_images(made, image_size), rule, density, skip=["conv1", "fc"])


@register
def mnasnet(
    rule: str | Rule | None = None,
    width: float = 1.0,
    classes: int = 1000,
    image_size: int = 224,
    density: float | None = None,
) -> nn.Module:
    """MnasNet-B1 × ``width`` (Tan and others, 2019); with a ``density``, wired but for first layer and classifier."""
    check_width(width)
    made = _torchvision("MnasNet").MNASNet(width, num_classes=classes)
    return wired(for_images(made, image_size), rule, density, skip=["layers.0", "classifier"])
