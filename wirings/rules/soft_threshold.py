"""Soft thresholds with a straight-through gradient: ST-3 and Feather."""

import math

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, Rule
from wirings.selection import functional
from wirings.selection.kept_edges import KeptEdges
from wirings.selection.shrink import shrunk
from wirings.utils.checks import check_bool, check_number, is_number
from wirings.utils.text import brief

POWERS = {"soft": 1.0, "feather": 3.0, "hard": math.inf}


@register
class SoftThreshold(Rule):
    """The k edges of largest magnitude are real but shrunk, so that edges enter from zero and leave at zero.

    A real weight w is used as sign(w) · (|w|ᵖ − tᵖ)^(1/p), where the threshold t is the magnitude of the strongest
    hallucinated edge. With p = 1 all are shrunk by t, as in ST-3; a larger p leaves strong edges almost unchanged, as
    in Feather with p = 3. In `DNW`, where p is infinite, an edge that is swapped in starts with its full weight, which
    the network has never seen. The gradient is passed straight through to real edges, as if they had not been shrunk,
    and times ``factor`` to the others.

    Both methods start with all edges and decrease to k by a cubic schedule, so set one:

        wire_(model, rules.get("soft_threshold", schedule="cubic"), density=0.1)

    ST-3 is Vanderschueren and De Vleeschouwer, WACV 2023: ResNet50 with 10 % of its weights reaches 76.03 % on
    ImageNet. Feather is Glentis Georgoulakis, Retsinas and Maragos, BMVC 2023: 76.93 %. Both rank the edges of all
    layers together (``share="global"``). Setting t to the next edge's magnitude, which makes the number exact, and how
    ``rescale`` works are our choices. A real edge that is exactly as strong as the next one weighs zero: of weights
    kept in bfloat16 one or two in a hundred do, and if all weights are equal, all of them.

    Args:
        shape: ``"feather"``, p = 3; ``"soft"``, p = 1; ``"hard"``, no shrinking; or p itself, at least 1.
        factor: the factor of the gradient of hallucinated edges, from 0 to 1. Feather lowers it when very few edges are
            left.
        rescale: rescale the shrunk weights of a layer so that the sum of their magnitudes is unchanged, as ST-3 does.
    """

    name = "soft_threshold"
    kept: KeptEdges | None = None
    reaches = "all"
    acts_between_steps = False

    def __init__(self, shape: str | float = "feather", factor: float = 1.0, rescale: bool = False) -> None:
        power = POWERS.get(shape) if isinstance(shape, str) else shape
        if not is_number(power) or not power >= 1:
            raise WiringError(
                f"{self.name}: shape must be one of {', '.join(map(repr, POWERS))}, or a power of at least 1, got "
                f"{brief(shape)}."
            )
        self.shape, self._power = shape, float(power)
        self.factor, self.rescale = check_number(self.name, "factor", factor), check_bool(self.name, "rescale", rescale)
        if not self.rescale or self._power == math.inf:
            self.kept = KeptEdges(power=self._power, factor=self.factor)

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        if self.kept_at_once is not None:
            return super().forward(weight, edges)
        values, real = weight.detach(), self.real(weight, edges)
        size = values.abs().to(torch.promote_types(values.dtype, torch.float32))
        threshold = edges.next_magnitude(values, real).to(size.dtype)
        used = torch.where(real, shrunk(size, threshold, self._power), 0.0)
        before, after = torch.where(real, size, 0.0).sum(), used.sum()
        used = (used * torch.where(after > 0, before / after, 1.0)).to(values.dtype).copysign(values)
        return functional.scaled_through(weight, used, real, self.factor, edges.allowed)
