"""From a recipe to node functions."""

from __future__ import annotations

from typing import Any

from torch import nn

from wirings.errors import WiringError
from wirings.graph.nodes.base import After, Node, NodeFunction, NodeRecipe, get
from wirings.graph.nodes.plain import Plain
from wirings.utils.text import brief


def build(recipe: NodeRecipe | None, nodes: int, where: str, sends: bool = True, receives: bool = True) -> NodeFunction:
    """Make the node functions of a recipe; ``where`` is the graph that asks, for error messages."""
    if recipe is None:
        return Plain()
    if isinstance(recipe, str):
        recipe = get(recipe)
    if isinstance(recipe, Node):
        return recipe.build(nodes, sends, receives)
    if isinstance(recipe, type) and issubclass(recipe, Node):
        raise WiringError(f"{where}: node= expects a recipe, got its class: write {recipe.__name__}(…).")
    make: Any = recipe
    try:
        made = make(nodes) if callable(recipe) and not isinstance(recipe, nn.Module) else None
    except TypeError as error:
        raise WiringError(
            f"{where}: node={_short(recipe)} failed to make a module for {nodes} nodes: {error}"
        ) from error
    if not isinstance(made, nn.Module):
        raise WiringError(
            f"{where}: node= expects a recipe such as ConvNode(), or a function that takes a number of nodes and "
            f"returns their module, got {_short(recipe)}. For a module of your own, write node=lambda nodes: …."
        )
    return made if isinstance(made, NodeFunction) else After(made)


def _short(recipe: Any) -> str:
    return type(recipe).__name__ if isinstance(recipe, nn.Module) else brief(recipe)
