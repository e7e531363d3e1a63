"""Sweeps whose runs share a GPU, tested with fake training processes that share the speed of a fake one."""

import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_sweep import go, write_template

from wirings.train.sweep import folder, gpus, local, mps, mps_keeper, packing, schedule
from wirings.train.sweep.plan import SweepPlan, SweepRun
from wirings.train.sweep.schedule import FAILED, FINISHED

PEAK = "1,1.6,2.1,1.5"
"""Speeds of one run, two, and so on: three are fastest."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS and the end of processes with their parents")


@pytest.fixture(autouse=True)
def _fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_template(tmp_path / "template.json")
    for module, name, value in [
        (schedule, "PAUSE", 0.01),
        (local, "EVERY", 0.05),
        (packing, "WARM_UP", 0.1),
        (packing, "WINDOW", 0.4),
        (local, "_gpus", lambda: ["0"]),
        (gpus, "memory", lambda gpu: []),
        (gpus, "uuids", lambda gpus: {}),
        (mps, "DEFAULT", tmp_path / "absent"),
    ]:
        monkeypatch.setattr(module, name, value)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)


def runs_of(seeds: int) -> list[SweepRun]:
    return SweepPlan(["digits/static-dnw"], list(range(seeds)), []).runs()


def most(tmp_path: Path, run: SweepRun) -> int:
    """The most runs that a run has seen on its GPU, itself included."""
    return int((tmp_path / "out" / run.path / "most").read_text())


def test_packs_as_many_runs_as_are_fastest(tmp_path: Path) -> None:
    runs = runs_of(10)
    states, recorder = go(tmp_path, runs, {"seed": f"train {PEAK} 2200"}, executor=local.LocalExecutor(per_gpu=None))
    assert [state.status for state in states] == [FINISHED] * 10
    found = [text for text in recorder.said if text.startswith("GPU 0: ")]
    assert "staying at 3" in found[-1]
    assert most(tmp_path, runs[0]) >= 2
    assert most(tmp_path, runs[-3]) == 3, "after a fourth was tried, three share the GPU"
    assert max(most(tmp_path, run) for run in runs) == 4
    assert found[-1] in (tmp_path / "out" / folder.EVENTS).read_text()


def test_a_given_number_is_not_searched_for(tmp_path: Path) -> None:
    runs = runs_of(4)
    _, recorder = go(tmp_path, runs, {"seed": f"train {PEAK} 600"}, executor=local.LocalExecutor(per_gpu=2))
    assert max(most(tmp_path, run) for run in runs) == 2
    assert not any(text.startswith("GPU 0") for text in recorder.said)


def test_a_killed_run_takes_nobody_with_it(tmp_path: Path) -> None:
    runs = runs_of(6)
    how = {"seed1": f"train {PEAK} 1000 dies", "seed": f"train {PEAK} 1000"}
    states, recorder = go(tmp_path, runs, how, executor=local.LocalExecutor(per_gpu=3))
    assert [state.status for state in states] == [FINISHED] * 6
    starts = [len((tmp_path / "out" / run.path / "starts").read_text().splitlines()) for run in runs]
    assert starts == [1, 2, 1, 1, 1, 1]
    assert sum("was killed (signal 9)" in text for text in recorder.said) == 1


def test_a_run_without_memory_continues_when_fewer_share_the_gpu(tmp_path: Path) -> None:
    runs = runs_of(5)
    how = {"seed": "train 1,2,3,4,5 2000 memory2"}
    states, recorder = go(tmp_path, runs, how, executor=local.LocalExecutor(per_gpu=None))
    assert [state.status for state in states] == [FINISHED] * 5
    said = [text for text in recorder.said if "ran out of memory" in text]
    assert said
    assert said[0].endswith("ran out of memory beside 2 others; at most 2 share the GPU now")
    assert max(most(tmp_path, run) for run in runs) <= 3
    assert all(state.attempts == 1 for state in states), "it was not their fault"


def test_a_run_that_never_fits_fails(tmp_path: Path) -> None:
    how = {"seed": "train 1 3000 memory0"}
    states, _ = go(tmp_path, runs_of(2), how, executor=local.LocalExecutor(per_gpu=None))
    assert [state.status for state in states] == [FAILED] * 2
    assert "CUDA out of memory" in states[0].reason


CONTROL = """#!{python} -S
import os, subprocess, sys
from pathlib import Path
pipe, note = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path({note!r})
def say(text):
    with note.open("a") as file:
        file.write(f"{{text}} {{os.environ.get('CUDA_VISIBLE_DEVICES')}}\\n")
