"""Runs as processes of this machine: as many per GPU as train fastest, or on the cores of the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wirings.errors import WiringError
from wirings.train.run.heartbeat import VARIABLE, read_beat, write_sharing
from wirings.train.sweep import gpus, process
from wirings.train.sweep.mps import Mps, somebody_elses, start_mps
from wirings.train.sweep.packing import ObservedRun, Packing

EVERY = 1.0
"""Seconds between two looks at the speed of the runs."""
USUAL = 4
"""Runs per GPU among which the cores of the CPU are divided, if the number is searched for."""
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In the output of a run that found too little memory on its GPU."""
FAULTS = ("CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS", "cudaError", "MPS")
"""In the output of a run that ended with an error of its GPU. Under MPS, such an error ends all runs on the GPU."""


@dataclass(eq=False)
class Device:
    """A GPU, or the CPU as a whole, and the runs on it."""

    name: str
    """As in CUDA_VISIBLE_DEVICES; ``"CPU"`` for the CPU."""
    packing: Packing
    runs: list[LocalRun] = field(default_factory=list)
    mps: Mps | None = None
    """The sweep's own MPS for this GPU."""
    overlaps: bool = False
    """Whether runs overlap under MPS, the sweep's own or somebody else's."""

    def observed(self) -> dict[str, ObservedRun]:
        """The runs and what they last told, by the numbers of their processes."""
        return {str(run.process.pid): run.observed() for run in self.runs}


@dataclass(eq=False)
class LocalRun:
    """A run that was started on this machine."""

    process: subprocess.Popen[bytes]
    """Its process."""
    device: Device
    """What it is executed on."""
    folder: Path
    """Its folder."""
    network: str
    """What its network is called."""
    plain: bool = False
    """Whether it is kept out of MPS."""
    begun: float = field(default_factory=time.time)
    """When it was started, in seconds since the epoch."""

    def observed(self) -> ObservedRun:
        """What the search for the number of runs needs to know about it."""
        beat = read_beat(self.folder)  # an earlier process of this run may have left one
        new = beat is not None and beat.time >= self.begun
        return ObservedRun(self.network, str(self.folder.parent), beat if new else None)


