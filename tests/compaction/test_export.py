"""Files of compact models: each loads in one call, and its outputs are compared before it gets its name."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, compact, load_compact, models, wire_
from wirings.compaction import CompactModel
from wirings.compaction import operations as ops
from wirings.compaction.check_program import check_program
from wirings.compaction.program import Program

BLOCKED = """
import sys

class Blocker:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Blocker(finder) for finder in sys.meta_path]
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
def test_files_load_in_one_call_without_other_packages(
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


def test_safetensors_are_loaded_bit_for_bit(digits: CompactModel, tmp_path: Path) -> None:
    path = digits.save(tmp_path / "model.safetensors")
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
        ops.SelectChannels("some", ("sum",), torch.tensor([2, 0])),
        ops.SelectChannels("range", ("sum",), torch.tensor([1, 2])),
        ops.Concat("joined", ("some", "range")),
        ops.ScatterChannels("placed", ("joined",), torch.tensor([0, 2, 3, 5]), 6),
        ops.Mean("gate", ("placed",), keep=True),
        ops.Multiply("gated", ("placed", "gate")),
        ops.Pooling("max", ("gated",), "max", (3, 3), (1, 1), (1, 1)),
        ops.Pooling("avg", ("max",), "avg", (3, 3), (1, 1), (1, 1), count_padding=False),
        ops.Pooling("avg2", ("avg",), "avg", (3, 3), (1, 1), (1, 1), count_padding=True),
        ops.Pad("padded", ("avg2",), (1, 0), (0, 2)),
        ops.Crop("cropped", ("padded",), (1, 0), (7, 9), (1, 2)),
        ops.Pooling("four", ("padded",), "adaptive_avg", (3, 5), (3, 5)),
        ops.Flatten("flat", ("cropped",)),
        ops.Reshape("numbers", ("gate",), ()),
        ops.Linear("head", ("flat",), t(6, 6 * 6 * 5), t(6)),
        ops.Add("result", ("head", "numbers")),
        ops.Constant("same", ("input",), t(2, 3)),
        ops.Mean("mean", ("four",)),
    ]
    return Program({"input": (3, 8, 8)}, operations, ("result", "same", "mean"), {"one_output": False})


def every_token_operation() -> Program:
    torch.manual_seed(0)
    t = torch.randn
    mask = t(4, 7, 7).masked_fill(torch.rand(4, 7, 7) < 0.2, -float("inf"))
    mask[:, :, 0] = 0
    operations: list[ops.Operation] = [
        ops.Embedding("embedded", ("ids",), t(11, 6)),
        ops.MultiplyMap("turned", ("embedded",), t(6, 7)),
        ops.ChannelNorm("layer_norm", ("turned",), t(6), t(6), 1e-4, True, 9),
        ops.ChannelNorm("rms_norm", ("layer_norm",), t(6), t(6), 1e-4, False, 6),
        ops.Conv("queries", ("rms_norm",), t(12, 6, 1), t(12), (1,), (0,), (1,)),
        ops.Conv("keys", ("rms_norm",), t(6, 6, 1), t(6), (1,), (0,), (1,)),
        ops.Attention("shared", ("queries", "keys", "keys"), None, (2, 4), (1, 5), 2, 0.5, True),
        ops.Attention("masked", ("queries", "queries", "queries"), mask, (3,) * 4, (3,) * 4, 1, 0.3),
        ops.Attention("one_mask", ("keys", "keys", "keys"), mask[:1].clone(), (3, 3), (3, 3), 1, 0.3, True),
        ops.Arrange("tokens", ("shared",), ((3, 4), (7,)), (0, 3, 2, 1), (-1, 7, 12)),
        ops.Recurrent("states", ("keys",), t(12, 6), t(12, 3), t(12), t(12), "lstm", True),
    ]
    notes = {"types": {"ids": "torch.int64"}}
    return Program({"ids": (7,)}, operations, ("tokens", "masked", "one_mask", "states"), notes)


def every_diffusion_operation() -> Program:
    torch.manual_seed(0)
    t = torch.randn
    operations: list[ops.Operation] = [
        ops.GroupNorm("norm", ("input",), t(6), t(6), (3, 3), 3),
        ops.GroupNorm("part", ("norm",), t(6), t(6), (2, 4), 4, 1e-4),
        ops.AddNumbers("sum", ("part", "numbers")),
        ops.RepeatPixels("larger", ("sum",), (2, 3)),
        ops.Roll("rolled", ("larger",), (-3, 7)),
        ops.GroupNorm("single", ("flat",), t(4), t(4), (2, 2), 3),
    ]
    shapes = {"input": (6, 4, 5), "numbers": (6, 1, 1), "flat": (4,)}
    return Program(shapes, operations, ("rolled", "single"), {"one_output": False})


