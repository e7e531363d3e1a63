"""Open a network by name: of a recipe before training, of a run, or one that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from wirings.errors import WiringError
from wirings.train import recipes
from wirings.train.saved_runs import open_run
from wirings.train.untrained import new_model


class OpenedNetwork(NamedTuple):
    """A network, and the input to profile it with."""

    model: nn.Module
    shape: tuple[int, ...] | None
    """The shape of one example, without the batch; None if the model has no ``input_shape``."""
    title: str


def open_network(
    network: str,
    *,
    trained: bool = False,
    best: bool = False,
    image_size: int | None = None,
    classes: int | None = None,
) -> OpenedNetwork:
    """Open the network of a recipe before training, or of a run.

    Args:
        network: a recipe's name or YAML file, or a run's folder.
        trained: whether ``network`` is the name of a trained network that comes with the package.
        best: for a run, open the network of the best epoch instead of the last.
        image_size: height and width of an image in pixels, instead of the network's own. A recipe's network is built
            for it.
        classes: the number of classes, if a recipe's data set does not determine it.
    """
    if classes is not None and classes < 1:
        raise WiringError(f"classes must be at least 1, got {classes}.")
    if trained or Path(network).is_dir():
        run = open_run(network, best, "cpu")
        model, shape = run.model, getattr(run.model, "input_shape", None)
        title = f"{network}, trained ({run.recipe})"
        if image_size is not None and shape is not None:
            shape = (shape[0], *[image_size] * (len(shape) - 1))
    else:
        try:
            recipe = recipes.get(network)
        except WiringError as error:
            raise WiringError(f"{error} Nor is {network!r} the folder of a run.") from error
        model = new_model(recipe.settings, classes, image_size)
        shape, title = getattr(model, "input_shape", None), f"{recipe.name}, before training"
    suffix = "" if shape is None else f", {' × '.join(map(str, shape))} values"
    return OpenedNetwork(model, shape, title + suffix)
