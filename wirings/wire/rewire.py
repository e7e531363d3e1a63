"""`rewire_` a model as it was when it was saved: the same edges, rule, budget, memory and step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.structure import FREE, Structure
from wirings.utils.layers import check_module
from wirings.utils.text import shortened
from wirings.wire.checks import allowed_masks, check_by_pattern, check_not_wrapped, check_wirable, first_names, set_axes
from wirings.wire.describe import check_costs, check_format, describe_part, make_budget, make_rule
from wirings.wire.handle import Wiring
from wirings.wire.parametrization import detach
from wirings.wire.pretrained import KEY, handles_of, read_descriptions, read_tensors
from wirings.wire.structured import check_gradient_every, groups_of
from wirings.wire.targets import Target, all_targets
from wirings.wire.wire import put_edges, size_of


def rewire_(
    model: nn.Module,
    saved: Mapping[str, Any] | str | PathLike[str],
    state: Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    allowed: Mapping[str, Tensor] | None = None,
) -> Wiring:
    """Wire a plain model in place as another one was wired when it was saved, with all its weights.

    The rule, the budget, what the rule remembers and the step of its schedules are those of the saved model, so that
    training can go on. A Hugging Face model is restored from its folder:

        model = AutoModelForCausalLM.from_pretrained(folder)
        wiring = wirings.rewire_(model, folder)

    and any other model from the description of its wiring and its ``state_dict``:

        torch.save({"wiring": wiring.describe(), "model": model.state_dict()}, path)
        ...
        saved = torch.load(path)
        wiring = wirings.rewire_(model, saved["wiring"], saved["model"])

    Args:
        model: a plain model of the same architecture, or the part of it that was wired. All its weights are loaded.
        saved: a folder that ``save_pretrained`` or the Trainer has written while the model was wired, or the
            description of a wiring (`Wiring.describe`).
        state: with a description, the ``state_dict`` of the wired model, or the folder that holds it.
        allowed: the masks that `wirings.wire_` was given, if any. A folder holds them already.

    Returns:
        A new handle.

    Raises:
        WiringError: if the model does not match what was saved. It is left unchanged.
    """
    check_module("rewire_()", model)
    check_not_wrapped(model)
    masks = check_by_pattern("allowed", allowed)
    folder = next((str(place) for place in (saved, state) if isinstance(place, (str, PathLike))), "")
    where = f"{shortened(folder, 200)}: " if folder else ""
    try:
        return _rewire(model, saved, state, masks)
    except WiringError as error:
        said = shortened(str(error), 1000)  # it may quote any text in a description
        if folder in said and said == str(error):
            raise
        raise WiringError(said if folder in said else f"{where}{said}") from error
    except _OF_DAMAGE as error:
        raise WiringError(
            f"{where}the wiring of this {type(model).__name__} cannot be restored: its description or its state is "
            f"damaged, or they do not belong together ({type(error).__name__}: {shortened(str(error), 200)})."
        ) from error


_OF_DAMAGE = (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RuntimeError)
"""What a description may cause whose values are of other types or out of range."""


def _rewire(model: nn.Module, saved: Any, state: Any, allowed: Mapping[str, Tensor]) -> Wiring:
    given, state = _resolve(model, saved, state)
    check_format(given)
    description, prefix = _within(model, given)
    rule, plan = make_rule(description["rule"]), make_budget(description.get("budget"))
    layers, targets = description["layers"], _targets(model, description)
    whole = isinstance(state, Mapping)
    tensors = state if isinstance(state, Mapping) else read_tensors(state)
    tensors = {str(key).removeprefix(prefix): x for key, x in tensors.items() if str(key).startswith(prefix)}
    if not whole:
        _check_saved_wired(state, targets, tensors)
    masks = _masks(targets, layers, tensors, allowed)
    set_axes(targets, {layer["names"][0]: layer["axes"] for layer in layers if layer["axes"] is not None})
    check_costs(layers)
    structure = Structure.of(description.get("structure", FREE))
    groups = groups_of(structure, targets, masks)
    sizes = [
        size_of(target, layer["allowed"] if one is None else one.possible, layer["cost"], _node_costs(layer, target))
        for target, layer, one in zip(targets, layers, groups, strict=True)
    ]
    before = {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    starts = _final_wirings(targets, tensors) if rule.keeps_zeros else None
    ranked = description["state"].get("ranked")
    every = description.get("gradient_every", 1)
    check_gradient_every(structure, rule, every)
    put = {"starts": starts, "structure": structure, "gradient_every": every}
    wiring, _ = put_edges(model, rule, plan, targets, masks, sizes, ranked, **put)
    try:
        _load(wiring, targets, tensors, whole)
        wiring.load_state_dict(description["state"])
        wiring.look()
    except BaseException as error:
        detach(model, only=[layer.edges for layer in wiring.layers])
        model.load_state_dict(before, strict=False)
        if isinstance(error, RuntimeError) and not isinstance(error, WiringError):  # of load_state_dict
            raise WiringError(f"the saved state does not fit this {type(model).__name__}: {error}") from error
        raise
    wiring.restored = given
    _drop_restored(model)
    return wiring


def _node_costs(layer: Mapping[str, Any], target: Target) -> tuple[int, ...] | None:
    """What each node of a graph costs, if a bound on multiply-adds counts nodes."""
    if layer.get("nodes") is None:
        return None
    nodes = getattr(target.places[0][1], "nodes", 0)
    if len(layer["nodes"]) != nodes:
        raise WiringError(f"'nodes' of {target.name} must have {nodes:,} entries, got {len(layer['nodes']):,}.")
    return tuple(layer["nodes"])


def _within(model: nn.Module, description: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The description with the names that weights have in this model, and the prefix that names in the state have.

    A model that was saved with a wired part can be restored by wiring the whole, or that part.
    """
    known = {name for target in all_targets(model) for name in target.names}

    def fits(one: Mapping[str, Any]) -> bool:
        return all(layer["names"] and layer["names"][0] in known for layer in one["layers"])

    if description.get("part") and not fits(description) and fits(of_part := describe_part(description)):
        return of_part, f"{description['part']}."
    return description, ""


