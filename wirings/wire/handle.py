"""The handle that `wire_` returns: steps the rule, reports on the wiring, saves what is not in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.budgets.budget import Budget, Size
from wirings.errors import WiringError
from wirings.rules import Layer, Rule
from wirings.selection import sharded
from wirings.utils.checks import whole_number
from wirings.utils.layers import joined, parametrizations_of
from wirings.wire import fsdp

RANKED_EVERY = 100
"""Optimizer steps from one ranking of all layers to the next, where a budget of multiply-adds is shared out globally.

In between every layer keeps its number. A rule that remembers its wiring keeps the numbers of the first ranking.
"""


_AT_LAST = 2**62
"""A step that no training comes to."""


@dataclass(frozen=True)
class LayerReport:
    """What one layer's wiring looks like now."""

    name: str
    shape: tuple[int, ...]
    edges: int
    possible: int
    swapped: int
    """Edges that are real now and were not at the last look."""
    without_input: int
    """Nodes that no real edge of this layer leads to."""
    without_output: int
    """Nodes that no real edge of this layer leaves from."""

    @property
    def density(self) -> float:
        return self.edges / max(self.possible, 1)


def _wires(layer: Layer) -> bool:
    """Whether a layer still has the edges that it was wired with."""
    holder = parametrizations_of(layer.module).get(layer.attribute)
    return holder is not None and holder[0] is layer.edges


