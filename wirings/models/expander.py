"""X-MobileNet (Prabhu, Varma and Namboodiri, "Deep Expander Networks", 2018): MobileNetV1 with sparse pointwise layers.

X-4 is MobileNetV1 × 0.5 with a quarter of its pointwise weights. The multiply-adds that its authors published
(85.8M, 53.7M, 37.6M and 29.5M for a half, a quarter, an eighth and a sixteenth) show that the first pointwise layer
stays dense.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wirings.models.mobilenet import MobileNetV1, SeparableConv
from wirings.models.option_groups import LayerWiring, NetworkSize
from wirings.models.registry import register
from wirings.rules import get as get_rule
from wirings.wire.wire import wire_

SIZE = NetworkSize(width=0.5)
WIRING = LayerWiring(density=0.25)
POINTWISE = 3
"""Index of the pointwise convolution in a `SeparableConv`."""


@register
def mobilenetv1_x(size: NetworkSize = SIZE, wiring: LayerWiring = WIRING) -> nn.Module:
    """MobileNetV1 × 0.5; all pointwise layers but the first are wired, at a density of 0.25 by default."""
    model = MobileNetV1(size)
    pairs = [number for number, layer in enumerate(model.features) if isinstance(layer, SeparableConv)]
    names = [f"features.{number}.{POINTWISE}" for number in pairs[1:]]
    model.wiring = None  # type: ignore[assignment]
    if wiring.rule is not None:
        rule = get_rule(wiring.rule)
        budget: dict[str, Any] = {} if rule.own_budget else {"share": wiring.share, "mult_adds": wiring.mult_adds}
        if not rule.own_budget:
            budget |= {"density": wiring.density} if wiring.k is None else {"k": wiring.k}
        model.wiring = wire_(model, rule, include=names, **budget)  # type: ignore[assignment]
    return model
