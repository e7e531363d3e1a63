"""The handle that `wire_` returns: steps the rule, reports on the wiring, saves what is not in the model.

A training step runs as follows, with the places where it happens:

    x, y = batch
    loss = criterion(model(x), y)    # 1, 2, 3
    loss.backward()                  # 4
    optimizer.step()                 # 5
    wiring.step(optimizer)           # 6

1. The forward pass of the model begins. Its pre-hook, `wirings.selection.service.Selection`, drops all earlier choices.
2. The first wired layer that runs asks for its weight. On a GPU, the selection makes the weights of all layers at
   once, if the rule says what they keep (`Rule.kept`). Otherwise the layer's parametrization
   (`wirings.wire.edges.Edges`) asks the rule (`Rule.forward`), and the rule asks the selection, which ranks layers
   that share a budget once.
3. Each further layer takes its weight from what was made, or is asked itself.
4. The backward pass: the gradient goes straight through to all edges, or to those that the rule says it reaches.
5. The optimizer changes the parameters, which hold the weights of all edges, hallucinated ones included.
6. `Wiring.step` advances the schedules, writes the new budgets to the layers' ``edges.k``, and calls `Rule.update` with
   the step, the planned length of training, and whether the budget has changed. If that raises, everything is restored.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wirings.budgets.bounded_ranking import BoundedRanking
from wirings.budgets.budget import Budget, LayerSize
from wirings.errors import WiringError
from wirings.rules.rule import Rule, Training
from wirings.selection import sharded
from wirings.selection.grouped import GroupedSelection
from wirings.selection.structure import Structure
from wirings.utils.checks import check_int, check_number
from wirings.utils.layers import original_weight
from wirings.wire import fsdp
from wirings.wire.checks import check_total
from wirings.wire.clipping import clip_by_used
from wirings.wire.describe import describe
from wirings.wire.handle_state import check_state, shown
from wirings.wire.layer import Layer
from wirings.wire.node_bound import LayerRanking
from wirings.wire.parametrization import wired
from wirings.wire.report import LayerReport, Packed, report_layers, table
from wirings.wire.transaction import undone_on_error

_AT_LAST = 2**62
"""A step that no training reaches."""


class Wiring:
    """The handle of a wired model. Print it for a table of its layers; printing changes nothing."""

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        layers: list[Layer],
        budget: Budget | None,
        sizes: list[LayerSize],
        ranked: list[int] | BoundedRanking | None = None,
        structure: Structure | None = None,
    ) -> None:
        self.structure = structure
        """Which edges are real together (``wire_(…, structure=…)``); None if every edge is chosen for itself."""
        self.model, self.rule, self.layers, self.budget, self._sizes = model, rule, layers, budget, sizes
        self._given = budget  # before a plan turned fractions of training into steps
        first = ranked if isinstance(ranked, BoundedRanking) else None
        self._ranked = ranked.counts if isinstance(ranked, BoundedRanking) else ranked  # in the last ranking, by layer
        self._ranking = (
            None
            if ranked is None
            else LayerRanking(rule, layers, sizes, first, None if budget is None else budget.spent)
        )
        self.planned: int | None = None
        """The planned number of optimizer steps (`plan`), or None if it is unknown."""
        self._planned_before: int | None = None  # at the last update
        self.steps = 0
        """The number of optimizer steps so far."""
        self.restored: Mapping[str, Any] | None = None
        """The description that `wirings.rewire_` has restored this wiring from, if it has."""
        self._counts = [int(layer.edges.k) for layer in layers]
        self._last_look: Packed = []
        self._managed: list[bool] = []  # the layers that FSDP managed when it was last looked at,
        self._fsdp: list[Any] = []  # and the modules that it was called on
        self._note_ends()
        if self._ranking is not None and self._ranked is not None:
            self._ranking.close(self._counts, self._ranked)

    def _note_ends(self) -> None:
        """Store the final number of edges of a schedule, so that `finalize_` can warn if it was not reached."""
        if self.budget is None or not self.budget.changes or self._ranked is not None:
            return
        ends = self._budgeted(self.budget.planned(1), _AT_LAST, None)
        for layer, end in zip(self.layers, ends, strict=True):
            if self.rule.removes_permanently and end > int(layer.edges.k):
                raise WiringError(
                    f"{layer.name}: rule {self.rule.name!r} removes edges permanently, but the budget's schedule rises "
                    f"from {int(layer.edges.k):,} to {end:,}; give it a density that does not rise."
                )
            layer.edges.end = end

    @property
    def gradient_every(self) -> int:
        """Steps from one gradient of hallucinated edges to the next (``wire_(…, gradient_every=…)``)."""
        return getattr(self.layers[0].edges.selection, "gradient_every", 1)

    @property
    def gradient_to_all(self) -> bool:
        """Whether the gradient of the next step reaches hallucinated edges too, if the rule lets it.

        `step` sets it, if ``gradient_every`` is more than 1. A CUDA graph repeats the step that was captured: set it to
        capture one of each kind, and replay the graph that it asks for.
        """
        return getattr(self.layers[0].edges.selection, "gradient_to_all", True)

    @gradient_to_all.setter
    def gradient_to_all(self, value: bool) -> None:
        if isinstance(selection := self.layers[0].edges.selection, GroupedSelection):
            selection.gradient_to_all = value

    def plan(self, steps: int) -> None:
        """Set the number of optimizer steps of the training, before it begins.

        Needed by rules with a schedule (`l1_anneal`, …) and by schedules of the density in fractions of training;
        ignored otherwise. It is part of the handle's state; a plan made before the state is loaded takes precedence.
        Warns if the training ends before a rule that acts periodically, or a schedule, changes anything.
        """
        self.planned = check_int("Wiring.plan", "steps", steps)
        if self._given is not None:
            self.budget = self._given.planned(self.planned)
        idle = {
            f"rule {self.rule.name!r} will not change the wiring": self.rule.idle(self.planned),
            "the density will not change": None if self._given is None else self._given.idle(self.planned),
        }
        for what, why in idle.items():
            if why is not None:
                warnings.warn(f"{what} in a training of {self.planned:,} steps: {why}.", stacklevel=2)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Advance schedules and let the rule act. Call it after every ``optimizer.step()``.

        If it raises, the step does not count, and weights, gradients, optimizer state, budgets, what the rule remembers
        and the handle are restored. Changes inside a rule's own Python objects, such as lists and random generators,
        are not undone, nor are writes through NumPy.

        Args:
            optimizer: the optimizer, for rules that read or change its state; they raise if it is missing.
        """
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise WiringError(f"wiring.step() expects an optimizer or None, got {type(optimizer).__name__}.")
        self._forget()
        with sharded.on_shards(self._sharded()):
            self._update(self.steps + 1, optimizer)
        self.steps += 1
        self.gradient_to_all = self.steps % self.gradient_every == 0

    def _update(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        ranked, counts = self._ranked, self._counts
        budget, now = self.budget, Training(step, self.planned, False, self._planned_before)
        ranking = self._ranking
        if budget is not None and ranking is not None and ranking.is_due(budget, now):
            ranked = ranking.rank(budget)
        if budget is not None and budget.changes:
            counts = self._budgeted(budget, step, ranked)
            ends = counts == ranked == self._ranked != self._counts  # a schedule does, and the bound begins to hold
            if ranking is not None and ends and not self.rule.removes_permanently:
                ranked = counts = ranking.rank(budget)
        changed = counts != self._counts
        if changed or self.rule.acts_between_steps or ranked is not self._ranked:
            now = replace(now, budget_changed=changed)
            with undone_on_error(self.rule, self.layers, optimizer, (self._counts, counts) if changed else None):
                if changed or self.rule.acts_between_steps:
                    self.rule.update(self.layers, now, optimizer)
                if ranking is not None and ranked is not None and (changed or ranked is not self._ranked):
                    ranking.close(counts, ranked)
        self._ranked, self._counts, self._planned_before = ranked, counts, self.planned

    def _budgeted(self, budget: Budget, step: int, ranked: list[int] | None) -> list[int]:
        """The number of edges of every layer after a step; that of all layers together for each, if they share one."""
        counts = budget.counts(self._sizes, step, ranked)
        return counts * len(self.layers) if len(counts) == 1 else counts

    @property
    def acts_between_steps(self) -> bool:
        """Whether `step` may have something to do after any step, for the rule, a schedule or ``gradient_every``."""
        changes = self.budget is not None and self.budget.changes
        return self.rule.acts_between_steps or changes or self.gradient_every > 1

    @property
    def _moves(self) -> bool:
        """Whether the rule may have moved edges between layers that each have a budget."""
        return self.rule.moves_budget and not self.layers[0].edges.shared

    def _check_total(self, counts: list[int] | None = None) -> None:
        total = sum(self._counts if counts is None else counts)
        if self._moves:
            check_total(
                self.layers,
                total,
                sum(int(layer.edges.k) for layer in self.layers),
                "Either the rule is broken, or the checkpoints loaded into the model and into its handle do not belong "
                "together.",
            )

    def masks(self, full: bool = False) -> dict[str, Tensor]:
        """The wiring: a boolean mask of the real edges of every wired weight.

        Args:
            full: return whole masks on every process, even of weights that are sharded (FSDP); by default they are
                sharded like the weights.
        """
        masks = zip(self.layers, self._real(), strict=True)
        return {layer.name: (sharded.whole(real) if full else real).clone() for layer, real in masks}

    def _sharded(self) -> bool:
        """Whether weights are sharded over processes now. Those that FSDP has left whole are resharded first."""
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
        """The current wiring of every layer: the rule's own tensors, not to be changed."""
        self._start_afresh()
        return [layer.edges.real(layer.weight) for layer in self.layers]

    def _start_afresh(self) -> None:
        """Check that the layers still belong to this handle, and forget earlier choices, before the rule is asked."""
        self._forget()
        self._sharded()

    def _forget(self) -> None:
        """Check that the layers are wired, and forget choices that may be out of date.

        Some optimizers (``fused=True``, or those that write ``weight.data``) change weights without a trace.
        """
        self._check_wired()
        self.layers[0].edges.selection.forget()
        fsdp.check_whole((layer.name, layer.weight, layer.edges) for layer in self.layers)

    def _check_wired(self) -> None:
        """Raise if the layers are no longer wired by this handle."""
        for layer in self.layers:
            if not _is_wired(layer):
                raise WiringError(
                    f"{layer.name} is no longer wired by this handle: the model was finalized or unwired. Wire it "
                    "again for a new handle."
                )

    @property
    def ended(self) -> bool:
        """Whether the model was finalized or unwired, so that this handle can no longer be used."""
        return not any(_is_wired(layer) for layer in self.layers)

    def report(self) -> list[LayerReport]:
        """A report on every layer. Swapped edges are counted since the last `look`; this changes nothing."""
        return self._reported()[0]

    def look(self) -> list[LayerReport]:
        """A report on every layer; the next one counts swapped edges from now on."""
        reports, self._last_look = self._reported()
        return reports

    def _reported(self) -> tuple[list[LayerReport], Packed]:
        self._check_total()
        return report_layers(self.layers, self._sizes, self._real(), self._last_look)

    @property
    def last_look(self) -> list[np.ndarray]:
        """The wiring at the last `look`: packed bits, one array per layer. Part of a checkpoint that resumes a log."""
        return list(self._last_look)

    @last_look.setter
    def last_look(self, packed: list[np.ndarray]) -> None:
        shapes = [[one.shape for one in some] for some in (packed, self._last_look)]
        if shapes[0] != shapes[1]:
            raise WiringError(
                "last_look must come from a handle with the same layers; wire the model as it was when saved."
            )
        self._last_look = [one.copy() for one in packed]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the model by the norm over the edges in use.

        Most edges are hallucinated, and may have gradients too. `torch.nn.utils.clip_grad_norm_` counts them all, and
        so clips harder than the network in use needs. This method leaves hallucinated edges out of the norm; all
        gradients, theirs included, are then scaled alike. Those of other wirings of the model count as used by their
        own rules.

        Args:
            max_norm: the largest norm allowed; ``math.inf`` only measures.
            norm_type: the order of the norm, positive; ``math.inf`` for the largest magnitude.

        Returns:
            The norm before clipping.
        """
        if max_norm != math.inf:
            max_norm = check_number("wiring.clip_grad_norm_()", "max_norm", max_norm, 0.0, math.inf)
        if norm_type != math.inf:
            norm_type = check_number("wiring.clip_grad_norm_()", "norm_type", norm_type, 0.0, math.inf, above=True)
        self._check_wired()  # and forget nothing: what the forward pass has ranked is what the gradients belong to
        with sharded.on_shards(self._sharded()):
            norm = clip_by_used(self.model, max_norm, norm_type)
        return norm.full_tensor() if sharded.is_sharded(norm) else norm  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's own ``state_dict``: where the schedules stand."""
        state = {"rule": self.rule.name, "steps": self.steps, "edges": self._counts, "planned": self.planned}
        state |= {} if self.structure is None else {"structure": self.structure.text}
        return state if self._ranked is None else {**state, "ranked": self._ranked}

    def describe(self) -> dict[str, Any]:
        """What is wired, with which rule and budget, and where the schedules stand, in values that JSON can hold.

        With the model's ``state_dict``, this is all that `wirings.rewire_` needs to wire another model alike. Save it
        beside the weights; Hugging Face models do so by themselves in ``save_pretrained``.
        """
        return self.describe_within(self.model)

    def describe_within(self, model: nn.Module) -> dict[str, Any]:
        """`describe`, with the layers' names in a ``model`` that contains the wired one."""
        part = next((name for name, module in model.named_modules() if module is self.model), "")
        state = self.state_dict()
        described = describe(model, part, self.rule, self.layers, self._given, self._sizes, state, self.structure)
        return described if self.gradient_every == 1 else {**described, "gradient_every": self.gradient_every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`. Load the model's first."""
        check_state(state, self.rule, self.structure, self._counts, self._ranked)
        steps, saved, own, counts = state["steps"], state.get("planned"), self.planned, self._counts
        ranked: list[int] | None = state.get("ranked", self._ranked)
        budget = self.budget if saved is None or self._given is None else self._given.planned(saved)
        if budget is not None and budget.changes:
            counts = self._budgeted(budget, steps, ranked)
        if counts != state["edges"]:
            raise WiringError(
                f"this state was saved with {shown(state['edges'])} edges, but at step {steps} the model is wired "
                f"with {shown(counts)}; wire the model with the budget it was saved with."
            )
        self._check_total(counts)
        self.steps, self._ranked, self._planned_before = steps, ranked, saved
        self.gradient_to_all = self.steps % self.gradient_every == 0
        # What the rule remembers was loaded with the model, and so was k if the rule moves edges between layers.
        if counts != self._counts and not self._moves:
            for layer, k in zip(self.layers, counts, strict=True):
                layer.edges.k.fill_(k)
        self._counts = counts
        if (
            planned := saved if own is None else own
        ) is not None:  # training may be longer or shorter than planned before
            self.plan(planned)

    def __repr__(self) -> str:
        structure = "" if self.structure is None else f" in {self.structure}"
        rule = f"{self.rule!r}{structure}"
        return f"<Wiring of {type(self.model).__name__}: {rule}, {len(self.layers)} layers, step {self.steps}>"

    def __str__(self) -> str:
        """A table of the layers. Swapped edges are counted since the last `look`."""
        reports = self.report()
        text = table(reports)
        edges = {id(original_weight(module, name)) for _, module, name, _ in wired(self.model)}
        total = sum(p.numel() for p in self.model.parameters())
        dense = sum(p.numel() for p in self.model.parameters() if id(p) not in edges)
        if self.structure is not None:
            text += f"\nstructure: {self.structure}"
            if self.structure.nm is None:
                real, possible = sum(r.counted for r in reports), sum(size.allowed for size in self._sizes)
                text += f", {real:,} of {possible:,} groups"
        if dense:
            text += f"\nnot wired: {dense:,} of {total:,} parameters ({100 * dense / total:.1f} %)"
        if self.budget is not None and self.budget.spent is not None and self.budget.k is None:
            left = self.budget.spent - sum(r.counted * s.cost for r, s in zip(reports, self._sizes, strict=True))
            if left > 0:  # during a schedule from above it is negative
                text += f"\n{left:,} multiply-adds below the budget: no numbers of edges near the shares are closer"
        return text


def _is_wired(layer: Layer) -> bool:
    """Whether a layer still has the edges that it was wired with."""
    lists: Any = layer.module._modules.get("parametrizations")  # without PyTorch's checks: it is called in every step
    holder = None if lists is None else lists._modules.get(layer.attribute)
    return holder is not None and holder._modules.get("0") is layer.edges
