"""A model that is sharded over processes (FSDP2) has the same wiring as in one process, after every step.

Both processes see the same batches here, so that the mean of their gradients equals that of one process, bit for bit;
in `test_processes_with_different_data` they see different ones. Processes are started once for all cases, since that
takes longest.
"""

import os
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from soak import SOAK
from torch import Tensor, nn

import wirings
from wirings import rules
from wirings.train.distributed import leave

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:share=.(global|scaled). leaves no edges"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"),
]
STEPS = 20 if SOAK else 8
CASES = [  # rule, share, which modules are sharded separately, whether it is wired before or after sharding
    ("dnw", "uniform", "all", "before"),
    ("dnw", "uniform", "each", "after"),
    ("dnw", "global", "all", "after"),
    ("dnw", "global", "each", "before"),
    ("random", "uniform", "each", "before"),
    ("random", "global", "all", "after"),
    ("no_update", "uniform", "each", "before"),
    ("l1_anneal", "uniform", "each", "after"),
    ("l1_anneal", "global", "all", "before"),
    ("sparse_momentum", "uniform", "each", "before"),
    ("rigl", "uniform", "each", "after"),
    ("fine_tune", "erk", "each", "after"),
    ("keep", "weights", "each", "before"),  # weights: the network is sparse already, and its weights are the start
    ("keep", "weights", "all", "after"),
    ("rigl", "weights", "each", "after"),
    ("dnw", "weights", "each", "after"),
    ("dnw", "scaled", "each", "before"),
    ("soft_threshold", "scaled", "all", "after"),
    ("gmp", "scaled", "each", "after"),
]
FIXED = {"random", "expander", "fine_tune", "keep", "lottery"}
ELSEWHERE = {"dense", "str"}  # all edges; refused, see test_sharded.py
# Every other registered rule, in the most demanding layout.
CASES += [(name, "global", "each", "before") for name in rules.names() if name not in {c[0] for c in CASES} | ELSEWHERE]
OPTIONS: dict[str, dict[str, Any]] = {
    "gmp": {"every": 2},
    "l1_anneal": {"every": 2},
    "random": {"seed": 3},
    "rigl": {"every": 2},
    "soft_threshold": {"rescale": True},
    "sparse_momentum": {"every": 3},
    "top_kast": {"exploration": 0.01},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)  # uneven rows for two processes, and a single row that only the first has
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 1), nn.Linear(1, 33),
        nn.ReLU(), nn.Linear(33, 10),
    )  # fmt: skip


def shard(model: nn.Module, which: str, **more: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules() if which == "each" else ():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fully_shard(module, **more)
    fully_shard(model, **more)


def wired(rule: str, share: str, which: str | None = None, when: str = "before") -> tuple[nn.Module, wirings.Wiring]:
    model, made = network(), rules.get(rule, **OPTIONS.get(rule, {}))
    budget: dict[str, Any] = {"density": 0.2, "share": share}
    if share == "weights":
        wirings.finalize_(wirings.wire_(model, "fine_tune", density=0.2).model)
        budget = {"start": "weights"}
    if which is not None and when == "after":
        shard(model, which)
    wiring = wirings.wire_(model, made, **budget)
    if which is not None and when == "before":
        shard(model, which)
    return model, wiring


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)


def trained(model: nn.Module, wiring: wirings.Wiring, own_data: int | None = None, world: int = 1) -> dict[str, Any]:
    """Train; return the wiring after every step, and the final state of the run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    wiring.plan(STEPS)
    history, norms = [], []
    for step in range(STEPS):
        batches = [batch(step, r) for r in ([0] if own_data is None else [own_data] if world == 1 else range(world))]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(wiring.clip_grad_norm_(2.0)))
        optimizer.step()
        wiring.step(optimizer)
        history.append(wiring.masks(full=True))
    with torch.no_grad():
        model.eval()(batch(0)[0])  # leaves what the root module holds unsharded
    table = str(wiring)
    state = whole(model.state_dict())
    wirings.finalize_(model)
    with torch.no_grad():
        outputs = model(batch(0)[0])
    return {
        "history": history, "norms": norms, "table": table, "state": state, "final": whole(model.state_dict()),
        "outputs": outputs.clone(),
    }  # fmt: skip


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: getattr(value, "full_tensor", lambda v=value: v)().clone() for name, value in state.items()}


def started(rank: int, folder: str, world: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)


def train_all(rank: int, folder: str) -> None:
    started(rank, folder, 2)
    found = [trained(*wired(*case)) for case in CASES]
    model, wiring = wired("dnw", "global", "each")
    keep_statistics(model)
    torch.save((found, trained(model, wiring, own_data=rank)["history"]), f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def sharded_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """For each process, the outcomes of all cases, and its wirings when trained on its own data."""
    folder = tmp_path_factory.mktemp("fsdp")
    mp.start_processes(train_all, (str(folder),), nprocs=2, start_method=processes.METHOD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])
def test_wiring_equals_that_of_one_process(case: tuple[str, str, str, str], sharded_runs: list[Any]) -> None:
    alone = trained(*wired(*case[:2]))
    for run in (runs[CASES.index(case)] for runs, _ in sharded_runs):
        assert len(run["history"]) == STEPS
        for step, (ours, theirs) in enumerate(zip(alone["history"], run["history"], strict=True)):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), step
        assert run["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert run["table"] == alone["table"]
        for kind in ("state", "final"):
            assert run[kind].keys() == alone[kind].keys()
            for name, value in alone[kind].items():
                torch.testing.assert_close(run[kind][name], value, rtol=1e-5, atol=1e-6)
        for name in alone["history"][0]:
            assert torch.equal(run["final"][name] != 0, alone["final"][name] != 0), name
        torch.testing.assert_close(run["outputs"], alone["outputs"])
    first, last = alone["history"][0], alone["history"][-1]
    moved = any(not torch.equal(first[name], last[name]) for name in first)
    assert moved == (case[0] not in FIXED)


def keep_statistics(model: Any) -> None:
    """Keep batch norms from using batch statistics, which differ between processes."""
    model[1].eval().train = lambda mode=True: model[1]


def test_processes_with_different_data(sharded_runs: list[Any]) -> None:
    first, second = (history for _, history in sharded_runs)
    model, wiring = wired("dnw", "global")
    keep_statistics(model)
    alone = trained(model, wiring, own_data=0, world=2)["history"]
    for ours, one, other in zip(alone, first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(ours[name], one[name]) for name in one)


def test_example_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "sharded.py"

    def run(world: int, steps: int) -> str:
        outputs = [tmp_path / f"{rank}.txt" for rank in range(world)]
        words = ["--steps", str(steps), "--folder", str(tmp_path / "saved")]
        ranks = [
            processes.start(processes.script, example, *words, output=output, env=env)
            for output, env in zip(outputs, processes.rank_environments(world), strict=True)
        ]
        statuses = [processes.wait(rank) for rank in ranks]
        assert statuses == [0] * world, [output.read_text() for output in outputs]
        return outputs[0].read_text()

    assert "resuming" not in run(2, 100)
    again = run(1, 110)
    assert "resuming at step 100" in again
    assert "10,777   5.00 %" in again
    assert float(again.splitlines()[-1].removeprefix("test accuracy ").split(" %")[0]) > 85
