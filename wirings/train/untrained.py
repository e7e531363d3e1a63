"""The network of a recipe before its first step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from wirings import models
from wirings.errors import WiringError
from wirings.train import data
from wirings.train.build import build
from wirings.train.distributed import ProcessContext
from wirings.train.settings import Settings
from wirings.utils.importing import import_function, is_import_path, takes_argument


def new_model(settings: Settings, classes: int | None = None, image_size: int | None = None) -> nn.Module:
    """Make the model of some settings, with the weights and the wiring of their seed, on the CPU.

    Args:
        settings: such as a recipe's.
        classes: the number of classes; needed for data sets that only know it once they are read.
        image_size: height and width of an image in pixels, instead of the recipe's.
    """
    known = data.get(settings.data.name).classes
    if known is None:
        known = settings.data.options.get("classes", settings.model.options.get("classes"))
    classes = known if classes is None else classes
    if classes is None:
        raise WiringError(
            f"the number of classes of data set {settings.data.name!r} is not known before it is read. Give it with "
            "--classes."
        )
    if image_size is not None:
        name = settings.model.name
        if is_import_path(name):
            resizable = takes_argument(import_function(name, "model.name"), "image_size")
        else:
            resizable = "image_size" in models.options(name)
        if not resizable:
            raise WiringError(f"model {name!r} takes images of one size. Drop image_size={image_size}.")
        options = {**settings.model.options, "image_size": image_size}
        settings = replace(settings, model=replace(settings.model, options=options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return build(settings, classes, ProcessContext(0, 1, torch.device("cpu")))[0]
