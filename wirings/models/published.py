"""Networks of Table 3 that torchvision provides: MobileNetV2, ShuffleNetV2 and MnasNet."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from wirings.errors import WiringError
from wirings.models.option_groups import DENSE_LAYERS, IMAGENET_SIZE, LayerWiring, NetworkSize
from wirings.models.parts import check_width, for_images
from wirings.models.registry import register

SHUFFLENETV2 = {
    0.5: (24, 48, 96, 192, 1024),
    1.0: (24, 116, 232, 464, 1024),
    1.5: (24, 176, 352, 704, 1024),
    2.0: (24, 244, 488, 976, 2048),
}
"""Channels of the stem, the stages and the last convolution, by width."""


def _torchvision(what: str) -> Any:
    try:
        return importlib.import_module("torchvision").models
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not match PyTorch
        raise WiringError(
            f"{what} needs torchvision, which cannot be imported ({error}). Install the version that matches your "
            "PyTorch: pip install torchvision."
        ) from error


@register
def mobilenetv2(size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """MobileNetV2 (Sandler and others, 2018); all layers but the first and the classifier are wired.

    Channels are rounded to multiples of eight, as by its authors.
    """
    check_width(size.width)
    network = _torchvision("MobileNetV2").MobileNetV2(num_classes=size.classes, width_mult=size.width)
    return wiring.wire(for_images(network, size.image_size), skip=["features.0", "classifier"])


@register
def shufflenetv2(size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """ShuffleNetV2 (Ma and others, 2018); all layers but the first and the classifier are wired."""
    if size.width not in SHUFFLENETV2:
        known = ", ".join(f"{choice:g}" for choice in SHUFFLENETV2)
        raise WiringError(f"ShuffleNetV2 comes in the widths {known}, got width = {size.width!r}.")
    module = _torchvision("ShuffleNetV2").shufflenetv2
    network = module.ShuffleNetV2([4, 8, 4], list(SHUFFLENETV2[size.width]), num_classes=size.classes)
    return wiring.wire(for_images(network, size.image_size), skip=["conv1", "fc"])


@register
def mnasnet(size: NetworkSize = IMAGENET_SIZE, wiring: LayerWiring = DENSE_LAYERS) -> nn.Module:
    """MnasNet-B1 (Tan and others, 2019); all layers but the first and the classifier are wired."""
    check_width(size.width)
    network = _torchvision("MnasNet").MNASNet(size.width, num_classes=size.classes)
    return wiring.wire(for_images(network, size.image_size), skip=["layers.0", "classifier"])
