"""Networks in int8: which layers, calibration, accuracy, files, exports, generation."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import exported
from tests.engine.all_in_int8 import all_layers, loss
from tests.engine.test_int8 import INT8, kinds
from tests.engine.test_kernels import nodes
from wirings import WiringError, engine, models
from wirings.compaction.operations import Add, Conv, Linear
from wirings.compaction.program import Program
from wirings.engine.engine_model import EngineModel
from wirings.engine.quantization import Quantization

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


def convolutions() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 20, 3, 2, 1), nn.ReLU(), nn.Conv2d(20, 24, 1)]
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(*layers, *head).eval(), torch.randn(4, 3, 16, 16)


def gpt() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "width": 64, "context": 12, "classes": 20}
    return models.get("gpt", rule="dnw", density=0.3, **sizes).eval(), torch.randint(20, (1, 12))


def compiled(kind: str, way: str = "sparse") -> tuple[EngineModel, Tensor]:
    if kind == "gpt":
        model, tokens = gpt()
        return engine.compile(model, tokens, engine=way, threads=2, dtype="int8"), tokens
    model, images = convolutions()
    return engine.compile(model, images, engine=way, threads=2, dtype="int8", calibrate=[images]), images


# ---- which layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "convolutions"])
@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_outputs_are_close_to_those_in_float32(kind: str, way: str) -> None:
    fast, inputs = compiled(kind, way)
    model = (gpt if kind == "gpt" else convolutions)()[0]
    with torch.no_grad():
        expected = model(inputs)
    assert kinds(fast) & INT8
    assert 0 < loss(fast(inputs), expected) < 0.02


def test_convolutions_need_calibration_data() -> None:
    model, images = convolutions()
    fast = engine.compile(model, images, engine="sparse", dtype="int8")
    assert fast.quantization is not None
    assert fast.quantization.floats["2"] == "needs calibration data"
    assert fast.quantization.floats["0"] == "reads an input of the network"
    assert fast.quantization.layers == {"4", "8"}
    assert "in float32, needs calibration data: 2" in str(fast.report)
    calibrated, _ = compiled("convolutions")
    assert calibrated.quantization is not None
    assert calibrated.quantization.layers == {"2", "4", "8"}


def test_layers_that_lose_too_much_stay_in_float32() -> None:
    """One input is so large that the bytes of all others are zero."""
    torch.manual_seed(0)
    first, second = torch.randn(16, 16), torch.randn(8, 16)
    first[:, 0] = 0
    program = Program({"x": (16,)}, [Linear("a", ("x",), first), Linear("b", ("a",), second)], ("b",))
    x = torch.randn(8, 16)
    x[:, 0] = 1e6
    fast = engine.compile(program, engine="sparse", dtype="int8", calibrate=[x])
    assert fast.quantization is not None
    assert fast.quantization.layers == {"b"}
    assert fast.quantization.floats["a"].startswith("loses ")
    assert "in float32, loses" in str(fast.report)
    assert loss(fast(x), program.run(x)[0]) < 0.03
    assert engine.compile(program, engine="sparse", dtype="int8").quantization.layers == {"a", "b"}  # type: ignore[union-attr]


def test_what_is_added_stays_in_float32() -> None:
    torch.manual_seed(0)
    conv = Conv("y", ("x",), torch.randn(16, 16, 1) / 1000, None, (1,), (0,), (1,))
    program = Program({"x": (16, 40)}, [conv, Add("z", ("x", "y"))], ("z",))
    x = torch.randn(2, 16, 40)
    fast = EngineModel(program, "sparse", 2, quantization=Quantization(frozenset({"y"})))
    assert kinds(fast) & INT8
    assert (fast(x) - program.run(x)[0]).abs().max() < 5e-4  # a byte of x is about 0.02


def test_layers_that_are_slower_stay_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from wirings.engine import int8_speed

    model, images = convolutions()
    monkeypatch.setattr(int8_speed, "SLOWER", 0.0)
    small = engine.compile(model, images, engine="sparse").program
    fast = engine.compile(small, dtype="int8", calibrate=[images], threads=1)
    assert fast.quantization is not None
    assert not fast.quantization.layers
    assert not kinds(fast) & INT8
    assert all("slower in int8" in fast.quantization.floats[name] for name in ("2", "4", "8"))
    assert not fast.quantization.ranges
    assert engine.load(fast.save(tmp_path / "fast.safetensors")).choices == fast.choices
    monkeypatch.setattr(int8_speed, "SLOWER", 1e9)
    assert engine.compile(small, dtype="int8", calibrate=[images], threads=1).quantization.layers == {"2", "4", "8"}  # type: ignore[union-attr]


def test_a_token_that_is_not_a_number_spoils_no_other() -> None:
    torch.manual_seed(0)
    program = Program({"x": (16, 40)}, [Conv("y", ("x",), torch.randn(8, 16, 1), None, (1,), (0,), (1,))], ("y",))
    fast = EngineModel(program, "sparse", 2, quantization=Quantization(frozenset({"y"})))
    x = torch.randn(1, 16, 40)
    expected = fast(x)
    x[0, 3, 7], x[0, 5, 30] = torch.nan, torch.inf
    found = fast(x)
    assert found[0, :, [7, 30]].isnan().all()
    others = [i for i in range(40) if i not in (7, 30)]
    assert torch.equal(found[..., others], expected[..., others])


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8", "calibrate": []}, "at least one batch of inputs, got none"),
        ({"dtype": "int8", "calibrate": [torch.zeros(0, 3, 16, 16)]}, "at least one batch of inputs, got none"),
        ({"dtype": "int8", "calibrate": torch.zeros(2, 3, 16, 16)}, "batches of inputs, such as a DataLoader"),
        ({"dtype": "int8", "calibrate": [torch.zeros(2, 3, 8, 8)]}, r"shape \(batch, 3, 16, 16\) for"),
        ({"dtype": "int8", "calibrate": 3}, "got int"),
        ({"calibrate": [torch.zeros(2, 3, 16, 16)]}, 'calibrate is for dtype="int8"'),
        ({"dtype": "int4"}, "int4"),
    ],
)
def test_rejects_invalid_calibration(arguments: dict[str, Any], message: str) -> None:
    model, images = convolutions()
    with pytest.raises(WiringError, match=message):
        engine.compile(model, images, **arguments)


def test_calibration_data_may_have_labels() -> None:
    model, images = convolutions()
    labels = torch.zeros(4, dtype=torch.int64)
    name = next(iter(engine.compile(model, images, engine="torch").program.inputs))
    made = [
        engine.compile(model, images, engine="sparse", dtype="int8", calibrate=batches).quantization.as_mapping()  # type: ignore[union-attr]
        for batches in ([images], [(images, labels)], [{name: images}], (x for x in [images]))
    ]
    assert made[0] == made[1] == made[2] == made[3]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "convolutions"])
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    fast, inputs = compiled(kind)
    again = engine.load(fast.save(tmp_path / "fast.safetensors"))
    assert again.choices == fast.choices
    assert torch.equal(again(inputs), fast(inputs))
    assert torch.equal(pickle.loads(pickle.dumps(fast))(inputs), fast(inputs))


def damaged(kind: str, saved: dict[str, Any]) -> Any:
    tensor = next(iter(saved["ranges"]))
    low, high = saved["ranges"][tensor]
    match kind:
        case "not a mapping":
            return [saved]
        case "missing":
            del saved["floats"]
        case "unknown layer":
            saved["layers"].append("nothing")
        case "activation":
            saved["layers"].append("1")
        case "few edges":
            saved["layers"] = ["0"]
        case "no ranges":
            saved["ranges"] = {}
        case "other tensor":
            saved["ranges"]["nothing"] = [low, high]
        case "length":
            saved["ranges"][tensor] = [low[:-1], high]
        case "nan":
            saved["ranges"][tensor] = [low, [float("nan"), *high[1:]]]
        case "infinite":
            saved["ranges"][tensor] = [low, [float("inf"), *high[1:]]]
        case "text":
            saved["ranges"][tensor] = [low, ["1", *high[1:]]]
        case "one side":
            saved["ranges"][tensor] = [low]
        case "reasons":
            saved["floats"] = {"0": 3}
    return saved


DAMAGES = (
    "not a mapping", "missing", "unknown layer", "activation", "few edges", "no ranges", "other tensor", "length",
    "nan", "infinite", "text", "one side", "reasons",
)  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_rejects_damaged_files(kind: str, tmp_path: Path) -> None:
    fast, _ = compiled("convolutions")
    choices = copy.deepcopy(fast.choices)
    choices["int8"] = damaged(kind, choices["int8"])
    program = fast.program
    notes = {**program.notes, "engine": choices}
    Program(program.inputs, program.operations, program.outputs, notes).save(tmp_path / "bad.safetensors")
    with pytest.raises(WiringError, match=r"bad\.safetensors"):
        engine.load(tmp_path / "bad.safetensors")


# ---- exports and generation ------------------------------------------------------------------------------------------


@exported.needs_gpp
@pytest.mark.parametrize("kind", ["gpt", "convolutions", "nodes"])
def test_exported_networks_are_equal_bit_for_bit(kind: str, tmp_path: Path) -> None:
    if kind == "nodes":
        program = nodes(3, (33, 30), [12, 18, 10], 1, 0.3)
        fast = EngineModel(
            program, "sparse", 2, quantization=all_layers(program, torch.randn(2, 3, 33, 30), static=True)
        )
    else:
        fast, _ = compiled(kind, "dense")
    assert kinds(fast) & INT8
    fast.export(tmp_path)
    exported.build(tmp_path)
    exported.check_equal(fast, tmp_path)


def test_generating_in_int8() -> None:
    fast, tokens = compiled("gpt")
    generator = fast.generator()
    assert {step.kind for step in generator._plan.steps} & INT8
    found = torch.stack([generator.step(int(token)) for token in tokens[0]])
    assert loss(found, fast(tokens)[0]) < 0.01
