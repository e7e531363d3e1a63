"""Keeps NVIDIA's MPS running for a sweep: python mps_keeper.py FOLDER GPU.

It starts the control daemon of MPS in FOLDER, prints "ready", and waits until its standard input is closed, which the
system does when the sweep ends, even if it is killed. Then it stops the daemon and removes the folder. It needs nothing
but Python, so that it takes little memory beside the runs.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 30.0
"""How long the daemon may take to start, and the last runs to end once the sweep has ended."""


def ask(command: str, environment: dict[str, str], seconds: float = SECONDS) -> bool:
    """Give the daemon a command; whether it answered."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{command}\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def main(folder: Path, gpu: str) -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # only the end of the sweep ends it
    pipe, log = folder / "pipe", folder / "log"
    for path in (pipe, log):
        path.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    environment["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        # The daemon must not hold the pipe to the sweep open.
        subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=True,
        )
        deadline = time.monotonic() + SECONDS
        while not ask("get_server_list", environment):
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.2)
        print("ready", flush=True)
        sys.stdin.read()
    except (OSError, subprocess.SubprocessError):
        return 1
    finally:
        ask(f"quit -t {SECONDS:.0f}", environment, 2 * SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
