"""Networks to look at and to count: a recipe's before training, or a run's."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from wirings.errors import WiringError
from wirings.models.registry import _registry
from wirings.train import recipes
from wirings.train.build import build
from wirings.train.distributed import Place
from wirings.train.runs import open_run
from wirings.train.settings import Settings
from wirings.utils.importing import import_function, is_import_path

CLASSES = {"imagenet": 1000, "cifar10": 10, "digits": 10}
"""Classes of the data sets that always have as many."""


def new_model(settings: Settings, classes: int | None = None, image_size: int | None = None) -> nn.Module:
    """The model of some settings before its first step, with the weights and the wiring of their seed.

    Args:
        settings: a recipe's.
        classes: how many, where the data does not say so before it is read.
        image_size: of a side, in pixels, instead of the recipe's.
    """
    known = CLASSES.get(settings.data.name, settings.data.options.get("classes", settings.model.options.get("classes")))
    classes = known if classes is None else classes
    if classes is None:
        raise WiringError(
            f"how many classes there are is known when the data {settings.data.name!r} is read: give their number, "
            "--classes."
        )
    if image_size is not None:
        name = settings.model.name
        make = import_function(name, "model.name") if is_import_path(name) else _registry[name]
        if "image_size" not in inspect.signature(make).parameters:
            raise WiringError(f"model {settings.model.name!r} is for images of one size: drop image_size={image_size}.")
        options = {**settings.model.options, "image_size": image_size}
        settings = replace(settings, model=replace(settings.model, options=options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return build(settings, classes, Place(0, 1, torch.device("cpu")))[0]


class Opened(NamedTuple):
    """A network, and what it is counted on."""

    model: nn.Module
    shape: tuple[int, ...] | None
    """Of one example, without the batch; None if the model does not say."""
    title: str


def opened(
    network: str,
    *,
    trained: bool = False,
    best: bool = False,
    image_size: int | None = None,
    classes: int | None = None,
) -> Opened:
    """The network of a recipe before training, or of a run's folder.

    Args:
        network: a recipe's name or YAML file, or a run's folder.
        trained: take the name for that of a trained network which comes with the package.
        best: of a run, the best epoch's network instead of the last.
        image_size: of a side, in pixels, instead of the network's own. A recipe's network is made for it.
        classes: how many, where a recipe's data does not say so.
    """
    if classes is not None and classes < 1:
        raise WiringError(f"a network has at least one class, not {classes}.")
    if trained or Path(network).is_dir():
        model, _, name, _ = open_run(network, best, "cpu")
        shape, title = getattr(model, "input_shape", None), f"{network}, trained ({name})"
        if image_size is not None and shape is not None:
            shape = (shape[0], *[image_size] * (len(shape) - 1))
    else:
        try:
            recipe = recipes.get(network)
        except WiringError as error:
            raise WiringError(f"{error} Nor is {network!r} the folder of a run.") from error
        model = new_model(recipe.settings, classes, image_size)
        shape, title = getattr(model, "input_shape", None), f"{recipe.name}, before training"
    on = "" if shape is None else f", {' × '.join(map(str, shape))} values"
    return Opened(model, shape, title + on)
