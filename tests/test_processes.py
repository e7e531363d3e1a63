"""The processes that other tests start end in time and see the environment of the test."""

import signal
import time
from pathlib import Path

import processes


def test_stuck_processes_are_killed(tmp_path: Path) -> None:
    process = processes.start(time.sleep, 600, output=tmp_path / "output.txt")
    assert processes.wait(process, 1) == -signal.SIGKILL
    assert not process.is_alive()
