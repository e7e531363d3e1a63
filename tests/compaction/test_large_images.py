"""Compacting models of large images takes little more memory than running them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wirings.compaction import compare
from wirings.compaction.compact import compact
from wirings.compaction.compare import largest_magnitude, relative_difference


class LargestResult(TorchDispatchMode):
    """The most bytes of a tensor that an operator made on the CPU, and the number of convolutions there."""

    bytes, convolutions = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        here = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.is_cpu]
        if not func.is_view:
            self.bytes = max([self.bytes, *(x.numel() * x.element_size() for x in here)])
        self.convolutions += bool(here) and "convolution" in str(func)
        return made


def test_outputs_are_compared_in_pieces() -> None:
    one, two = torch.randn(2, 2**21).unbind()
    with LargestResult() as seen:
        difference = relative_difference(one, two, largest_magnitude(two))
    assert seen.bytes < 2**23
    assert difference == pytest.approx(float((one - two).abs().max() / two.abs().max()), rel=1e-6)


@pytest.mark.parametrize("place", [0, 7, 11])
def test_nothing_is_lost_between_pieces(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PIECE", 4)
    x = torch.zeros(3, 4)
    assert largest_magnitude(x) == 1
    assert relative_difference(x, x, 1.0) == 0
    for value in (float("nan"), float("inf"), -5.0):
        y = x.clone()
        y.view(-1)[place] = value
        assert largest_magnitude(y) == (5 if value == -5 else 1)
        assert relative_difference(y, y, 1.0) == 0
        assert not relative_difference(x, y, 1.0) < 5
        assert not relative_difference(y, x, 1.0) < 5


def test_large_images_are_run_a_few_times_only() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    with LargestResult() as seen:
        small = compact(model.eval(), torch.randn(1, 1, 1100, 1000))
    assert "one_size" not in small.program.notes
    assert seen.convolutions <= 6  # tracing included; shapes are found without running anything
    assert seen.bytes <= 4 * 2 * 2 * 1100 * 1000
