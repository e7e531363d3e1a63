"""Recipes whose model and data are functions of the user's own, named as package.module:function."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from wirings import WiringError
from wirings.train import phases, recipes, results, saved_runs
from wirings.train.settings import from_mapping
from wirings.train.untrained import new_model

MODULE = """
import torch
from torch import nn

import wirings
from wirings.train.data.base import Data
from wirings.train.data.device import DeviceLoader


def plain(classes, hidden=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def with_rule(classes, rule, k=20):
    model = plain(classes)
    model.wiring = wirings.wire_(model, rule, k=k)
    return model


def with_options(classes, **options):
    assert "rule" not in options
    return plain(classes, **options)


def forgets_the_rule(classes, rule):
    return plain(classes)


def no_module(classes):
    return 3


def stripes(options, *, examples=24):
    labels = torch.arange(examples) % 2
    images = torch.zeros(examples, 1, 4, 4, dtype=torch.uint8)
    images[labels == 1, :, ::2] = 255
    more = {"batch": options.batch, "mean": [0.5], "std": [0.5], "device": options.device, "seed": options.seed}
    train, test = (DeviceLoader(images, labels, shuffle=shuffle, **more) for shuffle in (True, False))
    return Data("stripes", 2, (1, 4, 4), train, test)


def no_data(options):
    return None
"""
RECIPE = """
model: {name: "NAME:plain", options: {hidden: 16, density: 0.5}}
data: {name: "NAME:stripes", options: {examples: 32}}
epochs: 3
batch: 8
optimizer: {lr: 0.1}
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a new module in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = f"own_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{found}.py").write_text(MODULE)
    return found


def test_trains_a_model_and_data_of_the_users_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("NAME", name))
    settings = recipes.get("mine.yaml").settings
    result = phases.train("mine", settings, tmp_path / "run", device="cpu")
    assert result is not None
    assert (result.steps, result.edges) == (12, (16 * 16 + 2 * 16) // 2)
    assert result.accuracy == 100.0
    assert results.read(tmp_path / "run" / "result.json").settings["model"]["name"] == f"{name}:plain"
    assert saved_runs.measure(tmp_path / "run", device="cpu")[1] == 100.0, "opened again"
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    with pytest.raises(WiringError, match="only your own code knows how to prepare an image"):
        next(saved_runs.predict(tmp_path / "run", [tmp_path / "image.png"], device="cpu"))


def test_options_reach_the_functions(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("NAME", name))
    (tmp_path / "other.yaml").write_text(
        f"base: mine.yaml\nmodel: {{name: '{name}:with_rule', options: {{hidden: null}}}}\n"
    )
    with pytest.raises(WiringError, match=r"with_rule cannot be called with its options \(classes, hidden, density, "):
        new_model(recipes.get("other.yaml").settings, classes=2)
    for path, options, edges in [("with_rule", {"k": 7}, 7), ("plain", {"density": 0.25}, 36)]:
        settings = from_mapping({"model": {"name": f"{name}:{path}", "options": options}})
        assert sum(layer.edges for layer in new_model(settings, classes=2).wiring.look()) == edges
    settings = from_mapping({"model": {"name": f"{name}:with_options", "options": {"hidden": 4, "density": 0.25}}})
    wired = new_model(settings, classes=2)
    assert [layer.edges for layer in wired.wiring.look()] == [16, 2], "a rule is not passed as one of **options"
    dense = from_mapping({"model": {"name": f"{name}:plain"}, "rule": {"name": "dense"}})
    assert new_model(dense, classes=2).wiring is None


def test_scales_the_starting_weights(name: str) -> None:
    layers = []
    for scale in (False, True):
        options = {"density": 0.25, "scale_weights": scale}
        settings = from_mapping({"model": {"name": f"{name}:plain", "options": options}})
        layers.append(new_model(settings, classes=2).wiring.layers[0].weight.detach())
    torch.testing.assert_close(layers[1], 2 * layers[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"name": "NAME:no_module"}}, "no_module must return a torch.nn.Module, got int"),
        ({"model": {"name": "NAME:forgets_the_rule"}}, "takes a rule, but the model that it returned is not wired"),
        ({"model": {"name": "NAME:plian"}}, "Did you mean NAME:plain"),
        ({"model": {"name": "NAME:plain"}}, "density"),
        ({"data": {"name": "NAME:no_data"}}, "no_data must return a wirings.train.data.Data, got NoneType"),
        ({"data": {"name": "NAME:stripes", "options": {"exampels": 3}}}, "Did you mean 'examples'"),
        ({"data": {"name": "NAME stripes:"}}, "data.name must be a name or package.module:function"),
        ({"data": {"options": {"batch": 3}}}, "data.options cannot hold 'batch', which is a setting outside of it"),
        ({"data": {"options": {"workers": 3}}}, "data.options cannot hold 'workers'"),
        ({"rule": {"options": {"rule": 1}}}, "rule.options cannot hold 'rule'. Set rule.name instead"),
    ],
)
def test_mistakes_leave_nothing_behind(
    name: str, tmp_path: Path, settings: dict[str, dict[str, object]], message: str
) -> None:
    base = {"model": {"name": "NAME:plain", "options": {"density": 0.5}}, "data": {"name": "NAME:stripes"}, "batch": 8}
    text = repr(base | settings).replace("NAME", name)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(WiringError, match=message.replace("NAME", name)):
        phases.train("mine", recipes.get("mine.yaml").settings, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / "settings.yaml").exists()
