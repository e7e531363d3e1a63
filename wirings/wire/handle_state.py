"""Checks of the state that a handle loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wirings.errors import WiringError
from wirings.rules.rule import Rule
from wirings.selection.structure import FREE, Structure
from wirings.utils.checks import is_int
from wirings.utils.text import brief


def check_state(
    state: Any, rule: Rule, structure: Structure | None, counts: list[int], ranked: list[int] | None
) -> None:
    """Raise unless this can be the state of a wiring.

    Args:
        state: what `Wiring.load_state_dict` is given.
        rule: the rule of the wiring.
        structure: its structure.
        counts: the number of edges of its layers.
        ranked: that in the last ranking of all layers, if the budget is shared out by it.
    """
    if not isinstance(state, Mapping):
        raise WiringError(f"expected the state_dict() of a wiring, got {type(state).__name__}.")
    if state.get("rule") == "nm":
        raise WiringError(
            "this state was saved with the former rule 'nm', which structure=\"N:M\" has replaced, and cannot be "
            "continued. Start the training again with rule 'dnw' and that structure."
        )
    if state.get("rule") != rule.name:
        raise WiringError(
            f"this state was saved with rule {state.get('rule')!r}, but the model is wired with "
            f"{rule.name!r}; wire the model with the rule that it was saved with."
        )
    ours, theirs = FREE if structure is None else structure.text, state.get("structure", FREE)
    if theirs != ours:
        raise WiringError(f"this state was saved with structure={theirs!r}, but the model is wired with {ours!r}.")
    if missing := [key for key in ("steps", "edges") if key not in state]:
        raise WiringError(f"this is not the state of a wiring: it has no {missing[0]!r}.")
    steps, saved = state["steps"], state.get("planned")
    if not _is_count(steps):
        raise WiringError(f"this is not the state of a wiring: 'steps' must be a whole number, got {brief(steps)}.")
    if saved is not None and not (_is_count(saved) and saved > 0):
        raise WiringError(
            f"this is not the state of a wiring: 'planned' must be a positive whole number, got {brief(saved)}."
        )
    for key in ("edges", "ranked"):
        given = state.get(key, counts)
        if not isinstance(given, list) or not all(map(_is_count, given)):
            raise WiringError(f"this is not the state of a wiring: {key!r} must be a list of whole numbers.")
    if "ranked" in state and (ranked is None or len(state["ranked"]) != len(ranked)):
        raise WiringError("this is not the state of this wiring: 'ranked' belongs to other layers.")


def _is_count(value: Any) -> bool:
    return is_int(value) and value >= 0


def shown(counts: list[int]) -> str:
    """The first of several numbers, for messages."""
    return ", ".join(f"{count:,}" for count in counts[:4]) + (", …" if len(counts) > 4 else "")
