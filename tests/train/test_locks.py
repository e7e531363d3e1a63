"""Locks: one process at a time in a folder."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from wirings import WiringError
from wirings.utils.locks import LOCK, BusyError, held, take

fcntl = pytest.importorskip("fcntl", reason="needs fcntl")

HOLDER = """
import sys, time
from pathlib import Path
from wirings.utils.locks import held
with held(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def silent(text: str) -> None:
    raise AssertionError(f"unexpected message: {text}")


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(WiringError) as caught, held(tmp_path, silent):
            pass
        said = json.loads((tmp_path / LOCK).read_text())
        process.send_signal(signal.SIGKILL)
    assert str(caught.value) == (
        f"{tmp_path} is in use by process {process.pid} on {socket.gethostname()}, since {said['since']}. "
        "Wait until it ends, stop it, or give another --out."
    )
    with held(tmp_path, silent):  # a killed process leaves its file, but not its lock
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_removes_empty_folders_that_it_made(tmp_path: Path) -> None:
    with held(tmp_path / "runs" / "one" / "two", silent):
        pass
    assert not list(tmp_path.iterdir())
    with held(tmp_path / "runs" / "one" / "two", silent):
        (tmp_path / "runs" / "other").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    with held(tmp_path / "runs", silent):
        (tmp_path / "runs" / "other").unlink()
    assert (tmp_path / "runs").exists(), "it existed before"


def test_refuses_the_same_process(tmp_path: Path) -> None:
    with held(tmp_path, silent):
        with pytest.raises(BusyError), held(tmp_path, silent):
            pass
        assert (tmp_path / LOCK).exists(), "the lock file is kept"


def test_a_damaged_lock_file_still_locks(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"pid": "x", "host": 1, "since": 2}'):
        with held(tmp_path, silent):
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(BusyError, match="in use by another process"):
                take(tmp_path)


def test_threads_hold_the_lock_one_at_a_time(tmp_path: Path) -> None:
    """The file is removed with the lock, so a thread may open a file that has just been unlinked."""
    inside, most, entered = 0, 0, 0
    guard, end = threading.Lock(), time.monotonic() + 1

    def work() -> None:
        nonlocal inside, most, entered
        while time.monotonic() < end:
            try:
                with held(tmp_path, silent):
                    with guard:
                        inside, entered = inside + 1, entered + 1
                        most = max(most, inside)
                    time.sleep(0.0005)
                    with guard:
                        inside -= 1
            except BusyError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert entered > 20


def test_a_child_process_holds_an_inherited_lock(tmp_path: Path) -> None:
    lock = take(tmp_path)
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    more: dict[str, Any] = {"pass_fds": (lock.file,), "env": {**os.environ, **lock.environment()}}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **more) as process:
        lock.close()
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {process.pid} "):
            take(tmp_path)
        process.kill()
    take(tmp_path).release()


def test_ignores_a_descriptor_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "other").open("w") as other:
        monkeypatch.setenv("WIRINGS_LOCK", str(other.fileno()))
        with held(tmp_path / "run", silent), pytest.raises(BusyError):
            take(tmp_path / "run")
        assert not other.closed
    monkeypatch.setenv("WIRINGS_LOCK", "no number")
    take(tmp_path / "run").release()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_warns_if_the_file_system_has_no_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    with held(tmp_path, said.append):
        pass
    assert said == [f"{tmp_path} cannot be locked here: make sure that no other process trains in it."]


def test_rejects_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(WiringError, match=r"file/run cannot be written: .*\. Give another --out\."),
        held(tmp_path / "file" / "run", silent),
    ):
        pass
