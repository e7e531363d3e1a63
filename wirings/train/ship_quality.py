"""What a shipped network is measured by on data: accuracy over batches, or a user's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.utils.example_input import tensors_in
from wirings.utils.text import brief

_EXPECTED = "data must be a loader of batches (x, y), or a function that takes a model and returns a number"


@dataclass(frozen=True)
class Quality:
    """A number that a model reaches, and how to write it."""

    value: float
    label: str
    unit: str = ""
    digits: int = 4
    examples: int | None = None


@dataclass(frozen=True)
class QualityMeasure:
    """How a model is measured, before and after.

    Args:
        measure: measures a model.
        required: whether a `WiringError` of ``measure`` is raised; otherwise, the report says what it says.
    """

    measure: Callable[[nn.Module], Quality]
    required: bool = True


ShipData = Iterable[Any] | Callable[[nn.Module], float] | QualityMeasure
"""Batches of (x, y), a function of a model that returns a number, or a `QualityMeasure`."""


def quality_measure(data: ShipData) -> QualityMeasure:
    """The measure that a user's data stands for."""
    if isinstance(data, QualityMeasure):
        return data
    epoch: Any = getattr(data, "epoch", None)
    if callable(epoch):  # a loader of wirings.train.data
        return QualityMeasure(lambda model: accuracy(model, epoch(0)))
    if isinstance(data, Iterable):
        if isinstance(data, Iterator):
            raise WiringError(
                f"{_EXPECTED}, got {type(data).__name__}, which can be read only once, but is needed before and after. "
                "Give a list or a DataLoader."
            )
        return QualityMeasure(lambda model: accuracy(model, data))
    if not callable(data) or isinstance(data, nn.Module):
        raise WiringError(f"{_EXPECTED}, got {type(data).__name__}.")
    name = getattr(data, "__name__", "<")
    label = "metric" if name.startswith("<") else name.replace("_", " ")
    return QualityMeasure(lambda model: Quality(_called(data, model), label))


def _called(measure: Callable[[nn.Module], Any], model: nn.Module) -> float:
    """The number that a user's function returns."""
    try:
        value = measure(model)
    except WiringError:
        raise
    except Exception as error:  # of the user, so that the cause has to be shown, too
        raise WiringError(f"the function that was given as data raised {type(error).__name__}: {error}") from error
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise WiringError(f"{_EXPECTED}, got a function that returns {brief(value)}.") from error


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Any]) -> Quality:
    """The accuracy of a model in percent.

    Args:
        model: takes x: a tensor, a tuple of inputs or a dictionary of keyword inputs.
        batches: pairs of x and labels, whose shape is that of the scores without the last dimension. Negative labels,
            such as padding, are not counted.
    """
    right = labels = 0
    for batch in _read(batches):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise WiringError(f"{_EXPECTED}, got a batch that is no pair with a tensor of labels.")
        try:
            x, y = _on_cpu(batch[0]), batch[1].cpu()
            scores = _scores(model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, tuple) else model(x))
        except WiringError:
            raise
        except Exception as error:  # whatever a model raises for inputs that do not fit it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
            raise WiringError(f"the model cannot be run on a batch of data: {reason}. {_EXPECTED}.") from error
        if scores.shape[:-1] != y.shape or y.is_floating_point() or y.is_complex():
            raise WiringError(
                f"accuracy needs integer labels of shape {tuple(scores.shape[:-1])} for scores "
                f"{tuple(scores.shape)}, got {y.dtype} {tuple(y.shape)}. Give a function as data for other measures."
            )
        counted = y >= 0
        right += int(((scores.argmax(-1) == y) & counted).sum())
        labels += int(counted.sum())
    if not labels:
        raise WiringError("data has no labelled examples, so there is no accuracy to measure.")
    return Quality(100 * right / labels, "accuracy", " %", 2, labels)


def _read(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; errors of whatever makes them name the data."""
    try:
        yield from batches
    except WiringError:
        raise
    except Exception as error:
        raise WiringError(f"data cannot be read: {type(error).__name__}: {error}. {_EXPECTED}.") from error


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cpu()
    if isinstance(x, Mapping):
        return {key: _on_cpu(value) for key, value in x.items()}
    return tuple(_on_cpu(value) for value in x) if isinstance(x, (tuple, list)) else x


def _scores(outputs: Any) -> Tensor:
    """The scores among a model's outputs: those called logits, or the first tensor."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return outputs["logits"]
    found = next(tensors_in(outputs), None)
    if found is None or found.dim() < 2:
        raise WiringError("accuracy needs a model that returns scores (batch, …, classes).")
    return found
