"""Make the model and load the data of a run's settings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings import models, rules
from wirings.budgets.mult_adds import evaluating
from wirings.errors import WiringError
from wirings.models.norms import draw_norm_scales
from wirings.train.data import Data
from wirings.train.data import get as get_dataset
from wirings.train.data import load as load_dataset
from wirings.train.distributed import ProcessContext
from wirings.train.memory_limit import MemoryLimit
from wirings.train.settings import Settings
from wirings.utils.checks import is_int
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
        images: data that the model is checked to accept, images or tokens.

    Returns:
        The model and its handle, which is None if nothing is wired.
    """
    rule = rules.get(settings.rule.name, **settings.rule.options)
    options = {"classes": classes, **_context_option(settings), **settings.model.options}
    with MemoryLimit():
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


def context_of(settings: Settings) -> int | None:
    """The number of tokens of a training window; None for data that has no such option, such as images."""
    parameter = inspect.signature(get_dataset(settings.data.name).load).parameters.get("context")
    if parameter is None:
        return None
    context = settings.data.options.get("context", parameter.default)
    return context if is_int(context) else None


def _context_option(settings: Settings) -> dict[str, int]:
    """The context of a model that has one, by default that of its data."""
    context = context_of(settings)
    if context is None or is_import_path(settings.model.name) or "context" not in models.options(settings.model.name):
        return {}
    own = settings.model.options.get("context", context)
    if is_int(own) and own < context:
        raise WiringError(
            f"model.options.context = {own} is smaller than the windows of the text, data.options.context = {context}. "
            "Make it at least as large, or leave it out."
        )
    return {"context": context}


def _own_model(path: str, rule: rules.Rule, options: dict[str, Any]) -> nn.Module:
    """The model that a user's own function builds. One without a parameter ``rule`` returns a plain one, wired here."""
    function = import_function(path, "model.name")
    wires_itself = has_parameter(function, "rule")
    budget: dict[str, Any] = {}
    if wires_itself:
        options = {**options, "rule": rule}
    else:
        names = ("density", "share", "skip", "scale_weights", "structure", "gradient_every")
        budget = {key: options[key] for key in names if key in options}
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
    """Raise if a new model, still on the CPU, cannot take the images of a data set, or tell its classes apart.

    This comes before anything is written.
    """
    if data.tokens:
        _check_tokens(model, data, name)
        return
    try:
        with evaluating(model):
            scores = model(torch.zeros(1, *data.shape))
    except RuntimeError as error:
        shape = " × ".join(map(str, data.shape))
        raise WiringError(
            f"model {name!r} cannot take the images of data set {data.name!r}, which are {shape} "
            f"(channels, height, width): {error}"
        ) from error
    returned = tuple(scores.shape) if isinstance(scores, torch.Tensor) else ()
    if len(returned) != 2 or returned[1] < data.classes:
        got = returned if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise WiringError(
            f"model {name!r} must return a score for each of {data.classes:,} classes of data set {data.name!r}, shape "
            f"(1, {data.classes}) for one image, got {got}. Fix model.options.classes, or leave it out."
        )


def _check_tokens(model: nn.Module, data: Data, name: str) -> None:
    """Raise if a new model, still on the CPU, cannot take or predict the tokens of a data set."""
    count = data.shape[-1]
    try:
        with evaluating(model):
            scores = model(torch.full((1, *data.shape), data.classes - 1))
    except IndexError as error:
        raise WiringError(
            f"model {name!r} knows fewer tokens than data set {data.name!r} has, which are {data.classes:,}. Fix "
            "model.options.classes, or leave it out."
        ) from error
    except (WiringError, RuntimeError) as error:
        raise WiringError(
            f"model {name!r} cannot take the text of data set {data.name!r}, windows of {count:,} tokens out of "
            f"{data.classes:,}: {str(error).rstrip('.')}. Fix model.options or data.options."
        ) from error
    if scores.shape[:-1] != (1, count) or scores.shape[-1] < data.classes:
        raise WiringError(
            f"model {name!r} must predict the next token at each of {count:,} places, out of {data.classes:,}, but "
            f"its output is {tuple(scores.shape)}. Fix model.options.classes, or leave it out."
        )


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
