"""Pooling in the engine, against PyTorch."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wirings import engine
from wirings.compaction.operations import Pooling
from wirings.compaction.program import Program

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
PAIRS = st.tuples(st.integers(1, 5), st.integers(1, 5))


def compare(pooling: Pooling, images: torch.Tensor, threads: int = 1) -> None:
    program = Program({"x": tuple(images.shape[1:])}, [pooling], ("y",))
    found, expected = engine.compile(program, engine="sparse", threads=threads)(images), program.run(images)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if pooling.kind == "max":
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["max", "avg"]),
    size=st.tuples(st.integers(1, 20), st.integers(1, 90)),
    kernel=st.one_of(PAIRS, st.tuples(st.integers(1, 3), st.integers(14, 20))),
    stride=PAIRS,
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padded=st.booleans(),
    ceil=st.booleans(),
    count_padding=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_random_windows(
    kind: str,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padded: bool,
    ceil: bool,
    count_padding: bool,
    seed: int,
) -> None:
    dilation = dilation if kind == "max" else (1, 1)
    padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    assume(all(r <= n + 2 * p for r, n, p in zip(reach, size, padding, strict=True)))
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))
    compare(Pooling("y", ("x",), kind, kernel, stride, padding, dilation, ceil, count_padding), images, seed % 3 + 1)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_nan_and_infinity(stride: int) -> None:
    images = torch.randn(1, 2, 9, 70)
    images[0, 0, 4, 30], images[0, 0, 2, 3], images[0, 1, 0, 69] = torch.nan, -torch.inf, torch.inf
    images[0, 1, 5:] = -torch.inf  # whole windows
    for kind in ("max", "avg"):
        compare(Pooling("y", ("x",), kind, (3, 3), (stride, stride), (1, 1)), images)


def test_wide_maps() -> None:
    """The first pooling of a ResNet, on two threads."""
    images = torch.randn(1, 4, 112, 112)
    compare(Pooling("y", ("x",), "max", (3, 3), (2, 2), (1, 1)), images, 2)
