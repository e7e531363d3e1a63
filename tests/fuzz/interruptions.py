"""Runs that are interrupted: by kills, signals, a full disk, memory that runs out, and another process in the folder.

After each interruption, the exit status and the message must be right, and the last checkpoint intact. In the end, the
resumed run must be the same as one that was never interrupted, bit for bit.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.runner import MISTAKE, Fuzzer, limit_memory
from tests.train.breaking import same_runs
from wirings import WiringError
from wirings.train.run import checkpoint
from wirings.train.run.folder import LAST

RECIPE = "digits/static-dnw"
CHANGES = (
    "epochs=4", "batch=100", "checkpoint_every=1", "data.name=synthetic",
    "data.options={shape: [1, 8, 8], examples: 600, test_examples: 40}",
)  # fmt: skip
CONTEXT = multiprocessing.get_context("fork")
LONGEST = 60.0
"""Seconds after which a run hangs."""


def train(out: Path, output: Path, limit: Callable[[], None] = lambda: None) -> None:
    """Train in this process, as ``wirings train --resume`` does."""
    from wirings.__main__ import main

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    changes = [word for change in CHANGES for word in ("--set", change)]
    sys.argv = ["wirings", "train", RECIPE, "--device", "cpu", "--out", str(out), "--resume", *changes]
    limit()
    main()


def limit_files(size: int) -> None:
    """Let no file grow larger, as if the disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def start(out: Path, output: Path, limit: Callable[[], None] = lambda: None) -> Any:
    output.touch()
    process = CONTEXT.Process(target=train, args=(out, output, limit))
    process.start()
    return process


def ended(process: Any) -> int:
    """The exit status of a process; raises if it hangs."""
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError("a run hangs")
    return int(process.exitcode)


def steps_of(out: Path) -> int:
    """How far the last checkpoint is; raises if it is damaged."""
    if not (out / LAST).exists():
        return 0
    _, about = checkpoint.read(out / LAST)
    return int(about["progress"]["steps"])


def interrupt(draw: random.Random, kind: str, out: Path, output: Path) -> tuple[int, tuple[int, ...]]:
    """Interrupt a run once. Returns its exit status, and those that are right; 0 if it ended before.

    Without memory, some libraries abort, which is status -6.
    """
    match kind:
        case "read-only":
            return ended(start(Path("/proc/wirings/run"), output)), (1,)
        case "disk":
            return ended(start(out, output, lambda: limit_files(draw.randrange(40_000)))), (0, 1)
        case "memory":
            return ended(start(out, output, lambda: limit_memory(draw.randrange(2**20, 2**25)))), (0, 1, -6)
    process = start(out, output)
    trains = wait(draw, process, out)
    if kind == "two":
        second = ended(start(out, output.with_suffix(".second")))
        said = output.with_suffix(".second").read_text(errors="replace")
        if second not in (0, 1) or "Traceback" in said:
            raise AssertionError(f"the second process ended with {second}: {said[-300:]}")
        return ended(process), (0, 1)  # it waits for nobody: whichever comes first trains
    number = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "ctrl-c": signal.SIGINT}[kind]
    if process.is_alive():
        os.kill(process.pid, number)
    status = ended(process)
    early = (-number, 1, 130) if kind == "ctrl-c" else (-number,)  # before the command has begun
    return status, (0, -9) if kind == "kill" else (0, 128 + number, *(() if trains else early))


def wait(draw: random.Random, process: Any, out: Path) -> bool:
    """Wait until a run has written a few checkpoints; or, now and then, only for a moment.

    Returns:
        Whether the run was training.
    """

    def written() -> int:
        try:
            return (out / LAST).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, 1.5))
        return False
    before, left = written(), draw.randint(1, 8)
    while process.is_alive() and left:
        now = written()
        if now != before:
            before, left = now, left - 1
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))
    return True


KINDS = ("kill", "kill", "kill", "terminate", "ctrl-c", "disk", "memory", "two", "read-only")


def prepare(folder: Path) -> Path:
    """A run without interruptions."""
    for name in ("torch._dynamo", "wirings.train.phases"):  # without memory, not even Python survives imports
        importlib.import_module(name)
    whole = folder / "whole"
    assert ended(start(whole, folder / "whole.txt")) == 0, (folder / "whole.txt").read_text()
    return whole


def case(whole: Path, folder: Path, seed: int) -> str:
    """Interrupt a run four times in random ways, then let it finish."""
    draw = random.Random(seed)
    out, output, reached = folder / f"run{seed}", folder / f"run{seed}.txt", 0
    kinds, statuses = [draw.choice(KINDS) for _ in range(4)], []
    try:
        for kind in kinds:
            status, right = interrupt(draw, kind, out, output)
            statuses.append(status)
            said = output.read_text(errors="replace")
            if status not in right or (kind != "kill" and "Traceback" in said and status != -signal.SIGTERM):
                return f"{MISTAKE}: {kind}: exit status {status}, {said[-400:]!r}"
            steps = steps_of(out)
            if steps < reached:
                return f"{MISTAKE}: {kind}: a checkpoint after {steps} steps follows one after {reached}"
            reached = steps
        status = ended(start(out, output))
        if status != 0:
            return f"{MISTAKE}: after {', '.join(kinds)}: exit status {status}, {output.read_text()[-400:]!r}"
        same_runs(whole, out)
    except WiringError as error:
        return f"{MISTAKE}: after {', '.join(kinds)}: {error}"
    finally:
        shutil.rmtree(out, ignore_errors=True)
        for path in folder.glob(f"run{seed}.*"):
            path.unlink()
    killed, ended_early = statuses.count(-signal.SIGKILL), sum(status != 0 for status in statuses)
    return f"resumed after {killed} kills and {ended_early - killed} others"


FUZZERS = {"interruptions": Fuzzer(prepare, case, memory=2**40, chunk=20, seconds=300.0, short=3)}
