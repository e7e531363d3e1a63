"""The edges of one weight: the parametrization that `wirings.wire_` puts on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wirings.budgets.ranking import rank_factor
from wirings.selection import passes, sharded
from wirings.selection.kept_edges import KeptEdges
from wirings.utils.transforms import in_transform

if TYPE_CHECKING:
    from wirings.rules.rule import Rule
    from wirings.selection.passes import ReadyWeight
    from wirings.selection.service import Selection
    from wirings.selection.weight_groups import WeightGroups
    from wirings.wire.block_layers import BlockPlan

_STRAIGHT_THROUGH = KeptEdges()


class Edges(nn.Module):
    """The edges of one weight: how many are real, which are allowed, and what the rule remembers about them.

    Called with the weight, it returns the weight of the forward pass.

    Args:
        rule: the rule, shared by all edges of a model.
        k: the number of real edges; with a shared budget, that of all layers together. With ``groups``, of their units.
        possible: the number of allowed edges, or of units.
        allowed: a boolean mask of the weight's shape, or None if all edges are allowed.
        selection: chooses the edges of all layers that were wired together.
        saved: whether ``k`` changes over training and therefore belongs in a checkpoint.
        axes: what the dimensions of the weight are, if it is not that of a layer of PyTorch.
        groups: which edges are real together, if the wiring has a structure.
    """

    k: Tensor
    allowed: Tensor | None
    left: Tensor | None
    rank_factor: Tensor | None
    blocks: BlockPlan | None = None
    """What is known about the real blocks of the weight, if there are kernels that skip the others."""

    def __init__(
        self,
        rule: Rule,
        k: int,
        possible: int,
        allowed: Tensor | None,
        selection: Selection,
        saved: bool = False,
        axes: tuple[str, ...] | None = None,
        groups: WeightGroups | None = None,
    ) -> None:
        super().__init__()
        self.rule, self.possible, self.selection, self.axes = rule, possible, selection, axes
        self.groups = groups
        self.ready: dict[torch.dtype | None, ReadyWeight] = {}
        """The weight of the forward pass that is running, once it is made; by precision, None for the weight's own."""
        self.in_layer = False
        """Whether a layer is running that uses the weight only in operations that autocast converts."""
        self.place = 0
        """The position of the weight among those of its selection."""
        self.start: Tensor | None = None
        """The first wiring that the caller asked for, while the rule is set up."""
        self.end: int | None = None
        """The final value of k if a schedule changes it, otherwise None."""
        # A tensor, so that a schedule can change it under torch.compile and in captured CUDA graphs. It is saved only
        # if the rule or a schedule changes it; otherwise it follows from the call that wired the model.
        self.register_buffer("k", torch.tensor(k, dtype=torch.int64), persistent=rule.moves_budget or saved)
        self.register_buffer("allowed", allowed, persistent=False)
        self.register_buffer("left", None)
        self.register_buffer("rank_factor", None)

    def forward(self, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.rule.forward(weight, self)
        used = self.selection.ready(self, weight, self._precision(weight) if self.in_layer else None)
        if used is not None:
            if not hasattr(used, "_all_edges"):
                _note_edges(used, weight)
            return used
        return self._made(weight)

    def _made(self, weight: Tensor) -> Tensor:
        """The weight of the forward pass as the rule makes it."""
        if sharded.is_sharded(weight):  # accessed outside of the forward pass, where weights are whole
            with sharded.on_shards():
                used = self.rule.forward(weight, self)
        else:
            used = self.rule.forward(weight, self)
        return used if used is weight or in_transform(weight) else self.marked(used, weight)

    def ready_in_layer(self, weight: Tensor | None) -> Tensor | None:
        """The weight of the forward pass that is running, for the layer's own operation; None if it is not made yet."""
        return None if weight is None else self.selection.ready(self, weight, self._precision(weight))

    def for_layer(self, weight: Tensor) -> Tensor:
        """The weight of the forward pass for the layer's own operation, which autocast converts."""
        used = self.selection.ready(self, weight, self._precision(weight))
        return self._made(weight) if used is None else used

    def marked(self, used: Tensor, weight: Tensor) -> Tensor:
        """Note on the weight of a forward pass where it comes from."""
        _note_edges(used, weight)
        # `torch.distributed.checkpoint` follows the names in a state_dict, such as fc.weight.wiring.seed.
        used.wiring = self  # type: ignore[attr-defined]
        return used

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ready": {}, "in_layer": False}

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Set all edges, hallucinated ones included, when something is assigned to a wired weight.

        Assigning a value that was read from a wired weight restores all its edges, not just the real ones. So code that
        saves ``module.weight``, assigns something else and restores it (as `torch.func.functional_call` does) loses
        nothing. A value that was changed in place meanwhile is a new one.
        """
        everything, version = getattr(weight, "_all_edges", (weight, None))
        return everything if version == _version(weight) else weight

    def real(self, weight: Tensor, fresh: bool = False) -> Tensor:
        """The wiring that the rule gives this weight: a boolean mask.

        Args:
            weight: the parameter with all weights.
            fresh: ignore what was chosen before, for callers outside a forward pass: an optimizer may have changed
                weights without a trace.
        """
        if fresh and self.shared:
            self.selection.forget()
        with torch.no_grad(), sharded.on_shards(sharded.is_sharded(weight)):
            return self.rule.real(weight.detach(), self)

    def remember(self, name: str, value: Tensor, saved: bool = True) -> None:
        """Keep a tensor as the rule's memory: it is saved and loaded with the model, and moves with it to a device.

        The name ``left`` is special: these are the edges that can still be chosen, for rules that remove edges
        permanently. Masks are whole on every process, even of a sharded weight, since the forward pass sees whole
        weights; other tensors are sharded if they are at first.

        Args:
            name: the attribute under which the tensor is found.
            value: the tensor; copied into the one remembered under this name, if there is one.
            saved: whether it belongs in checkpoints. What follows from the call that wired the model does not.
        """
        now = self._buffers.get(name)
        if value.dtype == torch.bool or (now is not None and not sharded.is_sharded(now)):
            value = sharded.whole(value)
        if now is not None:
            now.copy_(value)
            return
        if not sharded.is_sharded(value) and value.storage_offset():  # a part of a row of all layers
            value = value.clone()
        self.register_buffer(name, value, persistent=saved)

    def memory(self) -> dict[str, Tensor]:
        """What the rule remembers or learns and a checkpoint holds, by name."""
        passing = self._non_persistent_buffers_set
        kept = {name: b for name, b in self._buffers.items() if name not in passing and b is not None}
        return kept | {name: p for name, p in self._parameters.items() if p is not None}

    @property
    def inputs(self) -> int:
        """The dimension of the weight along which the inputs of a node lie."""
        return 1 if self.axes is None else self.axes.index("in")

    @property
    def possible_edges(self) -> int:
        """The number of allowed edges, whatever budgets count."""
        return self.possible if self.groups is None else self.groups.edges

    @property
    def unit(self) -> str:
        """What budgets count, for messages."""
        return "edges" if self.groups is None else self.groups.unit

    @property
    def shared(self) -> bool:
        """Whether all layers that were wired together share one budget (``share="global"`` or ``"scaled"``)."""
        return self.selection.shared

    def peers(self) -> list[Edges]:
        """The edges of all layers that share the budget with these, in order; only these with a budget of their own."""
        return [layer.edges for layer in self.selection.layers] if self.selection.shared else [self]

    def density(self) -> Tensor:
        """The fraction of the allowed edges that is real: of this weight, or of all that share the budget."""
        return self.k / sum(edges.possible for edges in self.peers())

    def within(self) -> Tensor | None:
        """The edges that may be chosen: the allowed ones, or what the rule has left of them; None for all."""
        buffers = self._buffers  # without PyTorch's look-up of attributes: this is asked for every layer and pass
        left = buffers["left"]
        return buffers["allowed"] if left is None else left

    def rank_by_scale(self, weight: Tensor) -> None:
        """From now on, divide by the scale that the weight has now where layers are ranked together: its RMS."""
        self.remember("rank_factor", rank_factor(weight, self.allowed, self.possible_edges))

    def choose(self, weight: Tensor) -> Tensor:
        """A mask of the budget's number of edges of largest magnitude, in this weight or over all layers."""
        return self.selection.choose(self, weight)

    def choose_more(self, weight: Tensor, density: float) -> Tensor:
        """A mask of the strongest edges up to a larger ``density``, or of the budget's number if that is more."""
        return self.selection.choose_more(self, weight, density)

    def choose_among(self, scores: Tensor, count: int | Tensor, within: Tensor | None) -> Tensor:
        """A mask of the ``count`` edges of this weight, among those ``within``, whose scores are largest."""
        return self.selection.choose_among(self, scores, count, within)

    def count(self, mask: Tensor) -> Tensor:
        """The number of edges in a mask as budgets count them: with a structure, that of groups."""
        return self.selection.count(self, mask)

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Uniform random numbers for all edges, on the CPU; with a structure, equal ones for edges of a group."""
        return self.selection.draw(self, shape, generator)

    def exchange(
        self, weight: Tensor, wiring: Tensor, others: Tensor, rate: float, growth: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """The edges that stay and the new wiring when a fraction is exchanged: see `Selection.exchange`."""
        return self.selection.exchange(self, weight, wiring, others, rate, growth)

    def next_magnitude(self, weight: Tensor, real: Tensor) -> Tensor:
        """The magnitude of the strongest edge that is not real, 0 if all are; with a shared budget, of all layers."""
        return self.selection.next_magnitude(self, weight, real)

    def keep(self, weight: Tensor, kept: KeptEdges = _STRAIGHT_THROUGH) -> Tensor:
        """The chosen edges, zeros elsewhere; by default the gradient passes straight through to all allowed edges."""
        return self.selection.keep(self, weight, kept)

    def _precision(self, weight: Tensor) -> torch.dtype | None:
        """The precision to which autocast would convert the weight anyway, if it is lower."""
        device = "cuda" if weight.is_cuda else weight.device.type
        if device not in passes.DEVICES or weight.dtype != torch.float32 or not torch.is_autocast_enabled(device):
            return None
        if parametrize._cache_enabled:  # the weight may be used again outside of autocast
            return None
        dtype = torch.get_autocast_dtype(device)
        return None if dtype == weight.dtype else dtype

    def extra_repr(self) -> str:
        unit = "" if self.groups is None else f" {self.unit}"
        return f"{self.rule!r}, k={int(self.k)}{unit}" + (" (over all layers)" if self.shared else "")


def _note_edges(used: Tensor, weight: Tensor) -> None:
    """Note on a weight of a forward pass all edges that it was made of, for `Edges.right_inverse`."""
    used._all_edges = weight.detach(), _version(used)  # type: ignore[attr-defined]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
