"""Weights in bfloat16: the same sums as in float32 with rounded weights, in kernels, files, exports and generators."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine import exported
from wirings import WiringError, engine, models
from wirings.compaction.operations import Activation, Conv, Linear
from wirings.compaction.program import Program
from wirings.engine import EngineModel
from wirings.engine.bfloat16 import RoundedWeights, restore_slower, round_weights
from wirings.engine.bfloat16_steps import MAX_INPUTS, SUFFIX, bfloat16_ways, fits_bfloat16
from wirings.engine.step import StepChoice

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


def perceptron(seed: int, inputs: int, hidden: int, outputs: int, density: float) -> Program:
    torch.manual_seed(seed)
    weights = [torch.randn(hidden, inputs), torch.randn(outputs, hidden)]
    for weight in weights:
        weight *= torch.rand_like(weight) < density
    operations = [
        Linear("a", ("x",), weights[0], torch.randn(hidden)),
        Activation("b", ("a",), "relu"),
        Linear("y", ("b",), weights[1], None),
    ]
    return Program({"x": (inputs,)}, operations, ("y",))


def rounded(program: Program) -> Program:
    shapes = program.shapes()
    return round_weights(program, shapes, lambda o: True).program


def ways(fast: EngineModel) -> list[str]:
    plan = fast._segments[0].plan
    assert plan is not None
    return [c.way for step, c in zip(plan.steps, plan.choices, strict=True) if step.kind == "linear"]


def test_rounds_to_nearest_even_by_hand() -> None:
    weight = torch.tensor([[1.0, 1.00390625, 1.01171875, -3.14159265]])  # bfloat16 has steps of 1/128 above 1
    made = rounded(Program({"x": (4,)}, [Linear("y", ("x",), weight, None)], ("y",)))
    assert made.operations[0].weight.tolist() == [[1.0, 1.0, 1.015625, -3.140625]]  # type: ignore[attr-defined]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 140)),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 3),
)
def test_equals_float32_with_rounded_weights(
    seed: int, sizes: tuple[int, int, int], density: float, way: str, threads: int
) -> None:
    program = perceptron(seed, *sizes, density)
    fast = engine.compile(program, engine=way, threads=threads, dtype="bfloat16")
    assert ways(fast) == [way + SUFFIX] * 2
    x = torch.randn(5, sizes[0])
    expected = rounded(program).run(x)[0]
    size = float(expected.abs().max().clamp_min(1.0))
    assert (fast(x) - expected).abs().max() < 1e-5 * size
    floats = EngineModel(rounded(program), way, threads)
    plan, other = fast._segments[0].plan, floats._segments[0].plan
    assert plan is not None
    assert other is not None
    other.choose([StepChoice(c.way.removesuffix(SUFFIX), c.strips) for c in other.choices])
    assert (plan.run([x])[0] - other.run([x])[0]).abs().max() <= 1e-6 * size


def test_zeros_that_pad_do_not_spread_infinity() -> None:
    weight = torch.zeros(17, 3)
    weight[:, 1] = torch.arange(17.0)
    weight[2, 2] = 1.0
    program = Program({"x": (3,)}, [Linear("y", ("x",), weight, None)], ("y",))
    fast = engine.compile(program, engine="sparse", dtype="bfloat16")
    assert ways(fast) == ["sparse" + SUFFIX]
    assert fast(torch.tensor([[torch.inf, 2.0, 3.0]])).tolist() == [[2.0 * i + 3.0 * (i == 2) for i in range(17)]]


def test_layers_with_more_inputs_than_16_bits_are_dense() -> None:
    wide = np.ones((1, MAX_INPUTS + 1), np.float32)
    assert bfloat16_ways(["sparse", "dense"], wide) == ["dense bf16", "sparse", "dense"]
    assert bfloat16_ways(["sparse"], wide[:, 1:]) == ["sparse bf16", "sparse"]
    assert bfloat16_ways(["sparse"], np.full((2, 2), 0.1, np.float32)) == ["sparse"]
    assert fits_bfloat16(np.array([[0.5, -0.0, np.inf]], np.float32))


def test_report_says_what_stays_in_float32() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    fast = engine.compile(net, torch.randn(1, 3, 8, 8), engine="dense", dtype=torch.bfloat16)
    assert list(fast.report.floats.values()) == ["its weights stay in caches"]
    assert "in float32, its weights stay in caches" in str(fast.report)
    assert "dense bf16" in str(fast.report)
    weight = torch.full((1, 2), 3.4e38)  # rounds to infinity
    program = Program({"x": (2,)}, [Linear("y", ("x",), weight, None)], ("y",))
    assert engine.compile(program, engine="dense", dtype="bfloat16").report.floats == {
        "y": "weights that are not finite"
    }


def test_layers_that_are_not_faster_get_their_weights_back() -> None:
    program = perceptron(0, 20, 30, 10, 1.0)
    shapes = program.shapes()
    made = round_weights(program, shapes, lambda o: True)
    fast = EngineModel(made.program, "dense", 1)
    plan = fast._segments[0].plan
    assert plan is not None
    assert restore_slower(made, program, fast._segments) is made
    plan.choose(
        [StepChoice("dense") if step.name == "y" else c for step, c in zip(plan.steps, plan.choices, strict=True)]
    )
    kept = restore_slower(made, program, fast._segments)
    assert isinstance(kept, RoundedWeights)
    assert kept.floats == {"y": "not faster in bfloat16"}
    weights = {o.output: o.weight for o in kept.program.operations if isinstance(o, Linear)}
    originals = {o.output: o.weight for o in program.operations if isinstance(o, Linear)}
    assert torch.equal(weights["y"], originals["y"])
    assert torch.equal(weights["a"], originals["a"].bfloat16().float())


def test_auto_computes_the_rounded_network() -> None:
    program = perceptron(1, 256, 512, 128, 1.0)
    fast = engine.compile(program, threads=1, dtype="bfloat16")
    x = torch.randn(2, 256)
    torch.testing.assert_close(fast(x), fast.program.run(x)[0], rtol=1e-4, atol=1e-4)
    for o in fast.program.operations:
        if isinstance(o, Linear):
            assert fits_bfloat16(o.weight.numpy()) == (o.output not in fast.report.floats)


def test_files_and_exports(tmp_path: Path) -> None:
    program = perceptron(2, 33, 40, 21, 0.4)
    fast = engine.compile(program, engine="sparse", threads=2, dtype="bfloat16")
    x = torch.randn(4, 33)
    again = engine.load(fast.save(tmp_path / "net.safetensors"))
    assert ways(again) == ways(fast)
    assert torch.equal(again(x), fast(x))


@exported.needs_gpp
@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_exported_network_equals_bit_for_bit(way: str, tmp_path: Path) -> None:
    fast = engine.compile(perceptron(3, 33, 40, 21, 0.4), engine=way, threads=2, dtype="bfloat16")
    exported.build(fast.export(tmp_path))
    x = torch.randn(4, 33)
    (found,) = exported.run_example(fast, tmp_path, [x])
    assert torch.equal(found, fast(x))


def test_language_model_generates_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = models.get("gpt", layers=2, width=32, heads=2, context=16, classes=20).eval()
    tokens = torch.randint(20, (1, 16))
    fast = engine.compile(model, tokens, engine="sparse", dtype="bfloat16")
    layers = [o for o in fast.program.operations if isinstance(o, Conv)]
    assert all(fits_bfloat16(o.weight.numpy()) for o in layers)
    generator = fast.generator()
    assert any(step.ways()[0].endswith(SUFFIX) for step in generator._plan.steps if step.ways())
    whole = fast(tokens)
    for t in range(16):
        found = generator.step(int(tokens[0, t]))
        torch.testing.assert_close(found, whole[0, t], rtol=1e-4, atol=1e-4)


def test_calibration_is_refused() -> None:
    with pytest.raises(WiringError, match='calibrate is for dtype="int8"'):
        engine.compile(perceptron(0, 2, 2, 2, 1.0), dtype="bfloat16", calibrate=[torch.zeros(1, 2)])
