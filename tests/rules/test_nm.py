"""N:M wiring: n of every m inputs of a node."""

import copy

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError
from wirings.rules import NM
from wirings.rules.nm import strongest_of_groups


def test_by_hand() -> None:
    model = nn.Linear(8, 2, bias=False)
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0, 9.0, 0, 0, 8.0], [1.0, 1.0, -1.0, 1.0, 0, 0, 0, 0]])
    with torch.no_grad():
        model.weight.copy_(weight)
    wiring = wirings.wire_(model, "nm")
    assert model.weight.tolist() == [[0, 0, 3, 4, 9, 0, 0, 8], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert wiring.look()[0].edges == 8, "exactly half, even with ties and zeros"
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == torch.ones(2, 8).tolist(), "all others get a gradient too"
    other = wirings.wire_(copy.deepcopy(wirings.unwire_(model)), NM(1, 8))
    assert other.masks()["weight"].nonzero().tolist() == [[0, 4], [1, 0]]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4), (3, 3), (1, 16)])
@pytest.mark.parametrize("shape", [(6, 48), (5, 48, 3, 3), (4, 48, 5), (2, 48, 2, 2, 2)])
def test_every_group_has_n(n: int, m: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    real = strongest_of_groups(weight, n, m)
    groups, sizes = (t.movedim(1, -1).reshape(-1, m) for t in (real, weight.abs()))
    assert (groups.sum(1) == n).all()
    weakest = sizes.masked_fill(~groups, float("inf")).amin(1)
    strongest = sizes.masked_fill(groups, 0).amax(1)
    assert (weakest >= strongest).all()


def test_convolutions_are_grouped_along_channels() -> None:
    model = nn.Conv2d(8, 4, 3, groups=2).to(memory_format=torch.channels_last)
    wiring = wirings.wire_(model, NM(1, 4))
    mask = wiring.masks()["weight"]
    assert mask.shape == (4, 4, 3, 3)
    assert (mask.sum(1) == 1).all(), "one of four channels at every place of the kernel"
    assert mask.is_contiguous(memory_format=torch.channels_last)


def test_settings_change_the_number_of_edges() -> None:
    counts = {}
    for n, m in ((1, 4), (2, 4), (2, 8)):
        counts[n, m] = wirings.wire_(nn.Linear(16, 4), NM(n, m)).look()[0].edges
    assert counts == {(1, 4): 16, (2, 4): 32, (2, 8): 16}


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (
            nn.Conv2d(3, 8, 3),
            {},
            r"weight of shape \(8, 3, 3, 3\) has 3 inputs.*not a multiple of 4. Leave.*skip=\['weight'\]",
        ),
        (nn.Conv2d(8, 8, 3, groups=8), {}, "has 1 inputs"),
        (nn.Linear(6, 8), {}, "has 6 inputs, which is not a multiple of 4"),
        (nn.ConvTranspose2d(8, 8, 3), {}, r"a row for every node.*shape \(8, 8, 3, 3\) in a .*ConvTranspose2d"),
        (wirings.StaticGraph([4, 8, 4]), {}, "has shape .* in a .*StaticGraph"),
        (nn.Linear(8, 4), {"allowed": {"weight": torch.rand(4, 8) < 0.9}}, "allowed= excludes edges of weight"),
        (nn.Linear(8, 4), {"density": 0.5}, "fixes the number of edges itself; drop density=0.5"),
    ],
)
def test_rejects_weights_that_do_not_fit(model: nn.Module, settings: dict[str, object], says: str) -> None:
    keys, kind = list(model.state_dict()), type(model)
    with pytest.raises(WiringError, match=says):
        wirings.wire_(model, "nm", **settings)
    assert (list(model.state_dict()), type(model)) == (keys, kind), "the model is unchanged"


def test_skipping_the_named_layer_works() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    wiring = wirings.wire_(model, "nm", skip=["0"])
    assert [layer.name for layer in wiring.layers] == ["2.weight"]


def test_mistakes() -> None:
    with pytest.raises(WiringError, match="n must be at most m, got n = 5 and m = 4"):
        NM(5, 4)
    with pytest.raises(WiringError, match="n must be a whole number, at least 1, got 0"):
        NM(0, 4)
