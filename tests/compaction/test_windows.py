"""Attention within windows that move, as in Swin: compact, saved and compiled without PyTorch in between."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, compact, engine, load_compact
from wirings.compaction.check_program import check_program
from wirings.compaction.operations import Attention, Crop, Roll, TorchOperator
from wirings.compaction.program import Program

SIDE, HEADS = 4, 2


class Windows(nn.Module):
    """Attention within windows of 4 × 4 pixels, moved by ``shift``, with a bias for every pair of pixels."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift, self.norm = shift, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(1, HEADS, SIDE**2, SIDE**2))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        count = h * w // SIDE**2
        y = self.norm(x).roll((-self.shift, -self.shift), (1, 2)) if self.shift else self.norm(x)
        y = y.view(b, h // SIDE, SIDE, w // SIDE, SIDE, c).permute(0, 1, 3, 2, 4, 5).reshape(b * count, SIDE**2, c)
        q, k, v = self.qkv(y).view(b * count, SIDE**2, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        scores = (q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1) + self.bias
        if self.shift:
            parts = y.new_zeros(h, w)
            for number, rows in enumerate((slice(-self.shift), slice(-self.shift, None))):
                for more, columns in enumerate((slice(-self.shift), slice(-self.shift, None))):
                    parts[rows, columns] = 2 * number + more
            parts = parts.view(h // SIDE, SIDE, w // SIDE, SIDE).permute(0, 2, 1, 3).reshape(count, SIDE**2)
            mask = parts[:, None] - parts[:, :, None]
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
            scores = scores.view(b, count, HEADS, SIDE**2, SIDE**2) + mask[None, :, None]
            scores = scores.view(-1, HEADS, SIDE**2, SIDE**2)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b * count, SIDE**2, c))
        y = y.view(b, h // SIDE, w // SIDE, SIDE, SIDE, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + (y.roll((self.shift, self.shift), (1, 2)) if self.shift else y)


class Hierarchy(nn.Module):
    """Two blocks of windows, and pixels that are merged after them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, width, 1), nn.Linear(4 * width, 5)
        self.one, self.two = Windows(width, 0), Windows(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(self.into(x).permute(0, 2, 3, 1)))
        merged = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.out(merged).mean((1, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dead", [False, True])
def test_windows_are_compact_and_compiled(dead: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = Hierarchy().eval()
    if dead:
        with torch.no_grad():
            model.two.qkv.weight[-4:], model.two.qkv.bias[-4:] = 0, 0  # the values of the second head
    small = compact(model, torch.randn(1, 3, 8, 12))
    operations = small.program.operations
    assert not any(isinstance(o, TorchOperator) for o in operations)
    assert {Roll, Crop, Attention} <= {type(o) for o in operations}
    shifted = [o for o in operations if isinstance(o, Attention)][1]
    assert shifted.window_mask is not None
    assert shifted.value_sizes == ((4,) if dead else (4, 4))
    assert small.report is not None
    assert small.report.uncounted == ()
    x = torch.randn(3, 3, 8, 12)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-4, atol=1e-5)
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(x), small(x))
    for kind in ("onnx", "pt2"):
        assert small.save(tmp_path / f"model.{kind}").exists()  # compares the outputs
    fast = engine.compile(small, engine="sparse", threads=2)
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
    if fast.compiled:
        assert all(segment.plan is not None for segment in fast._segments)


@pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
@pytest.mark.parametrize("both", [False, True])
def test_masks_of_windows(tokens: int, both: bool) -> None:
    torch.manual_seed(tokens)
    windows = torch.randn(3, tokens, tokens)
    windows[:, :, 1:][torch.rand(3, tokens, tokens - 1) < 0.3] = -math.inf
    mask = torch.randn(2, tokens, tokens) if both else None
    made = Attention("y", ("x",) * 3, mask, (4, 4), (4, 4), window_mask=windows)
    program = Program({"x": (8, 3, tokens)}, [made], ("y",))
    x = torch.randn(5, 8, 3, tokens)
    parts = x.view(5, 2, 4, 3, tokens).permute(0, 3, 1, 4, 2)
    added = windows[:, None] if mask is None else windows[:, None] + mask
    expected = F.scaled_dot_product_attention(parts, parts, parts, attn_mask=added, scale=1.0)
    expected = expected.permute(0, 2, 4, 1, 3).reshape(x.shape)
    torch.testing.assert_close(program.run(x)[0], expected)
    for way in (1, 3):
        torch.testing.assert_close(
            engine.compile(program, engine="sparse", threads=way)(x), expected, rtol=1e-4, atol=1e-5
        )


def test_invalid_masks_and_shifts_in_files() -> None:
    made = Attention("y", ("x",) * 3, None, (4,), (4,), window_mask=torch.zeros(2, 5, 5))
    for shape in ((4, 3, 5), (4, 5)):
        with pytest.raises(WiringError, match=r"expected (windows|a tensor of size)"):
            check_program(Program({"x": shape}, [made], ("y",)), 2**30)
    with pytest.raises(WiringError, match="expected a shift for each dimension of the maps"):
        check_program(Program({"x": (4, 3, 5)}, [Roll("y", ("x",), (1,))], ("y",)), 2**30)


@pytest.mark.parametrize("dims", [(2,), (2, 3), (3, -2)])
def test_rolled_maps(dims: tuple[int, ...]) -> None:
    class Rolled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll([1, -7][: len(dims)], dims).relu()

    model = nn.Sequential(nn.Conv2d(2, 3, 1), Rolled(), nn.Conv2d(3, 2, 3, padding=1)).eval()
    x = torch.randn(2, 2, 5, 6)
    small = compact(model, x)
    assert any(isinstance(o, Roll) for o in small.program.operations)
    with torch.no_grad():
        torch.testing.assert_close(engine.compile(small, engine="dense")(x), model(x), rtol=1e-4, atol=1e-5)


def test_channels_and_batches_that_are_rolled_run_on_pytorch() -> None:
    class Rolled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll(1, 1)

    x = torch.randn(2, 3, 4, 4)
    small = compact(Rolled(), x)
    assert torch.equal(small(x), x.roll(1, 1))
