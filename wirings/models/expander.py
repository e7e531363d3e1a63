"""X-MobileNet (Prabhu, Varma and Namboodiri, "Deep Expander Networks", 2018): MobileNetV1 with sparse pointwise layers.

X-4 is MobileNetV1 × 0.5 with a quarter of its pointwise weights. The counts that its authors published (85.8M, 53.7M,
37.6M and 29.5M for a half, a quarter, an eighth and a sixteenth) show that the first pointwise layer stays dense.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wirings.models.mobilenet import MobileNetV1, Separable
from wirings.models.registry import register
from wirings.rules import Rule
from wirings.rules import get as get_rule
from wirings.wire.wire import wire_

POINTWISE = 3
"""Where the pointwise convolution stands in a `Separable`."""


@register
def mobilenetv1_x(
    rule: str | Rule | None = None,
    width: float = 0.5,
    classes: int = 1000,
    image_size: int = 224,
    density: float = 0.25,
) -> nn.Module:
    """MobileNetV1 × ``width``, whose pointwise layers but the first keep ``density`` of their weights."""
    model = MobileNetV1(width, classes, image_size)
    pairs = [number for number, layer in enumerate(model.features) if isinstance(layer, Separable)]
    names = [f"features.{number}.{POINTWISE}" for number in pairs[1:]]
    chosen = None if rule is None else get_rule(rule)
    model.wiring = None  # type: ignore[assignment]
    if chosen is not None:
        budget: dict[str, Any] = {} if chosen.own_budget else {"density": density}
        model.wiring = wire_(model, chosen, include=names, **budget)  # type: ignore[assignment]
    return model
