"""Make the model and load the data of a run's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings import models, rules
from wirings.budgets.mult_adds import evaluating
from wirings.errors import WiringError
from wirings.models.norms import draw_norm_scales
from wirings.train.data import Data
from wirings.train.data import load as load_dataset
from wirings.train.distributed import ProcessContext
from wirings.train.settings import Settings
from wirings.utils.importing import check_function_arguments, has_parameter, import_function, is_import_path
from wirings.wire.handle import Wiring
from wirings.wire.wire import wire_


def build(
    settings: Settings, classes: int, context: ProcessContext, images: Data | None = None
) -> tuple[nn.Module, Wiring | None]:
    """Make the model of some settings, on the device of this process.

    Args:
        settings: the run's settings.
        classes: the number of classes.
        context: this process.
        images: data that the model is checked to accept.

    Returns:
        The model and its handle, which is None if nothing is wired.
    """
    rule = rules.get(settings.rule.name, **settings.rule.options)
    options = {"classes": classes, **settings.model.options}
    if is_import_path(settings.model.name):
        model = _own_model(settings.model.name, rule, options)
    else:
        model = models.get(settings.model.name, rule=rule, **options)
    if settings.norm_scales == "uniform":
        draw_norm_scales(model)
    if images is not None:
        _check_images(model, images, settings.model.name)
    model = model.to(context.device)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wiring: Wiring | None = getattr(model, "wiring", None)
    if wiring is not None:
        wiring.model = model  # its own may be a part, such as a graph, but gradients are clipped over the whole model
    return model, wiring


def _own_model(path: str, rule: rules.Rule, options: dict[str, Any]) -> nn.Module:
    """The model that a user's own function builds. One without a parameter ``rule`` returns a plain one, wired here."""
    function = import_function(path, "model.name")
    wires_itself = has_parameter(function, "rule")
    budget: dict[str, Any] = {}
    if wires_itself:
        options = {**options, "rule": rule}
    else:
        budget = {key: options[key] for key in ("density", "share", "skip") if key in options}
        options = {key: value for key, value in options.items() if key not in budget}
    check_function_arguments(function, path, **options)
    model = function(**options)
    if not isinstance(model, nn.Module):
        raise WiringError(f"{path} must return a torch.nn.Module, got {type(model).__name__}.")
    dense = isinstance(rule, rules.Dense)
    if not wires_itself:
        model.wiring = None if dense and not budget else wire_(model, rule, **budget)  # type: ignore[assignment]
    elif not dense and not isinstance(getattr(model, "wiring", None), Wiring):
        raise WiringError(
            f"{path} takes a rule, but the model that it returned is not wired. Let it set "
            "model.wiring = wirings.wire_(model, rule, ...), or remove its argument rule."
        )
    return model


def _check_images(model: nn.Module, data: Data, name: str) -> None:
    """Raise if a new model, still on the CPU, cannot take the images of a data set: before anything is written."""
    try:
        with evaluating(model):
            model(torch.zeros(1, *data.shape))
    except RuntimeError as error:
        shape = " × ".join(map(str, data.shape))
        raise WiringError(
            f"model {name!r} cannot take the images of data set {data.name!r}, which are {shape} "
            f"(channels, height, width): {error}"
        ) from error


def load_data(settings: Settings, context: ProcessContext) -> Data:
    """Load this process's share of the data of some settings."""
    wanted = settings.data
    return load_dataset(
        wanted.name,
        directory=None if wanted.directory is None else Path(wanted.directory),
        batch=settings.batch,
        device=context.device,
        seed=settings.seed,
        rank=context.rank,
        world=context.world,
        augment=wanted.augment,
        workers=wanted.workers,
        image_size=wanted.image_size,
        skip_corrupt=wanted.skip_corrupt,
        **wanted.options,
    )
