"""RigL, "Rigging the Lottery" (Evci, Gale, Menick, Castro and Elsen, ICML 2020)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.optimizers import gradient_of
from wirings.rules.registry import register
from wirings.rules.rule import LayerLike, Training
from wirings.rules.set import SET, forget, others_of
from wirings.selection.kept_edges import KeptEdges


@register
class RigL(SET):
    """`SET`, but the edges that grow are those with the largest gradient.

    Hallucinated edges weigh zero, and their gradient is needed only in steps after which the wiring changes. In these
    it is passed straight through to all allowed edges; in all others, to real ones only. It is read from the
    optimizer's state: after its step, the state of an edge that weighs zero and has no momentum is the gradient,
    whatever a captured CUDA graph, fp16's scaler or DDP did before. That is SGD's momentum, the running mean of Adam
    and its relatives and, squared, that of RMSprop; with SGD without momentum it is how far the step carried the edge
    from zero. Optimizers whose state does not reveal it (Adafactor, Adagrad, Rprop) are rejected. Then all hallucinated
    edges, and their state, are set to zero again.

    ResNet50 with 10 % of its weights, shared out by ERK (``share="erk"``), reaches 73.07 % on ImageNet, and 76.42 %
    when trained five times as long. The paper changes the wiring every 100 steps of batches of 4,096 images; smaller
    batches have noisier gradients and may need fewer changes. Using the gradient of a single batch follows the paper.
    Two things are our choices: where it is read, so that only edges that were hallucinated before can grow; and that
    the weights take that step as well, while the paper replaces it by the change of the wiring.

    Needs ``wiring.step(optimizer)``.

    Args:
        fraction, decay, every, end, seed, steps: as for `SET`, with the paper's values.
    """

    name = "rigl"
    kept = KeptEdges(mask="wiring", reach="reach")
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

    def setup(self, layers: Sequence[LayerLike]) -> None:
        super().setup(layers)
        for layer in layers:
            # If every step changes the wiring, so does the first.
            layer.edges.remember("reach", _everything(layer) if self.every == 1 else layer.edges.wiring.clone())

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise WiringError(
                f"rule {self.name!r} reads gradients from the optimizer's state: call wiring.step(optimizer)."
            )
        step, steps = training.step, self.length(training)
        if step == 1:  # report an unsuitable optimizer at once
            for layer in layers:
                if layer.weight.requires_grad:
                    gradient_of(self.name, layer, others_of(layer, layer.edges.wiring), optimizer)
        due, listens = self.due(step, steps), self.due(step + 1, steps)
        # Whether the gradient reached all edges in this step, by the plan at that time.
        listened = self.every == 1 if step == 1 else self.due(step, self.length_before(training) or steps)
        super().update(layers, training, optimizer)
        # The gradient can be read from edges that weighed zero before, which those of a checkpoint of a plain model do
        # not; and it may have reached all edges for a change that a new plan has cancelled.
        if listens or (listened and not due):
            for layer in layers:
                forget(layer, layer.edges.wiring, optimizer)
        if due or listened or listens or training.budget_changed:
            for layer in layers:
                layer.edges.remember("reach", _everything(layer) if listens else layer.edges.wiring)

    def growth(
        self, layer: LayerLike, others: Tensor, step: int, optimizer: torch.optim.Optimizer | None
    ) -> Tensor | None:
        # There is no gradient if fp16's scaler has skipped the step, or if the layer was not used in it.
        return None if optimizer is None else gradient_of(self.name, layer, others, optimizer)


def _everything(layer: LayerLike) -> Tensor:
    allowed = layer.edges.allowed
    return torch.ones_like(layer.edges.wiring) if allowed is None else allowed
