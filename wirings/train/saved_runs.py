"""Use a trained run: open its model, evaluate it again, classify images."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from wirings.errors import WiringError
from wirings.train import bundled
from wirings.train import data as data_sets
from wirings.train.build import build, load_data
from wirings.train.data.augment import read_image
from wirings.train.data.base import Data
from wirings.train.distributed import ProcessContext, start
from wirings.train.results import load_settings
from wirings.train.run import checkpoint
from wirings.train.run.evaluate import Evaluation, evaluate_by_metric
from wirings.train.run.folder import BEST, LAST, SETTINGS
from wirings.train.run.step import autocast
from wirings.train.settings import Settings, from_mapping
from wirings.utils.checks import check_bool
from wirings.utils.files import check_path
from wirings.utils.importing import is_import_path

TRANSLATED = "Use `wirings eval`; the run's translations are in its translations.txt."
"""What a run that translates is good for, to complete a message."""


class OpenedRun(NamedTuple):
    """A trained run."""

    model: nn.Module
    """The model that was evaluated, in evaluation mode."""
    settings: Settings
    recipe: str
    """The recipe's name."""
    context: ProcessContext
    """This process, with the device of the model."""


def open_run(run: str | Path, best: bool = False, device: str | None = None) -> OpenedRun:
    """Open a trained run.

    Args:
        run: a run's folder, or the name of a trained network that comes with the package (`wirings models`).
        best: open the best epoch's checkpoint instead of the last.
        device: such as ``"cuda"`` or ``"cpu"``; by default a GPU, if there is one.
    """
    return open_with_header(run, best, device)[0]


def open_with_header(run: str | Path, best: bool, device: str | None) -> tuple[OpenedRun, dict[str, Any]]:
    """Open a trained run as `open_run` does, and return the header of its checkpoint as well."""
    folder = check_path(run)
    check_bool("open_run", "best", best)
    if (bundle := bundled.find(run)) is not None:
        if best:
            raise WiringError(f"{run} has no checkpoint of a best epoch: it is one trained network. Leave out --best.")
        return _open_bundled(bundle, start(device))
    path = folder / (BEST if best else LAST)
    if not folder.is_dir() or not path.exists():
        near = difflib.get_close_matches(str(run), bundled.names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise WiringError(
            f"{run} is not the folder of a run: expected {path.name} and {SETTINGS} in it. Nor is it a trained network "
            f"that comes with the package.{hint} `wirings models` lists them."
        )
    name, settings, _ = load_settings(folder / SETTINGS)
    context = start(device)
    tensors, about = checkpoint.read(path)
    model, _ = build(settings, checkpoint.field(about, "classes", int, path), context)
    checkpoint.load_model(model, tensors, path, checkpoint.evaluated(tensors))
    if about.get("names") is not None and len(checkpoint.field(about, "names", list, path)) != about["classes"]:
        raise checkpoint.damaged(path, "it does not name every class")
    return OpenedRun(model.eval(), settings, name, context), about


def _open_bundled(folder: Path, context: ProcessContext) -> tuple[OpenedRun, dict[str, Any]]:
    card = bundled.read_card(folder)
    settings = from_mapping(card.result.settings)
    for name in (settings.model.name, settings.data.name):
        if is_import_path(name):  # it would be imported, and so run, although the folder may be a stranger's
            raise WiringError(
                f"{folder} needs the function {name[:60]}, but trained networks are made of those of the library. Open "
                "the folder of the run instead."
            )
    model, _ = build(settings, card.classes, context)
    bundled.load_into(model, folder, card)
    names = None if card.class_names is None else list(card.class_names)
    about = {"classes": card.classes, "names": names, "data_md5": card.result.data_md5}
    return OpenedRun(model.eval(), settings, card.result.recipe, context), about


def measure(
    run: str | Path, *, best: bool = False, data: Path | None = None, device: str | None = None
) -> tuple[float, float, float]:
    """Evaluate a run on its test set.

    Args:
        run: see `open_run`.
        best: see `open_run`.
        data: the folder that holds the data, instead of the run's own.
        device: see `open_run`.

    Returns:
        The mean loss, the accuracy and the top-5 accuracy, both in percent.
    """
    found = measure_by(run, best=best, data=data, device=device)
    return found.loss, found.accuracy, found.top5


def measure_by(
    run: str | Path, *, best: bool = False, data: Path | None = None, device: str | None = None
) -> Evaluation:
    """Evaluate a run as `measure` does, by its metric as well. Warns if the data is not the one of the training."""
    opened, about = open_with_header(run, best, device)
    found = run_data(run, opened, about, data)
    precision, context = opened.settings.precision, opened.context
    return evaluate_by_metric(opened.model, found, lambda: autocast(precision, context.device), context)


def run_data(
    run: str | Path,
    opened: OpenedRun,
    about: dict[str, Any],
    directory: Path | None = None,
    image_size: int | None = None,
) -> Data:
    """Load the data of a run. Warns if it is not the one of the training.

    Args:
        run: what the user calls the run.
        opened: the run.
        about: the header of its checkpoint.
        directory: the folder that holds the data, instead of the run's own.
        image_size: the height and width of the images, instead of the run's own.
    """
    settings = opened.settings
    if directory is not None:
        settings = replace(settings, data=replace(settings.data, directory=str(directory)))
    if image_size is not None:
        settings = replace(settings, data=replace(settings.data, image_size=image_size))
    found = load_data(settings, opened.context)
    if checkpoint.other_data(about, found.md5):
        warnings.warn(
            f"{run} was trained on other data: the checksum of {settings.data.name} has changed. What is measured does "
            "not compare with the run's result.",
            stacklevel=3,
        )
    return found


@torch.no_grad()
def predict(
    run: str | Path, images: Sequence[Path], *, best: bool = False, device: str | None = None
) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """Classify images.

    Args:
        run: see `open_run`.
        images: files to read.
        best: see `open_run`.
        device: see `open_run`.

    Yields:
        Each file with its three most likely classes and their probabilities.
    """
    (model, settings, _, context), about = open_with_header(run, best=best, device=device)
    dataset = data_sets.get(settings.data.name)
    if not isinstance(dataset, data_sets.ImageDataset):
        if len(getattr(model, "input_shape", ())) > 1:
            raise WiringError(f"{run} was trained to translate, not on images. {TRANSLATED}")
        raise WiringError(f"{run} was trained on {dataset.title}, not on images. Use `wirings generate`.")
    names = dataset.class_names or about.get("names")
    for path in images:
        prepared = dataset.with_options(settings.data.options)
        x = prepared.prepare_image(read_image(path), settings.data.image_size)
        with autocast(settings.precision, context.device):
            scores = model(x[None].to(context.device)).float().softmax(1)[0]
        top = scores.topk(min(3, len(scores)))
        yield (
            path,
            [
                (names[i] if names else f"class {i}", p)
                for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ],
        )
