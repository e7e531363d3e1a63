"""DDP and FSDP2 train the same whether the weights of all layers are made at once or one by one."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import METHOD
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wirings
from wirings.selection import passes
from wirings.train.distributed import leave

CASES = [(kind, rule, share) for kind in ("ddp", "fsdp") for rule in ("dnw", "soft_threshold", "top_kast", "set")
         for share in ("uniform", "global")]  # fmt: skip
CASES += [("ddp", "str", "uniform"), ("ddp", "str", "global")]  # it is refused with FSDP


def train_all(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    made, plain = 0, passes.kept_of

    def counted(*args: object) -> object:
        nonlocal made
        made += 1
        return plain(*args)  # type: ignore[arg-type]

    passes.kept_of = counted  # type: ignore[assignment]
    found = []
    for case in CASES:
        passes.DEVICES = ()
        alone, made = losses(rank, *case), 0
        passes.DEVICES = ("cpu",)
        found.append((alone, losses(rank, *case), made))
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


def losses(rank: int, kind: str, rule: str, share: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    made = wirings.rules.get(rule, **({"every": 2, "seed": 0} if rule == "set" else {}))
    wiring = wirings.wire_(model, made, density=0.3, share=share)
    wiring.plan(4)
    used: nn.Module = model
    if kind == "ddp":
        used = DistributedDataParallel(model)
    else:
        for part in (*model[::2], model):
            fully_shard(part)
    optimizer = torch.optim.SGD(used.parameters(), 0.1, 0.9)
    found = []
    for step in range(4):
        torch.manual_seed(2 * step + rank)
        loss = used(torch.randn(5, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wiring.step(optimizer)
        found.append(loss.item())
    return found


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.filterwarnings("ignore:share=.global. leaves no edges")
def test_training_equals_layer_by_layer(tmp_path: Path) -> None:
    mp.start_processes(train_all, (str(tmp_path),), nprocs=2, start_method=METHOD)
    for rank in range(2):
        for (kind, _, share), (alone, at_once, made) in zip(CASES, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert at_once == alone
            # FSDP has one whole weight at a time; layers of a shared budget are then ranked as shards.
            assert made == (4 if kind == "ddp" else 12 if share == "uniform" else 0)
