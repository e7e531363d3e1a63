"""Trained runs: open one, measure it again, let it look at images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings.errors import WiringError
from wirings.train import bundled, checkpoint
from wirings.train.build import build, load_data
from wirings.train.distributed import Place, start
from wirings.train.evaluate import evaluate
from wirings.train.results import load_settings
from wirings.train.settings import Settings, from_mapping
from wirings.train.step import autocast
from wirings.utils.importing import is_import_path

Opened = tuple[nn.Module, Settings, str, Place]


def open_run(run: str | Path, best: bool = False, device: str | None = None) -> Opened:
    """A run's model as it was evaluated, its settings, its recipe's name, and where the model lies."""
    return _open(run, best, device)[0]


def _open(run: str | Path, best: bool, device: str | None) -> tuple[Opened, dict[str, Any]]:
    """The same, with what stands in the checkpoint beside tensors."""
    folder = Path(run)
    if not folder.exists() and str(run) in bundled.names():
        return _open_trained(str(run), start(device))
    path = folder / (checkpoint.BEST if best else checkpoint.LAST)
    if not folder.is_dir() or not path.exists():
        known = ", ".join(bundled.names())
        raise WiringError(
            f"{run} is no folder of a run: expected {path.name} and settings.yaml in it. Nor is it a trained network "
            f"that comes with the package: {known}."
        )
    name, settings, _ = load_settings(folder / "settings.yaml")
    place = start(device)
    tensors, about = checkpoint.read(path)
    model, _ = build(settings, checkpoint.field(about, "classes", int, path), place)
    checkpoint.load_model(model, tensors, path, checkpoint.evaluated(tensors))
    if about.get("names") is not None and len(checkpoint.field(about, "names", list, path)) != about["classes"]:
        raise checkpoint.damaged(path, "it does not name every class")
    return (model.eval(), settings, name, place), about


def _open_trained(name: str, place: Place) -> tuple[Opened, dict[str, Any]]:
    path = bundled.path_of(name)
    _, about = checkpoint.read(path)
    settings = from_mapping(checkpoint.field(about, "settings", dict, path))
    model, _ = build(settings, checkpoint.field(about, "classes", int, path), place)
    bundled.load_into(model, path)
    return (model.eval(), settings, checkpoint.field(about, "recipe", str, path), place), about


def measure(
    run: str | Path, *, best: bool = False, data: Path | None = None, device: str | None = None
) -> tuple[float, float, float]:
    """Loss, accuracy and top-5 accuracy in percent of a run on its test set."""
    model, settings, _, place = open_run(run, best, device)
    if data is not None:
        settings = replace(settings, data=replace(settings.data, directory=str(data)))
    found = load_data(settings, place)
    return evaluate(model, found.test, lambda: autocast(settings.precision, place.device), place)


@torch.no_grad()
def predict(
    run: str | Path, images: Sequence[Path], *, device: str | None = None
) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """For each image the three likeliest classes and their probabilities."""
    from wirings.train.data.predict_input import prepared

    (model, settings, _, place), about = _open(run, best=False, device=device)
    if is_import_path(settings.data.name):
        raise WiringError(
            f"{run} was trained on data of your own ({settings.data.name}), and only your code knows how to prepare an "
            "image for it. Open the run with wirings.train.runs.open_run and call the model."
        )
    for path in images:
        x, known = prepared(path, settings.data.name, settings.data.image_size)
        names = known or about.get("names")
        with autocast(settings.precision, place.device):
            scores = model(x[None].to(place.device)).float().softmax(1)[0]
        top = scores.topk(min(3, len(scores)))
        yield (
            path,
            [
                (names[i] if names else f"class {i}", p)
                for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ],
        )
