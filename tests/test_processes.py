"""The processes that other tests start end in time and have the environment of the test."""

import os
import signal
import time
from pathlib import Path

import processes
import pytest


def test_stuck_processes_are_killed(tmp_path: Path) -> None:
    process = processes.start(time.sleep, 600, output=tmp_path / "output.txt")
    assert processes.wait(process, 1) == -signal.SIGKILL
    assert not process.is_alive()


def print_variables() -> None:
    print({name: value for name, value in os.environ.items() if name.startswith("WIRINGS_TEST")})


def test_processes_have_the_environment_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def variables() -> str:
        output = tmp_path / "output.txt"
        process = processes.start(print_variables, output=output, env={"WIRINGS_TEST_GIVEN": "1"})
        assert processes.wait(process) == 0, output.read_text()
        return output.read_text().strip()

    assert variables() == "{'WIRINGS_TEST_GIVEN': '1'}"
    monkeypatch.setenv("WIRINGS_TEST_SET", "2")  # after the server of the processes has started
    assert variables() == "{'WIRINGS_TEST_SET': '2', 'WIRINGS_TEST_GIVEN': '1'}"
    monkeypatch.undo()
    assert variables() == "{'WIRINGS_TEST_GIVEN': '1'}"
