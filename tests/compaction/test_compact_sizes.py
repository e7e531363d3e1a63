"""A compact model is not larger than the model: how indices and tables are stored, and what the report says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from wirings import WiringError, compact, load_compact
from wirings.compaction.operations import MultiplyMap, SelectChannels
from wirings.compaction.program import Program
from wirings.compaction.report import program_size
from wirings.compaction.tensor_storage import loaded_tensors, stored_parts
from wirings.models import get


@pytest.mark.parametrize(
    ("index", "parts", "bytes_"),
    [
        (torch.arange(5, 205), set(), 0),
        (torch.arange(200).flip(0), set(), 0),
        (torch.zeros(9, dtype=torch.int64), set(), 0),
        (torch.tensor([*range(100, 200), *range(100)]), {"small"}, 200),
        (torch.tensor([*range(10), 1000, -7]), {"small"}, 24),
        (torch.tensor([*range(10), 2**40]), {""}, 88),
        (torch.tensor([3, 1]), {""}, 16),
    ],
)
def test_indices_are_stored_in_few_bytes(index: Tensor, parts: set[str], bytes_: int) -> None:
    stored, about = stored_parts(index)
    assert (about is None) == bool(parts)
    assert set(stored) == parts
    assert sum(x.numel() * x.element_size() for x in stored.values()) == bytes_
    there = {f"i.{part}" if part else "i": x for part, x in stored.items()}
    (found,) = loaded_tensors(there, {"i": about} if about else {}, {}, 8 * len(index), 1e9, "4").values()
    assert torch.equal(found, index)


def test_positions_of_several_heads_are_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    map_ = torch.randn(4, 50).repeat(8, 1)
    program = Program({"x": (32, 50)}, [MultiplyMap("y", ("x",), map_)], ("y",))
    program.save(tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in stored.items()} == {
        "y.map.few": (4, 50),
        "y.map.along0": (32,),
        "y.map.along1": (50,),
    }
    assert torch.equal(Program.load(tmp_path / "model.safetensors").operations[0].tensors()["map"], map_)
    size = program_size(program)
    assert size.constant_bytes == size.bytes == sum(x.numel() * x.element_size() for x in stored.values())


@pytest.mark.parametrize(
    "about",
    [
        {"shape": [3], "dtype": "int64", "range": [0, 2**31]},
        {"shape": [-1], "dtype": "int64", "range": [0, 1]},
        {"shape": [2, 2], "dtype": "int64", "range": [0, 1]},
        {"shape": [3], "dtype": "float32", "range": [0, 1]},
        {"shape": [3], "dtype": "int64", "range": [0, 1.5]},
        {"shape": [3], "dtype": "int64", "range": 1},
        {"shape": [3], "dtype": "int64", "range": [0, 1], "bits": 0},
    ],
)
def test_invalid_ranges_in_files(about: dict[str, Any]) -> None:
    with pytest.raises(WiringError, match="expected the first of some indices, their step and their number"):
        loaded_tensors({}, {"y.index": about}, {}, 24, 1e9, "4")


@pytest.mark.parametrize("value", [torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2)])
def test_invalid_indices_in_files(value: Tensor) -> None:
    with pytest.raises(WiringError, match="expected indices as integers"):
        loaded_tensors({"y.index.small": value}, {}, {}, 8 * value.numel(), 1e9, "4")


def test_ranges_do_not_take_more_memory_than_allowed() -> None:
    about = {"shape": [2**31 - 1], "dtype": "int64", "range": [0, 0]}
    with pytest.raises(WiringError, match="weights of at most"):
        loaded_tensors({}, {"y.index": about}, {}, 8 * (2**31 - 1), 1e6, "4")


class Positions(nn.Module):
    """A channel that holds positions alone, whose map after the next layer would take more than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 64, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(2, 20, 20))
        with torch.no_grad():
            self.one.weight[1] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x) + self.positions))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Positions(), torch.randn(1, 1, 20, 20)),
        (get("gpt", layers=2, width=72, heads=3, context=16, classes=11), torch.zeros(1, 16, dtype=torch.int64)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2), torch.randn(1, 9, 32)),
    ],
)
def test_nothing_becomes_larger(model: Any, example: Tensor) -> None:
    small = compact(model.eval(), example)
    report = small.report
    assert report is not None
    assert report.after.bytes <= report.before.bytes
    assert "larger than before" not in str(report)


class Turned(nn.Module):
    """Multiplies by positions that it computes in every call."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[:, None] * torch.arange(x.shape[2])
        return x * places.float().cos()


def test_the_report_says_what_is_stored_in_addition() -> None:
    report = compact(nn.Sequential(nn.Linear(4, 4), Turned()).eval(), torch.randn(1, 30, 4)).report
    assert report is not None
    assert report.after.constant_bytes > 0 == report.before.constant_bytes
    assert "bytes are maps and masks, some of which the model computes in every call" in str(report)


def test_files_with_selected_channels(tmp_path: Path) -> None:
    index = torch.tensor([*range(8, 16), *range(8)])
    program = Program({"x": (16,)}, [SelectChannels("y", ("x",), index)], ("y",))
    program.save(tmp_path / "model.safetensors")
    assert torch.equal(load_compact(tmp_path / "model.safetensors").program.operations[0].tensors()["index"], index)
