"""Kernels in int8: exact sums, the same quantisation as the reference in PyTorch, and what stays in float32."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.all_in_int8 import all_layers, loss
from tests.engine.random_programs import RandomProgram
from tests.engine.test_kernels import nodes
from wirings import engine
from wirings.compaction.operations import Activation, Conv, Linear, Mean, ScatterChannels, SelectChannels
from wirings.compaction.program import Program
from wirings.engine.engine_model import EngineModel
from wirings.engine.int8_steps import Int8SumsStep
from wirings.engine.node_convolution import NodesStep
from wirings.engine.quantization import Quantization

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")

INT8 = {"int8_sums", "int8_linear"}


def kinds(fast: EngineModel) -> set[str]:
    return {step.kind for plan in fast._plans() for step in plan.steps}


def integers(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights of which every row has a largest one of 127, so that their scale is 1."""
    weight = generator.integers(-127, 128, shape)
    weight[generator.random(shape) < generator.choice([0.0, 0.3, 0.9])] = 0
    weight.reshape(shape[0], -1)[:, 0] = 127 * generator.choice([-1, 1], shape[0])
    return weight.astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(2, 70),
    rows=st.integers(1, 40),
    tokens=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 80, 81, 128, 129, 144, 200, 208, 270, 400])),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 3),
)
def test_sums_over_tokens_are_exact(seed: int, channels: int, rows: int, tokens: int, way: str, threads: int) -> None:
    generator = np.random.default_rng(seed)
    x = generator.integers(0, 256, (3, channels, tokens)).astype(np.float32)
    x[:, 0], x[:, 1] = 255, 0  # so that the scale of every token is 1
    if seed % 2:
        x -= 100  # the byte that stands for 0 is another one
    weight, bias = integers(generator, rows, channels, 1), generator.integers(-1000, 1000, rows).astype(np.float32)
    conv = Conv("y", ("x",), torch.from_numpy(weight), torch.from_numpy(bias), (1,), (0,), (1,))
    program = Program({"x": (channels, tokens)}, [conv], ("y",))
    fast = EngineModel(program, way, threads, quantization=Quantization(frozenset({"y"})))
    assert "int8_sums" in kinds(fast)
    expected = np.einsum("rc,bct->brt", weight[:, :, 0], x) + bias[:, None]
    for given_ in (x, x[:1]):
        assert np.array_equal(fast(torch.from_numpy(given_)).numpy(), expected[: len(given_)])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.one_of(st.integers(2, 20), st.sampled_from([63, 64, 65, 200])),
    rows=st.integers(1, 40),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 3),
)
def test_linear_layers_are_exact(seed: int, channels: int, rows: int, way: str, threads: int) -> None:
    generator = np.random.default_rng(seed)
    x = generator.integers(0, 256, (3, channels)).astype(np.float32)
    x[:, 0], x[:, 1] = 255, 0
    x -= 100 * (seed % 2)
    weight = integers(generator, rows, channels)
    layer = Linear("y", ("x",), torch.from_numpy(weight), torch.ones(rows))
    program = Program({"x": (channels,)}, [layer], ("y",))
    fast = EngineModel(program, way, threads, quantization=Quantization(frozenset({"y"})))
    assert "int8_linear" in kinds(fast)
    assert np.array_equal(fast(torch.from_numpy(x)).numpy(), x @ weight.T + 1)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.sampled_from([1, 2, 6]),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 3),
    signed=st.booleans(),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 3),
)
def test_convolutions_are_exact(
    seed: int,
    channels: int,
    size: tuple[int, int],
    kernel: int,
    stride: int,
    signed: bool,
    way: str,
    threads: int,
) -> None:
    generator = np.random.default_rng(seed)
    x = torch.from_numpy(generator.integers(0, 256, (2, channels, *size)).astype(np.float32)) - 128 * signed
    groups = 2 if channels == 6 and seed % 3 == 0 else 1
    weight = torch.from_numpy(integers(generator, 4, channels // groups, kernel, kernel))
    steps, padding = (stride, 1 + seed % 2), (kernel // 2, kernel // 2)
    conv = Conv("y", ("x",), weight, torch.ones(4), steps, padding, (1, 1), groups)
    program = Program({"x": (channels, *size)}, [conv], ("y",))
    low = np.full(channels, -128.0 * signed, np.float32)
    fast = EngineModel(program, way, threads, quantization=Quantization(frozenset({"y"}), {"x": (low, low + 255)}))
    assert "int8_sums" in kinds(fast)
    assert torch.equal(fast(x), program.run(x)[0])


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(1, 9),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    steps=st.integers(1, 10),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 3),
    static=st.booleans(),
)
def test_random_programs(
    seed: int, channels: int, size: tuple[int, int], steps: int, way: str, threads: int, static: bool
) -> None:
    program = RandomProgram(seed, (channels, *size)).program(steps)
    images = torch.randn(3, channels, *size, generator=torch.Generator().manual_seed(seed))
    quantization = all_layers(program, images, static=static)
    fast = EngineModel(program, way, threads, quantization=quantization)
    for given_ in (images, images[:1]):
        found = fast(given_)
        for one, two in zip(found, quantization.reference(program).run(given_), strict=True):
            assert one.shape == two.shape
            assert loss(one, two) < 0.02


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    stride=st.integers(1, 2),
    density=st.sampled_from([0.05, 0.3, 1.0]),
    threads=st.integers(1, 4),
    way=st.sampled_from(["sparse", "dense"]),
    static=st.booleans(),
    in_floats=st.sampled_from([0.0, 0.5]),
)
def test_random_nodes(
    seed: int,
    size: tuple[int, int],
    widths: list[int],
    stride: int,
    density: float,
    threads: int,
    way: str,
    static: bool,
    in_floats: float,
) -> None:
    program = nodes(seed, size, widths, stride, density)
    images = torch.randn(threads + 1, 3, *size, generator=torch.Generator().manual_seed(seed))
    quantization = all_layers(program, images, static=static)
    random = np.random.default_rng(seed)
    layers = {name for name in sorted(quantization.layers) if random.random() >= in_floats}
    quantization = replace(quantization, layers=frozenset(layers))
    fast = EngineModel(program, way, threads, quantization=quantization)
    for given_ in (images, images[:1]):
        (expected,) = quantization.reference(program).run(given_)
        assert loss(fast(given_), expected) < 0.02


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [12, 40])
def test_what_quantises_and_averages_nodes_is_part_of_their_steps(threads: int, width: int) -> None:
    """Nodes in floats and in int8 write bytes, to be read in int8; nothing else reads those of the second."""
    program = nodes(0, (28, 28), [width, width, width], 1, 0.5)
    images = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    every = all_layers(program, images, static=True)
    quantization = replace(every, layers=every.layers - {"stem"})
    fast = EngineModel(program, "sparse", threads, quantization=quantization)
    steps = fast._plans()[0].steps
    assert [step.kind for step in steps] == ["nodes", "int8_sums", "int8_sums", "int8_sums", "int8_linear", "give"]
    assert isinstance(steps[0], NodesStep)
    assert steps[0].only_bytes
    for number in (1, 2, 3):
        step = steps[number]
        assert isinstance(step, Int8SumsStep)
        assert (step.bytes is not None and step.bytes.only, step.mean) == (number < 3, number == 3)
    assert loss(fast(images), quantization.reference(program).run(images)[0]) < 0.02