def _drop_restored(model: nn.Module) -> None:
    """Remove the descriptions from a model's config once all are restored: it is described anew when it is saved."""
    config: Any = getattr(model, "config", None)
    found, restored = getattr(config, KEY, None), [handle.restored for handle in handles_of(model)]
    if found and all(description in restored for description in found):
        delattr(config, KEY)


def _resolve(model: nn.Module, saved: Any, state: Any) -> tuple[Any, Any]:
    """The description, and the state or the folder that holds it."""
    if isinstance(saved, Mapping):
        if state is None:
            raise WiringError(
                "rewire_() with a description also needs the wired model's state_dict(), or the folder that holds it: "
                "rewire_(model, description, state)."
            )
        return saved, state
    if state is not None:
        raise WiringError("rewire_() with a folder takes no state: the folder holds it.")
    found = read_descriptions(saved)
    if len(found) > 1:
        raise WiringError(
            f"{str(saved)!r} has {len(found)} wirings. Restore one after the other: rewire_(model, description, "
            f"{str(saved)!r}) for each description in model.config.{KEY}."
        )
    return found[0], saved


def _targets(model: nn.Module, description: Mapping[str, Any]) -> list[Target]:
    """The weights that a description names."""
    known = {name: target for target in all_targets(model) for name in target.names}
    targets = []
    hint = f"Make the model as it was when saved, a {description.get('model', 'model')}."
    names = [layer["names"][0] for layer in description["layers"]]
    if missing := [name for name in names if name not in known]:
        raise WiringError(
            f"this {type(model).__name__} has no weight {first_names(missing)}, which the saved wiring names. {hint}"
        )
    for layer in description["layers"]:
        target = known[layer["names"][0]]
        if list(target.weight.shape) != list(layer["shape"]):
            raise WiringError(
                f"{target.name} has shape {tuple(target.weight.shape)}, but {tuple(layer['shape'])} in the saved "
                f"wiring. {hint}"
            )
        if set(target.names) != set(layer["names"]):
            raise WiringError(
                f"the weight {layer['names'][0]} is used as {', '.join(target.names)}, but as "
                f"{', '.join(layer['names'])} in the saved wiring: weights are tied differently. {hint}"
            )
        check_wirable(target, model)
        targets.append(target)
    return targets


def _check_saved_wired(folder: Any, targets: list[Target], tensors: Mapping[str, Any]) -> None:
    """Raise if a folder's config describes a wiring, but its weights were saved without it."""
    for target in targets:
        if not any(f"{name}.wiring.all_edges" in tensors for name in target.names):
            raise WiringError(
                f"the config in {str(folder)!r} describes a wiring, but the weights were saved from a plain model: "
                f"there is no {target.name}.wiring.all_edges. Wire the model with wirings.wire_."
            )


def _masks(
    targets: list[Target], layers: list[Any], state: Mapping[str, Any], given: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """The allowed edges of every weight, from the saved state or as given."""
    found = dict(given)
    for target in targets:
        for name in target.names:
            if (mask := state.get(f"{name}.wiring.allowed")) is not None:
                found[name] = mask.bool()
    masks = allowed_masks(targets, found)
    for target, layer, mask in zip(targets, layers, masks, strict=True):
        count = math.prod(layer["shape"]) if mask is None else int(mask.sum())
        if layer["masked"] != (mask is not None) or count != layer["allowed"]:
            raise WiringError(
                f"{target.name} had {layer['allowed']:,} allowed edges when it was saved, but has {count:,} now: pass "
                "the allowed= that wirings.wire_ was given."
            )
    return masks


def _final_wirings(targets: list[Target], state: Mapping[str, Any]) -> list[Tensor]:
    """The saved wiring of every weight, for a rule whose wiring is final and cannot be loaded later."""
    found: list[Tensor] = []
    for target in targets:
        saved = [state[key] for name in target.names if (key := f"{name}.wiring.wiring") in state]
        if not saved:
            raise WiringError(
                f"the saved state has no {target.name}.wiring.wiring: it belongs to a plain model, or to one that was "
                "wired by another rule."
            )
        found.append(saved[0].bool().to(target.weight.device))
    return found


def _load(wiring: Wiring, targets: list[Target], state: Mapping[str, Any], whole: bool) -> None:
    """Load a state into the wired model. A ``whole`` one has all keys; a file lacks some of those of tied weights."""
    for layer, target in zip(wiring.layers, targets, strict=True):
        for name in layer.edges.memory():
            stored = not layer.edges.place or name not in layer.edges._parameters  # the first layer's are those of all
            if stored and not any(f"{place}.wiring.{name}" in state for place in target.names):
                raise WiringError(
                    f"the saved state has no {target.name}.wiring.{name}, which rule {wiring.rule.name!r} remembers: "
                    "it belongs to a plain model, or to one that was wired by another rule."
                )
    result = wiring.model.load_state_dict(dict(state), strict=False)
    unexpected = [key for key in result.unexpected_keys if ".wiring." not in key]  # those belong to other wirings
    if whole and (result.missing_keys or unexpected):
        raise WiringError(
            f"the saved state does not fit this {type(wiring.model).__name__}: {len(result.missing_keys)} keys are "
            f"missing and {len(unexpected)} are unexpected ({first_names([*result.missing_keys, *unexpected])})."
        )
