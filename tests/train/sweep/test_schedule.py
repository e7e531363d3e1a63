"""What a sweep does with runs that end well, fail, are killed or go on for ever; with processes that only pretend."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wirings import WiringError
from wirings.cli.console import output
from wirings.train import results
from wirings.train.sweep import folder, local, plan, schedule, show, work
from wirings.train.sweep.plan import Run
from wirings.train.sweep.schedule import FAILED, FINISHED, STOPPED, State
from wirings.utils.locks import take

FAKE = Path(__file__).with_name("fake.py")


class Quiet:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.updates = 0

    def update(self, states: Sequence[State]) -> None:
        self.updates += 1

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    known: dict[str, Any] = {
        "epochs": 2,
        "steps": 4,
        "params": 10,
        "settings": {},
        "overrides": {},
        "precision": "fp32",
    }
    known |= {"hardware": "none", "versions": {}, "commit": None, "dirty": None, "started": "2026-01-01"}
    path = tmp_path / "template.json"
    results.write_json(
        path, results.Result(recipe="digits/x", seed=0, accuracy=50.0, train_s=60.0, wall_s=70.0, **known)
    )
    return path


def go(tmp_path: Path, runs: Sequence[Run], how: dict[str, str], **more: Any) -> tuple[list[State], Quiet]:
    """Sweep over runs that do as ``how`` says, by a part of their folder's name."""
    told, out = more.pop("told", None) or Quiet(), tmp_path / "out"

    def command(run: Run, out: Path, **options: Any) -> list[str]:
        kind = next((kind for part, kind in how.items() if part in run.place), "well")
        return [sys.executable, "-S", "-E", str(FAKE), str(tmp_path / "template.json"), str(out / run.place), kind]

    folder.enter(out, runs)
    executor = local.Local(jobs=more.pop("jobs", 3), device="cpu")
    return schedule.sweep(runs, out, executor, told, command=command, **more), told


def starts(tmp_path: Path, run: Run) -> int:
    path = tmp_path / "out" / run.place / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PAUSE", 0.01)


@pytest.mark.usefixtures("template")
def test_a_failure_is_told_and_stops_nobody(tmp_path: Path) -> None:
    runs = plan.make(["digits/static-dnw", "digits/static-random"], [0, 1, 2], [["epochs=2"]])
    states, told = go(tmp_path, runs, {"dnw/epochs=2/seed1": "fail"})
    assert [state.status for state in states] == [FINISHED, FINISHED, FAILED, FINISHED, FINISHED, FINISHED]
    failed = states[2]
    assert "ended with exit status 1" in failed.reason
    assert "it has failed, for a reason" in failed.reason
    assert any("it has failed, for a reason" in text for text in told.said)
    assert [starts(tmp_path, run) for run in runs] == [1] * 6, "what ends with an error is not tried again"
    (tmp_path / "out" / runs[0].place / "last.safetensors").unlink()  # to save space, with its result in the folder
    again, _ = go(tmp_path, runs, {})
    assert [state.status for state in again] == [FINISHED] * 6
    assert [starts(tmp_path, run) for run in runs] == [1, 1, 2, 1, 1, 1], "nothing finished is repeated"
    noted = (tmp_path / "out" / folder.NOTES).read_text()
    assert noted.count("finished ") == 6
    lines = schedule.summary(again)
    assert [(line.name, line.seeds, line.mean, line.std, line.left) for line in lines] == [
        ("digits/static-dnw", (0, 0, 0), 50.0, 0.0, 0),
        ("digits/static-random", (0, 0, 0), 50.0, 0.0, 0),
    ]


@pytest.mark.usefixtures("template")
def test_what_was_killed_goes_on(tmp_path: Path) -> None:
    runs = plan.make(["digits/static-dnw"], [0, 1], [])
    states, told = go(tmp_path, runs, {"seed0": "killed once", "seed1": "killed"}, retries=2)
    assert [state.status for state in states] == [FINISHED, FAILED]
    assert [starts(tmp_path, run) for run in runs] == [2, 3]
    assert "was killed 3 times" in states[1].reason
    assert sum("goes on from its last checkpoint" in text for text in told.said) == 3


