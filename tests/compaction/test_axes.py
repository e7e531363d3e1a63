"""Views of stored tensors: random reshapes, permutations and parts, compared with PyTorch's."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wirings.compaction.aten import ProgramTensor, view_of
from wirings.compaction.axes import Axes, Factor, merged
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.convert_parts import take
from wirings.compaction.convert_views import stored_alike
from wirings.compaction.operations.arrange import arrange, stored_with_channels

STORED = [(2, 12), (2, 12, 5), (3, 8, 6), (1, 6, 4), (2, 6, 4, 3), (1, 1, 5), (2, 4, 1)]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class View:
    """A tensor of a program and what PyTorch makes of it."""

    def __init__(self, stored: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.expected = torch.randn(stored)
        self.builder = ProgramBuilder([self.expected])
        self.tensor = ProgramTensor(self.builder.inputs[0])
        self.seen: Counter[str] = Counter()

    @property
    def axes(self) -> Axes:
        found = view_of(self.builder, self.tensor)
        assert found is not None
        return found

    def change(self, axes: Axes | None, expected: torch.Tensor, kind: str) -> None:
        self.seen[kind if axes is not None else f"no {kind}"] += 1
        if axes is not None:
            self.tensor, self.expected = ProgramTensor(self.tensor.name, axes), expected
            assert axes.shape == tuple(expected.shape)

    def step(self, draw: st.DataObject) -> None:
        shape, axes = tuple(self.expected.shape), self.axes
        kind = draw.draw(st.sampled_from(["permute", "merge", "split", "one", "part"]))
        dim = draw.draw(st.integers(0, len(shape) - 1))
        if kind == "permute":
            order = draw.draw(st.permutations(range(len(shape))))
            self.change(axes.permuted(order), self.expected.permute(order), kind)
        elif kind == "merge" and dim + 1 < len(shape):
            sizes = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
            made = axes.reshaped(sizes)
            assert made is not None
            self.change(made, self.expected.reshape(sizes), kind)
        elif kind == "split" and len(shape) < 7:
            first = draw.draw(st.sampled_from(divisors(shape[dim])))
            sizes = (*shape[:dim], first, shape[dim] // first, *shape[dim + 1 :])
            made = axes.reshaped(sizes)
            whole = len(axes.dims[dim]) <= 1 and not any(f.dim == 0 for f in axes.dims[dim])
            assert made is not None or not whole
            self.change(made, self.expected.reshape(sizes), kind)
        elif kind == "one" and len(shape) < 7:
            sizes = (*shape[:dim], 1, *shape[dim:])
            self.change(axes.reshaped(sizes), self.expected.reshape(sizes), kind)
        elif kind == "part" and not any(f.dim == 0 for f in axes.dims[dim]):
            first = draw.draw(st.integers(0, shape[dim] - 1))
            last, step = draw.draw(st.integers(first + 1, shape[dim])), draw.draw(st.sampled_from([1, 1, 2]))
            part = take(self.builder, "part", self.tensor, dim, first, last, step)
            self.seen["part" if part is not None else "no part"] += 1
            if part is not None:
                index = torch.arange(first, last, step)
                self.tensor, self.expected = part, self.expected.index_select(dim, index)


def test_views_match_pytorch() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(STORED), st.data(), st.integers(1, 8))
    def check(stored: tuple[int, ...], draw: st.DataObject, steps: int) -> None:
        view = View(stored)
        for _ in range(steps):
            view.step(draw)
        found = view.builder.values[arrange(view.builder, view.tensor.name, view.axes, "plain")]
        assert torch.equal(found, view.expected)
        check_constants(view, draw)
        check_channels(view, draw)
        seen.update(view.seen)

    check()
    assert all(seen[kind] > 20 for kind in ("permute", "merge", "split", "one", "part")), seen


def check_constants(view: View, draw: st.DataObject) -> None:
    """A constant that broadcasts with the view, added to what is stored."""
    sizes = [1 if any(f.dim == 0 for f in own) or draw.draw(st.booleans()) else size
             for own, size in zip(view.axes.dims, view.axes.shape, strict=True)]  # fmt: skip
    constant = torch.randn(sizes)
    stored = view.axes.to_stored(constant)
    if stored is None:
        assert any(len(own) > 1 and any(f.dim == 0 for f in own) for own in view.axes.dims)
        return
    builder = ProgramBuilder([view.builder.values[view.tensor.name] + stored])
    found = builder.values[arrange(builder, builder.inputs[0], view.axes, "plain")]
    assert torch.equal(found, view.expected + constant)


def check_channels(view: View, draw: st.DataObject) -> None:
    """The same tensor with another dimension as its channels, and the sum of both."""
    dim = draw.draw(st.integers(0, len(view.axes.dims) - 1))
    moved = stored_with_channels(view.builder, view.tensor.name, view.axes, dim, "moved")
    if moved is None:
        assert any(f.dim == 0 for f in view.axes.dims[dim])
        return
    name, axes = moved
    assert axes.is_channels(dim)
    assert axes.shape == view.axes.shape
    assert torch.equal(view.builder.values[arrange(view.builder, name, axes, "plain")], view.expected)
    alike = stored_alike(view.builder, view.tensor, ProgramTensor(name, None if axes.is_plain else axes))
    if alike is not None:
        one, two = (view.builder.values[stored] for stored in alike[:2])
        assert torch.equal(one, two)


def test_heads_by_hand() -> None:
    axes = Axes.plain((2, 6, 5)).permuted((0, 2, 1))
    heads = axes.reshaped((2, 5, 3, 2))
    assert heads is not None
    assert heads.dims == ((Factor(0, 2, 1),), (Factor(2, 5, 1),), (Factor(1, 3, 2),), (Factor(1, 2, 1),))
    assert heads.reshaped((2, 5, 6)) == axes
    assert heads.permuted((0, 2, 1, 3)).reshaped((2, 3, 5, 2)) == heads.permuted((0, 2, 1, 3))
    assert heads.reshaped((5, 2, 3, 2)) is None  # splits the batch
    assert axes.reshaped((2, 5, 4)) is None
    assert heads.without_part(2, 1).stored == (2, 2, 5)
    assert heads.channels_of_part(2, torch.tensor([1])).tolist() == [2, 3]
    assert heads.channels_of_part(3, torch.tensor([0])).tolist() == [0, 2, 4]


def test_channel_shuffle_by_hand() -> None:
    shuffled = Axes.plain((2, 6, 5)).reshaped((2, 2, 3, 5))
    assert shuffled is not None
    back = shuffled.permuted((0, 2, 1, 3)).reshaped((2, 6, 5))
    assert back is not None
    order = back.permuted_channels()
    assert order is not None
    assert order.tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 1), (1, 1, 1)])
def test_plain_axes(shape: tuple[int, ...]) -> None:
    axes = Axes.plain(shape)
    assert axes.is_plain
    assert axes.batch_first
    assert axes.shape == shape
    assert merged([f for own in axes.dims for f in own]) == tuple(f for own in axes.dims for f in own)
