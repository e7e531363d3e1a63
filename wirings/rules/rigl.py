"""RigL, "Rigging the Lottery" (Evci, Gale, Menick, Castro, Elsen, ICML 2020)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.base import Edges, Layer, register
from wirings.rules.optimizers import gradient_of
from wirings.rules.set import SET, forget, others_of, wiring_of
from wirings.selection import functional as primitive


@register
class RigL(SET):
    """`SET`, but the edges that grow are those with the largest gradient.

    Hallucinated edges weigh zero, and their gradient is needed in no other steps than those that the wiring changes
    after. In these it is passed straight through to all allowed edges; in all others to real ones alone. Of an edge
    that weighs zero and has no momentum the optimizer remembers, after its step, the gradient: that is where it is
    read, since the optimizer's memory is where a captured CUDA graph, fp16's scaler and DDP leave what they did. It is
    SGD's momentum, the running mean of Adam and its kin, and, squared, that of RMSprop; with SGD without momentum it is
    how far the step carried the edge from zero. An optimizer whose memory does not tell it (Adafactor, Adagrad, Rprop)
    is refused. Then all hallucinated edges are set to zero again, and what is remembered of them too.

    ResNet50 with 10 % of its weights, shared out by ERK (``share="erk"``), reaches 73.07 % on ImageNet, and 76.42 %
    when it trains five times as long. The paper changes the wiring every 100 steps of batches of 4,096 images; smaller
    batches have noisier gradients, and may want fewer changes. That gradients are those of one step's batch is the
    paper's; where they are read, and so that only edges that were hallucinated before can grow, and that the weights
    take that step as well, which the paper changes the wiring instead of, is ours.

    Args:
        fraction, decay, every, end, seed, steps: as for `SET`, with the paper's values.

    Needs ``wiring.step(optimizer)``.
    """

    name = "rigl"
    reaches = "some"

    def __init__(
        self,
        fraction: float = 0.3,
        decay: str = "cosine",
        every: int | None = 100,
        end: float = 0.75,
        seed: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(fraction, decay, every, end, seed, steps)

    def setup(self, layers: Sequence[Layer]) -> None:
        super().setup(layers)
        for layer in layers:
            # Where every step changes the wiring, the first is no exception.
            layer.edges.remember("reach", _everything(layer) if self.every == 1 else wiring_of(layer).clone())

    def forward(self, weight: Tensor, edges: Edges) -> Tensor:
        return primitive.straight_through(weight, edges.wiring, edges.reach)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, layers: Sequence[Layer], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise WiringError(
                f"rule {self.name!r} reads gradients from the optimizer's memory: call wiring.step(optimizer)."
            )
        if step == 1:  # what is wrong with the optimizer is told at once
            for layer in layers:
                if layer.weight.requires_grad:
                    gradient_of(self.name, layer, others_of(layer, wiring_of(layer)), optimizer)
        due, listens, replanned = self.due(layers, step), self.due(layers, step + 1), self.replanned(layers)
        changed = due or replanned or self._before is not None
        super().step(layers, step, optimizer)
        # The gradient is read from edges that weighed zero before, which those of a checkpoint of a plain model do not;
        # and it may have reached all edges for a change that is not to come now.
        if listens or (replanned and not due):
            for layer in layers:
                forget(layer, wiring_of(layer), optimizer)
        if changed or listens:
            for layer in layers:
                layer.edges.remember("reach", _everything(layer) if listens else wiring_of(layer))

    def growth(self, layer: Layer, others: Tensor, step: int, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        # Nothing has come where fp16's scaler has skipped the step, or the layer was not used in it.
        return None if optimizer is None else gradient_of(self.name, layer, others, optimizer)


def _everything(layer: Layer) -> Tensor:
    allowed = layer.edges.allowed
    return torch.ones_like(wiring_of(layer)) if allowed is None else allowed
