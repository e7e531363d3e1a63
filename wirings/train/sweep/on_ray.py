"""Runs on a Ray cluster, or on a Ray of this machine's own where there is no cluster.

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
from wirings.train.sweep import work

KILLED = -9


@dataclass(frozen=True)
class Sent:
    """A run that was given to Ray."""

    task: Any
    folder: Path
    at: float


class OnRay:
    """Tasks of Ray, one a run.

    Args:
        jobs: runs at a time; by default as many as the cluster takes.
        per_gpu: runs that share a GPU.
        device: ``"cpu"`` to leave GPUs alone.
        cpus: cores of a run.
    """

    def __init__(self, jobs: int | None = None, per_gpu: int = 1, device: str | None = None, cpus: float = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise WiringError(
                '--on ray needs the package Ray, which is not installed: pip install "wirings[ray]". Without it, leave '
                "--on out, and runs are processes of this machine."
            ) from error
        self.ray, self.jobs = ray, jobs
        self._mine = not ray.is_initialized()
        if self._mine:
            self._connect()
        gpus = ray.cluster_resources().get("GPU", 0)
        share = 0 if not gpus or (device or "").startswith("cpu") else 1 / per_gpu
        # A run whose worker or machine has gone is started again by the sweep, which counts how often, not by Ray.
        self._task = ray.remote(num_cpus=cpus, num_gpus=share, max_retries=0)(_work)
        self._sent: list[Sent] = []

    def _connect(self) -> None:
        usual: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
        address = os.environ.get("RAY_ADDRESS")
        try:
            self.ray.init(address=address or "auto", **usual)
        except Exception as error:
            if address:  # whatever Ray says of it: it may be no address at all
                raise WiringError(
                    f"no Ray cluster can be reached at RAY_ADDRESS={address} ({error}): mend it, or unset it."
                ) from error
            if not isinstance(error, ConnectionError):
                raise
            self.ray.init(include_dashboard=False, num_cpus=self.jobs, **usual)

    def __str__(self) -> str:
        found = self.ray.cluster_resources()
        machines = len([node for node in self.ray.nodes() if node["Alive"]])
        return f"on Ray, with {found.get('CPU', 0):g} cores and {found.get('GPU', 0):g} GPUs of {machines} machines"

    def free(self) -> bool:
        """Whether a run can be given to Ray, which has a queue of its own."""
        return self.jobs is None or len(self._sent) < self.jobs

    def start(self, words: Sequence[str], folder: Path) -> Sent:
        """Give a run to Ray."""
        now = time.time()
        sent = Sent(self._task.remote(list(words), str(folder.resolve()), now), folder, now)
        self._sent.append(sent)
        return sent

    def poll(self, sent: Sent) -> int | None:
        """The exit status of a run that has ended, below 0 if it was killed; None while it runs or waits."""
        done, _ = self.ray.wait([sent.task], timeout=0)
        if not done:
            return None
        self._sent.remove(sent)
        try:
            return int(self.ray.get(sent.task))
        except self.ray.exceptions.RayError:
            return KILLED

    def where(self, sent: Sent) -> str:
        """Whether a run has been begun; Ray knows where."""
        output = sent.folder / work.OUTPUT
        return "Ray" if output.exists() and output.stat().st_mtime >= sent.at - 1 else "in Ray's queue"

    def stop(self) -> None:
        """End all runs, and Ray if it was started here."""
        for sent in self._sent:
            self.ray.cancel(sent.task, force=True)
        self._sent.clear()
        if self._mine:
            self.ray.shutdown()


def _work(words: list[str], folder: str, sent: float) -> int:
    """What a worker of Ray does; ``sent`` is when the run was given to Ray, whose queue it may have waited in since."""
    if "--max-minutes" in words:
        place = words.index("--max-minutes") + 1
        left = float(words[place]) - (time.time() - sent) / 60
        if left <= 0:
            return 0  # as a run that has stopped in time: it was not begun
        words = [*words[:place], str(left), *words[place + 1 :]]
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    try:
        return work.work([sys.executable, *words[1:]], Path(folder), environment)  # this machine's own Python
    except subprocess.SubprocessError:
        return KILLED
