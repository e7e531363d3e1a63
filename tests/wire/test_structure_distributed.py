"""Groups are the same on all processes: with DDP on different data, and with FSDP2 as in one process."""

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
from wirings import rules
from wirings.train.distributed import leave

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:share=.(global|scaled). leaves no edges"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"),
]
STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "gmp": {"every": 2},
    "random": {"seed": 3},
    "rigl": {"every": 2, "fraction": 0.5},
    "set": {"every": 2, "fraction": 0.5, "seed": 3},
    "sparse_momentum": {"every": 2},
    "soft_threshold": {"rescale": True},
    "top_kast": {"exploration": 0.01},
}
CASES = [  # rule, structure, share, whether it is wired before or after it is sharded
    ("dnw", "2x3, padded", "uniform", "before"),
    ("dnw", "2x3, padded", "global", "after"),
    ("dnw", "1:2", "uniform", "after"),
    ("dnw", "column", "scaled", "before"),
    ("soft_threshold", "2x3, padded", "uniform", "before"),
    ("soft_threshold", "row", "global", "after"),
    ("top_kast", "row", "global", "before"),
    ("gmp", "2x3, padded", "uniform", "after"),
    ("rigl", "1:2", "uniform", "before"),
    ("rigl", "2x3, padded", "uniform", "after"),
    ("dnw", "1:2, transposable", "uniform", "before"),
    ("rigl", "1:2, transposable", "uniform", "after"),
    ("set", "column", "uniform", "before"),
    ("random", "2x3, padded", "global", "before"),
    ("sparse_momentum", "2x3, padded", "uniform", "before"),
]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)  # uneven rows for two processes, and a single row that only the first has
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 1), nn.Linear(1, 34),
        nn.ReLU(), nn.Linear(34, 10), wirings.StaticGraph([10, 6, 10]),
    )  # fmt: skip


def wire(model: nn.Module, rule: str, structure: str, share: str) -> wirings.Wiring:
    budget = {} if ":" in structure else {"density": 0.4, "share": share}
    skip = ["5"] if ":" in structure else []
    if "transposable" in structure:
        skip = ["0", "4", "5", "8"]  # tiles of layer 7 lie on both processes: 5 of its 10 rows on each
    made = rules.get(rule, **OPTIONS.get(rule, {}))
    wiring = wirings.wire_(model, made, structure=structure, skip=skip, **budget)
    wiring.plan(STEPS)
    return wiring


def trained(model: Any, wiring: wirings.Wiring, rank: int = 0) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator, history = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        x, y = torch.randn(8, 2, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        wiring.step(optimizer)
        history.append(wiring.masks(full=True))
    return {"history": history, "table": str(wiring)}


def sharded(rule: str, structure: str, share: str, when: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = network()
    wiring = wire(model, rule, structure, share) if when == "before" else None
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fully_shard(module)
    fully_shard(model)
    if wiring is None:
        wiring = wire(model, rule, structure, share)
    found = trained(model, wiring)
    wirings.finalize_(model)
    return found


def replicated(rank: int, rule: str, structure: str, share: str) -> dict[str, Any]:
    model = network(seed=rank)
    wiring = wire(model, rule, structure, share)
    return trained(DistributedDataParallel(model), wiring, rank)


def train_all(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = [(sharded(*case), replicated(rank, *case[:3])) for case in CASES]
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("structures")
    mp.start_processes(train_all, (str(folder),), nprocs=2, start_method=METHOD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])
def test_shards_have_the_wiring_of_one_process(case: tuple[str, str, str, str], runs: list[Any]) -> None:
    model = network()
    alone = trained(model, wire(model, *case[:3]))
    for run, _ in (both[CASES.index(case)] for both in runs):
        for step, (ours, theirs) in enumerate(zip(alone["history"], run["history"], strict=True)):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), step
        assert run["table"] == alone["table"]


@pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])
def test_replicas_have_one_wiring(case: tuple[str, str, str, str], runs: list[Any]) -> None:
    first, second = (both[CASES.index(case)][1]["history"] for both in runs)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
