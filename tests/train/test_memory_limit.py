"""Settings that name a network larger than this machine's memory are refused before the network is made."""

from typing import Any

import pytest
import torch
from torch import nn

from wirings import WiringError, wire_
from wirings.train import recipes
from wirings.train.build import build
from wirings.train.distributed import ProcessContext
from wirings.train.memory_limit import MemoryLimit
from wirings.train.settings import with_overrides
from wirings.utils.memory import installed_memory

LARGE = "the model takes more memory than the .* GiB of this machine. Make it smaller: see model.options"


def own_model(classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, classes)
    )


def made(*changes: str) -> nn.Module:
    settings, _ = with_overrides(recipes.get("digits/static-dnw").settings, changes)
    return build(settings, 10, ProcessContext(0, 1, torch.device("cpu")))[0]


@pytest.mark.parametrize(
    "changes",
    [
        ("model.name=gpt", "model.options={width: 4000000, heads: 2, layers: 2, context: 8}"),
        (f"model.name={__name__}:own_model", "model.options={width: 1000000, density: 0.1}"),
    ],
)
def test_refuses_networks_that_memory_cannot_hold(changes: tuple[str, ...]) -> None:
    assert installed_memory() < 4 * 10**12
    with pytest.raises(WiringError, match=LARGE):
        made(*changes)


def test_counts_all_tensors_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_with(memory: int) -> Any:
        monkeypatch.setattr("wirings.train.memory_limit.installed_memory", lambda: memory)
        with MemoryLimit():
            return wire_(nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(20))), "dnw", density=0.1)

    assert build_with(20 * 40_000).layers
    with pytest.raises(WiringError, match=LARGE):
        build_with(9 * 40_000)
    assert torch.zeros(10**6).numel() == 10**6, "nothing is left behind"


def test_draws_the_same_weights() -> None:
    torch.manual_seed(0)
    expected = own_model(10, 20).state_dict()
    torch.manual_seed(0)
    with MemoryLimit():
        found = own_model(10, 20).state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
