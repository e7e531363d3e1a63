"""Example inputs in all of their forms."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from wirings import WiringError
from wirings.utils.example_input import call_error, example_arguments, is_shape, tensors_in

MODEL = nn.Linear(4, 2).double()
X, Y = torch.zeros(2, 4), torch.ones(3)


def test_a_tensor_is_the_only_argument() -> None:
    args, kwargs = example_arguments(MODEL, X, "profile")
    assert len(args) == 1
    assert args[0] is X
    assert kwargs == {}


@pytest.mark.parametrize("shape", [(4, 5), [4, 5], torch.Size([4, 5]), (np.int64(4), 5)])
def test_a_shape_is_one_example_without_the_batch(shape: Any) -> None:
    (x,), kwargs = example_arguments(MODEL, shape, "profile")
    assert x.shape == (1, 4, 5)
    assert x.dtype == torch.float64
    assert x.std() > 0.1
    assert torch.equal(x, example_arguments(MODEL, shape, "profile").args[0]), "the same numbers every time"
    assert kwargs == {}


@pytest.mark.parametrize("inputs", [(X, Y), [X, Y], (X, 3), (X,), ([X, Y],)])
def test_several_inputs(inputs: Any) -> None:
    args, kwargs = example_arguments(MODEL, inputs, "profile")
    assert all(a is b for a, b in zip(args, inputs, strict=True))
    assert kwargs == {}


def test_keyword_inputs() -> None:
    args, kwargs = example_arguments(MODEL, {"input_ids": X, "mask": Y}, "profile")
    assert args == ()
    assert list(kwargs) == ["input_ids", "mask"]
    assert str(example_arguments(MODEL, {"input_ids": X, "flag": True}, "profile")) == "input_ids=(2, 4), flag=True"


def test_a_packed_sequence_is_one_input() -> None:
    packed = pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)])
    assert example_arguments(MODEL, packed, "profile").args[0] is packed
    assert "PackedSequence of (5, 4)" in str(example_arguments(MODEL, packed, "profile"))


def test_the_models_own_shape_by_default() -> None:
    model = nn.Linear(4, 2)
    model.input_shape = (4,)  # type: ignore[assignment]
    assert example_arguments(model, None, "profile").args[0].shape == (1, 4)


@pytest.mark.parametrize(
    ("example_input", "message"),
    [
        (None, "profile needs example_input for Linear: a tensor, a tuple of inputs, a dict"),
        (3, "example_input must be a tensor, .*shape of one example without the batch dimension.*got 3"),
        ("words", "got str"),
        (np.zeros((1, 4)), "got ndarray. Convert it with torch.from_numpy"),
        ((), "example_input is empty"),
        ((3, 0), r"sizes of a shape must be positive, got \(3, 0\)"),
        ({1: X}, "keys of a mapping as example_input must be argument names"),
    ],
)
def test_rejects_what_is_no_input(example_input: Any, message: str) -> None:
    with pytest.raises(WiringError, match=message):
        example_arguments(MODEL, example_input, "profile")


def test_errors_of_the_model_name_shapes_but_print_no_tensor() -> None:
    wide = torch.zeros(2, 1000)
    error = call_error(MODEL, wide, example_arguments(MODEL, wide, "profile"), ValueError("bad\n" * 500), "profile")
    assert str(error).startswith(
        "profile: Linear failed on example_input of shape (2, 1000): bad. example_input must be"
    )
    assert len(str(error)) < 300
    shape = (1, 3, 8, 8)
    message = str(call_error(MODEL, shape, example_arguments(MODEL, shape, "profile"), ValueError("no"), "profile"))
    assert "of shape (1, 1, 3, 8, 8)" in message
    assert "leave the batch dimension out" in message


def test_shapes_are_integers_alone() -> None:
    assert is_shape([1, 2])
    assert not is_shape([1.0, 2])
    assert not is_shape([True, 2])
    assert not is_shape(torch.zeros(2))


def test_tensors_in_outputs_of_all_kinds() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        states: tuple[torch.Tensor, ...] | None = None

    found = list(tensors_in({"a": Output(X, (Y,)), "b": None, "c": "text"}))
    assert [id(x) for x in found] == [id(X), id(Y)]
