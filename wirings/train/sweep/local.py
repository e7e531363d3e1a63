"""Runs on this machine: as many at a time as there are GPUs, or several a GPU, or some on the CPU's cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wirings.errors import WiringError
from wirings.train.sweep import work


@dataclass(frozen=True)
class Started:
    """A run that has been started here."""

    process: subprocess.Popen[bytes]
    slot: int


class Local:
    """Processes on this machine.

    Args:
        jobs: runs at a time; by default as many as GPUs with ``per_gpu`` each, or one for every two cores.
        per_gpu: runs that share a GPU.
        device: ``"cpu"`` to leave GPUs alone.
    """

    def __init__(self, jobs: int | None = None, per_gpu: int = 1, device: str | None = None) -> None:
        self.gpus = [] if device is not None and device.startswith("cpu") else _gpus()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        usual = len(self.gpus) * per_gpu if self.gpus else max(cores // 2, 1)
        self.jobs = usual if jobs is None else jobs
        if self.gpus and self.jobs > len(self.gpus) * per_gpu:
            raise WiringError(
                f"{self.jobs} runs at a time do not fit on {len(self.gpus)} GPUs with {per_gpu} each: lower --jobs, or "
                "raise --per-gpu."
            )
        self._threads = max(cores // self.jobs, 1)
        self._busy: dict[int, Started] = {}

    def __str__(self) -> str:
        where = f"{len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}" if self.gpus else "this machine's CPU"
        return f"{self.jobs} at a time on {where}"

    def free(self) -> bool:
        """Whether a run can be started now."""
        return len(self._busy) < self.jobs

    def start(self, words: Sequence[str], folder: Path) -> Started | None:
        """Start a run; None if another process is at it in the same folder."""
        slot = next(number for number in range(self.jobs) if number not in self._busy)
        environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(self._threads)}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        process = work.begin(words, folder, environment)
        if process is None:
            return None
        self._busy[slot] = Started(process, slot)
        return self._busy[slot]

    def poll(self, started: Started) -> int | None:
        """The exit status of a run that has ended, below 0 if it was killed; None while it runs."""
        status = started.process.poll()
        if status is not None:
            self._busy.pop(started.slot, None)
        return status

    def where(self, started: Started) -> str:
        """What a run works on."""
        return f"GPU {self.gpus[started.slot % len(self.gpus)]}" if self.gpus else f"process {started.process.pid}"

    def stop(self) -> None:
        """End all runs."""
        for started in self._busy.values():
            if started.process.poll() is None:
                started.process.terminate()  # all at once; then wait for each
        for started in list(self._busy.values()):
            work.end(started.process)
        self._busy.clear()


def _gpus() -> list[str]:
    """The names of the GPUs that processes may use, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
