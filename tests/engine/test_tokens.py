"""The kernels for tokens compute what PyTorch does: attention, norms, embeddings, other orders, vector functions."""

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, engine
from wirings.compaction.operations import (
    Activation,
    Arrange,
    Attention,
    ChannelNorm,
    Conv,
    Embedding,
    MultiplyMap,
    Operation,
    Reshape,
)
from wirings.compaction.program import Program

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")

TOKENS = (1, 7, 16, 17, 33, 128)


def check(program: Program, inputs: list[Tensor], threads: int, tolerance: float = 2e-5) -> None:
    """Compile a program without PyTorch in between, and compare all outputs for a batch and for its first example."""
    for way in ("sparse", "dense"):
        fast = engine.compile(program, engine=way, threads=threads)
        assert all(segment.plan is not None for segment in fast._segments)
        for given in (inputs, [x[:1] for x in inputs]):
            found = fast(*given)
            found = found if isinstance(found, tuple) else (found,)
            for one, two in zip(found, program.run(*given), strict=True):
                torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance * float(two.abs().max()))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attention(tokens: int, threads: int) -> None:
    for seed in range(6):
        random = Random(100 * tokens + 10 * threads + seed)
        torch.manual_seed(seed)
        heads, sharing = random.choice([1, 2, 3]), random.choice([1, 1, 2])
        others = random.choice([tokens, tokens, 1, 5, 40])
        sizes = (*(random.choice([0, 1, 3, 8, 16]) for _ in range(heads - 1)), random.choice([1, 8]))
        value_sizes = tuple(random.choice([1, 4, 9]) for _ in range(heads))
        kind = random.choice(["none", "causal", "mask", "heads", "bias", "bias for all", "causal mask", "rows"])
        rows = (3,) if kind == "rows" else ()
        mask = None
        if kind in ("mask", "heads", "causal mask"):
            mask = torch.randn(heads * sharing if kind == "heads" else 1, tokens, others)
            mask[:, :, 1:][torch.rand(mask[:, :, 1:].shape) < 0.3] = -math.inf
        shapes = {
            "q": (sharing * sum(sizes), *rows, tokens),
            "k": (sum(sizes), *rows, others),
            "v": (sum(value_sizes), *rows, others),
        }
        if kind.startswith("bias"):
            shapes["b"] = (1, 1, others) if kind == "bias for all" else (heads * sharing, tokens, others)
        causal = kind.startswith("causal")
        made = Attention("y", tuple(shapes), mask, sizes, value_sizes, sharing, 0.4, causal)
        batch = random.choice([2, 5])
        inputs = [2 * torch.randn(batch, *shape) for shape in shapes.values()]
        check(Program(shapes, [made], ("y",)), inputs, threads)


def test_attention_of_tokens_that_see_nothing() -> None:
    """As in PyTorch, whose attention gives zeros then."""
    mask = torch.zeros(1, 20, 20)
    mask[:, 3] = -math.inf
    made = Attention("y", ("q", "k", "v"), mask, (4,), (4,))
    program = Program(dict.fromkeys("qkv", (4, 20)), [made], ("y",))
    x = [torch.randn(2, 4, 20) for _ in range(3)]
    found = engine.compile(program, threads=2)(*x)
    assert torch.equal(found[:, :, 3], torch.zeros(2, 4))
    torch.testing.assert_close(found, program.run(*x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(9,), *((9, tokens) for tokens in TOKENS), (5, 7, 6), (3, 2, 19)])
