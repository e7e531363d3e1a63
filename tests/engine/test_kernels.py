"""The compiled kernels compute what PyTorch does, for random networks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine.random_programs import RandomProgram
from wirings import engine
from wirings.compaction.operations import Activation, Add, Concat, Conv, Linear, Mean, ScatterChannels, SelectChannels
from wirings.compaction.program import Program
from wirings.engine.copies import CopyStep

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


def differences(program: Program, images: Tensor, **how: Any) -> list[float]:
    """For every output, the largest difference from PyTorch's, as a share of its largest number."""
    made = engine.compile(program, **how)
    assert made.compiled
    results = made(images)
    results = results if isinstance(results, tuple) else (results,)
    shares = []
    for result, expected in zip(results, program.run(images), strict=True):
        assert result.shape == expected.shape
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        shares.append(float((result - expected).abs().max()) / max(scale, 1e-3) if expected.numel() else 0.0)
    return shares


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(1, 9),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    steps=st.integers(1, 10),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 3),
    batch=st.sampled_from([1, 3]),
)
def test_random_programs(
    seed: int, channels: int, size: tuple[int, int], steps: int, way: str, threads: int, batch: int
) -> None:
    program = RandomProgram(seed, (channels, *size)).program(steps)
    images = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(seed))
    assert max(differences(program, images, engine=way, threads=threads)) < 1e-5


def nodes(seed: int, size: tuple[int, int], widths: list[int], stride: int, density: float) -> Program:
    """A compacted static graph: ReLU, depthwise convolution, edges from all earlier blocks."""
    made = RandomProgram(seed, (3, *size))
    state = made.add(
        Conv("stem", ("x",), made.normal(widths[0], 3, 3, 3), made.normal(widths[0]), (stride, stride), (1, 1))
    )
    sent: list[str] = []
    for j, width in enumerate(widths):
        active = made.add(Activation(f"relu{j}", (state,)))
        step = stride if j == 0 else 1
        kernel = made.normal(width, 1, 3, 3) / 3
        sent.append(made.add(Conv(f"sent{j}", (active,), kernel, None, (step, step), (1, 1), (1, 1), width)))
        after = widths[j + 1] if j + 1 < len(widths) else 7
        source = made.add(Concat(f"all{j}", tuple(sent))) if j else sent[0]
        weight = made.weight(after, sum(widths[: j + 1]), 1, 1, density=density)
        state = made.add(Conv(f"edges{j}", (source,), weight, made.normal(after)))
    made.add(Mean("mean", (made.add(Activation("relu", (state,))),)))
    made.add(Linear("head", ("mean",), made.normal(10, 7)))
    return Program(made.inputs, made.operations, ("head",))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    stride=st.integers(1, 2),
    density=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    threads=st.integers(1, 4),
    batch=st.sampled_from([1, 3, 4]),
)
def test_graphs_of_nodes(
    seed: int, size: tuple[int, int], widths: list[int], stride: int, density: float, threads: int, batch: int
) -> None:
    program = nodes(seed, size, widths, stride, density)
    images = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))
    assert max(differences(program, images, engine="sparse", threads=threads)) < 1e-5


@pytest.mark.parametrize("size", [(7, 7), (14, 14), (28, 28), (15, 33)])
@pytest.mark.parametrize("threads", [1, 2])
def test_all_choices_return_the_same(size: tuple[int, int], threads: int) -> None:
    program = nodes(0, size, [24, 40, 9], 1, 0.3)
    images = torch.randn(2, 3, *size)
    made = engine.compile(program, engine="sparse", threads=threads)
    expected = program.run(images)[0]
    for segment in made._segments:
        for plan in (segment.plan, segment.batch_plan):
            if plan is None:
                continue
            for i, step in enumerate(plan.steps):
                for choice in plan.choices_of(step):
                    plan.choose([choice if j == i else c for j, c in enumerate(plan.choices)])
                    torch.testing.assert_close(plan.run([images])[0], expected, rtol=1e-5, atol=1e-5)


