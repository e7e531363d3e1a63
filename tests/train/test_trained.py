"""Trained networks that come with the package: small, plain, and what they say they are."""

from pathlib import Path

import pytest
import torch

from wirings import WiringError, models
from wirings.train import bundled, checkpoint, runs
from wirings.utils.cache import cache_folder


def test_the_tiny_static_network_opens_by_name() -> None:
    path = bundled.path_of("table1/static-dnw")
    assert path.stat().st_size < 1_000_000
    model, settings, name, _ = runs.open_run("table1/static-dnw", device="cpu")
    assert (name, settings.model.name, settings.rule.name) == ("table1/static-dnw", "tiny_static", "dnw")
    assert isinstance(model.graph.weight, torch.nn.Parameter)  # plain: finalized
    assert model.paper_parameters()["total"] == 41_458
    assert model.graph.longest_path() == 5
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert 80 < checkpoint.read(path)[1]["accuracy"] < 82


def test_it_reaches_what_it_says() -> None:
    if not (cache_folder() / "cifar10.npy").exists():
        pytest.skip("CIFAR-10 is not in the cache; `wirings data cifar10` puts it there")
    said = checkpoint.read(bundled.path_of("table1/static-dnw"))[1]["accuracy"]
    _, accuracy, _ = runs.measure("table1/static-dnw", device="cpu")
    assert abs(accuracy - said) < 0.2  # half precision rounds otherwise on another device


def test_keep_and_load_give_the_same_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.get("digits_static", rule="dnw").eval()
    x = torch.randn(3, 1, 8, 8)
    before = model(x)
    path = bundled.keep(model, tmp_path / "kept.safetensors", {"recipe": "digits/static-dnw"})
    other = models.get("digits_static", rule="random").eval()
    assert bundled.load_into(other, path)["recipe"] == "digits/static-dnw"
    assert torch.equal(other(x), before)
    assert int(other.graph.weight.count_nonzero()) == 200


def test_names_that_do_not_exist() -> None:
    with pytest.raises(WiringError, match="comes with the package: table1/static-dnw"):
        runs.open_run("table1/static-dnv")
    with pytest.raises(WiringError, match="unknown trained network"):
        bundled.path_of("table9/x")
