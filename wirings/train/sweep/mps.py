"""NVIDIA's MPS for a sweep: the runs on a GPU overlap under it, and take turns without it.

The sweep starts a daemon of its own for each GPU, in a new folder, and stops it at the end. A daemon that somebody else
has started is used if the user's environment or the default folder names it, and left running.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wirings.train.sweep import mps_keeper

DEFAULT = Path("/tmp/nvidia-mps")
"""Where MPS is, unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""
PROBE = "import torch; torch.zeros(1, device='cuda').item()"
"""What a process tries under MPS before the runs do: where it is installed, it may still not be allowed."""
SECONDS = 120.0
"""How long that may take."""


def somebody_elses() -> bool:
    """Whether processes use an MPS of somebody else unless told otherwise."""
    given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if shutil.which(mps_keeper.CONTROL) is None or not (Path(given) if given else DEFAULT).exists():
        return False
    return mps_keeper.ask("get_server_list", dict(os.environ), 5.0)


class Mps:
    """An MPS of the sweep's own, for one GPU.

    Args:
        gpu: The UUID of the GPU. A number would mean another GPU to processes under MPS than to others.

    Attributes:
        environment: Environment variables of a process that is to use it.
    """

    def __init__(self, gpu: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="wirings-mps-"))  # short: it holds a socket
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
            "CUDA_VISIBLE_DEVICES": gpu,
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", "-E", mps_keeper.__file__, str(self._folder), gpu],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the sweep, which lets the runs save checkpoints first
        )

    def works(self) -> bool:
        """Whether a process can use the GPU under it."""
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline().strip() != "ready":
            return False
        try:
            subprocess.run(
                [sys.executable, "-c", PROBE],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def stop(self) -> None:
        """Stop it, after the runs."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()


def start_mps(gpu: str) -> Mps | None:
    """Start MPS for the GPU with this UUID; None if it is not installed or does not work here."""
    if shutil.which(mps_keeper.CONTROL) is None:
        return None
    mps = Mps(gpu)
    try:
        works = mps.works()
    except BaseException:  # such as Ctrl-C
        mps.stop()
        raise
    if not works:
        mps.stop()
        return None
    return mps
