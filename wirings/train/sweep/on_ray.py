"""Runs on a Ray cluster. Without a cluster, Ray is started on this machine.

Every machine of the cluster needs wirings, the data and the sweep's folder under the same paths.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wirings.errors import WiringError
from wirings.train.sweep import process

KILLED = -9
"""Exit status of a run whose worker or machine was lost."""
SECONDS = 60.0
"""How long a cluster may take to answer."""
PROBE = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='error'); ray.shutdown()"
"""What another process tries first: Ray waits for a cluster that does not answer, without an end."""


@dataclass(frozen=True)
class RayRun:
    """A run that was submitted to Ray."""

    task: Any
    """Ray's reference to its result."""
    folder: Path
    """The run's folder."""
    submitted: float
    """When it was submitted, in seconds since the epoch."""


class RayExecutor:
    """Executes each run as a task of Ray.

    Args:
        jobs: Number of runs at a time. By default as many as the cluster takes.
        per_gpu: Number of runs that share a GPU.
        device: ``"cpu"`` to use no GPU.
        cpus: Number of cores for each run.
    """

    def __init__(self, jobs: int | None = None, per_gpu: int = 1, device: str | None = None, cpus: float = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise WiringError(
                '--on ray needs the package Ray, which is not installed: pip install "wirings[ray]". Without --on, '
                "runs are processes of this machine."
            ) from error
        self.ray, self.jobs = ray, jobs
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            self._connect()
        gpus = ray.cluster_resources().get("GPU", 0)
        share = 0 if not gpus or device == "cpu" else 1 / per_gpu
        # The sweep restarts a run whose worker or machine was lost, and counts how often, so Ray must not.
        self._task = ray.remote(num_cpus=cpus, num_gpus=share, max_retries=0)(_execute)
        self._submitted: list[RayRun] = []

    def _connect(self) -> None:
        usual: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
        address = os.environ.get("RAY_ADDRESS")
        if address and (problem := _problem_with(address)):
            raise WiringError(f"no Ray cluster can be reached at RAY_ADDRESS={address} ({problem}). Fix or unset it.")
        try:
            self.ray.init(address=address or "auto", **usual)
        except Exception as error:
            if address:  # whatever Ray raises: it may not be an address at all
                raise WiringError(
                    f"no Ray cluster can be reached at RAY_ADDRESS={address} ({error}). Fix or unset it."
                ) from error
            if not isinstance(error, ConnectionError):
                raise
            self.ray.init(include_dashboard=False, num_cpus=self.jobs, **usual)

    def __str__(self) -> str:
        found = self.ray.cluster_resources()
        machines = len([node for node in self.ray.nodes() if node["Alive"]])
        return f"on Ray, with {found.get('CPU', 0):g} cores and {found.get('GPU', 0):g} GPUs of {machines} machines"

    def is_free(self) -> bool:
        """Whether another run can be submitted; Ray has a queue of its own."""
        return self.jobs is None or len(self._submitted) < self.jobs

    def start(self, words: Sequence[str], folder: Path, network: str = "") -> RayRun:
        """Submit a run to Ray."""
        now = time.time()
        run = RayRun(self._task.remote(list(words), str(folder.resolve()), now), folder, now)
        self._submitted.append(run)
        return run

    def poll(self, run: RayRun) -> int | None:
        """Return the exit status of a run that has ended, negative if it was killed, or None before."""
        done, _ = self.ray.wait([run.task], timeout=0)
        if not done:
            return None
        self._submitted.remove(run)
        try:
            return int(self.ray.get(run.task))
        except self.ray.exceptions.RayError:
            return KILLED

    def excuse(self, run: RayRun) -> str | None:
        """None: a run that ended with an error is not continued."""
        return None

    def observe(self) -> list[str]:
        """Nothing to report: the number of runs that share a GPU is fixed."""
        return []

    def where(self, run: RayRun) -> str:
        """Describe whether a run has started. Only Ray knows where."""
        output = run.folder / process.OUTPUT
        return "Ray" if output.exists() and output.stat().st_mtime >= run.submitted - 1 else "in Ray's queue"

    def stop(self) -> None:
        """Stop all runs, and Ray if it was started here."""
        for run in self._submitted:
            self.ray.cancel(run.task, force=True)
        self._submitted.clear()
        if self._started_ray:
            self.ray.shutdown()


def _problem_with(address: str) -> str:
    """Say why a cluster cannot be reached; empty if it can be."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, address],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:g} s"
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else said[-1][:300] if said else "no reason was given"


def _execute(words: list[str], folder: str, submitted: float) -> int:
    """Execute a run in a worker of Ray. Time in Ray's queue, since ``submitted``, counts against ``--max-minutes``."""
    if "--max-minutes" in words:
        place = words.index("--max-minutes") + 1
        left = float(words[place]) - (time.time() - submitted) / 60
        if left <= 0:
            return 0  # like a run that stopped in time: it was not started
        words = [*words[:place], str(left), *words[place + 1 :]]
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    try:
        return process.run_process([sys.executable, *words[1:]], Path(folder), environment)  # this machine's Python
    except subprocess.SubprocessError:
        return KILLED
