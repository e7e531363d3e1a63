"""Attention as vision transformers spell it out: keys or values as (…, size, tokens), with and without heads."""

import pytest
import torch
from torch import Tensor, nn

from wirings import compact, engine
from wirings.compaction.operations import Attention, TorchOperator


class SpelledOut(nn.Module):
    """Attention over the pixels of maps, with a bias for every pair of them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.into, self.out = form, nn.Conv2d(6, 24, 1), nn.Conv2d(8, 4, 1)
        self.bias = nn.Parameter(torch.randn(12, 12) if form == "one head" else torch.randn(2, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        y = self.into(x).flatten(2)
        heads = (b,) if self.form == "one head" else (b, 2)
        q, k, v = y.view(*heads, -1, h * w).chunk(3, -2)
        if self.form == "keys":  # as LeViT
            z = (((q.transpose(-2, -1) @ k) * 0.5 + self.bias).softmax(-1) @ v.transpose(-2, -1)).transpose(-2, -1)
        else:  # as EfficientViT
            z = v @ ((q * 0.5).transpose(-2, -1) @ k + self.bias).softmax(-1).transpose(-2, -1)
        return self.out(z.reshape(b, 8, h, w))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["keys", "values", "one head"])
def test_attention_is_recognized(form: str) -> None:
    torch.manual_seed(0)
    model = SpelledOut(form).eval()
    small = compact(model, torch.randn(1, 6, 3, 4))
    (made,) = (o for o in small.program.operations if isinstance(o, Attention))
    assert made.sizes == ((8,) if form == "one head" else (4, 4))
    assert not any(isinstance(o, TorchOperator) for o in small.program.operations)
    assert small.report is not None
    assert small.report.uncounted == ()
    assert small.report.before.mult_adds == 12 * (6 * 24 + 8 * 4) + 2 * 8 * 12 * 12
    x = torch.randn(3, 6, 3, 4)
    with torch.no_grad():
        expected = model(x)
    for fast in (small, engine.compile(small, engine="sparse", threads=2)):
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)


class Lookalike(nn.Module):
    """A softmax over queries instead of keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def test_softmax_over_queries_is_no_attention() -> None:
    x = [torch.randn(2, 2, 5, 4) for _ in range(3)]
    small = compact(Lookalike(), tuple(x))
    assert not any(isinstance(o, Attention) for o in small.program.operations)
    torch.testing.assert_close(small(*x), Lookalike()(*x))
