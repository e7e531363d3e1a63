"""AC/DC, alternating compressed and decompressed training (Peste, Iofinova, Vladu, Alistarh, NeurIPS 2021)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.optimizers import bring_to_rest
from wirings.rules.planned import Planned
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Training, choose_by
from wirings.rules.set import forget
from wirings.selection import sharded
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.checks import check_bool, is_int, is_number
from wirings.utils.text import brief


@register
class ACDC(Planned):
    """Dense and sparse phases in turn: all edges, then the k of largest magnitude, and so on; sparse at the end.

    Training begins with all edges. When a sparse phase begins, the k strongest edges become the wiring, and all others
    are set to zero and stay there, without a gradient, until the next dense phase, in which they grow from zero. The
    wiring, which evaluation and `finalize_` use, is the k strongest edges in dense phases too.

    The phases are those of the paper's ResNet50, as fractions of training: 10 of 100 epochs with all edges, then 5
    epochs each, sparse first, up to a last dense phase of 10 epochs and a last sparse one of 15. There, all layers are
    ranked together (``share="global"``). If multiply-adds are bounded too, the layers' numbers of edges are those of a
    ranking at the beginning of each sparse phase. With ``wiring.step(optimizer)`` the optimizer's state of edges that
    are set to zero is cleared, and when a sparse phase ends, so is the momentum of all edges, as in the authors' runs.

    Args:
        warmup: how long the first dense phase lasts: a float is a fraction of training, an int optimizer steps.
        sparse: how long each sparse phase lasts, in the same two ways.
        dense: how long each dense phase lasts.
        last_dense: how long the dense phase before the last sparse one lasts, at least.
        last_sparse: how long the last sparse phase lasts.
        keep_dense: remember the weights at the end of the last dense phase: `dense_weights` returns them, for a dense
            network that was trained alongside.
        steps: the number of optimizer steps of the whole training; by default that of `Wiring.plan`.
    """

    name = "acdc"
    kept = KeptEdges(mask="left", factor=0.0, in_training=True)
    reaches = "some"
    starts_with_all = True
    keeps_wiring = True
    chooses_when_ranked = True
    atomic = True

    def __init__(
        self,
        warmup: float = 0.1,
        sparse: float = 0.05,
        dense: float = 0.05,
        last_dense: float = 0.1,
        last_sparse: float = 0.15,
        keep_dense: bool = False,
        steps: int | None = None,
    ) -> None:
        super().__init__(steps)
        self.warmup, self.sparse, self.dense = warmup, sparse, dense
        self.last_dense, self.last_sparse = last_dense, last_sparse
        for phase in ("warmup", "sparse", "dense", "last_dense", "last_sparse"):
            length = getattr(self, phase)
            if not (is_int(length) and length >= 1) and not (is_number(length) and 0 < length < 1):
                raise WiringError(
                    f"{self.name}: {phase} must be a fraction of training, a float between 0 and 1, or a number of "
                    f"steps, an int of at least 1, got {brief(length)}."
                )
        fractions = [one for one in (warmup, last_dense, last_sparse) if not is_int(one)]
        if sum(fractions) > 1 + 1e-9:
            raise WiringError(
                f"{self.name}: warmup, last_dense and last_sparse must leave time for each other, but they are "
                f"{sum(fractions):g} of training."
            )
        self.keep_dense = check_bool(self.name, "keep_dense", keep_dense)

    def is_sparse(self, step: int, steps: int) -> bool:
        """Whether a training of ``steps`` optimizer steps is in a sparse phase after ``step`` of them."""
        warmup, sparse, dense, last_dense, last_sparse = (
            int(one) if is_int(one) else max(int(one * steps + 0.5), 1)
            for one in (self.warmup, self.sparse, self.dense, self.last_dense, self.last_sparse)
        )
        if step >= max(steps - last_sparse, 1):
            return True
        return warmup <= step < steps - last_sparse - last_dense and (step - warmup) % (sparse + dense) < sparse

    def setup(self, layers: Sequence[LayerLike]) -> None:
        for layer in layers:
            layer.edges.remember("left", _all_of(layer))
            if self.keep_dense:
                layer.edges.remember("dense", layer.weight.detach().clone())

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return edges.choose(weight)

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return torch.where(edges.left if edges.training else self.real(weight, edges), weight, 0.0)  # type: ignore[arg-type]

    def used(self, weight: Tensor, edges: EdgesLike) -> Tensor | None:
        return edges.left

    @torch.no_grad()
    def update(self, layers: Sequence[LayerLike], training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        was, now = self._phases(training)
        if now and (not was or training.budget_changed):
            weights, within = [layer.weight for layer in layers], [layer.edges.allowed for layer in layers]
            chosen = [sharded.whole(real) for real in choose_by(layers, weights, within=within, magnitudes=True)]
            for layer, real in zip(layers, chosen, strict=True):
                if self.keep_dense and not was:
                    layer.edges.remember("dense", layer.weight.detach())
                layer.edges.remember("left", real)
                forget(layer, real, optimizer)
        elif was and not now:
            for layer in layers:
                everything = _all_of(layer)
                layer.edges.remember("left", everything)
                bring_to_rest(layer.weight, everything, optimizer)

    def takes_ranking(self, training: Training) -> bool:
        was, now = self._phases(training)
        return now and not was

    def _phases(self, training: Training) -> tuple[bool, bool]:
        """Whether training was in a sparse phase before this step, and whether it is in one now."""
        steps, before = self.length(training), self.length_before(training)
        was = before is not None and training.step > 1 and self.is_sparse(training.step - 1, before)
        return was, self.is_sparse(training.step, steps)

    def idle(self, steps: int | None) -> str | None:
        steps = steps if self.steps is None else self.steps
        if steps is None or steps > 1:  # the last step but one is in the last sparse phase, however short that is
            return None
        return "no sparse phase begins before its end; make the phases shorter"

    def dense_weights(self, layers: Sequence[LayerLike]) -> dict[str, Tensor]:
        """The weights at the end of the last dense phase, by name, with ``keep_dense``: for ``wiring.layers``.

        Load them into a plain copy of the model, and let its batch norms see some batches: their statistics, biases and
        all that is not wired are those of the sparse network.
        """
        if not self.keep_dense:
            raise WiringError(f"rule {self.name!r} has not kept the dense weights; make it with keep_dense=True.")
        return {layer.name: layer.edges.dense.detach().clone() for layer in layers}


def _all_of(layer: LayerLike) -> Tensor:
    """A mask of all allowed edges."""
    allowed = layer.edges.allowed
    return torch.ones_like(layer.weight, dtype=torch.bool) if allowed is None else allowed.clone()
