"""Files of compact models: each loads by one call where wirings is not there, and is tried before it gets its name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from wirings import WiringError, compact, load_compact, models
from wirings.compaction import operations as ops
from wirings.compaction.export import export
from wirings.compaction.module import CompactModel
from wirings.compaction.program import Program

BLOCKED = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import numpy as np
x = np.load("x.npy")
"""
READ = {
    "onnx": "import onnxruntime\ny = onnxruntime.InferenceSession('model.onnx').run(None, {'input': x})[0]",
    "pt2": "import torch\ny = torch.export.load('model.pt2').module()(torch.from_numpy(x)).numpy()",
    "safetensors": "import torch, wirings\ny = wirings.load_compact('model.safetensors')(torch.from_numpy(x)).numpy()",
}


@pytest.fixture(scope="module")
def digits() -> CompactModel:
    torch.manual_seed(0)
    return compact(models.get("digits_static", rule="dnw").eval(), torch.randn(2, 1, 8, 8))


OTHERS = {"onnx", "onnxruntime", "onnxscript", "typer", "rich", "yaml", "matplotlib", "PIL", "torchvision"}


@pytest.mark.parametrize(
    ("kind", "blocked"),
    [("onnx", {"wirings", "torch", "onnx", "safetensors"}), ("pt2", {"wirings", *OTHERS}), ("safetensors", OTHERS)],
)
def test_files_load_by_one_call_where_there_is_nothing_else(
    digits: CompactModel, tmp_path: Path, kind: str, blocked: set[str]
) -> None:
    pytest.importorskip("onnxruntime")
    assert digits.save(tmp_path / f"model.{kind}").exists()
    x = torch.randn(5, 1, 8, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    code = BLOCKED.format(blocked=repr(blocked)) + READ[kind] + "\nnp.save('y.npy', y)"
    code += f"\nassert not {blocked!r} & {{name.split('.')[0] for name in sys.modules}}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
    found, expected = torch.from_numpy(np.load(tmp_path / "y.npy")), digits(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_safetensors_come_back_bit_for_bit(digits: CompactModel, tmp_path: Path) -> None:
    path = export(digits, tmp_path / "model.safetensors")
    again = load_compact(path)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(again(x), digits(x))
    assert again.report == digits.report
    assert str(again.program) == str(digits.program)
    from safetensors import safe_open

    with safe_open(str(path), framework="np") as file:  # the wiring is JSON in the header
        assert '"operation": "InstanceNorm"' in file.metadata()["program"]


def every_operation() -> Program:
    torch.manual_seed(0)
    t = torch.randn
    weight = t(4, 3, 3, 3) * (torch.rand(4, 3, 3, 3) < 0.2)
    border = t(4, 3, 3)[:, [0, *[1] * 6, 2]][:, :, [0, *[1] * 6, 2]].contiguous()
    acts = [
        ("relu", ()),
        ("clamp", (-1.0, 6.0)),
        ("clamp", (-float("inf"), 2.0)),
        ("leaky_relu", (0.2,)),
        ("elu", (1.5,)),
    ]
    acts += [(kind, ()) for kind in ("tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "hardswish", "hardsigmoid")]
    acts += [("softplus", ()), ("mish", ())]
    operations: list[ops.Operation] = [ops.Conv("a", ("input",), weight, t(4), padding=(1, 1))]
    last = "a"
    for number, (kind, values) in enumerate(acts):
        operations.append(ops.Activation(f"act{number}", (last,), kind, values))
        operations.append(ops.Affine(f"next{number}", (f"act{number}",), t(4), t(4)))
        last = f"next{number}"
    operations += [
        ops.AddMap("map", (last,), border),
        ops.InstanceNorm("norm", ("map",), t(4), t(4)),
        ops.Conv("depth", ("norm",), t(4, 1, 3, 3), stride=(1, 1), padding=(1, 1), groups=4),
        ops.Add("sum", ("depth", "norm", "a")),
        ops.Select("some", ("sum",), torch.tensor([2, 0])),
        ops.Select("range", ("sum",), torch.tensor([1, 2])),
        ops.Concat("joined", ("some", "range")),
        ops.Place("placed", ("joined",), torch.tensor([0, 2, 3, 5]), 6),
        ops.Mean("gate", ("placed",), keep=True),
        ops.Multiply("gated", ("placed", "gate")),
        ops.Pool("max", ("gated",), "max", (3, 3), (1, 1), (1, 1)),
        ops.Pool("avg", ("max",), "avg", (3, 3), (1, 1), (1, 1), count_padding=False),
        ops.Pool("avg2", ("avg",), "avg", (3, 3), (1, 1), (1, 1), count_padding=True),
        ops.Pad("padded", ("avg2",), (1, 0), (0, 2)),
        ops.Crop("cropped", ("padded",), (1, 0), (7, 9), (1, 2)),
        ops.Pool("four", ("padded",), "adaptive_avg", (3, 5), (3, 5)),
        ops.Flatten("flat", ("cropped",)),
        ops.Reshape("numbers", ("gate",), ()),
        ops.Linear("head", ("flat",), t(6, 6 * 6 * 5), t(6)),
        ops.Add("result", ("head", "numbers")),
        ops.Constant("same", ("input",), t(2, 3)),
        ops.Mean("mean", ("four",)),
    ]
    return Program({"input": (3, 8, 8)}, operations, ("result", "same", "mean"), {"one_output": False})


@pytest.mark.parametrize("kind", ["onnx", "pt2", "safetensors"])
def test_every_operation_can_be_exported(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("onnxruntime")
    path = export(CompactModel(every_operation()), tmp_path / f"all.{kind}")  # compares the outputs itself
    assert path.stat().st_size > 1000
    assert {type(o) for o in every_operation().operations} == set(ops.KINDS.values()) - {ops.Opaque}
    if kind == "safetensors":
        program, again = every_operation(), Program.load(path)
        for (name, one), (same, two) in zip(program.tensors(), again.tensors(), strict=True):
            assert name == same
            assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["onnx", "pt2", "safetensors"])
def test_operators_that_are_passed_on_are_exported_too(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Softmax(1))
    small = compact(model, torch.randn(2, 2, 6, 6))
    path = small.save(tmp_path / f"model.{kind}")
    if kind == "safetensors":
        x = torch.randn(3, 2, 6, 6)
        assert torch.equal(load_compact(path)(x), small(x))


class Cleared(nn.Module):
    """Writes a number, which is a parameter of the compact model, to places, which are a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, [0, 1]] = 0.5
        return y


def test_weights_and_indices_of_one_operator_keep_their_order(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 3, 3)
    path = compact(Cleared(), x).save(tmp_path / "model.safetensors")
    assert torch.equal(load_compact(path)(x), Cleared()(x))


def test_mistakes(digits: CompactModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WiringError, match=r"must end in .onnx, .pt2, .safetensors"):
        digits.save(tmp_path / "model.pth")
    with pytest.raises(WiringError, match="does not exist; make it first"):
        digits.save(tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(WiringError, match="compact it first"):
        export(nn.Linear(2, 2), tmp_path / "model.onnx")  # type: ignore[arg-type]
    with pytest.raises(WiringError, match="there is no file"):
        load_compact(tmp_path / "model.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(WiringError, match="damaged or no safetensors file"):
        load_compact(tmp_path / "bad.safetensors")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(WiringError, match="holds no compact model"):
        load_compact(tmp_path / "other.safetensors")
    import importlib.util

    found = importlib.util.find_spec
    small = digits.save(tmp_path / "small.safetensors")
    gone = {"onnx", "safetensors"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else found(name, *a))
    with pytest.raises(WiringError, match=r'pip install "wirings\[export\]"'):
        digits.save(tmp_path / "model.onnx")
    with pytest.raises(WiringError, match="pip install safetensors"):
        digits.save(tmp_path / "model.safetensors")
    with pytest.raises(WiringError, match="pip install safetensors"):
        load_compact(small)
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("aten::from_file", ("z",)),  # reads files
        ("aten::save", (ops.Taken(0), "z")),  # writes them
        ("aten::add_.Tensor", (ops.Taken(0), ops.Taken(0))),  # changes its input
        ("aten::__setattr__.__call__", ("relu", 1)),  # PyTorch's own attributes, not operators
        ("aten::no_such_operator", ()),
        ("os::system", ("true",)),
        ("eval", ("1",)),
    ],
)
def test_files_cannot_do_anything_but_compute(
    target: str, arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = Program({"x": (1,)}, [ops.Opaque("y", ("x",), target, arguments)], ("y",))
    with pytest.raises(WiringError, match="not among those that a file may name"):
        evil.save(tmp_path / "evil.safetensors")
    monkeypatch.setattr("wirings.compaction.files.check_target", lambda target: None)  # whoever wrote it did not mind
    evil.save(tmp_path / "evil.safetensors")
    with pytest.raises(WiringError, match=r"evil.safetensors cannot be read.*not among those that a file may name"):
        load_compact(tmp_path / "evil.safetensors")


def test_a_file_that_gives_other_outputs_is_not_handed_over(
    digits: CompactModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    from wirings.compaction import onnx as writer

    def without_bias(w: Any, o: ops.Linear) -> None:
        writer._linear(w, ops.Linear(o.output, o.inputs, o.weight))

    monkeypatch.setitem(writer._WRITERS, ops.Linear, without_bias)
    with pytest.raises(WiringError, match="the outputs of ONNX Runtime differ from the model's"):
        digits.save(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
