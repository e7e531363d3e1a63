"""One run as a process of its own: what it is called with, where its output goes; alone in its folder."""

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

from wirings.train import data as data_sets
from wirings.train.sweep.plan import Run
from wirings.utils.locks import BusyError, take

OUTPUT = "output.txt"


def reads_files(run: Run) -> bool:
    """Whether the folder of ``--data`` is for this run."""
    return data_sets.get(run.settings.data.name).reads_files


def command(
    run: Run, out: Path, *, data: Path | None = None, device: str | None = None, max_minutes: float | None = None
) -> list[str]:
    """The command line that trains a run of the sweep in ``out``, or goes on with it."""
    words = [sys.executable, "-m", "wirings", "train", run.recipe, "--seed", str(run.seed)]
    for change in run.changes:
        words += ["--set", change]
    out = out.resolve()  # other machines, and a Ray that was started elsewhere, have other current folders
    words += ["--out", str(out / run.place), "--resume"]
    if run.start is not None:
        words += ["--start", str(out / run.start.place)]
    given = {"--data": data if reads_files(run) else None, "--device": device, "--max-minutes": max_minutes}
    return words + [word for name, value in given.items() if value is not None for word in (name, str(value))]


def begin(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Start a run; None if another process is at it in the same folder.

    The folder's lock is handed to the process, which holds it itself: one whose starter was killed keeps others out as
    well. On Linux it ends with its starter.
    """
    try:
        lock = take(folder)
    except BusyError:
        return None
    try:
        more: dict[str, Any] = {}
        if sys.platform != "win32":
            more = {"start_new_session": True, "pass_fds": (lock.file,), "preexec_fn": _end_with_starter()}
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


def _end_with_starter() -> Any:
    """What a new process does before all else: ask to be ended when the thread that started it ends."""
    if sys.platform != "linux":
        return None
    libc, starter = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != starter:  # it ended before we asked
            os._exit(1)

    return ask


def end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a run and what it has started: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM):
        if process.poll() is not None:
            return
        try:
            if sys.platform == "win32":
                process.terminate()
            else:
                os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def work(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Do a run from its start to its end, here; its exit status. Waits while another process is at it."""
    while (process := begin(words, folder, environment)) is None:
        time.sleep(1)
    try:
        return process.wait()
    finally:
        end(process)


def last_words(folder: Path, lines: int = 12) -> str:
    """The end of a run's output."""
    try:
        text = (folder / OUTPUT).read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return "(no output)"
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:]) or "(no output)"