@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [((1, 1), 1, (2, 2)), ((1, 1), 1, (1, 2)), ((2, 2), 3, (2, 2)), ((3, 3), 3, (2, 2)), ((4, 6), 3, (1, 2))],
)
@pytest.mark.parametrize("in_floats", [False, True])
def test_strided_convolutions_of_nodes_read_maps_with_borders(
    size: tuple[int, int], kernel: int, stride: tuple[int, int], in_floats: bool
) -> None:
    """Their bytes are in another order than those of whole maps, even where they are as many."""
    made = RandomProgram(0, (3, *size))
    state = made.add(Conv("edges", ("x",), made.normal(5, 3, 1, 1), made.normal(5)))
    state = made.add(Activation("relu", (state,)))
    state = made.add(Conv("sent", (state,), made.normal(5, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 5))
    made.add(Conv("y", (state,), made.normal(6, 5, kernel, kernel), None, stride, (kernel // 2, kernel // 2)))
    program = Program(made.inputs, made.operations, ("y",))
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    quantization = all_layers(program, images, static=True)
    if in_floats:
        quantization = replace(quantization, layers=frozenset({"y"}))
    fast = EngineModel(program, "sparse", 1, quantization=quantization)
    assert loss(fast(images), quantization.reference(program).run(images)[0]) < 0.02


@pytest.mark.parametrize("width", [7, 16, 100, 70_000])
def test_nan_and_numbers_beyond_the_range_in_bytes(width: int) -> None:
    """As without int8, they do not spread to other pixels. A NaN is taken for the byte 0, which is the least number."""
    conv = Conv("y", ("x",), torch.ones(1, 1, 1, 1), torch.zeros(1))
    quantization = Quantization(frozenset({"y"}), {"x": (np.full(1, -1.0), np.full(1, 4.1))})
    fast = EngineModel(Program({"x": (1, 1, width)}, [conv], ("y",)), "sparse", 1, quantization=quantization)
    x = torch.zeros(1, 1, 1, width)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.5, 3e7])
    x[..., :7] = odd
    found = fast(x).flatten()
    expected = torch.tensor([-1.0, 4.1, -1.0, 4.1, -1.0, 0.5, 4.1])
    torch.testing.assert_close(found[:7], expected, rtol=0, atol=0.01)
    assert not found[7:].any()


def test_means_of_large_maps_are_exact() -> None:
    """Numbers of one map are not all added up one by one, which would lose small ones."""
    conv = Conv("y", ("x",), torch.ones(1, 1, 1, 1), torch.zeros(1))
    program = Program({"x": (1, 700, 900)}, [conv, Mean("mean", ("y",))], ("mean",))
    quantization = Quantization(frozenset({"y"}), {"x": (np.zeros(1), np.full(1, 255.0))})
    fast = EngineModel(program, "sparse", 2, quantization=quantization)
    assert kinds(fast) == {"quantize_channels", "int8_sums", "copy", "give"}
    x = torch.randint(256, (1, 1, 700, 900), generator=torch.Generator().manual_seed(0)).float()
    torch.testing.assert_close(fast(x), x.double().mean((2, 3)).float(), rtol=1e-6, atol=0)


def test_attention_that_amplifies_rounding_compiles() -> None:
    """A byte that is rounded the other way may change the outputs of a softmax by more than int8 usually does."""
    program = Program.load(Path(__file__).parent / "programs" / "amplified_rounding.safetensors")
    inputs = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(307179))]
    assert type(program.operations[-1]).__name__ == "Attention"
    quantization = all_layers(program, *inputs, static=True)
    for threads in (1, 2):
        fast = EngineModel(program, "sparse", threads, quantization=quantization)
        for found, exact in zip(fast(*inputs), program.run(*inputs), strict=True):
            assert loss(found, exact) < 0.2


def test_layers_whose_inputs_are_always_zero_compile() -> None:
    zeros = ScatterChannels("zeros", ("x",), torch.tensor([0]), 3)
    dead = SelectChannels("dead", ("zeros",), torch.tensor([1, 2]))
    linear = Linear("y", ("dead",), torch.ones(4, 2), torch.arange(4.0))
    program = Program({"x": (1,)}, [zeros, dead, linear], ("y",))
    fast = EngineModel(program, "sparse", 1, quantization=Quantization(frozenset({"y"})))
    assert torch.equal(fast(torch.randn(2, 1)), torch.arange(4.0).expand(2, 4))
