"""Models that return dictionaries, lists and nested outputs, and take keyword and constant arguments."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wirings import WiringError, compact, engine, load_compact, profile
from wirings.compaction.output_structure import check_structure, flatten_outputs, restore_outputs


class ModelOutput(OrderedDict[str, Any]):
    """As in Hugging Face's library: entries are attributes, and None is left out."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Returns(nn.Module):
    """Two layers over tokens; ``form`` says how their results are returned."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.one, self.two = form, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None, flag: bool = False) -> Any:
        hidden = self.one(x).relu() * scale
        if mask is not None:
            hidden = hidden * mask[..., None]
        out = self.two(hidden) if not flag else self.two(hidden) + 1
        forms: dict[str, Any] = {
            "tensor": out,
            "tuple": (out, hidden),
            "list": [out, hidden],
            "single": (out,),
            "dict": {"out": out, "hidden": hidden},
            "nested": {"out": out, "all": ({"first": [hidden, out + 1]}, None)},
            "model_output": ModelOutput(logits=out, hidden=(hidden, hidden + 1), cache=object()),
            "twice": (out, out),
        }
        return forms[self.form]


FORMS = ("tensor", "tuple", "list", "single", "dict", "nested", "model_output", "twice")


def assert_alike(found: Any, expected: Any) -> None:
    """The same structure with the same numbers."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, dict):
        kept = {key: x for key, x in expected.items() if x is None or isinstance(x, (Tensor, dict, tuple, list))}
        assert list(found) == list(kept)
        for key, x in kept.items():
            assert_alike(found[key], x)
            assert_alike(getattr(found, key), x)
    elif isinstance(expected, (tuple, list)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            assert_alike(one, two)
    else:
        assert found is expected is None


@pytest.mark.parametrize("form", FORMS)
def test_outputs_keep_their_structure(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Returns(form).eval()
    small = compact(model, torch.randn(1, 5, 4))
    x = torch.randn(3, 5, 4)
    with torch.no_grad():
        expected = model(x)
    assert_alike(small(x), expected)
    assert_alike(load_compact(small.save(tmp_path / "model.safetensors"))(x), expected)
    for way in ("sparse", "torch"):
        fast = engine.compile(small, engine=way, threads=1)
        assert_alike(fast(x), expected)
    assert_alike(engine.load(fast.save(tmp_path / "fast.safetensors"))(x), expected)
    if form == "model_output":
        assert small(x)[0] is not None
        assert small.program.notes["left_out"] == ["cache"]
        with pytest.raises(AttributeError, match="the outputs have no 'cache', only logits, hidden"):
            _ = small(x).cache


@pytest.mark.parametrize("form", ["nested", "model_output"])
def test_traces_return_nested_outputs_as_a_tuple(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Returns(form).eval()
    small, x = compact(model, torch.randn(1, 5, 4)), torch.randn(3, 5, 4)
    again = torch.export.load(small.save(tmp_path / "model.pt2")).module()
    with torch.no_grad():
        assert_alike(tuple(again(x)), tuple(flatten_outputs(model(x))[0]))


def test_keyword_and_constant_arguments() -> None:
    torch.manual_seed(0)
    model = Returns("dict").eval()
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]])
    example = {"x": torch.randn(1, 5, 4), "scale": 2.0, "mask": mask, "flag": True}
    small = compact(model, example)
    given = {"x": torch.randn(3, 5, 4), "mask": mask.expand(3, -1)}
    with torch.no_grad():
        expected = model(**given, scale=2.0, flag=True)
    assert_alike(small(**given), expected)
    assert_alike(small(given["x"], mask=given["mask"]), expected)
    assert_alike(engine.compile(small, threads=2)(**given), expected)
    assert profile(model, example).mult_adds == 5 * (16 + 12)
    with pytest.raises(WiringError, match="expected 2 inputs"):
        small(given["x"])
    with pytest.raises(WiringError, match="expected a tensor for mask, got float"):
        small(given["x"], mask=1.0)


@pytest.mark.parametrize("outputs", [3.0, (torch.zeros(1), 3.0), {"a": 3}, (), object(), {1: torch.zeros(1)}])
def test_other_outputs_are_rejected(outputs: Any) -> None:
    with pytest.raises(WiringError, match="expects a model that returns a tensor, or a tuple, list or dictionary"):
        flatten_outputs(outputs)


@pytest.mark.parametrize(
    "structure", [0, {"tuple": [0, 0]}, {"tuple": [0, 2]}, {"set": [0, 1]}, {"list": {"a": 0}}, {"dict": [0, 1]}, "x",
                  {"tuple": [0, 1, True]}, {"tuple": [0], "list": [1]}]
)  # fmt: skip
def test_invalid_structures_in_files_are_rejected(structure: Any) -> None:
    with pytest.raises(WiringError, match="expected"):
        check_structure(structure, 2)
    deep: Any = 0
    for _ in range(20):
        deep = {"tuple": [deep]}
    with pytest.raises(WiringError, match="nested at most 16 deep"):
        check_structure(deep, 1)


def test_structures_are_restored() -> None:
    tensors = [torch.tensor(float(i)) for i in range(3)]
    outputs = {"a": tensors[0], "b": [tensors[1], (tensors[2], None)]}
    flat, structure, left_out = flatten_outputs(outputs)
    check_structure(structure, 3)
    assert_alike(restore_outputs(structure, flat), outputs)
    assert left_out == []


def test_inputs_of_several_batch_sizes_are_rejected() -> None:
    with pytest.raises(
        WiringError, match="the same batch size, in dimension 0, for all inputs of the model, got 1 for"
    ):
        compact(Returns("tensor"), {"x": torch.randn(1, 5, 4), "mask": torch.ones(2, 5)})
