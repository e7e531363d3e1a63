"""`prune_`: edges are scored by |w| · ‖x‖ on a few batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, prune_, wire_
from wirings.utils.layers import receivers


class Conv1D(nn.Module):
    """As GPT-2 has it: a linear layer whose weight has shape (in, out). Known by its name and module."""

    def __init__(self, out: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


Conv1D.__module__ = "transformers.pytorch_utils"
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (3, 5, 6)),
    "Conv1D": (lambda: Conv1D(4, 6), (3, 5, 6)),
    "conv": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 6, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, dilation=2), (2, 3, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 2, 3, 4, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, padding_mode="circular"), (2, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding="same"), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 4, 5)),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)
by = pytest.mark.parametrize("by", ["node", "layer"])


def scores(layer: Any, batches: list[Tensor]) -> Tensor:
    """|w| · ‖x‖, found by running the layer with each of its edges alone, of weight one."""
    weight, found = layer.weight.detach().clone(), torch.zeros_like(layer.weight)
    with torch.no_grad():
        for place in range(weight.numel()):
            layer.weight.zero_().view(-1)[place] = 1.0
            bias = 0.0 if getattr(layer, "bias", None) is None else layer(torch.zeros_like(batches[0]))
            found.view(-1)[place] = torch.stack([(layer(x) - bias).square().sum() for x in batches]).sum().sqrt()
        layer.weight.copy_(weight)
    return weight.abs() * found


@each_layer
@by
def test_the_edges_that_carry_most_stay(kind: str, by: str) -> None:
    build, shape = LAYERS[kind]
    layer, batches = build(), [torch.randn(shape) * torch.rand(shape[1:]) for _ in range(2)]
    before, score = layer.weight.detach().clone(), scores(layer, batches)
    assert prune_(layer, batches, density=0.4, by=by) is layer
    kept = layer.weight != 0
    assert torch.equal(layer.weight[kept], before[kept])
    node = receivers(layer, "weight", before).expand(before.shape)
    parts = [torch.ones_like(kept)] if by == "layer" else [node == n for n in range(int(node.max()) + 1)]
    for part in parts:
        count = int(0.4 * int(part.sum()) + 1e-6)
        assert int(kept[part].sum()) == count
        assert score[part & kept].min() > score[part & ~kept].max() * (1 - 1e-5)


def test_a_matrix_by_hand() -> None:
    layer = nn.Linear(3, 2, bias=False)
    batches = [torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[4.0, 1.0, 0.0], [0.0, 0.0, 2.0]])]  # norms 5, 1, 2
    weight = torch.tensor([[1.0, -4.0, 3.0], [-0.1, 0.4, 0.3]])  # scores 5, 4, 6 and 0.5, 0.4, 0.6
    for by, expected in (
        ("node", [[0.0, 0.0, 3.0], [0.0, 0.0, 0.3]]),
        ("layer", [[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]),
    ):
        with torch.no_grad():
            layer.weight.copy_(weight)
        prune_(layer, batches, density=0.34, by=by)
        assert torch.equal(layer.weight, torch.tensor(expected))


class Net(nn.Module):
    """Called with keywords; one layer is used twice, and dropout and batch norm behave differently in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop, self.head, self.unused = nn.Dropout(0.5), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(input=self.first(x))
        return self.head(self.drop(self.norm(x)) if mask is None else x * mask)


@pytest.mark.parametrize("rule", ["keep", "dnw", "rigl"])
def test_any_rule_goes_on(rule: str) -> None:
    model = Net()
    model.drop.eval()
    modes = [module.training for module in model.modules()]
    state = {name: x.clone() for name, x in model.state_dict().items()}

    def loader() -> Iterator[Any]:
        yield torch.randn(8, 6), torch.zeros(8)
        yield {"x": torch.randn(8, 6), "mask": torch.ones(6)}
        yield [{"x": torch.randn(8, 6)}, torch.zeros(8)]

    prune_(model, loader(), density=0.5, skip=["unused"])
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    for name, x in model.state_dict().items():
        assert torch.equal(x, state[name]) or name in ("first.weight", "head.weight")
    real = model.first.weight != 0
    assert real.sum(1).tolist() == [3] * 6
    wiring = wire_(model, rule, start="weights", skip=["unused"])
    assert torch.equal(wiring.masks()["first.weight"], real)


def test_half_precision_does_not_overflow() -> None:
    layer = nn.Linear(4, 2).half()
    prune_(layer, [torch.tensor([[300.0, 1.0, 400.0, 500.0]]).half()], density=0.25)
    assert int(layer.weight.count_nonzero()) == 2
    assert not layer.weight[:, 1].any()


def test_rejects_what_cannot_be_scored_and_changes_nothing() -> None:
    model, x = Net(), [torch.randn(4, 6)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for arguments, message in (
        ({"batches": x}, r"no batch reaches unused.weight, .* skip=\['unused.weight'\]"),
        ({"batches": []}, "batches is empty"),
        ({"batches": ["text"]}, "a batch must be a tensor, a mapping of keyword arguments, .* got str"),
        ({"batches": x, "by": "row"}, "unknown by 'row'"),
        ({"batches": x, "density": 0.0}, r"density must be in \(0, 1\]"),
        (
            {"batches": [torch.full((1, 6), float("inf"))], "skip": ["unused"]},
            "the inputs of first.weight are not finite",
        ),
    ):
        with pytest.raises(WiringError, match=message):
            prune_(model, **{"density": 0.5, **arguments})  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(WiringError, match=r"weight_ih_l0 belongs to a LSTM; use skip="):
        prune_(nn.LSTM(3, 3), x, density=0.5)
    with pytest.raises(WiringError, match="is already wired"):
        prune_(wirings.wire_(nn.Linear(6, 6), density=0.5).model, x, density=0.5)


@pytest.mark.parametrize(("batch", "kind"), [(torch.randn(4, 3), "Tensor"), ({"input": torch.randn(4, 3)}, "dict")])
def test_one_batch_alone_is_an_error(batch: Any, kind: str) -> None:
    """Its rows, or its names, would be taken for batches."""
    with pytest.raises(
        WiringError, match=rf"prune_ expects several batches, got a {kind}: write \[batch\] if it is one"
    ):
        wirings.prune_(nn.Sequential(nn.Linear(3, 2)), batch, density=0.5)
