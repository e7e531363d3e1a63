"""An example input in any of the forms that a user may give it in: what to call the model with.

- A tensor x: ``model(x)``.
- A shape, the sizes of one example **without the batch dimension**: ``model(x)`` with a random x of shape (1, *shape).
- A tuple or list of inputs: ``model(*inputs)``.
- A mapping, such as a Hugging Face tokenizer returns: ``model(**inputs)``.
- None: as for the shape ``model.input_shape``.

A shape makes floating-point numbers; for a model of token ids that has an attribute ``input_tokens``, the number of
different tokens, it makes token ids. Other models of token ids need a tensor. A list that the model takes as its only
argument goes into a tuple: ``([a, b],)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from wirings.errors import WiringError
from wirings.utils.text import brief

ExampleInput = Tensor | Sequence[int] | Sequence[Any] | Mapping[str, Any]
"""A tensor, the shape of one example without the batch dimension, several inputs, or inputs by keyword."""

FORMS = (
    "a tensor, a tuple of inputs, a dict of keyword inputs, or the shape of one example without the batch dimension, "
    "such as (3, 224, 224)"
)


class CallArguments(NamedTuple):
    """What a model is called with: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        """The shapes of the inputs, such as ``(1, 3, 32, 32), mask=(1, 32)``."""
        named = [*(("", value) for value in self.args), *((f"{key}=", value) for key, value in self.kwargs.items())]
        return ", ".join(f"{name}{_describe(value)}" for name, value in named) or "no arguments"


def example_arguments(model: nn.Module, example_input: Any, where: str) -> CallArguments:
    """Turn an example input of any form (listed above) into what the model is called with.

    Args:
        model: the model; a tensor that is made for a shape has the dtype and device of its first parameter.
        example_input: the user's example input.
        where: the function that was given it, for error messages.

    Raises:
        WiringError: if ``example_input`` has none of the forms, or is None and the model has no ``input_shape``.

    >>> args, kwargs = example_arguments(nn.Conv2d(3, 8, 3), (3, 10, 10), "profile")
    >>> args[0].shape, kwargs
    (torch.Size([1, 3, 10, 10]), {})
    """
    if example_input is None:
        example_input = getattr(model, "input_shape", None)
        if example_input is None:
            raise WiringError(f"{where} needs example_input for {type(model).__name__}: {FORMS}.")
    if isinstance(example_input, Mapping):
        if not all(isinstance(key, str) for key in example_input):
            raise WiringError(f"{where}: the keys of a mapping as example_input must be argument names.")
        return CallArguments((), dict(example_input))
    if isinstance(example_input, (str, bytes, bool, int, float, np.ndarray, np.generic)):
        hint = " Convert it with torch.from_numpy." if isinstance(example_input, np.ndarray) else ""
        raise WiringError(f"{where}: example_input must be {FORMS}, got {_describe(example_input)}.{hint}")
    if not _is_sequence(example_input):
        return CallArguments((example_input,), {})
    if not example_input:
        raise WiringError(f"{where}: example_input is empty; give {FORMS}.")
    if not is_shape(example_input):
        return CallArguments(tuple(example_input), {})
    shape = [int(size) for size in example_input]
    if min(shape) < 1:
        raise WiringError(f"{where}: the sizes of a shape must be positive, got {tuple(shape)}.")
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    try:
        return CallArguments((_example_of(model, shape, first),), {})
    except (RuntimeError, TypeError) as error:  # no memory for it, or a size beyond 64 bits
        raise WiringError(
            f"{where}: an example of shape {brief(tuple(shape))} cannot be made: it does not fit into memory."
        ) from error


def _example_of(model: nn.Module, shape: list[int], first: Tensor) -> Tensor:
    """A batch of one example, with the device and, unless they are token ids, the dtype of ``first``."""
    if (count := getattr(model, "input_tokens", None)) is not None:
        tokens = torch.randint(count, (1, *shape), generator=torch.Generator().manual_seed(0))
        return tokens.to(first.device)
    # Random like an image rather than zeros: how many steps a continuous graph takes depends on its input.
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    return x.to(first.device, first.dtype)


def is_shape(example_input: Any) -> bool:
    """Whether an example input is a shape: a tuple or list of integers.

    >>> is_shape((3, 32, 32)), is_shape(torch.zeros(3)), is_shape(torch.zeros(2, 3).shape)
    (True, False, True)
    """
    integers = (int, np.integer)
    return _is_sequence(example_input) and all(
        isinstance(n, integers) and not isinstance(n, bool) for n in example_input
    )


def call_error(
    model: nn.Module, example_input: Any, arguments: CallArguments, error: Exception, where: str
) -> WiringError:
    """The error to raise if the model does not run on its example input.

    Args:
        model: the model.
        example_input: the example input as the user gave it.
        arguments: what the model was called with.
        error: what it raised.
        where: the function that was given the example input.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    text = f"{where}: {type(model).__name__} failed on example_input of shape {arguments}: {reason.rstrip('.')}."
    shape: Any = getattr(model, "input_shape", None) if example_input is None else example_input
    if is_shape(shape):
        text += (
            f" The shape {tuple(shape)} is that of one example, to which a batch dimension of 1 was added; leave the "
            "batch dimension out. It makes floating-point numbers: give token ids as a tensor."
        )
    else:
        text += f" example_input must be {FORMS}."
    return WiringError(text)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses, such as a model's output.

    >>> [x.item() for x in tensors_in({"loss": torch.tensor(1), "logits": [torch.tensor(2), None]})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def _is_sequence(value: Any) -> bool:
    """Whether a value is a plain tuple, a list or a size; a named tuple such as a PackedSequence is one input."""
    return type(value) in (tuple, list, torch.Size)


def _describe(value: Any) -> str:
    """A value in a few characters; never a tensor's contents."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, PackedSequence):
        return f"PackedSequence of {tuple(value.data.shape)}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_describe(item) for item in value[:4]) + (", …]" if len(value) > 4 else "]")
    return repr(value) if isinstance(value, (bool, int, float)) else type(value).__name__
