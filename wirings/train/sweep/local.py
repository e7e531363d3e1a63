"""Runs as processes of this machine: one or several per GPU, or on the cores of the CPU."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wirings.errors import WiringError
from wirings.train.sweep import process


@dataclass(frozen=True)
class LocalRun:
    """A run that was started on this machine."""

    process: subprocess.Popen[bytes]
    """Its process."""
    slot: int
    """Which of the executor's slots it takes, from 0."""


class LocalExecutor:
    """Executes runs as processes of this machine.

    Args:
        jobs: Number of runs at a time. By default ``per_gpu`` for each GPU, or without a GPU one for every two cores.
        per_gpu: Number of runs that share a GPU.
        device: ``"cuda"`` to require a GPU, ``"cpu"`` to use none, or None to use GPUs if there are any.
    """

    def __init__(self, jobs: int | None = None, per_gpu: int = 1, device: str | None = None) -> None:
        self.gpus = [] if device == "cpu" else _gpus()
        if device == "cuda" and not self.gpus:
            raise WiringError("--device is cuda, but PyTorch finds no CUDA device on this machine. Leave it out.")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        usual = len(self.gpus) * per_gpu if self.gpus else max(cores // 2, 1)
        self.jobs = usual if jobs is None else jobs
        if self.gpus and self.jobs > len(self.gpus) * per_gpu:
            raise WiringError(
                f"{self.jobs} runs at a time do not fit on {len(self.gpus)} GPUs with {per_gpu} each. Lower --jobs, or "
                "raise --per-gpu."
            )
        self._threads = max(cores // self.jobs, 1)
        self._running: dict[int, LocalRun] = {}

    def __str__(self) -> str:
        where = f"{len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}" if self.gpus else "this machine's CPU"
        return f"{self.jobs} at a time on {where}"

    def is_free(self) -> bool:
        """Whether another run can be started now."""
        return len(self._running) < self.jobs

    def start(self, words: Sequence[str], folder: Path) -> LocalRun | None:
        """Start a run, or return None if another process is running in its folder."""
        slot = next(number for number in range(self.jobs) if number not in self._running)
        environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(self._threads)}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        started = process.start_process(words, folder, environment)
        if started is None:
            return None
        self._running[slot] = LocalRun(started, slot)
        return self._running[slot]

    def poll(self, run: LocalRun) -> int | None:
        """Return the exit status of a run that has ended, negative if it was killed, or None while it is running."""
        status = run.process.poll()
        if status is not None:
            self._running.pop(run.slot, None)
        return status

    def where(self, run: LocalRun) -> str:
        """Describe what a run is executed on."""
        return f"GPU {self.gpus[run.slot % len(self.gpus)]}" if self.gpus else f"process {run.process.pid}"

    def stop(self) -> None:
        """Stop all runs; each saves a checkpoint first. An interrupt, such as a second Ctrl-C, kills them at once."""
        for run in self._running.values():
            if run.process.poll() is None:
                run.process.terminate()  # all at once, then wait for each
        deadline = time.monotonic() + process.PATIENCE
        try:
            for run in self._running.values():
                process.stop_process(run.process, max(0.0, deadline - time.monotonic()))
        finally:
            for run in self._running.values():
                process.kill_process(run.process)
            self._running.clear()


def _gpus() -> list[str]:
    """The GPUs that processes may use, named as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
