"""Sharded weights: which edges are chosen, checkpoints across layouts, and layouts that are rejected.

An assertion that fails in a process ends all of them, which the parent reports. Two processes are started once for all
checks that need two.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import METHOD
from torch import Tensor, nn

import wirings
from wirings import WiringError, finalize_, rules
from wirings.selection import functional as edges
from wirings.selection import sharded
from wirings.train.distributed import leave

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"),
]


def started(rank: int, folder: str, world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    return init_device_mesh("cpu", (world,))


# ---- which edges are chosen ------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[list[Tensor], list[Tensor | None], int]:
    """Weights of unusual shapes with many ties, some with edges that are not allowed, and how many edges to choose."""
    torch.manual_seed(seed)
    dtype = [torch.float32, torch.float64, torch.float16, torch.bfloat16][seed % 4]
    shapes = [(5, 4), (1, 7), (2, 3, 3), (11,), (4, 1), (6, 2)]
    weights: list[Tensor] = []
    for shape in shapes[: 1 + seed % len(shapes)]:
        weight = torch.randn(shape, dtype=torch.float64)
        weight = weight.round(decimals=seed % 3) if seed % 5 else torch.zeros(shape)
        weights.append(weight.to(dtype))
    if seed % 7 == 0:
        weights[0].view(-1)[:2] = torch.tensor([float("nan"), float("inf")])
    allowed = [torch.rand(w.shape) > 0.3 if (seed + i) % 3 == 0 else None for i, w in enumerate(weights)]
    possible = sum(w.numel() if a is None else int(a.sum()) for w, a in zip(weights, allowed, strict=True))
    return weights, allowed, [0, possible, possible // 2, max(possible // 7, 1), 1][seed % 5]


def choices(rank: int, folder: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = started(rank, folder, 3)
    for seed in range(40):
        weights, allowed, k = drawn(seed)
        row = torch.cat([w.reshape(-1) for w in weights])
        among = torch.cat([
            (torch.ones_like(w, dtype=torch.bool) if a is None else a).reshape(-1)
            for w, a in zip(weights, allowed, strict=True)
        ])  # fmt: skip
        wanted = edges.choose(row, k, among).split([w.numel() for w in weights])
        # The second is whole on every process, as if FSDP has just gathered it; the third is replicated.
        kinds = [None if i == 1 else Replicate() if i == 2 else Shard(0) for i in range(len(weights))]
        parts = [
            w if kind is None else distribute_tensor(w, mesh, [kind]) for w, kind in zip(weights, kinds, strict=True)
        ]
        cut = sharded.Cut.find(parts, torch.tensor(k), allowed)
        for i, (part, mask) in enumerate(zip(parts, wanted, strict=True)):
            found = cut.mask(i, part, allowed[i])
            assert sharded.is_sharded(found) == sharded.is_sharded(part)
            assert torch.equal(sharded.whole(found), mask.view(part.shape)), (seed, i)
        alone = min(k, weights[0].numel() if allowed[0] is None else int(allowed[0].sum()))
        found = edges.choose(parts[0], alone, allowed[0])
        assert torch.equal(sharded.whole(found), edges.choose(weights[0], alone, allowed[0])), seed
    weight = distribute_tensor(torch.arange(1.0, 13.0).view(6, 2), mesh, [Shard(0)])
    with pytest.raises(WiringError, match="only 2 are allowed"):
        edges.choose(weight, 3, torch.arange(12).view(6, 2) < 2)
    weight.requires_grad_()
    kept = edges.real_edges(weight, 3)
    assert kept.full_tensor().count_nonzero() == 3  # type: ignore[attr-defined]
    kept.sum().backward()
    assert torch.equal(weight.grad.full_tensor(), torch.ones(6, 2))  # type: ignore[union-attr]
    with sharded.on_shards(), torch.no_grad():
        assert float(weight.sum()) == 78, "numbers are those of the whole tensor"
        assert int(torch.count_nonzero(torch.where(torch.arange(12).view(6, 2) > 3, weight, 0.0))) == 8
        note = torch.zeros(6, 2)
        note.copy_(weight.detach())
        assert torch.equal(note, torch.arange(1.0, 13.0).view(6, 2))
    leave()


def test_the_same_edges_are_chosen(tmp_path: Path) -> None:
    mp.start_processes(choices, (str(tmp_path),), nprocs=3, start_method=METHOD)


# ---- checkpoints -----------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 5))


def make(kind: str, rule: str, seed: int) -> tuple[nn.Module, wirings.Wiring]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = network()
    wiring = wirings.wire_(model, rule, density=0.3)
    if kind == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    return model, wiring


def train(model: nn.Module, wiring: wirings.Wiring, kind: str, steps: int) -> dict[str, Tensor]:
    used = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wiring.plan(20)
    for step in range(steps):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        used(x).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
    return wiring.masks(full=True)


def checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    options = states.StateDictOptions(full_state_dict=True)
    for rule in ("dnw", "random", "l1_anneal"):
        for first in ("alone", "ddp", "fsdp"):
            model, wiring = make(first, rule, seed=1)
            train(model, wiring, first, 4)
            whole = states.get_model_state_dict(model, options=options)
            assert list(network().state_dict()) == [name for name in whole if ".wiring." not in name]
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{rule}-{first}")
            for second in ("alone", "ddp", "fsdp"):
                for how in ("whole", "files"):
                    other, again = make(second, rule, seed=2)
                    if how == "whole":
                        states.set_model_state_dict(other, dict(whole), options=options)
                    else:
                        state = {"model": other.state_dict()}
                        dcp.load(state, checkpoint_id=f"{folder}/{rule}-{first}")
                        other.load_state_dict(state["model"])
                    again.load_state_dict(wiring.state_dict())
                    ours, theirs = wiring.masks(full=True), again.masks(full=True)
                    assert all(torch.equal(ours[name], theirs[name]) for name in ours), (rule, first, second, how)
            twin, again = make("alone", rule, seed=2)
            twin.load_state_dict(whole)
            again.load_state_dict(wiring.state_dict())
            ours, theirs = train(model, wiring, first, 4), train(twin, again, "alone", 4)  # continue identically
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), (rule, first)


# ---- what is rejected, and what is not -------------------------------------------------------------------------


def layouts(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    def refused(match: str, do: Callable[[nn.Sequential], Any]) -> None:
        torch.manual_seed(0)
        with pytest.raises(WiringError, match=match):
            do(network())

    def columns(model: nn.Sequential) -> Any:
        return fully_shard(model[0], shard_placement_fn=lambda p: Shard(1) if p.shape == (9, 12) else None)

    def half(model: nn.Sequential) -> None:
        wiring = wirings.wire_(model, density=0.3)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        wiring.step()

    def elsewhere(model: nn.Sequential) -> None:
        fully_shard(model)
        wirings.wire_(model[0], density=0.3)

    def otherwise_seeded(model: nn.Sequential) -> None:
        torch.manual_seed(rank)
        wirings.wire_(fully_shard(model), "random", density=0.3)

    refused(
        r"weight of shape \(9, 12\) is laid out as \(Shard\(dim=1\)", lambda m: wirings.wire_(columns(m), density=0.3)
    )
    refused("MixedPrecisionPolicy of fully_shard casts it to torch.bfloat16", half)
    refused("not by fully_shard on this FSDPLinear or|not by fully_shard on this Linear or", elsewhere)
    refused("is not the same on all processes", otherwise_seeded)

    def otherwise_seeded_replicas(model: nn.Sequential) -> None:
        torch.manual_seed(rank)
        wiring = wirings.wire_(model, "random", density=0.3)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
        wiring.step()

    def never_asked(model: nn.Sequential) -> None:
        torch.manual_seed(rank)
        wirings.wire_(model, "random", density=0.3)
        wirings.finalize_(fully_shard(model))

    for do in (otherwise_seeded_replicas, never_asked):
        refused("is not the same on all processes", do)

    def asked_half_way(model: nn.Sequential) -> None:
        wiring = wirings.wire_(model, density=0.3)
        fully_shard(model[0])
        wiring.look()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        wiring.step()

    refused("MixedPrecisionPolicy of fully_shard casts it to torch.bfloat16", asked_half_way)

    def older(model: nn.Sequential, whole: bool, use: Callable[[wirings.Wiring, nn.Module], object]) -> None:
        wiring = wirings.wire_(model, density=0.3)
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=whole)
        use(wiring, model)

    for whole in (False, True):
        for use in (lambda wiring, _: wiring.step(), lambda wiring, _: wiring.masks(), lambda _, m: finalize_(m)):
            refused("use torch.distributed.fsdp.fully_shard", lambda m, w=whole, u=use: older(m, w, u))
    wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(WiringError, match="is wrapped in FullyShardedDataParallel, which flattens all"):
        wirings.wire_(wrapped, density=0.5)

    # Restore earlier weights: those of the sharded model, and those from before it was sharded.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    first = copy.deepcopy(model.state_dict())
    wiring = wirings.wire_(model, density=0.5)
    fully_shard(model)
    second = copy.deepcopy(model.state_dict())
    for state in (first, second):
        before = wiring.masks(full=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        wirings.rewind_(model, state)
        found = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert all(torch.equal(found[name], first[name]) for name in first)
        assert all(torch.equal(mask, before[name]) for name, mask in wiring.masks(full=True).items())
    with pytest.raises(WiringError, match=r"is sharded over processes. Load the full weights"):
        wirings.compact(model, torch.zeros(1, 5))
    refused("is the model's own tensor", lambda m: wirings.rewind_(fully_shard(m), m.state_dict()))
    refused(
        "a history can only be recorded in one process",
        lambda m: wirings.Recorder(wirings.wire_(fully_shard(m), density=0.3)),
    )

    def later(model: nn.Sequential) -> None:  # wired first, then sharded by columns
        wiring = wirings.wire_(model, rules.get("random", seed=0), density=0.3)
        columns(model)
        wiring.step()

    refused(r"0\.weight .* laid out as \(Shard\(dim=1\)", later)

    def own_numbers(model: nn.Sequential) -> None:
        wirings.wire_(fully_shard(model), "str", density=0.3)

    def own_numbers_first(model: nn.Sequential) -> None:
        wiring = wirings.wire_(model, "str", density=0.3)
        wiring.step(torch.optim.SGD(fully_shard(model).parameters(), lr=0.1))

    for do in (own_numbers, own_numbers_first):
        refused("rule 'str' has parameters of its own beside the weights", do)

    # A structure whose groups are ranked separately.
    ours, theirs = (nn.Linear(8, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    ours_wiring, theirs_wiring = (wirings.wire_(m, structure="2:4") for m in (ours, fully_shard(theirs)))
    assert torch.equal(ours_wiring.masks()["weight"], theirs_wiring.masks(full=True)["weight"])

    # A mesh of two dimensions, over one of which everything is replicated, is supported.
    alone = train(*make("alone", "dnw", seed=1), "alone", 4)
    for shape in ((1, 2), (2, 1)):
        model, wiring = make("alone", "dnw", seed=1)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))
        found = train(model, wiring, "fsdp", 4)
        assert all(torch.equal(alone[name], found[name]) for name in alone), shape
    # A weight that is tied, and a model that is wired, sharded, unwired and wired again.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    wirings.wire_(model, density=0.5)
    fully_shard(model)
    wirings.unwire_(model)
    assert type(model).__name__ == "FSDPSequential"
    wiring = wirings.wire_(model, density=0.5)
    train_twice = [model(torch.ones(2, 6)).sum().backward() for _ in range(2)]
    assert len(train_twice) == 2
    assert model[0].parametrizations.weight.original is model[1].parametrizations.weight.original
    assert len(wiring.layers) == 1
    wirings.finalize_(model)
    assert model[0].weight.full_tensor().count_nonzero() == 18
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


# ---- the two processes -----------------------------------------------------------------------------------------


def check_all(rank: int, folder: str) -> None:
    """Run both checks. Each writes a file when it has passed, which shows which one failed."""
    started(rank, folder, 2)
    checkpoints(folder)
    Path(folder, f"checkpoints{rank}").touch()
    layouts(rank)
    Path(folder, f"layouts{rank}").touch()
    leave()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exception | None]:
    """The folder with a file for each check that passed, and the error that ended the processes, if any."""
    folder = tmp_path_factory.mktemp("sharded")
    try:
        mp.start_processes(check_all, (str(folder),), nprocs=2, start_method=METHOD)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return folder, error
    return folder, None


def passed(check: str, outcome: tuple[Path, Exception | None]) -> None:
    folder, error = outcome
    assert all((folder / f"{check}{rank}").exists() for rank in range(2)), error


def test_checkpoints_load_across_layouts(two_processes: tuple[Path, Exception | None]) -> None:
    passed("checkpoints", two_processes)


def test_supported_and_rejected_layouts(two_processes: tuple[Path, Exception | None]) -> None:
    passed("layouts", two_processes)
    assert two_processes[1] is None