def every_indexed_operation() -> Program:
    torch.manual_seed(0)
    t = torch.randn
    operations: list[ops.Operation] = [
        ops.PickTokens("picked", ("input", "index"), 1, 8, 5),
        ops.SumTokens("summed", ("picked", "index"), 9, 8, 5),
        ops.Conv("scores", ("summed",), t(3, 6, 1), t(3), (1,), (0,), (1,)),
        ops.TopShares("shares", ("scores",), 2, True, True),
        ops.Experts("mixed", ("summed", "shares"), t(3, 14, 6), t(3, 4, 7), "silu", True, 2),
    ]
    shapes, notes = {"input": (6, 5), "index": (17,)}, {"types": {"index": "torch.int64"}}
    return Program(shapes, operations, ("mixed", "summed"), {"one_output": False, **notes})


def test_files_of_schema_3_are_read() -> None:
    """Written from `every_operation` when places were 32-bit integers, with the outputs in its notes."""
    path = Path(__file__).parent / "old_files" / "schema_3.safetensors"
    program, made = Program.load(path), every_operation()
    assert [type(o) for o in program.operations] == [type(o) for o in made.operations]
    assert int(program.operations[0].tensors()["weight"].count_nonzero()) < 36
    x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    for found, expected in zip(program.run(x), program.notes["expected"], strict=True):
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "error", "size"), [("float16", 1e-3, 0.55), ("bfloat16", 1e-2, 0.55), ("int8", 2e-2, 0.3)]
)
def test_weights_can_be_rounded_in_a_file(dtype: str, error: float, size: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten())
    for conv in (model[0], model[3]):
        conv.weight.data *= torch.rand_like(conv.weight) < 0.8
    x = torch.randn(4, 3, 8, 8)
    small = compact(model.eval(), x)
    exact, rounded = small.save(tmp_path / "exact.safetensors"), small.save(tmp_path / "rounded.safetensors", dtype)
    assert torch.equal(load_compact(exact)(x), small(x))
    again = load_compact(rounded)
    assert {t.dtype for t in again.parameters()} == {torch.float32}
    difference = float((again(x) - small(x)).abs().max() / small(x).abs().max())
    assert 0 < difference < error
    assert rounded.stat().st_size < size * exact.stat().st_size
    with pytest.raises(WiringError, match=r"dtype='int8' is for .safetensors files, got model.onnx"):
        small.save("model.onnx", "int8")
    with pytest.raises(WiringError, match="unknown dtype 'float8'"):
        small.save(tmp_path / "model.safetensors", "float8")


def test_files_take_few_bytes_an_edge(tmp_path: Path) -> None:
    """The figures in docs/compact.md."""
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = models.get("resnet18")
    wire_(model, "random", density=0.02)
    x = torch.randn(2, 3, 32, 32)
    small = compact(model.eval(), x)
    assert small.report is not None
    for dtype, most, error in ((None, 5.0, 0), ("float16", 3.0, 1e-3), ("bfloat16", 3.0, 0.01), ("int8", 2.1, 0.01)):
        path = small.save(tmp_path / "model.safetensors", dtype)
        assert path.stat().st_size < most * small.report.after.edges
        assert (load_compact(path)(x) - small(x)).abs().max() <= error * small(x).abs().max()
        if dtype is None:
            assert path.stat().st_size == pytest.approx(0.9e6, rel=0.05)
            assert path.stat().st_size == pytest.approx(small.report.after.bytes, rel=0.02)
    assert small.save(tmp_path / "model.onnx").stat().st_size == pytest.approx(37e6, rel=0.02)


@pytest.mark.parametrize("kind", ["onnx", "pt2", "safetensors"])
def test_every_operation_can_be_exported(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("onnxruntime")
    programs = every_operation(), every_token_operation(), every_diffusion_operation(), every_indexed_operation()
    kinds = {type(o) for program in programs for o in program.operations}
    assert kinds == set(ops.OPERATIONS.values()) - {ops.TorchOperator}
    for program in programs:
        path = CompactModel(program).save(tmp_path / f"all.{kind}")  # compares the outputs
        assert path.stat().st_size > 1000
        if kind == "safetensors":
            again = Program.load(path)
            assert str(again) == str(program)
            for (name, one), (same, two) in zip(program.tensors(), again.tensors(), strict=True):
                assert name == same
                assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["onnx", "pt2", "safetensors"])
def test_other_torch_operators_can_be_exported(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Softmax(1))
    small = compact(model, torch.randn(2, 2, 6, 6))
    path = small.save(tmp_path / f"model.{kind}")
    if kind == "safetensors":
        x = torch.randn(3, 2, 6, 6)
        assert torch.equal(load_compact(path)(x), small(x))