@pytest.mark.usefixtures("template")
def test_second_phases_wait_for_the_first(tmp_path: Path) -> None:
    runs = plan.make(["table2/lottery", "table2/fine_tune-0.1"], [0, 1], [["epochs=2"]])
    states, _ = go(tmp_path, runs, {"complete/epochs=2/seed1": "fail"}, jobs=6)
    by_place = {state.run.place: state for state in states}
    assert by_place["table2/lottery/epochs=2/seed0"].status == FINISHED
    for name in ("table2/lottery/epochs=2/seed1", "table2/fine_tune-0.1/epochs=2/seed1"):
        assert by_place[name].status == FAILED
        assert "it starts from table2/complete/epochs=2/seed1, which has failed" in by_place[name].reason
        assert starts(tmp_path, by_place[name].run) == 0
    noted = (tmp_path / "out" / folder.NOTES).read_text()
    first, second = (
        noted.index(f"{what}seed0")
        for what in ("finished table2/complete/epochs=2/", "started table2/lottery/epochs=2/")
    )
    assert first < second
    words = work.command(by_place["table2/lottery/epochs=2/seed0"].run, tmp_path / "out", data=tmp_path, max_minutes=5)
    assert words[3:] == [
        *("train", "table2/lottery", "--seed", "0", "--set", "epochs=2"),
        *("--out", str(tmp_path / "out/table2/lottery/epochs=2/seed0"), "--resume"),
        *("--start", str(tmp_path / "out/table2/complete/epochs=2/seed0")),
        *("--data", str(tmp_path), "--max-minutes", "5"),
    ]


@pytest.mark.usefixtures("template")
def test_time_that_is_up(tmp_path: Path) -> None:
    runs = plan.make(["digits/static-dnw"], [0, 1, 2], [])
    states, _ = go(tmp_path, runs, {"seed0": "time is up"}, jobs=1, max_minutes=60)
    assert [state.status for state in states] == [STOPPED, FINISHED, FINISHED]
    states, _ = go(tmp_path, plan.make(["digits/static-dnw"], [0, 1, 2, 3], []), {}, max_minutes=0)
    assert [state.status for state in states] == [STOPPED, FINISHED, FINISHED, STOPPED]