if sys.argv[1:] == ["-d"]:
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (pipe / "control").write_text(str(daemon.pid))
    say("started")
else:
    command = sys.stdin.read().split()
    if not (pipe / "control").exists():
        sys.exit(1)
    if command[0] == "quit":
        os.kill(int((pipe / "control").read_text()), 15)
        (pipe / "control").unlink()
        say("quit")
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-cuda-mps-control. Returns the file in which it notes what it does."""
    path, note = tmp_path / "bin" / mps_keeper.CONTROL, tmp_path / "note"
    path.parent.mkdir()
    path.write_text(CONTROL.format(python=sys.executable, note=str(note)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "uuids", lambda gpus: {"0": "GPU-abc"})
    monkeypatch.setattr(mps, "PROBE", "")
    return note


def test_a_sweep_starts_and_stops_an_mps_of_its_own(tmp_path: Path, control: Path) -> None:
    runs = runs_of(2)
    executor = local.LocalExecutor(per_gpu=2)
    states, _ = go(tmp_path, runs, {"seed": "train 1,2 300"}, executor=executor)
    assert [state.status for state in states] == [FINISHED] * 2
    assert control.read_text() == "started GPU-abc\nquit GPU-abc\n"
    environment = json.loads((tmp_path / "out" / runs[0].path / "environment").read_text())
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-abc", "a number means another GPU to processes under MPS"
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert not Path(environment["WIRINGS_SHARING"]).parent.exists()
    executor.stop()  # again, as the command does


def test_one_run_per_gpu_needs_no_mps(tmp_path: Path, control: Path) -> None:
    go(tmp_path, runs_of(1), {"seed": "train 1 100"}, executor=local.LocalExecutor(per_gpu=1))
    assert not control.exists()


def test_an_mps_that_does_not_work_is_not_used(tmp_path: Path, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "PROBE", "raise SystemExit(1)")
    (run,) = runs_of(1)
    states, _ = go(tmp_path, [run], {"seed": "train 1 100"}, executor=local.LocalExecutor(per_gpu=2))
    assert states[0].status == FINISHED
    assert control.read_text() == "started GPU-abc\nquit GPU-abc\n"
    environment = json.loads((tmp_path / "out" / run.path / "environment").read_text())
    assert "CUDA_MPS_PIPE_DIRECTORY" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_an_mps_of_somebody_else_is_used_and_left_running(
    tmp_path: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(theirs))
    assert not mps.somebody_elses(), "a folder without a daemon"
    (theirs / "control").write_text("1")
    executor = local.LocalExecutor(per_gpu=2)
    (run,) = runs_of(1)
    go(tmp_path, [run], {"seed": "train 1 100"}, executor=executor)
    assert not control.exists()
    environment = json.loads((tmp_path / "out" / run.path / "environment").read_text())
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(theirs)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_the_death_of_a_sweep_stops_its_mps(tmp_path: Path, control: Path) -> None:
    code = "import time; from wirings.train.sweep import mps; mps.PROBE = ''; kept = mps.start_mps('GPU-abc'); "
    code += "open('ready', 'w').write(kept.environment['CUDA_MPS_PIPE_DIRECTORY']); time.sleep(600)"
    code = f"import os; os.chdir({str(tmp_path)!r}); {code}"
    sweep = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    assert wait_for((tmp_path / "ready").exists)
    folder = Path((tmp_path / "ready").read_text()).parent
    assert folder.exists()
    os.kill(sweep, signal.SIGKILL)
    os.waitpid(sweep, 0)
    assert wait_for(lambda: not folder.exists())
    assert control.read_text() == "started GPU-abc\nquit GPU-abc\n"


def test_a_fault_under_mps_is_not_held_against_a_run(tmp_path: Path, control: Path) -> None:
    """Under MPS, an error of one run ends the others on its GPU, too. All of them continue, without MPS."""
    runs = runs_of(3)
    how = {"seed1": "train 1,2 800 fault", "seed": "train 1,2 800"}
    states, recorder = go(tmp_path, runs, how, executor=local.LocalExecutor(per_gpu=2))
    assert [state.status for state in states] == [FINISHED] * 3
    assert sum("it continues without MPS" in text for text in recorder.said) == 1
    used = [json.loads((tmp_path / "out" / run.path / "environment").read_text()) for run in runs]
    assert [Path(each["CUDA_MPS_PIPE_DIRECTORY"]).name == "pipe" for each in used] == [True, False, True]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in used] == ["GPU-abc", "0", "GPU-abc"]


def test_no_mps_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert mps.start_mps("GPU-abc") is None
    assert not mps.somebody_elses()
