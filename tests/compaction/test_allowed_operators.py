"""The operators that a file may contain: they exist, only compute, and check their indices."""

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from wirings import WiringError, compact
from wirings.compaction.allowed_operators import ALLOWED_OPERATORS, PYTHON_OPERATORS, python_operator
from wirings.compaction.operations import InputRef, TorchOperator, WeightRef
from wirings.compaction.operations.torch_operator import find_operator

A = torch.ops.aten
PRIVATE = {
    "_to_copy", "_softmax", "_log_softmax", "_native_batch_norm_legit_no_training", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "__and__", "__or__", "__xor__",
}  # fmt: skip
"""Names with an underscore that were reviewed. Where only the public function checks sizes, a guard of ours does."""


@pytest.mark.parametrize("name", sorted(ALLOWED_OPERATORS))
def test_allowed_operators_only_compute(name: str) -> None:
    found = find_operator(name)
    assert isinstance(found, torch._ops.OpOverload), "it exists"
    schema = found._schema
    assert not schema.is_mutable
    assert not {"filename", "generator", "out", "storage", "fd"} & {argument.name for argument in schema.arguments}
    assert torch.Tag.nondeterministic_seeded not in found.tags or name == "aten::scaled_dot_product_attention"
    short = name.removeprefix("aten::").partition(".")[0]
    words = (
        "unsafe",
        "backward",
        "sparse",
        "strided",
        "empty",
        "resize",
        "set_data",
        "storage",
        "quantize",
        "from_file",
    )
    assert not any(word in short for word in words)
    assert not short.startswith("_") or short in PRIVATE


X, BAD = torch.randn(4, 3), [10**6, -100]


def column(value: int) -> Tensor:
    return torch.tensor([[value, 0, 0]])


INDEXED: dict[str, Callable[[int], object]] = {
    "embedding": lambda i: A.embedding(X, torch.tensor([0, i])),
    "gather": lambda i: A.gather(X, 0, column(i)),
    "index.Tensor": lambda i: A.index.Tensor(X, [torch.tensor([0, i])]),
    "index_add": lambda i: A.index_add(X, 0, torch.tensor([i]), X[:1]),
    "index_copy": lambda i: A.index_copy(X, 0, torch.tensor([i]), X[:1]),
    "index_fill.int_Scalar": lambda i: A.index_fill.int_Scalar(X, 0, torch.tensor([i]), 1.0),
    "index_fill.int_Tensor": lambda i: A.index_fill.int_Tensor(X, 0, torch.tensor([i]), torch.tensor(1.0)),
    "index_put": lambda i: A.index_put(X, [torch.tensor([i])], torch.tensor(1.0)),
    "index_select": lambda i: A.index_select(X, 0, torch.tensor([i])),
    "max_unpool2d": lambda i: A.max_unpool2d(X[None, :2, :2], torch.full((1, 2, 2), i), [4, 4]),
    "max_unpool3d": lambda i: A.max_unpool3d(
        X[None, None, :2, :2], torch.full((1, 1, 2, 2), i), [1, 4, 4], [1, 2, 2], [0, 0, 0]
    ),
    "scatter.reduce": lambda i: A.scatter.reduce(X, 0, column(i), X[:1], reduce="add"),
    "scatter.src": lambda i: A.scatter.src(X, 0, column(i), X[:1]),
    "scatter.value": lambda i: A.scatter.value(X, 0, column(i), 1.0),
    "scatter.value_reduce": lambda i: A.scatter.value_reduce(X, 0, column(i), 1.0, reduce="add"),
    "scatter_add": lambda i: A.scatter_add(X, 0, column(i), X[:1]),
    "take": lambda i: A.take(X, torch.tensor([i])),
}
NO_INDEX = {"tensor_split.indices", "hsplit.array", "vsplit.array", "meshgrid.indexing"}
"""Operators whose arguments are called indices but are positions of splits, or an order."""


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", INDEXED)
def test_indices_out_of_range_raise(name: str, bad: int) -> None:
    assert f"aten::{name}" in ALLOWED_OPERATORS
    INDEXED[name](0)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|invalid max index"):
        INDEXED[name](bad)


def test_every_operator_with_indices_is_tested() -> None:
    takes = set()
    for name in ALLOWED_OPERATORS:
        arguments = {argument.name for argument in find_operator(name)._schema.arguments}
        if arguments & {"index", "indices", "indexing"} and name not in ("aten::select.int", "aten::select_scatter"):
            takes.add(name.removeprefix("aten::"))
    assert takes - NO_INDEX == set(INDEXED)


@pytest.mark.parametrize("name", PYTHON_OPERATORS)
def test_python_operators_accept_numbers_only(name: str) -> None:
    function = python_operator(name)
    count = 1 if name == "neg" else 2
    if name != "getitem":
        assert function(*(7, 3)[:count]) == getattr(operator, name)(*(7, 3)[:count])
    for wrong in ("x", [1], (1,), {}):
        with pytest.raises(WiringError, match="expects"):
            function(*(wrong, "x")[:count])
    if name == "getitem":
        assert function((4, 5), 1) == 5
    else:
        with pytest.raises(WiringError, match=r"63 bits|exponent"):
            function(*(2**64, 2**64)[:count])


class Spectrum(nn.Module):
    """A model with an operator that is not allowed in files."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


def test_other_operators_run_but_cannot_be_saved(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    small = compact(Spectrum(), x)
    torch.testing.assert_close(small(x), Spectrum()(x))
    with pytest.raises(
        WiringError, match=r"cannot be saved as .safetensors: the operator 'aten::fft_rfft' is not allowed"
    ):
        small.save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("q", "k", "v"), [((1, 4, 8), (1, 64, 8), (1, 2, 8)), ((1, 4, 8), (1, 4, 9), (1, 4, 8)), ((8,), (8,), (8,))]
)
def test_arguments_of_attention_are_checked(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    taken = (InputRef(0), InputRef(1), InputRef(2))
    attend = TorchOperator("y", ("q", "k", "v"), "aten::scaled_dot_product_attention", taken)
    with pytest.raises(WiringError, match="scaled_dot_product_attention expects"):
        attend.run(torch.randn(q), torch.randn(k), torch.randn(v))


@pytest.mark.parametrize("scale", [1e-320, 0.0, -1.0, float("inf"), float("nan")])
def test_scales_of_resizing_are_checked(scale: float) -> None:
    resize = TorchOperator("y", ("x",), "aten::upsample_nearest2d", (InputRef(0), (4, 4), scale, scale))
    with pytest.raises(WiringError, match="scales from"):
        resize.run(torch.randn(1, 1, 2, 2))


@pytest.mark.parametrize("channels", [1, 7, 9])
def test_batch_norm_statistics_must_fit_the_channels(channels: int) -> None:
    norm = TorchOperator(
        inputs=("x",),
        output="y",
        target="aten::_native_batch_norm_legit_no_training",
        arguments=(InputRef(0), None, None, WeightRef(0), WeightRef(0), 0.1, 1e-5),
        held=(torch.ones(channels),),
    )
    with pytest.raises(WiringError, match="running_mean with an entry for each of 8 channels"):
        norm.run(torch.ones(2, 8))