def strided_after_a_convolution(made: RandomProgram) -> None:
    first = made.add(Conv("a", ("x",), made.normal(4, 3, 3, 3), None, (1, 1), (1, 1)))
    second = made.add(Conv("b", (first,), made.normal(5, 4, 3, 3), None, (2, 2), (1, 1)))
    made.add(Conv("c", (second,), made.normal(5, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 5))


def a_mean_with_a_border(made: RandomProgram) -> None:
    wide = made.add(Conv("a", ("x",), made.normal(4, 3, 1, 1), made.normal(4), (1, 1), (0, 2)))
    made.add(Mean("b", (wide,)))


def a_mean_without_edges(made: RandomProgram) -> None:
    wide = made.add(Conv("a", ("x",), torch.zeros(4, 3, 1, 1), made.normal(4), (3, 1), (0, 2)))
    made.add(Mean("b", (wide,)))


def nodes_without_edges(made: RandomProgram) -> None:
    first = made.add(Conv("a", ("x",), torch.zeros(4, 3, 3, 3), made.normal(4), (2, 2), (1, 1)))
    made.add(Conv("b", (first,), made.normal(4, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 4))


def channels_that_are_zero(made: RandomProgram) -> None:
    placed = made.add(ScatterChannels("a", ("x",), torch.arange(3), 5))
    empty = made.add(SelectChannels("b", (placed,), torch.tensor([3, 4])))
    made.add(Conv("c", (empty,), made.normal(4, 2, 1, 3), made.normal(4), (1, 1), (0, 4)))  # wider than its input


def nodes_of_channels_that_are_zero(made: RandomProgram) -> None:
    channels_that_are_zero(made)
    made.add(Conv("d", ("c",), made.normal(4, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 4))


def a_mean_of_channels_that_are_zero(made: RandomProgram) -> None:
    channels_that_are_zero(made)
    made.add(Mean("d", ("c",)))


def phases_of_channels_that_are_zero(made: RandomProgram) -> None:
    channels_that_are_zero(made)
    made.add(Conv("d", ("c",), made.normal(3, 4, 3, 3), None, (2, 2), (1, 1)))


def sums_with_channels_that_are_zero(made: RandomProgram) -> None:
    channels_that_are_zero(made)
    wide = made.add(Conv("d", ("x",), made.normal(4, 3, 1, 3), None, (1, 1), (0, 4)))
    made.add(Add("e", ("c", wide)))


@pytest.mark.parametrize(
    "make",
    [
        strided_after_a_convolution,
        a_mean_with_a_border,
        a_mean_without_edges,
        nodes_without_edges,
        channels_that_are_zero,
        nodes_of_channels_that_are_zero,
        a_mean_of_channels_that_are_zero,
        phases_of_channels_that_are_zero,
        sums_with_channels_that_are_zero,
    ],
)
@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_regressions(make: Callable[[RandomProgram], None], way: str) -> None:
    made = RandomProgram(0, (3, 9, 7))
    make(made)
    program = Program(made.inputs, made.operations, (made.operations[-1].output,))
    assert max(differences(program, torch.randn(2, 3, 9, 7), engine=way, threads=2)) < 1e-5


def test_one_row_by_hand() -> None:
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, -1.0]])[:, :, None, None]
    program = Program({"x": (2, 1, 3)}, [Conv("y", ("x",), weight, torch.tensor([0.0, 5.0, 0.5]))], ("y",))
    images = torch.tensor([[[[1.0, 2.0, 3.0]], [[10.0, 20.0, 30.0]]]])
    expected = torch.tensor([[[[2.0, 4.0, 6.0]], [[5.0, 5.0, 5.0]], [[-8.5, -17.5, -26.5]]]])
    for way in ("sparse", "dense"):
        torch.testing.assert_close(engine.compile(program, engine=way)(images), expected)


def test_nan_and_infinity_are_handled_as_in_pytorch() -> None:
    program = nodes(1, (9, 9), [6, 5], 1, 0.5)
    images = torch.randn(2, 3, 9, 9)
    images[0, 1, 3, 3], images[1, 0, 0, 0] = float("nan"), float("inf")
    torch.testing.assert_close(engine.compile(program, engine="sparse")(images), program.run(images)[0], equal_nan=True)


def test_empty_batch() -> None:
    program = nodes(1, (9, 9), [6, 5], 1, 0.5)
    assert engine.compile(program, engine="sparse", threads=2)(torch.zeros(0, 3, 9, 9)).shape == (0, 10)


def test_non_contiguous_inputs() -> None:
    program = nodes(1, (9, 9), [6, 5], 1, 0.5)
    images = torch.randn(9, 9, 3, 2).permute(3, 2, 0, 1)
    torch.testing.assert_close(
        engine.compile(program, engine="sparse")(images), program.run(images)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_norms_of_maps_that_hardly_vary_keep_their_mean(groups: int) -> None:
    """Rounding the mean shifts all numbers of a map alike, so that the error stays when they are averaged."""
    torch.manual_seed(0)
    norm = (nn.InstanceNorm2d(4, affine=True) if groups == 4 else nn.GroupNorm(groups, 4)).eval()
    x = 50 + torch.randn(3, 4, 27, 36)
    made = engine.compile(norm, x, engine="sparse", threads=1)
    assert made.compiled
    with torch.no_grad():
        exact = norm.double()(x.double()).mean((2, 3))
    assert float((made(x).double().mean((2, 3)) - exact).abs().max()) < 5e-7


def test_only_the_phases_that_are_read_are_copied() -> None:
    """A shortcut of single pixels with a stride of 2 reads a quarter of its input."""
    made = RandomProgram(0, (3, 9, 8))
    first = made.add(Activation("relu", (made.add(Conv("a", ("x",), made.normal(5, 3, 1, 1))),)))
    made.add(Conv("short", (first,), made.normal(4, 5, 1, 1), None, (2, 2)))
    made.add(Conv("long", (first,), made.normal(4, 5, 1, 1)))
    program = Program(made.inputs, made.operations, ("short", "long"))
    fast = engine.compile(program, engine="sparse", threads=1)
    (copy,) = [s for s in fast._segments[0].plan.steps if isinstance(s, CopyStep) and s.stride == (2, 2)]  # type: ignore[union-attr]
    assert copy.needed is not None
    assert copy.needed.reshape(5, 2, 2).tolist() == 5 * [[[True, False], [False, False]]]
    assert max(differences(program, torch.randn(2, 3, 9, 8), engine="sparse")) < 1e-5
