"""The published networks of Table 3: their sizes and outputs, and that any rule can wire them."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from vision import MISSING

from wirings import WiringError, models
from wirings.models.shufflenetv1 import ChannelShuffle
from wirings.models.xception import XceptionUnit
from wirings.profiling import profile

OWN = ["densenet", "shufflenetv1", "xception"]
TORCHVISION = ["mobilenetv2", "shufflenetv2", "mnasnet"]
needs_torchvision = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
EVERY = [*OWN, *(pytest.param(name, marks=needs_torchvision) for name in TORCHVISION)]


@pytest.mark.parametrize("name", EVERY)
def test_takes_images_of_any_size(name: str) -> None:
    model = models.get(name, width=0.5, classes=7, image_size=64).eval()
    assert model.input_shape == (3, 64, 64)
    assert model.wiring is None
    for size in (32, 50, 64):
        assert model(torch.randn(2, 3, size, size)).shape == (2, 7)
    with pytest.raises(WiringError, match="image_size = 31 is too small"):
        models.get(name, image_size=31)
    with pytest.raises(WiringError, match="width"):
        models.get(name, width=0.0)


@pytest.mark.parametrize("name", EVERY)
def test_wires_all_layers_but_the_first_and_the_classifier(name: str) -> None:
    model: Any = models.get(name, rule="random", width=0.5, classes=7, density=0.25)
    reports = model.wiring.look()
    assert all(report.edges == max(1, report.possible // 4) for report in reports)
    weights = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(reports) == len(weights) - 2
    assert not any(hasattr(layer, "parametrizations") for layer in (weights[0], weights[-1]))
    with pytest.raises(WiringError, match="rule 'dnw' needs a budget"):
        models.get(name, rule="dnw")


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = models.get(name, width=0.5, classes=7, image_size=64)
    nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() > 1)


def test_channel_shuffle_interleaves_groups() -> None:
    x = torch.arange(6.0).view(1, 6, 1, 1)
    assert ChannelShuffle(3)(x).flatten().tolist() == [0, 2, 4, 1, 3, 5]


def test_units_with_a_stride_concatenate_the_pooled_shortcut() -> None:
    unit = XceptionUnit(8, 24, 2).eval()
    x = torch.rand(1, 8, 6, 6)
    out = unit(x)
    assert out.shape == (1, 24, 3, 3)
    torch.testing.assert_close(out[:, :8], nn.functional.avg_pool2d(x, 3, 2, padding=1))
    same = XceptionUnit(24, 24, 1).eval()
    nn.init.zeros_(same.branch[-1].weight)
    assert torch.equal(same(out), out.relu())


@pytest.mark.parametrize(
    ("name", "width", "millions"),
    [
        ("shufflenetv1", 0.5, 37.590),
        ("shufflenetv1", 1.0, 137.461),  # 137M in ShuffleNet's own paper, 140M in others' tables
        ("xception", 0.5, 39.660),
        ("xception", 1.0, 145.365),
        ("densenet", 0.5, 40.204),
        ("densenet", 1.0, 141.697),
    ],
)
def test_sizes(name: str, width: float, millions: float) -> None:
    model = models.get(name, width=width)
    counted = profile(model)
    assert round(counted.mult_adds / 1e6, 3) == millions
    assert counted.params == sum(p.numel() for p in model.parameters())
    assert counted.notes == ()


def test_x_mobilenet_keeps_its_first_pointwise_layer_dense() -> None:
    model: Any = models.get("mobilenetv1_x", rule="expander", classes=1000)
    names = [layer.name for layer in model.wiring.layers]
    assert (names[0], len(names)) == ("features.4.3.weight", 12)
    counted = profile(model)
    assert 50e6 < counted.mult_adds < 53.7e6  # the paper: "> 50M"; X-MobileNet's authors: 53.7M
    incoming = (model.features[4][3].weight != 0).flatten(1).sum(1)
    assert incoming.max() - incoming.min() <= 1
    halves = [profile(models.get("mobilenetv1_x", rule="expander", density=d)).mult_adds for d in (0.5, 0.125)]
    published = (85.8e6, 53.7e6, 37.6e6)
    ours = (halves[0], counted.mult_adds, halves[1])
    assert all(abs(a - b) < 0.7e6 for a, b in zip(published, ours, strict=True))  # all by the same half a million
    assert models.get("mobilenetv1_x").wiring is None
    assert models.get("mobilenetv1_x", rule="dense").wiring is not None


@needs_torchvision
def test_shufflenetv2_rejects_other_widths() -> None:
    with pytest.raises(WiringError, match=r"comes in the widths 0\.5, 1, 1\.5, 2, got width = 0\.7"):
        models.get("shufflenetv2", width=0.7)


@pytest.mark.parametrize("name", TORCHVISION)
def test_missing_torchvision_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(WiringError, match=r"needs torchvision, which cannot be imported .* pip install torchvision"):
        models.get(name)
