"""Two processes that train on different data hold bit-identical wirings after every step."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wirings
from wirings.train.distributed import leave


def _worker(rank: int, folder: str, rule: str, share: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(rank)  # other weights, another random graph and other data on each: DDP must make them one
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    made = wirings.rules.get(rule, **({"every": 2} if rule in ("set", "rigl") else {}))
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
    torch.save(
        {"history": history, "weights": [layer.weight.detach() for layer in wiring.layers], "x": x},
        f"{folder}/{rank}.pt",
    )
    leave()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(
    ("rule", "share"),
    [
        ("dnw", "uniform"),
        ("dnw", "global"),
        ("random", "uniform"),
        ("l1_anneal", "uniform"),
        ("sparse_momentum", "uniform"),
        ("soft_threshold", "global"),
        ("top_kast", "global"),
        ("str", "uniform"),
        ("set", "uniform"),
        ("rigl", "uniform"),
    ],
)
def test_replicas_hold_the_same_wiring_after_every_step(rule: str, share: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(_worker, (folder, rule, share), nprocs=2)
        first, second = (torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert not torch.equal(first["x"], second["x"]), "they saw different data"
    assert len(first["history"]) == 8
    for a, b in zip(first["history"], second["history"], strict=True):
        assert a.keys() == b.keys() == {"0.weight", "4.weight"}
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert sum(int(mask.sum()) for mask in a.values()) == (295 if share == "global" else 7 + 288)
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)
    swapped = any(
        not torch.equal(first["history"][0][name], first["history"][-1][name]) for name in first["history"][0]
    )
    assert swapped == (rule != "random")
