"""A run's folder is locked: a second process is refused, and the first is not affected."""

import json
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import processes
import pytest
import torch.distributed as dist
from breaking import Heard

from wirings import WiringError
from wirings.train import phases, recipes
from wirings.train.run import loop
from wirings.train.settings import with_overrides
from wirings.train.sweep.plan import SweepPlan
from wirings.train.sweep.process import output_tail, start_process, train_command
from wirings.utils.locks import LOCK, held

RECIPE = "digits/static-dnw"
CHANGES = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 400, test_examples: 20}"]
CHANGES += ["batch=20", "checkpoint_every=1", "history_every=1"]


def start(out: Path, epochs: int, output: Path, env: dict[str, str] | None = None) -> BaseProcess:
    words = ["train", RECIPE, "--device", "cpu", "--out", str(out)]
    words += [word for change in (*CHANGES, f"epochs={epochs}") for word in ("--set", change)]
    return processes.start(processes.command, *words, output=output, env=env)


def said(output: Path) -> str:
    return " ".join(output.read_text().split())


def until(wanted: Any, process: BaseProcess, output: Path) -> None:
    end = time.monotonic() + 120
    while not wanted():
        assert process.is_alive(), output.read_text()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_refuses_a_second_process(tmp_path: Path) -> None:
    out, outputs = tmp_path / "run", [tmp_path / f"{i}.txt" for i in range(2)]
    first = start(out, 200, outputs[0])
    try:
        until((out / "last.safetensors").exists, first, outputs[0])
        holder = json.loads((out / LOCK).read_text())
        assert holder["pid"] == first.pid
        second = start(out, 200, outputs[1])
        assert processes.wait(second) == 1
        assert f"is in use by process {first.pid} on " in said(outputs[1])
        assert said(outputs[1]).endswith("Wait until it ends, stop it, or give another --out.")
        settings = with_overrides(recipes.get(RECIPE).settings, [*CHANGES, "epochs=200"])[0]
        with pytest.raises(WiringError, match=f"is in use by process {first.pid} on "):
            loop.train(RECIPE, settings, out, device="cpu", resume=True)
        assert first.is_alive()
    finally:
        first.kill()
        first.join()
    log = Heard()
    assert loop.train(RECIPE, settings, out, device="cpu", resume=True, max_minutes=0, log=log) is None
    assert not any("history" in text for text in log.said)
    assert not (out / LOCK).exists()


def test_a_sweep_hands_its_lock_to_the_run(tmp_path: Path) -> None:
    (run,) = SweepPlan([RECIPE], [0], [[change] for change in (*CHANGES, "epochs=1")]).runs()
    words = train_command(run, tmp_path, device="cpu")
    folder = tmp_path / run.path
    process = start_process(words, folder, {})
    assert process is not None
    assert start_process(words, folder, {}) is None
    assert process.wait() == 0, output_tail(folder)
    assert (folder / "result.json").exists()
    assert not (folder / LOCK).exists()


def test_both_phases_lock_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["start.recipe=digits/static-dnw", "rule.name=fine_tune", "epochs=1", *CHANGES]
    settings, overrides = with_overrides(recipes.get(RECIPE).settings, changes)
    out, first = tmp_path / "second", tmp_path / RECIPE / "seed0"
    seen: list[tuple[str, bool, bool]] = []
    inner = loop.Run.train

    def watched(self: loop.Run, *arguments: Any) -> Any:
        seen.append((self.folder.name, (out / LOCK).exists(), (first / LOCK).exists()))
        return inner(self, *arguments)

    monkeypatch.setattr(loop.Run, "train", watched)
    with held(first, print), pytest.raises(WiringError, match=f"seed0 is in use by process {os.getpid()} "):
        phases.train("second", settings, out, device="cpu", overrides=overrides)
    assert seen == []
    assert phases.train("second", settings, out, device="cpu", overrides=overrides) is not None
    assert seen == [("seed0", True, True), ("second", True, False)]
    assert not list(tmp_path.rglob(LOCK))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_all_ranks_stop_if_the_folder_is_locked(tmp_path: Path) -> None:
    out, outputs = tmp_path / "run", [tmp_path / f"{i}.txt" for i in range(2)]
    out.mkdir()
    with held(out, print):
        environments = processes.rank_environments(2)
        ranks = [start(out, 1, output, env) for output, env in zip(outputs, environments, strict=True)]
        assert [processes.wait(rank, 120) for rank in ranks] == [1, 1]
    assert f"is in use by process {os.getpid()} on " in said(outputs[0])
    assert f"Error: process 1 of 2 stops because rank 0 cannot use {out}." in said(outputs[1])
    assert not list(out.iterdir())


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("precious")
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / LOCK
    for make in (lambda: lock.symlink_to(other), lambda: os.mkfifo(lock)):
        make()
        with pytest.raises(WiringError, match=r"\.lock is not a regular file\. Remove it"), held(lock.parent, print):
            pass
        lock.unlink()
    assert other.read_text() == "precious"
