"""SIGTERM and Ctrl-C: a run saves a checkpoint, says how to continue, and exits with the signal's status."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import typer
from breaking import Heard, same_runs
from PIL import Image
from test_resume import RECIPE, small, train

from wirings.__main__ import main
from wirings.train.run import checkpoint
from wirings.utils import signals as stop_signals
from wirings.utils.signals import REPEATED, StopSignals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

TINY = ["epochs=4", "data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}"]
TINY += ["batch=20", "checkpoint_epochs=4", "rule.name=sparse_momentum", "rule.options={every: 2}"]
RESUME = "with --resume, at epoch 2, batch 3."


def command(out: Path, *more: str, changes: list[str] = TINY) -> list[str]:
    words = ["train", RECIPE, "--device", "cpu", "--out", str(out), *more]
    return words + [word for change in changes for word in ("--set", change)]


def train_with_signals(at: int, send: Callable[[], None], words: list[str]) -> None:
    """Train in this process, and call a function after batch ``at`` of all epochs."""
    from wirings.train.run.log import ConsoleLog

    seen = []

    def batch(self: ConsoleLog, done: int) -> None:
        seen.append(done)
        if len(seen) == at:
            send()

    ConsoleLog.batch = batch  # type: ignore[method-assign]
    processes.command(*words)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_twice() -> None:
    interrupt()
    time.sleep(REPEATED + 0.1)
    interrupt()
    raise AssertionError("the second Ctrl-C has no effect")


def as_torchrun_does() -> None:
    """A terminal interrupts all processes of a group, and torchrun passes on what it received."""
    stop_signals.REPEATED = 60.0  # this process may have to wait for its turn between two signals
    interrupt()
    interrupt()
    terminate()


LOADING = """
import os, signal, subprocess, sys, time
from wirings.train.data.base import load
from wirings.utils.signals import StopSignals
os.setpgrp()
for name in ("INT", "TERM"):
    with StopSignals() as signals, signals.deferred():
        data = load("folder", directory=sys.argv[1], batch=1, workers=2, image_size=8)
        for number, _ in enumerate(data.train.epoch(0)):
            if number == 1:  # from outside of the group: PyTorch's workers obey their parent
                subprocess.run(["sh", "-c", f"kill -{name} -{os.getpgid(0)}"], start_new_session=True, check=True)
                time.sleep(0.3)
    assert (number, signals.name) == (19, f"SIG{name}")
"""
"""Reads all images with workers, while all processes of its group get a signal."""


def run(target: Callable[..., None], *arguments: Any, output: Path) -> tuple[int | None, str]:
    process = processes.start(target, *arguments, output=output)
    return processes.wait(process), output.read_text()


@pytest.mark.parametrize(
    ("send", "status", "name"),
    [(terminate, 143, "SIGTERM"), (interrupt, 130, "SIGINT"), (as_torchrun_does, 130, "SIGINT")],
)
def test_saves_a_checkpoint_and_exits(
    send: Callable[[], None], status: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / "run"
    code, said = run(train_with_signals, 5, send, command(out), output=tmp_path / "output")
    assert code == status, said
    assert f"Stopped by {name}. Continue {out} {RESUME}" in said
    assert "Press Ctrl-C again to end without it." in said
    assert "Traceback" not in said
    _, about = checkpoint.read(out / "last.safetensors")
    assert (about["progress"]["epoch"], about["progress"]["batch"]) == (1, 2)
    for folder in (out, tmp_path / "whole"):
        code, said = run(processes.command, *command(folder, "--resume"), output=tmp_path / "output")
        assert code == 0, said
    same_runs(tmp_path / "whole", out)


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said = run(train_with_signals, 5, interrupt_twice, command(out), output=tmp_path / "output")
    assert code == 130, said
    assert "Interrupted before the first checkpoint. To start over, repeat the command." in said
    assert "Traceback" not in said
    assert not (out / "last.safetensors").exists()


def test_sweeps_save_the_checkpoints_of_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    changes = [*TINY[1:4], "epochs=100000", "checkpoint_epochs=100000", "history_every=0"]
    words = ["sweep", RECIPE, "--device", "cpu", "--out", str(tmp_path / "sweep")]
    words += [word for change in changes for word in ("--set", change)]
    process = processes.start(processes.command, *words, output=tmp_path / "output")
    deadline = time.monotonic() + 200
    while not (found := list((tmp_path / "sweep").rglob("log.csv"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    assert processes.wait(process) == 143
    assert "Interrupted: 0 of 1 runs are finished. The same command continues." in (tmp_path / "output").read_text()
    assert (found[0].parent / "last.safetensors").exists()
    assert "Stopped by SIGTERM" in (found[0].parent / "output.txt").read_text()


def test_workers_outlast_signals_to_their_group(tmp_path: Path) -> None:
    """Terminals and schedulers signal all processes of a run, which would fail without its workers."""
    for split, label in ((split, label) for split in ("train", "val") for label in ("ant", "bee")):
        (tmp_path / split / label).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (12, 10), (20 * number, 0, 0)).save(tmp_path / split / label / f"{number}.png")
    words = [sys.executable, "-c", LOADING, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_stops_after_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """Epochs of one batch have no place to stop at but their end."""
    with StopSignals() as signals:

        class Signals(Heard):
            def batch(self, done: int) -> None:
                terminate()

        log = Signals()
        settings = small("batch=50", "checkpoint_epochs=4")
        assert train(tmp_path, settings, log=log, signals=signals) is None
    assert log.said[-1] == f"Stopped by SIGTERM. Continue {tmp_path} with --resume, at epoch 2, batch 1."
    _, about = checkpoint.read(tmp_path / "last.safetensors")
    assert (about["progress"]["epoch"], about["progress"]["batch"]) == (1, 0)


def test_signals_interrupt_what_cannot_be_saved() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as signals:
        assert signals.exit_status == 130
        with pytest.raises(KeyboardInterrupt):
            terminate()
        terminate()  # only Ctrl-C is impatient
        assert (signals.received, signals.name, signals.exit_status) == (signal.SIGTERM, "SIGTERM", 143)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_forked_processes_end_by_signals() -> None:
    with StopSignals() as signals, signals.deferred():
        ready, says_ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(says_ready, b".")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signals.received is None


def interrupted(number: int) -> None:
    with StopSignals():
        os.kill(os.getpid(), number)
        time.sleep(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("with_typer", [True, False])
def test_status_of_a_command_that_is_interrupted_outside_of_training(
    number: int, with_typer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = lambda: interrupted(number)  # noqa: E731
    if with_typer:
        app = typer.Typer()
        app.command()(lambda: interrupted(number))
    monkeypatch.setattr("wirings.cli.app.app", app)
    monkeypatch.setattr(sys, "argv", ["wirings"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + number
