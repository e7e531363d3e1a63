"""The contract of every registered model, so that registering one is enough to have it tested."""

import math
from typing import Any

import pytest
import torch
import vision  # noqa: F401 - makes torchvision's networks work wherever it is installed
from torch import nn

import wirings
from wirings import WiringError, models


def build(name: str, rule: str, **more: Any) -> nn.Module:
    takes = models.options(name)
    if rule != "dense" and "density" in takes:
        more["density"] = 0.2
    if "image_size" in takes and takes["image_size"] > 96:
        more["image_size"] = 96  # faster, and every layer still has pixels
    try:
        return models.get(name, rule=rule, classes=3, **more)
    except wirings.WiringError as error:
        if "pip install" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("rule", ["dnw", "dense"])
@pytest.mark.parametrize("name", models.names())
def test_every_model_trains_and_is_finalized(name: str, rule: str) -> None:
    torch.manual_seed(0)
    model = build(name, rule)
    wiring: Any = model.wiring
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    images, labels = torch.randn(3, *model.input_shape), torch.arange(3)
    if hasattr(model, "input_tokens"):
        images = torch.arange(3 * math.prod(model.input_shape)).view(3, *model.input_shape) % 3
        labels = images if images.dim() == 2 else images[:, -1]  # the last row of several is the target
    losses = []
    for _ in range(3):
        torch.manual_seed(1)  # dropout is the same every time
        loss = nn.functional.cross_entropy(model(images).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)  # MnasNet's gradient is large at first
        optimizer.step()
        if wiring is not None:
            wiring.step(optimizer)
        losses.append(loss.item())
    assert min(losses[1:]) < losses[0]
    if wiring is None:
        assert rule == "dense"
        return
    reports = wiring.look()
    before = model.eval()(images)
    wirings.finalize_(model)
    torch.testing.assert_close(model(images), before)
    for layer, report in zip(wiring.layers, reports, strict=True):
        assert int(getattr(layer.module, layer.attribute).count_nonzero()) == report.edges
        assert report.edges == report.possible if rule == "dense" else report.edges < report.possible


@pytest.mark.parametrize("name", models.names())
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(WiringError, match=rf"unknown option of model '{name}': 'clases'. Did you mean 'classes'"):
        models.get(name, clases=3)
