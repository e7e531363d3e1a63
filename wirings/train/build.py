"""What a run is made of: the model and the data of its settings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from wirings import models, rules
from wirings.budgets.mult_adds import evaluating
from wirings.errors import WiringError
from wirings.models.norms import draw_norm_scales
from wirings.train.data.base import Data
from wirings.train.data.base import load as load_set
from wirings.train.distributed import Place
from wirings.train.settings import Settings
from wirings.wire.handle import Wiring


def build(
    settings: Settings, classes: int, place: Place, images: Data | None = None
) -> tuple[nn.Module, Wiring | None]:
    """The model of the settings, for so many classes, on its device; an error if it cannot take these ``images``."""
    rule = rules.get(settings.rule.name, **settings.rule.options)
    options = {"classes": classes, **settings.model.options}
    model = models.get(settings.model.name, rule=rule, **options)
    if settings.norm_scales == "uniform":
        draw_norm_scales(model)
    if images is not None:
        _check_images(model, images, settings.model.name)
    model = model.to(place.device)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wiring: Wiring | None = getattr(model, "wiring", None)
    if wiring is not None:
        wiring.model = model  # its own may be a part, the graph, and gradients are clipped as a whole
    return model, wiring


def _check_images(model: nn.Module, data: Data, name: str) -> None:
    """Raise if a new model, still on the CPU, cannot take the images of a data set: before anything is written."""
    try:
        with evaluating(model):
            model(torch.zeros(1, *data.shape))
    except RuntimeError as error:
        what = " × ".join(map(str, data.shape))
        raise WiringError(
            f"model {name!r} cannot take the images of data set {data.name!r}, which are {what} "
            f"(channels, height, width): {error}"
        ) from error


def load_data(settings: Settings, place: Place) -> Data:
    """The data of the settings, this process's share of it."""
    wanted = settings.data
    return load_set(
        wanted.name,
        directory=None if wanted.directory is None else Path(wanted.directory),
        batch=settings.batch,
        device=place.device,
        seed=settings.seed,
        rank=place.rank,
        world=place.world,
        augment=wanted.augment,
        workers=wanted.workers,
        image_size=wanted.image_size,
        skip_corrupt=wanted.skip_corrupt,
        **wanted.options,
    )
