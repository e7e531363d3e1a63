"""Two processes that train on different data hold bit-identical wirings after every step."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import METHOD
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wirings
from wirings.train.distributed import leave

CASES = [
    ("dnw", "uniform"),
    ("dnw", "global"),
    ("random", "uniform"),
    ("l1_anneal", "uniform"),
    ("sparse_momentum", "uniform"),
    ("soft_threshold", "global"),
    ("soft_threshold", "scaled"),
    ("top_kast", "global"),
    ("str", "uniform"),
    ("set", "uniform"),
    ("rigl", "uniform"),
    ("keep", "uniform"),
    ("dnw", "bounded"),
    ("dnw", "start"),
    ("rigl", "start"),
]


def train_all(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save([trained(rank, *case) for case in CASES], f"{folder}/{rank}.pt")
    leave()


def trained(rank: int, rule: str, share: str) -> dict[str, Any]:
    """Train on this process's data; returns the wiring after every step, the weights and the last batch."""
    torch.manual_seed(rank)  # weights, graph and data differ between processes: DDP must synchronize them
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    made = wirings.rules.get(rule, **({"every": 2} if rule in ("set", "rigl") else {}))
    if made.own_budget or share == "start":
        wirings.finalize_(wirings.wire_(model, "random", density=0.1).model)  # a network that is sparse already
        wiring = wirings.wire_(model, made, start="weights")
    elif share == "bounded":  # the first ranking, of weights that still differ, is made again
        made = wirings.rules.get(rule, schedule={"end": 0.5})
        wiring = wirings.wire_(model, made, k=295, mult_adds=1200, example_input=(1, 8, 8), share="scaled")
    else:
        wiring = wirings.wire_(model, made, density=0.1, share=share)
    wiring.plan(8)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5, momentum=0.9)
    history = []
    for _ in range(8):
        x, y = torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()
        wiring.step(optimizer)
        history.append(wiring.masks())
    return {"history": history, "weights": [layer.weight.detach().clone() for layer in wiring.layers], "x": x}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The outcomes of all cases on both processes, which are started once, since that takes longest."""
    folder = tmp_path_factory.mktemp("ddp")
    mp.start_processes(train_all, (str(folder),), nprocs=2, start_method=METHOD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(("rule", "share"), CASES)
def test_replicas_hold_the_same_wiring_after_every_step(rule: str, share: str, replicas: Any) -> None:
    first, second = (outcomes[CASES.index((rule, share))] for outcomes in replicas)
    assert not torch.equal(first["x"], second["x"]), "they saw different data"
    assert len(first["history"]) == 8
    for step, (a, b) in enumerate(zip(first["history"], second["history"], strict=True), 1):
        assert a.keys() == b.keys() == {"0.weight", "4.weight"}
        assert all(torch.equal(a[name], b[name]) for name in a)
        if share != "bounded" or step >= 4:  # the end of its schedule
            assert sum(int(mask.sum()) for mask in a.values()) == 295
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)
    swapped = any(
        not torch.equal(first["history"][0][name], first["history"][-1][name]) for name in first["history"][0]
    )
    assert swapped == (rule not in ("random", "keep"))
