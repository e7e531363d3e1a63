"""Ship a trained run, measured on its own test set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train.data.base import Data, Loader
from wirings.train.run.evaluate import evaluate
from wirings.train.saved_runs import OpenedRun, open_with_header, run_data
from wirings.train.ship import ShippedModel, ship
from wirings.train.ship_quality import Quality, QualityMeasure
from wirings.utils.encoded_tensors import rounding_type
from wirings.utils.files import check_folder

CALIBRATION = 256
"""Training examples from which the ranges of activations in int8 are taken."""


def ship_run(
    run: str | Path,
    *,
    out: str | Path | None = None,
    best: bool = False,
    threads: int | None = None,
    image_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    data: Path | None = None,
    examples: int | None = None,
    seconds: float = 1.0,
) -> ShippedModel:
    """Ship a trained run with `wirings.ship`, and measure it by the run's metric before and after.

    Times are for one example. If the run's data cannot be loaded, the report says so, unless ``data`` names a folder.

    Args:
        run: a run's folder, or the name of a trained network that comes with the package.
        out: as for `wirings.ship`, as are ``threads``, ``dtype`` and ``seconds``.
        best: use the best epoch's checkpoint instead of the last.
        threads: see ``out``.
        image_size: the height and width of the images in pixels; by default, as in training.
        dtype: see ``out``.
        quantize: as for `wirings.ship`; the run's training data is used for calibration.
        data: the folder that holds the data, instead of the run's own.
        examples: the number of test examples to measure; by default all. With 0, no data is loaded.
        seconds: see ``out``.
    """
    if out is not None:
        check_folder(out, "out")
    rounding_type(dtype)  # before the run and its data are loaded
    opened, about = open_with_header(run, best, "cpu")
    example = example_of(run, opened, image_size)
    measure = None
    if examples != 0:
        found = run_data(run, opened, about, data, image_size) if data is not None else None

        def measured(model: nn.Module) -> Quality:
            nonlocal found
            found = run_data(run, opened, about, None, image_size) if found is None else found
            return measure_on_test_set(model, found, opened, examples)

        measure = QualityMeasure(measured, required=data is not None)
    calibrate = None
    if quantize is not None:
        with contextlib.nullcontext() if data is not None else contextlib.suppress(WiringError):
            calibrate = _first_inputs(run_data(run, opened, about, data, image_size).train)
    return ship(
        opened.model,
        example,
        out=out,
        data=measure,
        threads=threads,
        seconds=seconds,
        dtype=dtype,
        quantize=quantize,
        calibrate=calibrate,
        name=f"{run} ({opened.recipe})" if str(run) != opened.recipe else str(run),
    )


def _first_inputs(loader: Loader) -> list[Tensor]:
    """Inputs of the first batches of training data."""
    found: list[Tensor] = []
    for x, _ in loader.epoch(0):
        found.append(x)
        if sum(map(len, found)) >= CALIBRATION:
            break
    return found


def example_of(run: str | Path, opened: OpenedRun, image_size: int | None = None, batch: int = 1) -> Tensor:
    """A random example for the network of a run: images, or tokens.

    Args:
        run: what the user calls the run.
        opened: the run.
        image_size: the height and width of the images; by default, as in training.
        batch: the number of examples.
    """
    model = opened.model
    shape, tokens = getattr(model, "input_shape", None), getattr(model, "input_tokens", None)
    if shape is None:
        raise WiringError(
            f"model {opened.settings.model.name!r} of {run} has no attribute input_shape, which compaction needs for "
            "an example. Call wirings.compact(model, example_input) in Python instead."
        )
    random = torch.Generator().manual_seed(0)
    if tokens is not None and image_size is not None:
        raise WiringError(f"{run} was trained on tokens, which have no image size. Leave out --image-size.")
    if tokens is not None:
        return torch.randint(tokens, (batch, *shape), generator=random)
    sides = shape[1:] if image_size is None else (image_size,) * len(shape[1:])
    return torch.randn(batch, shape[0], *sides, generator=random)


def measure_on_test_set(model: nn.Module, data: Data, opened: OpenedRun, examples: int | None = None) -> Quality:
    """Measure a network by the metric of a run's data, in single precision.

    Args:
        model: the network, in PyTorch or compiled.
        data: the run's data.
        opened: the run.
        examples: the number of test examples; by default all.
    """
    metric = data.metric
    if data.measure is not None:
        raise WiringError(
            f"{metric.label} needs a model that translates word by word, and a compiled network returns scores only. "
            "Measure the run with `wirings eval`."
        )
    loader = data.test if examples is None else _FirstExamples(data.test, examples)
    loss, accuracy, _ = evaluate(model, loader, contextlib.nullcontext, opened.context)
    return Quality(metric.of(loss, accuracy), metric.label, metric.unit, metric.digits, loader.examples)


class _FirstExamples(Loader):
    """The first examples of another loader."""

    def __init__(self, loader: Loader, examples: int) -> None:
        super().__init__(min(examples, loader.examples), loader.batch)
        self.loader = loader

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        left: Any = self.examples
        for x, y in self.loader.epoch(number, start):
            yield x[:left], y[:left]
            left -= len(x)
            if left <= 0:
                return
