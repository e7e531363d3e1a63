"""Trained networks that come with the package."""

from pathlib import Path

import pytest
import torch

from wirings import WiringError, models
from wirings.train import bundled
from wirings.train import saved_runs as runs
from wirings.train.run import checkpoint
from wirings.utils.cache import cache_folder


def test_opens_by_name() -> None:
    path = bundled.path_of("table1/static-dnw")
    assert path.stat().st_size < 1_000_000
    model, settings, name, _ = runs.open_run("table1/static-dnw", device="cpu")
    assert (name, settings.model.name, settings.rule.name) == ("table1/static-dnw", "tiny_static", "dnw")
    assert isinstance(model.graph.weight, torch.nn.Parameter)  # finalized
    assert model.paper_parameters()["total"] == 41_458
    assert model.graph.longest_path() == 5
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert 80 < checkpoint.read(path)[1]["accuracy"] < 82


def test_reaches_the_accuracy_in_its_header() -> None:
    if not (cache_folder() / "cifar10.npy").exists():
        pytest.skip("CIFAR-10 is not in the cache; `wirings data cifar10` puts it there")
    said = checkpoint.read(bundled.path_of("table1/static-dnw"))[1]["accuracy"]
    _, accuracy, _ = runs.measure("table1/static-dnw", device="cpu")
    assert abs(accuracy - said) < 0.2  # half precision rounds differently on other devices


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.get("digits_static", rule="dnw").eval()
    x = torch.randn(3, 1, 8, 8)
    before = model(x)
    path = bundled.save_sparse(model, tmp_path / "kept.safetensors", {"recipe": "digits/static-dnw"})
    other = models.get("digits_static", rule="random").eval()
    assert bundled.load_into(other, path)["recipe"] == "digits/static-dnw"
    assert torch.equal(other(x), before)
    assert int(other.graph.weight.count_nonzero()) == 200


def test_rejects_unknown_names() -> None:
    with pytest.raises(WiringError, match="comes with the package \\(table1/static-dnw\\)"):
        runs.open_run("table1/static-dnv")
    with pytest.raises(WiringError, match="unknown trained network"):
        bundled.path_of("table9/x")
