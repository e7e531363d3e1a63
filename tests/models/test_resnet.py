"""Residual networks: outputs and sizes match torchvision's; what is wired, how they are initialised."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vision import MISSING

from wirings import WiringError, models
from wirings.profiling import profile


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("name", ["resnet50", "resnet18"])
def test_matches_torchvision(name: str) -> None:
    import torchvision

    theirs = getattr(torchvision.models, name)(weights=None).eval()
    ours = models.get(name, classes=1000, image_size=224).eval()
    renamed: dict[str, Tensor] = {}
    for key, value in theirs.state_dict().items():
        if key == "fc.bias":
            continue
        key = key.replace("downsample", "shortcut").replace("fc.weight", "head.weight")
        for stage in range(4):
            key = key.replace(f"layer{stage + 1}.", f"stages.{stage}.")
        renamed[key] = value[..., None, None] if key == "head.weight" else value
    nn.init.zeros_(theirs.fc.bias)
    ours.load_state_dict(renamed)
    images = torch.randn(2, 3, 96, 96).double()
    torch.testing.assert_close(ours.double()(images), theirs.double()(images))


def test_sizes() -> None:
    for name, params, mult_adds in (("resnet50", 25_556_032, 4_089_184_256), ("resnet18", 11_173_952, 555_422_720)):
        model = models.get(name)
        assert sum(p.numel() for p in model.parameters()) == params
        counted = profile(model)
        assert abs(counted.mult_adds / mult_adds - 1) < 1e-6, "except for weights that happen to be zero"
        assert counted.notes == ()
    half: Any = models.get("resnet18", width=0.5)
    assert [stage[0].conv1.out_channels for stage in half.stages] == [32, 64, 128, 256]


def test_stem_has_no_stride_for_small_images() -> None:
    small: Any = models.get("resnet18", width=0.25, image_size=64).eval()
    large: Any = models.get("resnet18", width=0.25, image_size=65).eval()
    assert (small.conv1.kernel_size, small.conv1.stride) == ((3, 3), (1, 1))
    assert (large.conv1.kernel_size, large.conv1.stride) == ((7, 7), (2, 2))
    for model, size in ((small, 8), (large, 32)):
        assert model(torch.randn(2, 3, size, size)).shape == (2, 10)
        with pytest.raises(WiringError, match=f"of at least {size} × {size} pixels"):
            model(torch.randn(2, 3, size - 1, size))
    with pytest.raises(WiringError, match="image_size = 7 is too small"):
        models.get("resnet18", image_size=7)
    with pytest.raises(WiringError, match="width"):
        models.get("resnet18", width=0)


@pytest.mark.parametrize("first_dense", [False, True])
def test_wires_every_convolution_including_the_classifier(first_dense: bool) -> None:
    model: Any = models.get("resnet50", rule="random", classes=10, image_size=32, density=0.1, first_dense=first_dense)
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    reports = model.wiring.look()
    assert [report.name for report in reports] == [f"{name}.weight" for name in convolutions][first_dense:]
    assert len(reports) == 54 - first_dense
    assert all(report.edges == report.possible // 10 for report in reports)
    assert not any(p.dim() == 1 for p in (layer.weight for layer in model.wiring.layers)), "norms stay dense"


def test_initialisation() -> None:
    model = models.get("resnet50")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))
        if isinstance(module, nn.Conv2d):
            expected = math.sqrt(2 / module.weight[0].numel())  # fan-in
            assert module.bias is None
            assert abs(module.weight.std().item() / expected - 1) < 0.03
    blocks = [m for m in model.modules() if type(m).__name__ == "Bottleneck"]
    assert len(blocks) == 16
    assert [b.conv2.stride[0] for b in blocks if b.conv2.stride[0] > 1] == [2, 2, 2]
    assert all(b.conv1.stride == b.conv3.stride == (1, 1) for b in blocks)
