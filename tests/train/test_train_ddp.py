"""Two processes train like one: the same loss, one wiring, one writer; if one dies, the other stops.

Starting processes takes longest, so one pair of them trains all cases, after those that die in the middle.
"""

import csv
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import processes
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from wirings import History, choose
from wirings.train import phases, recipes, results
from wirings.train.distributed import leave
from wirings.train.run import checkpoint, loop
from wirings.train.run.folder import HISTORY
from wirings.train.run.log import Log
from wirings.train.settings import Settings, StartSettings, with_overrides

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"),
]
RECIPE = "digits/static-dnw"
CHANGES = {
    # 20 steps; the last one of an epoch has 3 examples, 2 and 1 on the two ranks
    "plain": ["epochs=4", "data.options={shape: [1, 8, 8], examples: 99, test_examples: 41}", "batch=24"],
    "dies": [
        "epochs=3",
        "data.options={shape: [1, 8, 8], examples: 50, test_examples: 41}",
        "batch=20",
        "checkpoint_every=1",
    ],
}
CHANGES["ticket"] = ["epochs=2", *CHANGES["plain"][1:]]
CHANGES["parts"] = [*CHANGES["plain"], "accumulate=4", "ema=0.9", "checkpoint_every=3"]


def settings_of(case: str) -> Settings:
    pinned = ["data.name=synthetic", "optimizer.lr=0.3", "optimizer.momentum=0.9", "clip=1", "history_every=1"]
    return with_overrides(recipes.get(RECIPE).settings, [*pinned, *CHANGES[case]])[0]


def work(case: str, folder: Path, death: int) -> None:
    """Train and save the outcome in ``folder``; the second process dies after ``death`` batches."""
    kept = {}
    build = loop.build

    def spy(*args: object) -> object:
        kept["model"], kept["wiring"] = build(*args)  # type: ignore[arg-type]
        return kept["model"], kept["wiring"]

    loop.build = spy  # type: ignore[assignment]
    folder, rank = folder / case, int(os.environ["RANK"])

    class Dies(Log):
        done = 0

        def batch(self, done: int) -> None:
            self.done += 1
            if rank == 1 and self.done == death:
                os._exit(9)

    settings, out = settings_of(case), folder / f"run{rank}"
    if case == "ticket":
        rule, first = replace(settings.rule, name="lottery"), StartSettings(str(folder / "complete.yaml"), "initial")
        settings = replace(settings, rule=rule, start=first)
        phases.train(
            "ticket", settings, out, device="cpu", resume=True, overrides={"epochs": 2, "batch": 24}, log=Dies()
        )
    else:
        loop.train(RECIPE, settings, out, device="cpu", resume=True, log=Dies())
    state = {name: value.detach() for name, value in kept["model"].state_dict().items()}
    torch.save({"masks": kept["wiring"].masks(), "state": state}, folder / f"{rank}.pt")
    loop.build = build


def work_all(cases: list[str], folder: Path, death: int) -> None:
    for case in cases:
        work(case, folder, death)
    leave()
    assert not dist.is_initialized()


def start_two(cases: list[str], folder: Path, death: int = -1) -> list[tuple[int | None, str]]:
    """Train on two processes, case by case. Returns the exit status and the errors of both."""
    for case in cases:
        if not (folder / case).exists():
            (folder / case).mkdir()
            (folder / case / "run1").symlink_to(folder / case / "run0")  # one folder, as with torchrun
    outputs = [folder / f"output{rank}.txt" for rank in range(2)]
    ranks = [
        processes.start(work_all, cases, folder, death, output=output, env=env)
        for output, env in zip(outputs, processes.rank_environments(2), strict=True)
    ]
    statuses = [processes.wait(rank, 120) for rank in ranks]
    return [(status, output.read_text()) for status, output in zip(statuses, outputs, strict=True)]