class Wiring:
    """What is wired in a model. Print it for a table of its layers."""

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        layers: list[Layer],
        budget: Budget | None,
        sizes: list[Size],
        ranked: list[int] | None = None,
    ) -> None:
        self.model, self.rule, self.layers, self.budget, self._sizes = model, rule, layers, budget, sizes
        self._given = budget  # before a plan made steps of fractions
        self._ranked = ranked  # each layer's edges in the last ranking of all, where the budget goes by that
        self._planned: int | None = None
        self.steps = 0
        self._counts = [int(layer.edges.k) for layer in layers]
        self._seen: list[np.ndarray] = []
        self._managed: list[bool] = []  # the layers that FSDP kept when it was last looked at,
        self._fsdp: list[Any] = []  # and the modules that it was called on
        self._note_ends()
        self.look()

    def _note_ends(self) -> None:
        """Tell edges what a schedule leads to, so that `finalize_` can see whether it got there."""
        if self.budget is None or not self.budget.changes or self._ranked is not None:
            return
        for layer, end in zip(self.layers, self._counted(self.budget.planned(1), _AT_LAST), strict=True):
            if self.rule.for_good and end > int(layer.edges.k):
                raise WiringError(
                    f"{layer.name}: rule {self.rule.name!r} removes edges for good, but the budget's schedule rises "
                    f"from {int(layer.edges.k):,} to {end:,}; give it a density that does not rise."
                )
            layer.edges.end = end

    def plan(self, steps: int) -> None:
        """Say before training how many optimizer steps it will have, for schedules over the whole of it.

        These are rules' own (`l1_anneal`, …) and those of the density that are given in fractions of training. All else
        does not mind. A checkpoint's state has it, unless it was said before the state was loaded.
        """
        self._planned = whole_number("Wiring.plan", "steps", steps)
        self.rule.plan(self.layers, self._planned)
        if self._given is not None:
            self.budget = self._given.planned(self._planned)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Call it after every ``optimizer.step()``: moves schedules on, and lets rules act that do so between steps.

        Args:
            optimizer: for the rules that read its state; they say so if it is missing.
        """
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise WiringError(f"wiring.step takes the optimizer, or nothing, but {optimizer!r} came.")
        self._forget()
        counts = self._counts
        self.steps += 1
        try:
            with sharded.on_shards(self._sharded()):
                self._act(optimizer)
        except BaseException:  # the step was not made, and is to be made again
            self.steps, self._counts = self.steps - 1, counts
            raise

    def _act(self, optimizer: torch.optim.Optimizer | None) -> None:
        """What is to be done after an optimizer step."""
        if self._ranked is not None and self.steps % RANKED_EVERY == 0 and type(self.rule).rebudget is Rule.rebudget:
            weights, allowed = zip(*((layer.weight, layer.edges.allowed) for layer in self.layers), strict=True)
            self._ranked = rank_layers(weights, allowed, self._sizes, self.budget.spent or 0)  # type: ignore
        if self._follow_schedule():
            self.rule.rebudget(self.layers)
        self.rule.step(self.layers, self.steps, optimizer)

    def _follow_schedule(self) -> bool:
        """Set the budgets that belong to this step; says whether that changed any."""
        counts = self._budgeted()
        if counts == self._counts:
            return False
        self._counts = counts
        for layer, k in zip(self.layers, counts, strict=True):
            layer.edges.k.fill_(k)
        return True

    def _budgeted(self) -> list[int]:
        """Every layer's number of edges by the budget, at this step."""
        if self.budget is None or not self.budget.changes:
            return self._counts
        return self._counted(self.budget, self.steps)

    def _counted(self, budget: Budget, step: int) -> list[int]:
        """Every layer's number of edges by a budget; the number of all of them where they share one."""
        counts = budget.counts(self._sizes, step, self._ranked)
        return counts * len(self.layers) if len(counts) == 1 else counts

    @property
    def _moves(self) -> bool:
        """Whether the rule may have moved edges between layers that each have a budget; in a pool it may anyway."""
        return self.rule.moves_budget and self.layers[0].edges.pool is None

    def _check_total(self) -> None:
        if self._moves and (count := sum(int(layer.edges.k) for layer in self.layers)) != sum(self._counts):
            raise WiringError(
                f"rule {self.rule.name!r} should have {sum(self._counts):,} real edges over all layers, but it has "
                f"{count:,}. Either the rule is broken, or another checkpoint was loaded into the model than into its "
                "handle."
            )

    def masks(self, full: bool = False) -> dict[str, Tensor]:
        """The wiring: for every wired weight a boolean mask of its real edges.

        Args:
            full: of weights that are sharded (FSDP), the whole mask on every process; else it is sharded as they are.
        """
        masks = zip(self.layers, self._real(), strict=True)
        return {layer.name: (sharded.whole(real) if full else real).clone() for layer, real in masks}

    def _sharded(self) -> bool:
        """Whether weights are sharded over processes now. Those that FSDP has left whole are sharded again first."""
        managed = [fsdp.manages(layer.module) for layer in self.layers]
        if not any(managed):
            return False
        if managed != self._managed:  # for the first time, or more of them than the last time
            found = fsdp.sharded_modules(self.model)
            fsdp.check(found, self.layers, self._ranked is not None)
            self._managed, self._fsdp = managed, found
        fsdp.reshard(self._fsdp)
        return any(sharded.is_sharded(layer.weight) for layer in self.layers)

    def _real(self) -> list[Tensor]:
        """Every layer's wiring as it is now; the rule's own tensors, not to be changed."""
        self._start_afresh()
        return [layer.edges.real(layer.weight) for layer in self.layers]

    def _start_afresh(self) -> None:
        """Before the rule is asked: the layers are still this handle's, and no choice is kept from an earlier time."""
        self._forget()
        self._sharded()

    def _forget(self) -> None:
        """Raise if the layers are no longer this handle's; else forget choices that optimizers may have outdated.

        Some optimizers (``fused=True``, or those that write ``weight.data``) leave no trace that a choice could see.
        """
        for layer in self.layers:
            if not _wires(layer):
                raise WiringError(
                    f"{layer.name} is no longer wired by this handle (the model was finalized or unwired); wire the "
                    "model again for a new one."
                )
            if layer.edges.pool is not None:
                layer.edges.pool.forget()
            if layer.edges.together is not None:
                layer.edges.together.forget()
        fsdp.check_whole((layer.name, layer.weight, layer.edges) for layer in self.layers)

    @property
    def ended(self) -> bool:
        """Whether the model was finalized or unwired, so that this handle wires nothing any more."""
        return not any(_wires(layer) for layer in self.layers)

    def look(self) -> list[LayerReport]:
        """A report on every layer; edges swapped are counted from one look to the next."""
        self._check_total()
        reports, seen = [], []
        for i, (layer, size, mask) in enumerate(zip(self.layers, self._sizes, self._real(), strict=True)):
            real = sharded.whole(mask)
            seen.append(np.packbits(real.cpu().numpy()))
            receives, sends = joined(layer.module, layer.attribute, real)
            reports.append(
                LayerReport(
                    name=layer.name,
                    shape=size.shape,
                    edges=int(torch.count_nonzero(real)),
                    possible=size.allowed,
                    swapped=int(np.bitwise_count(seen[i] & ~self._seen[i]).sum()) if self._seen else 0,
                    without_input=int((~receives).sum()),
                    without_output=int((~sends).sum()),
                )
            )
        self._seen = seen
        return reports

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the model that was wired by the norm that the network has which is used.

        Hallucinated edges have gradients too, and most edges are hallucinated: `torch.nn.utils.clip_grad_norm_` counts
        them all, and so clips harder than the network that is used would need. This one leaves those of this handle's
        layers out of the norm; all gradients, theirs included, are then scaled alike. Returns the norm.
        """
        self._start_afresh()
        with sharded.on_shards(self._sharded()):
            norm = self._clip(max_norm, norm_type)
        return norm.full_tensor() if sharded.is_sharded(norm) else norm  # type: ignore[attr-defined]

    def _clip(self, max_norm: float, norm_type: float) -> Tensor:
        with torch.no_grad():
            used = {id(layer.weight): self.rule.used(layer.weight.detach(), layer.edges) for layer in self.layers}
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        grads = []
        for parameter in parameters:
            assert parameter.grad is not None
            mask = used.get(id(parameter))
            grads.append(parameter.grad if mask is None else torch.where(mask, parameter.grad, 0.0))
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's own ``state_dict``: where the schedules stand."""
        state = {"rule": self.rule.name, "steps": self.steps, "edges": self._counts, "planned": self._planned}
        return state if self._ranked is None else {**state, "ranked": self._ranked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved `state_dict`; load the model's first."""
        if not isinstance(state, Mapping):
            raise WiringError(f"a wiring's state is what its state_dict() gave, but {type(state).__name__} came.")
        if state.get("rule") != self.rule.name:
            raise WiringError(
                f"this state was saved with rule {state.get('rule')!r}, but the model is wired with "
                f"{self.rule.name!r}; wire the model with the rule that it was saved with."
            )
        if missing := [key for key in ("steps", "edges") if key not in state]:
            raise WiringError(f"this is no state of a wiring: it has no {missing[0]!r}.")
        steps, saved = state["steps"], state.get("planned")
        if not _is_count(steps):
            raise WiringError(f"this is no state of a wiring: its 'steps' are {steps!r}.")
        if saved is not None and not (_is_count(saved) and saved > 0):
            raise WiringError(f"this is no state of a wiring: its 'planned' are {saved!r}.")
        for key in ("edges", "ranked"):
            counts = state.get(key, self._counts)
            if not isinstance(counts, list) or not all(map(_is_count, counts)):
                raise WiringError(f"this is no state of a wiring: its {key!r} are not a list of whole numbers.")
        if "ranked" in state and (self._ranked is None or len(state["ranked"]) != len(self._ranked)):
            raise WiringError("this is no state of a wiring: its 'ranked' are not those of the layers wired here.")
        own = self._planned
        before = self.steps, self._ranked, self.budget
        self.steps, self._ranked = steps, state.get("ranked", self._ranked)
        if saved is not None and self._given is not None:
            self.budget = self._given.planned(saved)
        if (counts := self._budgeted()) != state["edges"]:
            at = self.steps
            self.steps, self._ranked, self.budget = before
            raise WiringError(
                f"this state was saved with {_shown(state['edges'])} edges, but at step {at} the model is wired with "
                f"{_shown(counts)}; wire the model with the budget it was saved with."
            )
        if saved is not None and saved != own:
            self.plan(saved)
        if self._moves:
            self._counts = counts  # where the rule moved them came with the model
        else:
            self._follow_schedule()  # what the rule remembers came with the model: it is not asked again
        if own is not None and own != saved:
            self.plan(own)  # a training that goes on for longer, or less long, than it was meant to
        self._check_total()

    def __repr__(self) -> str:
        return f"<Wiring of {type(self.model).__name__}: {self.rule!r}, {len(self.layers)} layers, step {self.steps}>"

    def __str__(self) -> str:
        """A table of the layers. Counts as a look: the next one tells the edges swapped since."""
        reports = self.look()
        text = table(reports)
        if self.budget is not None and self.budget.spent is not None:
            left = self.budget.spent - sum(r.edges * s.cost for r, s in zip(reports, self._sizes, strict=True))
            if left > 0:  # a schedule that comes down from more has more than that
                text += f"\n{left:,} multiply-adds fewer than asked for: no numbers of edges near it come nearer"
        return text


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@torch.no_grad()
def rank_layers(
    weights: Sequence[Tensor], allowed: Sequence[Tensor | None], sizes: Sequence[Size], spent: int
) -> list[int]:
    """How many edges of each layer are among the strongest of all layers that together cost ``spent`` multiply-adds."""
    device = weights[0].device
    rows = [w.detach().reshape(-1).to(device).abs().float() for w in weights]
    rows = [
        row if mask is None else torch.where(mask.reshape(-1).to(device), row, -1.0)
        for row, mask in zip(rows, allowed, strict=True)
    ]
    strongest, order = torch.cat(rows).sort(descending=True, stable=True)
    layer = torch.arange(len(rows), device=device).repeat_interleave(
        torch.tensor([len(r) for r in rows], device=device)
    )
    layer = layer[order][strongest >= 0]
    costs = torch.tensor([size.cost for size in sizes], device=device)[layer].cumsum(0)
    return torch.bincount(layer[costs <= spent], minlength=len(rows)).tolist()


def table(reports: list[LayerReport]) -> str:
    """Layer reports as text in columns, with a line for the sum."""
    head = ["layer", "shape", "edges", "density", "swapped", "no input", "no output"]
    rows = [[r.name.removesuffix(".weight"), "×".join(map(str, r.shape)), *_numbers([r])] for r in reports]
    rows.append(
        [
            f"{len(reports)} layer{'s' if len(reports) > 1 else ''}",
            f"{sum(r.possible for r in reports):,}",
            *_numbers(reports),
        ]
    )
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
    rule = "─" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _shown(counts: list[int]) -> str:
    return ", ".join(f"{count:,}" for count in counts[:4]) + (", …" if len(counts) > 4 else "")


def _numbers(reports: list[LayerReport]) -> list[str]:
    edges, possible = sum(r.edges for r in reports), sum(r.possible for r in reports)
    rest = [sum(getattr(r, name) for r in reports) for name in ("swapped", "without_input", "without_output")]
    return [f"{edges:,}", f"{100 * edges / max(possible, 1):.2f} %", *(f"{number:,}" for number in rest)]
