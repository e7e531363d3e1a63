"""Registering models: option groups, models that are wired after building, and mistakes."""

from typing import Any

import pytest
import torch
from torch import nn

from wirings import WiringError, models
from wirings.models import NetworkSize, registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def test_plain_models_are_wired_by_the_registry() -> None:
    @models.register
    def mine(hidden: int = 8, classes: int = 10) -> nn.Module:
        return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    wiring = {"rule": None, "density": None, "k": None, "share": "uniform", "mult_adds": None, "scale_weights": False}
    assert models.options("mine") == {**wiring, "structure": "free", "gradient_every": 1, "hidden": 8, "classes": 10}
    assert models.get("mine").wiring is None
    grouped: Any = models.get("mine", rule="random", structure="2:4")
    assert [report.density for report in grouped.wiring.look()] == [0.5, 0.5], "N:M needs no density"
    model: Any = models.get("mine", rule="dnw", density=0.25, share="global", classes=2)
    assert model[2].out_features == 2
    assert sum(report.edges for report in model.wiring.look()) == (4 * 8 + 8 * 2) // 4
    counted: Any = models.get("mine", rule="dnw", k=13)
    assert sum(report.edges for report in counted.wiring.look()) == 13
    with pytest.raises(WiringError, match="rule 'dnw' needs a budget"):
        models.get("mine", rule="dnw")


def test_option_groups_have_the_model_s_defaults() -> None:
    seen: list[Any] = []
    default = NetworkSize(width=0.5, classes=3)

    @models.register(passes_on=["bias"])
    def mine(size: NetworkSize = default, depth: int = 2, **settings: Any) -> nn.Module:
        seen.append((size, depth, settings))
        return nn.Linear(4, size.classes)

    models.get("mine")
    models.get("mine", width=2.0, depth=3, bias=False)
    assert seen == [(default, 2, {}), (NetworkSize(width=2.0, classes=3), 3, {"bias": False})]
    assert models.options("mine")["width"] == 0.5
    with pytest.raises(WiringError, match=r"unknown option of model 'mine': 'depht'. Did you mean 'depth'"):
        models.get("mine", depht=3)


def test_errors_inside_a_model_are_not_hidden() -> None:
    @models.register
    def mine(classes: int = 10) -> nn.Module:
        return nn.Linear("four", classes)  # type: ignore[arg-type]

    with pytest.raises(TypeError):
        models.get("mine")


def test_names_are_unique() -> None:
    def resnet18() -> nn.Module:
        return nn.Identity()

    with pytest.raises(WiringError, match="a model named 'resnet18' is registered already"):
        models.register(resnet18)


@pytest.mark.parametrize("classes", [0, -1, 2.5, True, "ten"])
def test_rejects_a_bad_number_of_classes(classes: Any) -> None:
    with pytest.raises(WiringError, match="classes must be an integer of at least 1, got"):
        models.get("resnet18", classes=classes)


@pytest.mark.parametrize("name", ["mobilenetv1", "mobilenetv1_x", "densenet", "resnet50"])
def test_share_changes_the_edges_of_layers(name: str) -> None:
    settings: dict[str, Any] = {"rule": "random", "density": 0.2, "width": 0.25, "classes": 3, "image_size": 32}
    counts = [[r.edges for r in models.get(name, share=s, **settings).wiring.look()] for s in ("uniform", "erk")]
    assert counts[0] != counts[1]
    assert torch.tensor(counts).sum(1).diff().abs() < 0.01 * sum(counts[0])
