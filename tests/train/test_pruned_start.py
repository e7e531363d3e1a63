"""Recipes that prune a trained network in one shot and train it on: `keep`, and rules that start from its wiring."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import wirings
from wirings import WiringError, choose
from wirings.train import phases, recipes, results
from wirings.train import saved_runs as runs
from wirings.train.bundle_run import bundle_run
from wirings.train.settings import with_overrides

DATA = {"name": "synthetic", "options": {"shape": [3, 8, 8], "examples": 24, "test_examples": 8}}
SMALL = {
    "data": DATA, "batch": 8, "precision": "fp32", "fast": False, "epochs": 2, "schedule": {"warmup_epochs": 0},
    "channels_last": False,
}  # fmt: skip
SIZE = {"width": 0.0625, "image_size": 8}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the recipes of ``pruned``, on a small network: three steps per epoch."""
    first = tmp_path / "dense.yaml"
    first.write_text(yaml.safe_dump({"base": "resnet/dense", "model": {"options": SIZE}, **SMALL}))
    for name in ("keep", "dnw", "rigl"):
        more = {"model": {"options": {**SIZE, "density": 0.1}}, "start": {"recipe": str(first)}, **SMALL}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"base": f"pruned/{name}-10", **more}))
    return tmp_path


def train(home: Path, name: str, *changes: str, **more: Any) -> results.Result | None:
    recipe = recipes.get(home / f"{name}.yaml")
    settings, overrides = with_overrides(recipe.settings, changes)
    out = more.pop("out", home / "runs" / recipe.name / "seed0")
    return phases.train(recipe.name, settings, out, device="cpu", overrides=overrides, **more)


def weights(folder: Path, file: str) -> dict[str, torch.Tensor]:
    """The wired weights in a checkpoint of the small network."""
    found = load_file(folder / f"{file}.safetensors")
    return {
        name.removeprefix("model."): value
        for name, value in found.items()
        if name.startswith("model.") and value.dim() == 4 and ".wiring." not in name and name != "model.conv1.weight"
    }


@pytest.mark.parametrize("rule", ["keep", "dnw", "rigl"])
def test_prunes_in_one_shot_and_trains_on(home: Path, rule: str) -> None:
    changes = ["rule.options.every=1"] if rule == "rigl" else []
    result = train(home, rule, *changes)
    assert result is not None
    folder = home / "runs" / rule / "seed0"
    trained, pruned = weights(home / "runs" / "dense" / "seed0", "last"), weights(folder, "initial")
    assert len(trained) == 20
    expected = {}
    for name, weight in trained.items():
        expected[name] = choose(weight, max(1, int(0.1 * weight.numel())))
        assert torch.equal(pruned[name], torch.where(expected[name], weight, 0.0)), name
    assert result.edges == sum(int(mask.sum()) for mask in expected.values())
    model = wirings.load(folder)
    ended = {name: dict(model.named_parameters())[name] != 0 for name in expected}
    if rule == "keep":
        assert all(torch.equal(ended[name], expected[name]) for name in expected)
    else:
        assert all(int(ended[name].sum()) <= int(expected[name].sum()) for name in expected)
        assert any(not torch.equal(ended[name], expected[name]) for name in expected)


def test_kept_zeros_survive_opening_resuming_and_bundling(home: Path) -> None:
    whole = train(home, "keep")
    assert whole is not None
    folder = home / "runs" / "keep" / "seed0"
    assert runs.measure(folder, device="cpu")[1] == pytest.approx(whole.accuracy)
    stopped = home / "other" / "keep" / "seed0"
    first = home / "runs" / "dense" / "seed0"
    assert train(home, "keep", "checkpoint_every=2", out=stopped, first_run=first, max_minutes=0) is None
    assert train(home, "keep", "checkpoint_every=2", out=stopped, resume=True) is not None
    one, other = load_file(folder / "last.safetensors"), load_file(stopped / "last.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one if name.startswith("model."))
    x = torch.randn(2, 3, 8, 8)
    entry = bundle_run(folder, home / "zoo", name="pruned/small", device="cpu")
    assert torch.equal(wirings.load(entry)(x), wirings.load(folder)(x))
    wirings.hub.save_pretrained(folder, home / "shared", card=False)
    again = wirings.hub.from_pretrained(home / "shared")
    assert torch.equal(again(x), runs.open_run(folder, device="cpu").model(x))


def test_rejects_invalid_settings(home: Path) -> None:
    with pytest.raises(WiringError, match=r"start.prune needs start.recipe"):
        train(home, "keep", "start.recipe=null")
    with pytest.raises(WiringError, match=r"start.prune needs start.recipe.*and start.weights = trained"):
        train(home, "keep", "start.weights=initial")
    with pytest.raises(WiringError, match=r"rule 'keep' keeps the zeros.*set start.prune=true"):
        train(home, "keep", "start.prune=false")
    with pytest.raises(WiringError, match=r"start.prune needs a rule with a budget, such as 'keep', got 'dense'"):
        train(home, "keep", "rule.name=dense")
    assert not (home / "runs").exists()
    with pytest.raises(WiringError, match=r"there is nothing to prune: the budget has all [\d,]+ edges of stages"):
        train(home, "keep", "model.options.density=null")
