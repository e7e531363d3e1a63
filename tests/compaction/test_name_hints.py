"""What an operator means does not depend on the names that its results get."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import compact
from wirings.compaction import aten


class Maps(nn.Module):
    """Operators of which several share one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Conv2d(2, 6, 1), function, nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Tokens(Maps):
    """The same for a sequence of tokens, whose dimensions are in another order in a program."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function)
        self.first, self.last = nn.Linear(2, 6), nn.Linear(6, 3)


OF_BOTH = {
    "sub": lambda x: x - x.sigmoid(),
    "rsub": lambda x: 2.0 - x,
    "div": lambda x: x / 3.0,
    "neg": lambda x: -x,
    "tanh": torch.tanh,
    "silu": F.silu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp_min": lambda x: x.clamp_min(0.2),
    "narrow": lambda x: torch.cat([x.narrow(1, 1, 3), x.narrow(1, 0, 1), x.narrow(1, 4, 2)], 1),
}
OF_MAPS = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "chunk": lambda x: torch.cat([*x.chunk(2, 1)][::-1], 1),
}
OF_TOKENS = {
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "unbind": lambda x: torch.stack([*x.unbind(1)][::-1], 1),
    "movedim": lambda x: x.movedim(1, 2).swapaxes(1, 2).transpose(1, 2).permute(0, 2, 1),
}
CASES = [(Maps, name, function) for name, function in {**OF_BOTH, **OF_MAPS}.items()]
CASES += [(Tokens, name, function) for name, function in {**OF_BOTH, **OF_TOKENS}.items()]


@pytest.mark.parametrize("hint", ["rsub_div_relu6_max_pool1d", "all"])
@pytest.mark.parametrize(("kind", "function"), [pytest.param(k, f, id=f"{n}-{k.__name__}") for k, n, f in CASES])
def test_hints_do_not_change_what_is_computed(
    kind: type[Maps], function: Callable[[Tensor], Tensor], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = kind(function).eval()
    x = torch.randn(2, 2, 4, 4) if kind is Maps else torch.randn(2, 6, 2)
    expected = [type(o).__name__ for o in compact(model, x).program.operations]

    def renamed(convert: Any, builder: Any, _: str, arguments: Any) -> Any:
        return convert(builder, hint, arguments)

    for table in (aten.CONVERTERS, aten.VIEW_CONVERTERS):
        for name, convert in list(table.items()):
            monkeypatch.setitem(table, name, functools.partial(renamed, convert))
    small = compact(model, x)  # compares the outputs with the model's
    assert [type(o).__name__ for o in small.program.operations] == expected
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)
