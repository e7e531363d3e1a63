"""Experts in the engine compute what PyTorch does: any sizes and numbers of them, for any tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wirings import engine
from wirings.compaction.operations import Experts, TopShares
from wirings.compaction.operations.experts import EXPERT_ACTIVATIONS
from wirings.compaction.program import Program

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 30), st.integers(1, 20), st.integers(1, 70)),
    experts=st.integers(1, 9),
    data=st.data(),
    activation=st.sampled_from(EXPERT_ACTIVATIONS),
    gated=st.booleans(),
    softmax=st.booleans(),
    density=st.sampled_from([0.05, 0.4, 1.0]),
    threads=st.integers(1, 3),
    way=st.sampled_from(["sparse", "dense"]),
    seed=st.integers(0, 2**16),
)
def test_any_experts(
    sizes: tuple[int, int, int, int],
    experts: int,
    data: st.DataObject,
    activation: str,
    gated: bool,
    softmax: bool,
    density: float,
    threads: int,
    way: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    channels, units, out, tokens = sizes
    count = data.draw(st.integers(1, experts))

    def edges(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * (torch.rand(shape) < density)

    matrices = edges(experts, units * (2 if gated else 1), channels), edges(experts, out, units)
    operations = [
        TopShares("shares", ("scores",), count, softmax, normalized=softmax),
        Experts("y", ("x", "shares"), *matrices, activation, gated, count),
    ]
    program = Program({"x": (channels, tokens), "scores": (experts, tokens)}, operations, ("y", "shares"))
    fast = engine.compile(program, engine=way, threads=threads)
    assert not fast.uses_torch
    for batch in (1, 4):
        inputs = torch.randn(batch, channels, tokens), torch.randn(batch, experts, tokens)
        for found, expected in zip(fast(*inputs), program.run(*inputs), strict=True):
            scale = float(expected.abs().max()) if expected.numel() else 1.0
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * max(scale, 1e-3))


def test_all_tokens_may_choose_the_same_experts() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(4, 10, 3), torch.randn(4, 5, 10)
    operations = [TopShares("shares", ("scores",), 2), Experts("y", ("x", "shares"), *matrices, "relu", False, 2)]
    program = Program({"x": (3, 33), "scores": (4, 33)}, operations, ("y",))
    fast = engine.compile(program, engine="sparse", threads=2)
    x = torch.randn(2, 3, 33)
    for best in (0, 2):
        scores = torch.zeros(2, 4, 33)
        scores[:, best], scores[:, best + 1] = 2.0, 1.0
        torch.testing.assert_close(fast(x, scores), program.run(x, scores)[0], rtol=1e-5, atol=1e-4)


def test_shares_that_are_no_numbers_are_given_as_in_pytorch() -> None:
    program = Program({"x": (3, 2)}, [TopShares("y", ("x",), 2)], ("y",))
    fast = engine.compile(program, engine="sparse", threads=1)
    x = torch.tensor([[[1.0, 3.0], [torch.nan, 2.0], [2.0, 1.0]]])
    torch.testing.assert_close(fast(x), program.run(x)[0], equal_nan=True)
