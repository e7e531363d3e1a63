"""Recipes of Table 4 and of the ResNet for CIFAR-10, trained end to end for a few steps on synthetic data."""

from pathlib import Path

import pytest
from soak import SOAK

from wirings import models
from wirings.train import recipes
from wirings.train.run import loop
from wirings.train.settings import with_overrides

SMALL = [
    "data.name=synthetic", "data.options={shape: [3, 8, 8], examples: 24, test_examples: 8}", "batch=8",
    "data.image_size=null", "precision=fp32", "fast=false", "epochs=2", "schedule.warmup_epochs=1",
]  # fmt: skip


@pytest.mark.parametrize("name", ["resnet/dense", "resnet/dnw-10", "resnet/random-2", "resnet/sparse_momentum-10"])
def test_resnet_recipes_train(name: str, tmp_path: Path) -> None:
    changes = ["model.options.width=0.125", "model.options.image_size=8"]
    settings, overrides = with_overrides(recipes.get(name).settings, [*SMALL, *changes])
    result = loop.train(name, settings, tmp_path / "run", device="cpu", overrides=overrides)
    assert result is not None
    assert result.steps == 6
    assert result.mult_adds is not None
    if name == "resnet/dense":
        assert result.edges is None
        return
    plain = models.get("resnet18", width=0.125)
    weights = sum(p.numel() for n, p in plain.named_parameters() if p.dim() == 4 and n != "conv1.weight")
    density = settings.model.options["density"]
    assert result.edges == pytest.approx(density * weights, abs=21), "rounded down in each of 20 layers"


@pytest.mark.slow
def test_table_4_recipes_train(tmp_path: Path) -> None:
    name = "table4/first_dense-30"
    changes = [*SMALL, "model.options.image_size=8"]
    if not SOAK:  # one step per epoch, not three
        changes.append("data.options={shape: [3, 8, 8], examples: 8, test_examples: 8}")
    settings, overrides = with_overrides(recipes.get(name).settings, changes)
    result = loop.train(name, settings, tmp_path / "run", device="cpu", overrides=overrides)
    assert result is not None
    assert result.steps == (6 if SOAK else 2)
    weights = 23_454_912 - 3 * 64 * 49 + 10 * 2048  # all convolutions except the first, and the classifier
    assert result.edges == pytest.approx(0.3 * weights, abs=54)
    assert result.top5 is not None
