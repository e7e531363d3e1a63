"""RigL, "Rigging the Lottery" (Evci, Gale, Menick, Castro and Elsen, ICML 2020)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.optimizers import gradient_of, has_both_moments
from wirings.rules.random import others_of
from wirings.rules.registry import register
from wirings.rules.rule import LayerLike, Training
from wirings.rules.set import SET, forget
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_int

LISTEN = 10
"""Steps in which the gradient reaches all edges before a change, with Adam."""
MOST, CHANGES = 100, 20
"""By default the wiring changes every so many steps, the paper's number, or so many times in a shorter training."""


@register
class RigL(SET):
    """`SET`, but the edges that grow are those with the largest gradient.

    Hallucinated edges weigh zero, and their gradient is needed only in the ``listen`` steps before the wiring changes.
    In these it is passed straight through to all allowed edges; in all others, to real ones only. It is read from the
    optimizer's state: after its step, the state of an edge that weighs zero and had no momentum is the gradient,
    whatever a captured CUDA graph, fp16's scaler or DDP did before. That is SGD's momentum, the running mean of Adam
    and its relatives and, squared, that of RMSprop; with SGD without momentum it is how far the step carried the edge
    from zero. Optimizers whose state does not reveal it (Adafactor, Adagrad, Rprop) are rejected. Then all hallucinated
    edges, and their state, are set to zero again.

    The paper uses SGD and the gradient of a single batch. With Adam, which divides the gradient of every edge by its
    own magnitude, that is a poor guide: gradients are large where nodes have a large scale, such as the values of an
    attention layer beside its queries, so most new edges lead to few nodes (docs/transformers.md has figures). So with
    Adam the rule listens for several steps, and ranks edges by the mean of the gradient divided by the root of the mean
    of its square: by how consistent it is.

    ResNet50 with 10 % of its weights, shared out by ERK (``share="erk"``), reaches 73.07 % on ImageNet, and 76.42 %
    when trained five times as long. The paper changes the wiring every 100 steps of batches of 4,096 images; smaller
    batches have noisier gradients and may need fewer changes. Three things are our choices: ``listen`` with Adam; where
    the gradient is read, so that only edges that were hallucinated before can grow; and that the weights take that step
    as well, while the paper replaces it by the change of the wiring.

    Needs ``wiring.step(optimizer)``.

    Args:
        fraction, decay, end, seed, steps: as for `SET`, with the paper's values.
        every: optimizer steps from one change to the next; None for the paper's 100, or a twentieth of training if that
            is less.
        listen: optimizer steps before a change in which the gradient reaches all edges; None for 10 with Adam and its
            relatives, and for 1, as in the paper, with other optimizers.
    """

    name = "rigl"
    atomic = True
    kept = KeptEdges(mask="wiring", reach="reach")
    reaches = "some"

    def __init__(
        self,
        fraction: float = 0.3,
        decay: str = "cosine",
        every: int | None = None,
        end: float = 0.75,
        seed: int | None = None,
        steps: int | None = None,
        listen: int | None = None,
    ) -> None:
        super().__init__(fraction, decay, every, end, seed, steps)
        self.listen = None if listen is None else check_int(self.name, "listen", listen)

    def period(self, steps: int) -> int:
        # Two at least: the mean of a single gradient, divided by the root of its square, is the same for all edges.
        return min(MOST, max(steps // CHANGES, 2)) if self.every is None else self.every

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
        due, listens = self.due(step, steps), self._listens(step + 1, steps, layers, optimizer)
        # Whether the gradient reached all edges in this step, by the plan at that time.
        before = self.length_before(training) or steps
        listened = self.every == 1 if step == 1 else self._listens(step, before, layers, optimizer)
        super().update(layers, training, optimizer)
        if listened and listens and not due:
            for layer in layers:
                forget(layer, layer.edges.wiring, None)  # the weights alone: the optimizer goes on averaging
        # The gradient can be read from edges that weighed zero before, which those of a checkpoint of a plain model do
        # not; and it may have reached all edges for a change that a new plan has cancelled.
        elif listens or (listened and not due):
            for layer in layers:
                forget(layer, layer.edges.wiring, optimizer)
        if due or listened != listens or training.budget_changed:
            for layer in layers:
                layer.edges.remember("reach", _everything(layer) if listens else layer.edges.wiring)

    def _window(self, layer: LayerLike, optimizer: torch.optim.Optimizer) -> int:
        """The number of steps before a change in which the gradient reaches all edges."""
        if self.listen is not None:
            return self.listen
        return LISTEN if has_both_moments(layer, optimizer) else 1

    def _listens(self, step: int, steps: int, layers: Sequence[LayerLike], optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradient of a step reaches all edges, for a change that is due after it or soon."""
        every = self.period(steps)
        change = -(-step // every) * every
        window = max(self._window(layer, optimizer) for layer in layers)
        return change - step < window and self.due(change, steps)

    def growth(
        self, layer: LayerLike, others: Tensor, step: int, optimizer: torch.optim.Optimizer | None
    ) -> Tensor | None:
        # There is no gradient if fp16's scaler has skipped the step, or if the layer was not used in it.
        if optimizer is None:
            return None
        # The gradient has reached them since the last change at most, and not in the first step.
        several = self._window(layer, optimizer) > 1 and self.every != 1 and step > 2
        return gradient_of(self.name, layer, others, optimizer, several)


def _everything(layer: LayerLike) -> Tensor:
    allowed = layer.edges.allowed
    return torch.ones_like(layer.edges.wiring) if allowed is None else allowed