class LocalExecutor:
    """Executes runs as processes of this machine.

    Args:
        jobs: Number of runs at a time. By default ``per_gpu`` for each GPU, or without a GPU one for every two cores.
        per_gpu: Number of runs that share a GPU; None to find out how many train fastest.
        device: ``"cuda"`` to require a GPU, ``"cpu"`` to use none, or None to use GPUs if there are any.
    """

    def __init__(self, jobs: int | None = None, per_gpu: int | None = 1, device: str | None = None) -> None:
        self.gpus = [] if device == "cpu" else _gpus()
        if device == "cuda" and not self.gpus:
            raise WiringError("--device is cuda, but PyTorch finds no CUDA device on this machine. Leave it out.")
        if self.gpus and jobs is not None and per_gpu is not None and jobs > len(self.gpus) * per_gpu:
            raise WiringError(
                f"{jobs} runs at a time do not fit on {len(self.gpus)} GPUs with {per_gpu} each. Lower --jobs, or "
                "raise --per-gpu."
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        usual = len(self.gpus) * (per_gpu or USUAL) if self.gpus else max(cores // 2, 1)
        self.per_gpu, self.jobs = per_gpu, jobs
        if jobs is None and (per_gpu is not None or not self.gpus):
            self.jobs = usual
        self._threads = max(cores // (self.jobs or usual), 1)
        self._running: list[LocalRun] = []
        self._plain: set[Path] = set()  # folders of runs that are kept out of MPS
        self._devices: list[Device] = []
        self._shared: Path | None = None  # holds a file for each device that says how many runs are on it
        self._looked = 0.0

    def __str__(self) -> str:
        where = f"{len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}" if self.gpus else "this machine's CPU"
        if self.jobs is None:
            return f"as many at a time as train fastest on {where}"
        return f"{self.jobs} at a time on {where}"

    def is_free(self) -> bool:
        """Whether another run can be started now."""
        return (self.jobs is None or len(self._running) < self.jobs) and self._free_device() is not None

    def start(self, words: Sequence[str], folder: Path, network: str = "") -> LocalRun | None:
        """Start a run, or return None if another process is running in its folder."""
        device = self._free_device()
        assert device is not None
        assert self._shared is not None
        environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(self._threads)}
        environment[VARIABLE] = str(self._shared / f"{device.name}.json")
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = device.name
        plain = folder in self._plain
        if device.mps is not None and not plain:
            environment |= device.mps.environment
        elif plain:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = str(self._shared)  # where there is no MPS
        started = process.start_process(words, folder, environment)
        if started is None:
            return None
        run = LocalRun(started, device, folder, network, plain)
        self._running.append(run)
        device.runs.append(run)
        self._tell(device)
        return run

    def poll(self, run: LocalRun) -> int | None:
        """Return the exit status of a run that has ended, negative if it was killed, or None while it is running."""
        status = run.process.poll()
        if status is not None and run in self._running:
            self._running.remove(run)
            run.device.runs.remove(run)
            self._tell(run.device)
        return status

    def excuse(self, run: LocalRun) -> str | None:
        """Say why a run that ended with an error is to be continued; None if the error is its own."""
        device, tail = run.device, process.output_tail(run.folder, lines=40)
        others = device.observed()
        if device.packing.searches and others and any(text in tail for text in NO_MEMORY):
            device.packing.too_many({**others, "": run.observed()})
            return f"ran out of memory beside {len(others)} others; at most {device.packing.limit} share the GPU now"
        if device.overlaps and not run.plain and any(text in tail for text in FAULTS):
            self._plain.add(run.folder)
            return "ended with an error of the GPU, which any run under MPS may have caused; it continues without MPS"
        return None

    def observe(self) -> list[str]:
        """Measure the speed of the runs, and return what there is to report."""
        if not self.gpus or self.per_gpu is not None or time.monotonic() - self._looked < EVERY:
            return []
        self._looked = time.monotonic()
        found = [(device, device.packing.observe(device.observed())) for device in self._devices]
        return [f"GPU {device.name}: {said}" for device, said in found if said is not None]

    def where(self, run: LocalRun) -> str:
        """Describe what a run is executed on."""
        return f"GPU {run.device.name}" if self.gpus else f"process {run.process.pid}"

    def stop(self) -> None:
        """Stop all runs; each saves a checkpoint first. An interrupt, such as a second Ctrl-C, kills them at once."""
        for run in self._running:
            if run.process.poll() is None:
                run.process.terminate()  # all at once, then wait for each
        deadline = time.monotonic() + process.PATIENCE
        try:
            for run in self._running:
                process.stop_process(run.process, max(0.0, deadline - time.monotonic()))
        finally:
            for run in self._running:
                process.kill_process(run.process)
            self._running.clear()
            self._close_devices()

    def _free_device(self) -> Device | None:
        """The device with the fewest runs that has room for another one."""
        if not self._devices:
            self._open_devices()
        free = [device for device in self._devices if len(device.runs) < device.packing.limit]
        return min(free, key=lambda device: len(device.runs), default=None)

    def _open_devices(self) -> None:
        self._shared = Path(tempfile.mkdtemp(prefix="wirings-sweep-"))
        if not self.gpus:
            self._devices = [Device("CPU", Packing(list, self.jobs))]
            return
        self._devices = [
            Device(gpu, Packing(lambda gpu=gpu: gpus.memory(gpu), self.per_gpu))  # type: ignore[misc]
            for gpu in self.gpus
        ]
        if self.per_gpu == 1:
            return
        theirs = somebody_elses()
        names = {} if theirs else gpus.uuids(self.gpus)
        for device in self._devices:
            device.mps = start_mps(names[device.name]) if device.name in names else None
            device.overlaps = theirs or device.mps is not None

    def _close_devices(self) -> None:
        devices, self._devices = self._devices, []
        for device in devices:
            if device.mps is not None:
                device.mps.stop()
        if self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)

    def _tell(self, device: Device) -> None:
        """Tell the runs on a device how many they are."""
        assert self._shared is not None
        write_sharing(self._shared / f"{device.name}.json", len(device.runs), device.overlaps)


def _gpus() -> list[str]:
    """The GPUs that processes may use, named as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