def alive(folder: Path) -> list[int]:
    """Processes that were started with a folder's name."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdecimal() else ""
            if str(folder) in words and "fake.py" in words and "State:\tZ" not in (entry / "status").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
@pytest.mark.usefixtures("template")
def test_an_interrupt_ends_all_runs(tmp_path: Path) -> None:
    class Interrupts(Quiet):
        def update(self, states: Sequence[State]) -> None:
            super().update(states)
            if all((state.folder / "starts").exists() for state in states):
                self.seen = [len(alive(tmp_path / "out")), [state.line for state in states]]
                raise KeyboardInterrupt

    told = Interrupts()
    runs = plan.make(["digits/static-dnw"], [0, 1], [])
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, runs, {"seed": "hang"}, told=told)
    assert told.seen[0] == 2
    assert not alive(tmp_path / "out")
    assert (tmp_path / "out" / folder.NOTES).read_text().count("stopped ") == 2
    states, _ = go(tmp_path, runs, {})
    assert [state.status for state in states] == [FINISHED] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="a process ends with its starter on Linux alone")
@pytest.mark.usefixtures("template")
def test_a_run_keeps_others_out_of_its_folder_and_ends_with_its_starter(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-S", "-E", str(FAKE), str(tmp_path / "template.json"), str(run), "hang"]
    starter = "import sys, time; from pathlib import Path; from wirings.train.sweep import work; "
    starter += "work.begin(sys.argv[1:], Path(sys.argv[-2]), {}); time.sleep(600)"
    child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", starter, *words])
    deadline = time.monotonic() + 60
    while not (run / "starts").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert work.begin(words, run, {}) is None, "another one is at it"
        assert len(alive(run)) >= 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(run)
    again = work.begin([*words[:-1], "well"], run, {})
    while again is None and time.monotonic() < deadline:  # a process is no longer seen a moment before its files close
        time.sleep(0.05)
        again = work.begin([*words[:-1], "well"], run, {})
    assert again is not None
    assert again.wait(60) == 0


@pytest.mark.usefixtures("template")
def test_the_table_of_progress(tmp_path: Path) -> None:
    runs = plan.make(["digits/static-dnw"], [0, 1, 2], [["epochs=4"]])
    states = [State(run, tmp_path / run.place) for run in runs]
    states[0].status, states[0].result = FINISHED, results.read(tmp_path / "template.json")
    states[1].status, states[1].where = schedule.RUNNING, "GPU 0"
    states[1].line = {"epoch": "1", "train_loss": "0.51234", "accuracy": "43.2", "seconds": "70"}
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(show.progress(states))
    console.print(show.results(schedule.summary(states)))
    text = console.export_text()
    assert "3 runs: 1 running, 1 finished, 1 waiting" in text
    line = next(line for line in text.splitlines() if "running, GPU 0" in line)
    assert [cell.strip() for cell in line.split("│")][3:-1] == ["1/4", "0.5123", "43.20 %", "3:30"]
    assert "50.00 %" in text
    with show.Shown(Console(force_terminal=True, width=100, file=io.StringIO()), every=0) as shown:
        shown.update(states)
        shown.say("something [with] brackets")


@pytest.mark.usefixtures("template")
def test_a_file_cuts_nothing_off(tmp_path: Path) -> None:
    """What `nohup` leaves behind is read later; a narrow terminal breaks words, but loses none."""
    grid = [[f"optimizer.lr={lr}" for lr in (0.1, 0.05)], ["optimizer.weight_decay=0.0001", "optimizer.weight_decay=0"]]
    runs = plan.make(["ste/mobilenet-decayed_gradient", "digits/static-random"], [0], grid)
    lines = schedule.summary([State(run, tmp_path / run.place) for run in runs])
    file = io.StringIO()
    show.Shown(output(file)).console.print(show.results(lines))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in file.getvalue().splitlines() if "│" in line]
    assert rows == [[line.name, " ".join(line.changes)] for line in lines]
    terminal = io.StringIO()
    Console(force_terminal=True, width=60, file=terminal).print(show.results(lines))
    assert "…" not in terminal.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_table_tells_runs_apart(tmp_path: Path, width: int) -> None:
    runs = plan.make(["digits/static-dnw"], [0, 1], [["optimizer.lr=0.1", "optimizer.lr=0.25"]])
    states = [State(run, tmp_path / run.place, where="process 12345") for run in runs]
    states[0].status = schedule.RUNNING
    file = io.StringIO()
    Console(width=width, file=file).print(show.progress(states, width))
    first = [line.split("│")[1].strip() for line in file.getvalue().splitlines() if "│" in line]
    assert "".join(first) == "".join(run.place for run in runs)
    assert ("process 12345" in file.getvalue()) == (width == 120)


@pytest.mark.usefixtures("template")
def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    runs = plan.make(["digits/static-dnw"], [0, 1], [])
    folder.enter(tmp_path / "out", runs)
    (tmp_path / "out" / runs[0].place).parent.mkdir(parents=True)
    (tmp_path / "out" / runs[0].place).write_text("a file")
    states, told = go(tmp_path, runs, {})
    assert [state.status for state in states] == [FAILED, FINISHED]
    assert "cannot be used: File exists" in states[0].reason
    assert any("cannot be used" in text for text in told.said)


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
@pytest.mark.usefixtures("template")
def test_a_wait_for_another_process_is_told_once(tmp_path: Path) -> None:
    (run,) = plan.make(["digits/static-dnw"], [0], [])
    here = tmp_path / "out" / run.place
    folder.enter(tmp_path / "out", [run])
    here.mkdir(parents=True)
    threading.Timer(1.0, take(here).release).start()
    states, told = go(tmp_path, [run], {})
    assert states[0].status == FINISHED
    assert sum("another process is at it" in text for text in told.said) == 1


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_gpus", lambda: ["4", "6"])
    assert str(local.Local()) == "2 at a time on 2 GPUs"
    assert str(local.Local(per_gpu=3)) == "6 at a time on 2 GPUs"
    with pytest.raises(WiringError, match="7 runs at a time do not fit on 2 GPUs with 3 each"):
        local.Local(jobs=7, per_gpu=3)
    given: list[Any] = []
    monkeypatch.setattr(work, "begin", lambda words, folder, environment: given.append(environment))
    executor = local.Local(per_gpu=2)
    for slot in range(4):
        executor.start([], Path())
        executor._busy[slot] = local.Started(None, slot)  # type: ignore[arg-type]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in given] == ["4", "6", "4", "6"]
    assert not executor.free()
    assert local.Local(device="cpu").gpus == []