@pytest.mark.parametrize("centered", [True, False])
def test_norms(shape: tuple[int, ...], threads: int, centered: bool) -> None:
    torch.manual_seed(0)
    channels, features = shape[0], shape[0] + (3 if threads == 2 else 0)
    scale, shift = torch.randn(channels), torch.randn(channels)
    made = ChannelNorm("y", ("x",), scale, shift, epsilon=1e-3, centered=centered, features=features)
    x = 3 * torch.randn(4, *shape) + 1
    check(Program({"x": shape}, [made], ("y",)), [x], threads)
    full = F.pad(x.movedim(1, -1), (0, features - channels))
    one, zero = F.pad(scale, (0, features - channels)), F.pad(shift, (0, features - channels))
    norm = F.layer_norm(full, (features,), one, zero, 1e-3) if centered else F.rms_norm(full, (features,), one, 1e-3)
    expected = norm[..., :channels].movedim(-1, 1) + (0 if centered else shift.view(-1, *[1] * (len(shape) - 1)))
    torch.testing.assert_close(made.run(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tokens", TOKENS)
def test_embeddings_and_other_orders(tokens: int, threads: int) -> None:
    torch.manual_seed(0)
    operations: list[Operation] = [
        Embedding("e", ("ids",), torch.randn(11, 6)),
        MultiplyMap("m", ("e",), torch.randn(6, tokens)),
        Conv("c", ("m",), torch.randn(4, 6, 1), torch.randn(4), (1,), (0,), (1,)),
        Arrange("t", ("c",), ((4,), (tokens,)), (0, 2, 1), (-1, tokens, 4)),
        Arrange("h", ("c",), ((2, 2), (tokens,)), (0, 2, 1, 3), (-1, 4, tokens)),
        Activation("a", ("h",), "gelu"),
        Reshape("r", ("a",), (tokens, 1)),
    ]
    program = Program({"ids": (tokens,)}, operations, ("t", "r"), {"types": {"ids": "torch.int64"}})
    check(program, [torch.randint(11, (3, tokens))], threads)


@pytest.mark.parametrize("way", ["sparse", "torch"])
@pytest.mark.parametrize("wrong", [-1, 11, 2**40])
def test_tokens_out_of_range_raise(wrong: int, way: str) -> None:
    embedding, notes = Embedding("e", ("ids",), torch.randn(11, 6)), {"types": {"ids": "torch.int64"}}
    program = Program({"ids": (5,)}, [embedding], ("e",), notes)
    fast = engine.compile(program, engine=way)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert fast(ids).shape == (2, 6, 5)
    ids[1, 3] = wrong
    with pytest.raises(WiringError, match="this network expects tokens from 0 to 10, got"):
        fast(ids)
    with pytest.raises(WiringError, match=r"expects int64 on the CPU, got torch.float32"):
        fast(ids.float())


FUNCTIONS: dict[str, Any] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),  # F.gelu(inf) is NaN for long tensors
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus, "mish": F.mish, "elu": F.elu,
}  # fmt: skip
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-38,
    1e-20,
    -1e-6,
    0.5999,
    0.6,
    1.0,
    -1.0,
    3.9,
    4.1,
    9.1,
    20.0,
    -20.0,
    87.3,
    88.8,
]
SPECIAL += [-87.3, -88.8, -104.0, 200.0, -200.0, 1e10, -1e10, 3e38, -3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_vector_functions(kind: str) -> None:
    """All of float32's range, to within a few roundings of the double-precision result."""
    x = torch.cat([torch.tensor(SPECIAL), torch.linspace(-12, 12, 4001), torch.logspace(-30, 3, 300), torch.randn(500)])
    x = torch.cat([x, -x])
    values = (1.0,) if kind == "elu" else ()
    program = Program({"x": (1, len(x))}, [Activation("y", ("x",), kind, values)], ("y",))
    found = engine.compile(program, threads=1)(x.view(1, 1, -1)).flatten()
    expected = FUNCTIONS[kind](x.double())
    plain = expected.float()
    assert torch.equal(found.isnan(), plain.isnan())
    finite = plain.isfinite()
    assert torch.equal(found[~finite & ~plain.isnan()], plain[~finite & ~plain.isnan()])
    error = (found.double() - expected).abs()[finite]
    # GELU adds 1 and a number near -1, as in PyTorch, so its error is a share of its argument.
    scale = (x.double() if "gelu" in kind else expected).abs()[finite].clamp_min(1e-6)
    assert float((error / scale).max()) < 3e-6


def test_exp_in_attention() -> None:
    """Scores of all magnitudes: softmax by hand."""
    x = torch.tensor([0.0, -1e-7, -0.3, -5.0, -20.0, -60.0, -87.0, -100.0, -1e4, -3e38])
    made = Attention("y", ("q", "k", "v"), None, (1,), (1,), 1, 1.0)
    program = Program({"q": (1, 1), "k": (1, 10), "v": (1, 10)}, [made], ("y",))
    fast = engine.compile(program, threads=1)
    for place in range(10):
        value = torch.zeros(1, 1, 10)
        value[..., place] = 1
        found = float(fast(torch.ones(1, 1, 1), x.view(1, 1, 10), value))
        assert found == pytest.approx(float(x.double().softmax(0)[place]), rel=2e-6, abs=1e-37)


def test_numbers_that_are_not_finite() -> None:
    """A query that is not finite changes its own result only."""
    made = Attention("y", ("q", "k", "v"), None, (2,), (2,), 1, 1.0, True)
    program = Program(dict.fromkeys("qkv", (2, 40)), [made], ("y",))
    q, k, v = (torch.randn(1, 2, 40) for _ in range(3))
    q[0, :, 20] = math.nan
    found, expected = engine.compile(program, threads=2)(q, k, v), program.run(q, k, v)[0]
    assert found.isnan().nonzero()[:, 2].unique().tolist() == [20]
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


class AttentionToMany(nn.Module):
    """One head whose keys are other tokens than its queries."""

    def forward(self, queries: Tensor, others: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (1, -1)).transpose(1, 2) for x in (queries, others))
        return F.scaled_dot_product_attention(q, k, k + 0.5).transpose(1, 2).flatten(2)


def test_attention_to_many_tokens_keeps_its_digits() -> None:
    torch.manual_seed(0)
    queries, others, model = torch.randn(1, 5, 8), torch.rand(1, 20_000, 8), AttentionToMany().eval()
    made = engine.compile(model, (queries, others), engine="sparse", threads=1)
    assert made.compiled
    exact = model(queries.double(), others.double())
    difference = (made(queries, others).double() - exact).abs().max() / exact.abs().max()
    assert float(difference) < 2e-6  # one long sum in single precision is off by 8e-6