class Cleared(nn.Module):
    """Writes a number, which becomes a parameter, to indices, which become a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, [0, 1]] = 0.5
        return y


def test_weights_and_indices_of_one_operator_keep_their_order(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 3, 3)
    path = compact(Cleared(), x).save(tmp_path / "model.safetensors")
    assert torch.equal(load_compact(path)(x), Cleared()(x))


def test_export_errors(digits: CompactModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WiringError, match=r"ends in .onnx, .pt2, .safetensors, got"):
        digits.save(tmp_path / "model.pth")
    with pytest.raises(WiringError, match=r"does not exist. Create it first"):
        digits.save(tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(WiringError, match=r"model.safetensors does not exist"):
        load_compact(tmp_path / "model.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(WiringError, match="damaged, or not a safetensors file"):
        load_compact(tmp_path / "bad.safetensors")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(WiringError, match="does not contain a compact model"):
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
        ("aten::save", (ops.InputRef(0), "z")),  # writes them
        ("aten::add_.Tensor", (ops.InputRef(0), ops.InputRef(0))),  # changes its input
        ("aten::__setattr__.__call__", ("relu", 1)),  # attributes of PyTorch, not operators
        ("aten::no_such_operator", ()),
        ("os::system", ("true",)),
        ("eval", ("1",)),
    ],
)
def test_files_can_only_compute(
    target: str, arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = Program({"x": (1,)}, [ops.TorchOperator("y", ("x",), target, arguments)], ("y",))
    with pytest.raises(WiringError, match="not allowed in a file"):
        evil.save(tmp_path / "evil.safetensors")
    monkeypatch.setattr(
        "wirings.compaction.file_format.check_allowed_operator", lambda target: None
    )  # as in a forged file
    evil.save(tmp_path / "evil.safetensors")
    with pytest.raises(WiringError, match=r"evil.safetensors cannot be read.*not allowed in a file"):
        load_compact(tmp_path / "evil.safetensors")


def test_a_file_with_other_outputs_is_not_written(
    digits: CompactModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    to_onnx = ops.Linear.to_onnx

    def without_bias(self: ops.Linear, writer: Any) -> None:
        to_onnx(ops.Linear(self.output, self.inputs, self.weight), writer)

    monkeypatch.setattr(ops.Linear, "to_onnx", without_bias)
    with pytest.raises(WiringError, match="the outputs of ONNX Runtime differ from the model's"):
        digits.save(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Masked(nn.Module):
    """Attention to the tokens that a mask of integers shows, as Hugging Face's encoders take it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.into, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        b, t = input_ids.shape
        parts = self.into(self.embed(input_ids)).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        seen = attention_mask[:, None, None, :].bool().expand(b, 1, t, t)
        y = F.scaled_dot_product_attention(*parts, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_masks_of_integers_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, ids = Masked().eval(), torch.randint(11, (3, 6))
    mask = torch.ones_like(ids)
    small = compact(model, {"input_ids": ids[:1], "attention_mask": mask[:1]})
    assert torch.equal(small.program.example(2)[1], torch.ones(2, 6, dtype=torch.int64))
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again.program.example(2)[1], torch.ones(2, 6, dtype=torch.int64))
    session = onnxruntime.InferenceSession(str(small.save(tmp_path / "model.onnx")))
    mask[0, 4:], mask[1] = 0, 0  # nothing of the second sequence is visible
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = model(**given)
    torch.testing.assert_close(small(**given), expected)
    (found,) = session.run(None, {name: x.numpy() for name, x in given.items()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_tokens_that_see_nothing_in_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    mask = torch.zeros(1, 5, 5)
    mask[:, 3] = -math.inf
    program = ops.Attention("y", ("x",) * 3, mask, (4,), (4,))
    small = CompactModel(Program({"x": (4, 5)}, [program], ("y",)))
    session = onnxruntime.InferenceSession(str(small.save(tmp_path / "model.onnx")))
    x = torch.randn(2, 4, 5)
    (found,) = session.run(None, {"x": x.numpy()})
    assert not found[:, :, 3].any()
    torch.testing.assert_close(torch.from_numpy(found), small(x))


@pytest.mark.parametrize(
    "ranges", [{"input": [0, 1]}, {"ids": [1, 0]}, {"ids": [0]}, {"ids": [0, 2**63]}, [1], {"ids": 1}]
)
def test_rejects_invalid_ranges_in_files(ranges: Any) -> None:
    embed = ops.Embedding("y", ("ids",), torch.randn(3, 2))
    program = Program({"ids": (4,)}, [embed], ("y",), {"types": {"ids": "torch.int64"}, "ranges": ranges})
    with pytest.raises(WiringError, match=r"expected (ranges of inputs of integers|a smallest and a largest integer)"):
        check_program(program, 2**30)


@torch.library.custom_op("wirings_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x).softmax(1)  # type: ignore[no-any-return]


def test_operators_of_other_libraries(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    small = compact(Custom(), torch.randn(2, 3))
    with pytest.raises(
        WiringError, match=r"ONNX has no operator for wirings_tests::doubled, which the model uses\. Save"
    ):
        small.save(tmp_path / "model.onnx")
    with pytest.raises(WiringError, match=r"'wirings_tests::doubled' is not allowed in a file"):
        small.save(tmp_path / "model.safetensors")
    assert small.save(tmp_path / "model.pt2").exists()
