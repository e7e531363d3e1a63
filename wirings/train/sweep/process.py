"""A run as a process of its own: its command line, its output, and its folder, which it locks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wirings.train.sweep.plan import SweepRun
from wirings.train.sweep.preflight import reads_files
from wirings.utils.locks import BusyError, take

OUTPUT = "output.txt"
"""File in a run's folder that holds the output of its process."""
PATIENCE = 30.0
"""Seconds in which a run that is asked to stop must have written its checkpoint."""


def train_command(
    run: SweepRun, out: Path, *, data: Path | None = None, device: str | None = None, max_minutes: float | None = None
) -> list[str]:
    """Return the command line that trains a run, or continues it.

    Args:
        run: The run.
        out: The sweep's folder.
        data: The folder of the data, for runs that read files.
        device: ``"cuda"``, ``"cpu"``, or None for a GPU if there is one.
        max_minutes: Stop the run at a checkpoint after this many minutes.
    """
    words = [sys.executable, "-m", "wirings", "train", run.recipe, "--seed", str(run.seed)]
    for change in run.changes:
        words += ["--set", change]
    out = out.resolve()  # other machines, and a Ray that was started elsewhere, have other current directories
    words += ["--out", str(out / run.path), "--resume"]
    if run.start is not None:
        words += ["--start", str(out / run.start.path)]
    given = {"--data": data if reads_files(run) else None, "--device": device, "--max-minutes": max_minutes}
    return words + [word for name, value in given.items() if value is not None for word in (name, str(value))]


def start_process(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Start a run, or return None if another process is running in its folder.

    The new process inherits the folder's lock, so it keeps others out even if its parent is killed. On Linux it ends
    when its parent does.

    Args:
        words: Command line.
        folder: The run's folder.
        environment: Environment variables to set besides those of this process.
    """
    try:
        lock = take(folder)
    except BusyError:
        return None
    try:
        more: dict[str, Any] = {}
        if sys.platform != "win32":
            more = {"start_new_session": True, "pass_fds": (lock.file,), "preexec_fn": _end_with_parent()}
        with (folder / OUTPUT).open("ab") as output:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **lock.environment(), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
                **more,
            )
    finally:
        lock.close()


def _end_with_parent() -> Any:
    """A function that a new process calls first, to ask the kernel to end it when its parent ends."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(1)

    return ask


def stop_process(process: subprocess.Popen[bytes], patience: float = PATIENCE) -> None:
    """Stop a run: with SIGTERM, upon which it saves a checkpoint, after ``patience`` seconds with SIGKILL.

    An interrupt, such as a second Ctrl-C, kills it at once. With SIGKILL, the processes that it started end as well.
    """
    try:
        process.terminate()
        process.wait(patience)
    except subprocess.TimeoutExpired:
        kill_process(process)
    except KeyboardInterrupt:
        kill_process(process)
        raise


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a run and the processes that it has started."""
    if process.poll() is None:
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def signal_of(status: int) -> int | None:
    """The signal that ended a run with this exit status, or None. A run that has saved a checkpoint returns 143."""
    if status < 0:
        return -status
    return status - 128 if status in (128 + signal.SIGTERM, 128 + signal.SIGINT) else None


def run_process(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Execute a run to its end and return its exit status. Waits while another process is running in its folder."""
    while (process := start_process(words, folder, environment)) is None:
        time.sleep(1)
    try:
        return process.wait()
    finally:
        stop_process(process)


def output_tail(folder: Path, lines: int = 12) -> str:
    """Return the last lines of a run's output."""
    try:
        text = (folder / OUTPUT).read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return "(no output)"
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:]) or "(no output)"