class Trained(NamedTuple):
    """The results of two processes for all cases, in a folder each, and for those whose second process died."""

    folder: Path
    dead: Path
    deaths: dict[str, list[tuple[int | None, str]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("ddp") / "runs"
    dead = folder.with_name("dead")
    (folder / "ticket").mkdir(parents=True)
    (folder / "ticket" / "run1").symlink_to(folder / "ticket" / "run0")
    (folder / "ticket" / "complete.yaml").write_text(f"base: {RECIPE}\nrule: {{name: dense}}\n")
    # The ticket's first phase has 10 batches; the other case is in its second epoch.
    deaths = {case: start_two([case], folder, death) for case, death in (("ticket", 8), ("dies", 5))}
    shutil.copytree(folder, dead, symlinks=True)
    ended = start_two(list(CHANGES), folder)
    assert [status for status, _ in ended] == [0, 0], ended
    return Trained(folder, dead, deaths)


def test_torchrun_starts_the_command_line(tmp_path: Path) -> None:
    changes = ["epochs=1", "batch=24", "data.name=synthetic", "data.options={examples: 96}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "wirings"]
    command += ["train", "table1/static-random", "--device", "cpu", "--out", str(tmp_path / "run")]
    command += [word for change in changes for word in ("--set", change)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert results.read(tmp_path / "run" / "result.json").steps == 4
    assert done.stdout.count("see ") == 1, "only one process prints"


def same_log(one: Path, other: Path) -> None:
    tables = [list(csv.DictReader((out / "log.csv").read_text().splitlines())) for out in (one, other)]
    for a, b in zip(*tables, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            assert float(a[key]) == pytest.approx(float(b[key]), rel=1e-4), key
    # The history has the mean loss over both processes, before and after a run is resumed.
    (steps, losses), (same_steps, expected) = (History.load(out / HISTORY).series("loss") for out in (one, other))
    assert steps.tolist() == same_steps.tolist() == list(range(1, len(steps) + 1))
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("case", ["plain", "parts"])
def test_two_processes_train_as_one(case: str, trained: Trained, tmp_path: Path) -> None:
    alone = loop.train(RECIPE, settings_of(case), tmp_path / "alone", device="cpu")
    assert alone is not None
    assert alone.steps == 20
    both = trained.folder / case / "run0"
    assert not list(both.glob(".*"))
    same_log(both, tmp_path / "alone")
    first, second = (torch.load(trained.folder / case / f"{rank}.pt", weights_only=True) for rank in range(2))
    for kind in ("masks", "state"):
        assert all(torch.equal(first[kind][name], second[kind][name]) for name in first[kind])
    ours, theirs = (load_file(out / "last.safetensors") for out in (both, tmp_path / "alone"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name.startswith(("model.", "average.")):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
        if name.startswith("seen."):  # the wiring, bit for bit
            assert torch.equal(ours[name], theirs[name])


def test_two_phases_resume_in_the_first(trained: Trained) -> None:
    complete = trained.dead / "ticket" / "complete" / "seed0"
    assert (complete / "last.safetensors").exists()
    assert not (complete / "result.json").exists()
    folder = trained.folder / "ticket"
    assert results.read(folder / "run0" / "result.json").steps == 10
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    for kind in ("masks", "state"):
        assert all(torch.equal(first[kind][name], second[kind][name]) for name in first[kind])
    weight = load_file(folder / "complete" / "seed0" / "last.safetensors")["model.graph.weight"]
    assert torch.equal(first["masks"]["weight"], choose(weight, 200))


def test_stops_if_a_process_dies_and_can_be_resumed(trained: Trained, tmp_path: Path) -> None:
    (first, error), (second, _) = trained.deaths["dies"]
    assert second == 9
    assert first not in (0, None)
    assert "process 0 of 2 stops because another process ended" in error
    assert "Start all processes again with --resume" in error
    tensors, about = checkpoint.read(trained.dead / "dies" / "run0" / "last.safetensors")
    assert about["progress"]["steps"] == 4
    assert all(value.isfinite().all() for value in tensors.values())
    loop.train(RECIPE, settings_of("dies"), tmp_path / "alone", device="cpu")
    same_log(trained.folder / "dies" / "run0", tmp_path / "alone")
