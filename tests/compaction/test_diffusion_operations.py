"""Operations of diffusion models: group norms, numbers that are added to maps, and repeated pixels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, compact, engine, load_compact
from wirings.compaction.check_program import check_program
from wirings.compaction.operations import AddNumbers, GroupNorm, Operation, RepeatPixels, TorchOperator
from wirings.compaction.program import Program


class Block(nn.Module):
    """A residual block with group norms and an embedding of the time step, and a larger map after it."""

    def __init__(self, channels: int = 12, groups: int = 3, factor: int = 2) -> None:
        super().__init__()
        self.into, self.time = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(5, channels)
        self.one, self.two = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv, self.out = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, 2, 1)
        self.factor = factor
        for p in self.parameters():
            nn.init.normal_(p, std=0.4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = F.silu(self.one(self.into(x))) + self.time(time)[:, :, None, None]
        x = x + self.conv(F.silu(self.two(x)))
        return self.out(F.interpolate(x, scale_factor=float(self.factor), mode="nearest"))  # type: ignore[no-any-return]


def inputs(batch: int, height: int = 6, width: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, height, width), torch.randn(batch, 5)


def check(model: nn.Module, given: tuple[Tensor, ...], found: Callable[..., Tensor]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found(*given), model(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dead", [0, 1, 5])
def test_blocks_of_a_unet(dead: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(dead)
    model = Block().eval()
    with torch.no_grad():
        model.into.weight[:dead] = 0  # the first channels are their bias, or zero
        model.into.bias[: max(dead - 1, 0)] = 0
        model.time.weight[:dead] = 0
        model.one.weight[4] = 0
        model.out.weight[:, :dead] = 0
        model.conv.weight[:dead] = 0
    small = compact(model, inputs(1))
    operations = small.program.operations
    assert not any(isinstance(o, TorchOperator) for o in operations)
    assert {GroupNorm, AddNumbers, RepeatPixels} <= {type(o) for o in operations}
    check(model, inputs(3), small)
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    given = inputs(2)
    assert torch.equal(again(*given), small(*given))
    for kind in ("onnx", "pt2"):
        assert small.save(tmp_path / f"model.{kind}").exists()  # compares the outputs
    for way in ("sparse", "dense"):
        fast = engine.compile(small, engine=way, threads=2)
        check(model, inputs(3), fast)
        if fast.compiled:
            assert all(segment.plan is not None for segment in fast._segments)


def test_groups_that_nothing_needs_are_removed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(3, 12), nn.Conv2d(12, 2, 1)).eval()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 0  # always zero, and counted by the norm
        model[2].weight[:, 1] = 0
        model[2].weight[:, 4:8] = 0
    x = torch.randn(2, 3, 4, 4)
    small = compact(model, x)
    (norm,) = (o for o in small.program.operations if isinstance(o, GroupNorm))
    assert (norm.sizes, norm.features) == ((3, 4), 4)
    check(model, (x,), small)


def test_group_that_is_always_zero_is_constant() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[0].bias[:2] = torch.tensor([1.0, 3.0])
    x = torch.randn(2, 3, 4, 4)
    small = compact(model, x)
    (norm,) = (o for o in small.program.operations if isinstance(o, GroupNorm))
    assert norm.sizes == (2,)
    check(model, (x,), small)


class Tokens(nn.Module):
    """A transformer's tokens, scaled and shifted by numbers for all of them, as in DiT; and a group norm of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.scale, self.shift = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(4, 8)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.into(x) * self.scale(time)[:, None] + self.shift(time)[:, None]
        return self.out(self.norm(y.mT).mT)  # type: ignore[no-any-return]


def test_numbers_for_all_tokens() -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    small = compact(model, (torch.randn(1, 7, 5), torch.randn(1, 4)))
    assert not any(isinstance(o, TorchOperator) for o in small.program.operations)
    given = torch.randn(3, 7, 5), torch.randn(3, 4)
    check(model, given, small)
    check(model, given, engine.compile(small, engine="sparse", threads=2))


@pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_kernels_compute_what_pytorch_does(data: Any) -> None:
    def draw(*numbers: int) -> int:
        return int(data.draw(st.sampled_from(numbers)))

    torch.manual_seed(data.draw(st.integers(0, 1000)))
    features, missing = draw(1, 2, 5), draw(0, 1)
    sizes = tuple(max(1, features - missing * draw(0, 1, 3)) for _ in range(draw(1, 2, 7)))
    channels, maps = sum(sizes), (draw(1, 4, 17), draw(1, 3, 16, 33))[draw(0, 1) :]
    norm = GroupNorm("y", ("x",), torch.randn(channels), torch.randn(channels), sizes, features, 0.1)
    shapes = {"x": (channels, *maps), "n": (channels, *[1] * len(maps))}
    factors = (draw(1, 2, 3), draw(1, 2))[: len(maps)]
    operations = [norm, AddNumbers("z", ("y", "n")), RepeatPixels("r", ("z",), factors)]
    program = Program(shapes, operations, ("y", "r"))
    x = [torch.randn(draw(1, 3, 4), *shapes["x"])]
    x.append(torch.randn(len(x[0]), *shapes["n"]))
    fast = engine.compile(program, engine="sparse", threads=draw(1, 2, 3))
    for one, two in zip(fast(*x), program.run(*x), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_group_norm_with_missing_channels_is_that_with_zeros() -> None:
    torch.manual_seed(0)
    x, scale, shift = torch.randn(2, 5, 3, 4), torch.randn(5), torch.randn(5)
    made = GroupNorm("y", ("x",), scale, shift, (2, 3), 4).run(x)
    places = [0, 2, 5, 6, 7]
    whole = torch.zeros(2, 8, 3, 4)
    whole[:, places] = x
    expected = F.group_norm(whole, 2)[:, places] * scale[:, None, None] + shift[:, None, None]
    torch.testing.assert_close(made, expected)
    assert made[:0].shape == GroupNorm("y", ("x",), scale, shift, (2, 3), 4).run(x[:0]).shape


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (GroupNorm("y", ("x",), torch.ones(4), torch.ones(4), (2, 3), 3), "groups of all channels"),
        (GroupNorm("y", ("x",), torch.ones(4), torch.ones(4), (2, 2), 1), "groups of all channels"),
        (GroupNorm("y", ("x",), torch.ones(4), torch.ones(4), (4,), 4, -1.0), "an epsilon of 0 or more"),
        (GroupNorm("y", ("x",), torch.ones(3), torch.ones(4), (4,), 4), "a tensor of size"),
        (AddNumbers("y", ("x", "x")), "maps of one pixel"),
        (RepeatPixels("y", ("x",), (2,)), "a factor for each dimension"),
        (RepeatPixels("y", ("x",), (2, 10**6)), "factors from 1 to 1024"),
    ],
)
def test_invalid_fields_in_files(operation: Operation, message: str) -> None:
    with pytest.raises(WiringError, match=message):
        check_program(Program({"x": (4, 5, 6)}, [operation], ("y",)), 2**30)


def test_sizes_that_are_no_multiple_stay_on_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(size=(7, 8), mode="nearest")).eval()
    small = compact(model, torch.randn(1, 3, 4, 4))
    assert [o.target for o in small.program.operations if isinstance(o, TorchOperator)] == [
        "aten::upsample_nearest2d.vec"
    ]
    check(model, (torch.randn(2, 3, 4, 4),), small)
