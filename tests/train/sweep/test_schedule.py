"""How a sweep handles runs that finish, fail, are killed or hang, tested with fake training processes."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import FAKE, Recorder, go, write_template
from rich.console import Console

from wirings import WiringError
from wirings.train import results
from wirings.train.sweep import display, folder, local, process, schedule
from wirings.train.sweep.plan import SweepPlan, SweepRun
from wirings.train.sweep.schedule import FAILED, FINISHED, STOPPED, RunProgress
from wirings.utils.console import open_console
from wirings.utils.locks import take


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return write_template(tmp_path / "template.json")


def starts(tmp_path: Path, run: SweepRun) -> int:
    path = tmp_path / "out" / run.path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PAUSE", 0.01)


@pytest.mark.usefixtures("template")
def test_reports_a_failure_and_continues_with_the_others(tmp_path: Path) -> None:
    runs = SweepPlan(["digits/static-dnw", "digits/static-random"], [0, 1, 2], [["epochs=2"]]).runs()
    states, recorder = go(tmp_path, runs, {"dnw/epochs=2/seed1": "fail"})
    assert [state.status for state in states] == [FINISHED, FINISHED, FAILED, FINISHED, FINISHED, FINISHED]
    failed = states[2]
    assert "ended with exit status 1" in failed.reason
    assert "failed for a reason" in failed.reason
    assert any("failed for a reason" in text for text in recorder.said)
    assert [starts(tmp_path, run) for run in runs] == [1] * 6, "a run that ends with an error is not repeated"
    (tmp_path / "out" / runs[0].path / "last.safetensors").unlink()  # to save space, with its result in the folder
    again, _ = go(tmp_path, runs, {})
    assert [state.status for state in again] == [FINISHED] * 6
    assert [starts(tmp_path, run) for run in runs] == [1, 1, 2, 1, 1, 1], "finished runs are not repeated"
    noted = (tmp_path / "out" / folder.EVENTS).read_text()
    assert noted.count("finished ") == 6
    lines = schedule.summarize_sweep(again)
    assert [(line.name, line.seeds, line.mean, line.std, line.unfinished) for line in lines] == [
        ("digits/static-dnw", (0, 0, 0), 50.0, 0.0, 0),
        ("digits/static-random", (0, 0, 0), 50.0, 0.0, 0),
    ]


@pytest.mark.usefixtures("template")
def test_restarts_killed_runs(tmp_path: Path) -> None:
    runs = SweepPlan(["digits/static-dnw"], [0, 1], []).runs()
    states, recorder = go(tmp_path, runs, {"seed0": "killed once", "seed1": "killed"}, retries=2)
    assert [state.status for state in states] == [FINISHED, FAILED]
    assert [starts(tmp_path, run) for run in runs] == [2, 3]
    assert "was killed 3 times" in states[1].reason
    assert sum("continues from its last checkpoint" in text for text in recorder.said) == 3


@pytest.mark.usefixtures("template")
def test_restarts_runs_that_saved_a_checkpoint_after_a_signal(tmp_path: Path) -> None:
    runs = SweepPlan(["digits/static-dnw"], [0], []).runs()
    states, recorder = go(tmp_path, runs, {"seed0": "terminated once"})
    assert [state.status for state in states] == [FINISHED]
    assert any("was killed (signal 15); it continues from its last checkpoint" in text for text in recorder.said)


@pytest.mark.usefixtures("template")
def test_second_phases_wait_for_the_first(tmp_path: Path) -> None:
    runs = SweepPlan(["table2/lottery", "table2/fine_tune-0.1"], [0, 1], [["epochs=2"]]).runs()
    states, _ = go(tmp_path, runs, {"complete/epochs=2/seed1": "fail"}, jobs=6)
    by_path = {state.run.path: state for state in states}
    assert by_path["table2/lottery/epochs=2/seed0"].status == FINISHED
    for name in ("table2/lottery/epochs=2/seed1", "table2/fine_tune-0.1/epochs=2/seed1"):
        assert by_path[name].status == FAILED
        assert "it starts from table2/complete/epochs=2/seed1, which has failed" in by_path[name].reason
        assert starts(tmp_path, by_path[name].run) == 0
    noted = (tmp_path / "out" / folder.EVENTS).read_text()
    first, second = (
        noted.index(f"{what}seed0")
        for what in ("finished table2/complete/epochs=2/", "started table2/lottery/epochs=2/")
    )
    assert first < second
    words = process.train_command(
        by_path["table2/lottery/epochs=2/seed0"].run, tmp_path / "out", data=tmp_path, max_minutes=5
    )
    assert words[3:] == [
        *("train", "table2/lottery", "--seed", "0", "--set", "epochs=2"),
        *("--out", str(tmp_path / "out/table2/lottery/epochs=2/seed0"), "--resume"),
        *("--start", str(tmp_path / "out/table2/complete/epochs=2/seed0")),
        *("--data", str(tmp_path), "--max-minutes", "5"),
    ]


@pytest.mark.usefixtures("template")
def test_stops_when_time_is_up(tmp_path: Path) -> None:
    runs = SweepPlan(["digits/static-dnw"], [0, 1, 2], []).runs()
    states, _ = go(tmp_path, runs, {"seed0": "time is up"}, jobs=1, max_minutes=60)
    assert [state.status for state in states] == [STOPPED, FINISHED, FINISHED]
    states, _ = go(tmp_path, SweepPlan(["digits/static-dnw"], [0, 1, 2, 3], []).runs(), {}, max_minutes=0)
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("template")
def test_an_interrupt_stops_all_runs(tmp_path: Path) -> None:
    class Interrupts(Recorder):
        def update(self, states: Sequence[RunProgress]) -> None:
            super().update(states)
            if all((state.folder / "starts").exists() for state in states):
                self.seen = [len(alive(tmp_path / "out")), [state.last_epoch for state in states]]
                raise KeyboardInterrupt

    recorder = Interrupts()
    runs = SweepPlan(["digits/static-dnw"], [0, 1], []).runs()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, runs, {"seed": "hang"}, recorder=recorder)
    assert recorder.seen[0] == 2
    assert not alive(tmp_path / "out")
    assert (tmp_path / "out" / folder.EVENTS).read_text().count("stopped ") == 2
    states, _ = go(tmp_path, runs, {})
    assert [state.status for state in states] == [FINISHED] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("template")
def test_a_second_interrupt_kills_all_runs(tmp_path: Path) -> None:
    class Interrupts(Recorder):
        def update(self, states: Sequence[RunProgress]) -> None:
            if all((state.folder / "deaf").exists() for state in states):
                raise KeyboardInterrupt

        def say(self, text: str) -> None:
            super().say(text)
            if text.startswith("Stopping"):
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    recorder = Interrupts()
    runs = SweepPlan(["digits/static-dnw"], [0, 1], []).runs()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, runs, {"seed": "stubborn"}, recorder=recorder)
    assert not alive(tmp_path / "out")
    assert recorder.said[-1] == "Stopping the runs, which save checkpoints. Press Ctrl-C again to kill them."


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux do processes end with their parents")
@pytest.mark.usefixtures("template")
def test_a_run_locks_its_folder_and_ends_with_its_parent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-S", "-E", str(FAKE), str(tmp_path / "template.json"), str(run), "hang"]
    parent = "import sys, time; from pathlib import Path; from wirings.train.sweep import process; "
    parent += "process.start_process(sys.argv[1:], Path(sys.argv[-2]), {}); time.sleep(600)"
    child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", parent, *words])
    deadline = time.monotonic() + 60
    while not (run / "starts").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert process.start_process(words, run, {}) is None, "another process is running there"
        assert len(alive(run)) >= 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(run)
    again = process.start_process([*words[:-1], "finish"], run, {})
    while again is None and time.monotonic() < deadline:  # a process disappears a moment before its files are closed
        time.sleep(0.05)
        again = process.start_process([*words[:-1], "finish"], run, {})
    assert again is not None
    assert again.wait(60) == 0


@pytest.mark.usefixtures("template")
def test_progress_table(tmp_path: Path) -> None:
    runs = SweepPlan(["digits/static-dnw"], [0, 1, 2], [["epochs=4"]]).runs()
    states = [RunProgress(run, tmp_path / run.path) for run in runs]
    states[0].status, states[0].result = FINISHED, results.read(tmp_path / "template.json")
    states[1].status, states[1].where = schedule.RUNNING, "GPU 0"
    states[1].last_epoch = {"epoch": "1", "train_loss": "0.51234", "accuracy": "43.2", "seconds": "70"}
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(display.progress_table(states))
    console.print(display.results_table(schedule.summarize_sweep(states)))
    text = console.export_text()
    assert "3 runs: 1 running, 1 finished, 1 waiting" in text
    line = next(line for line in text.splitlines() if "running, GPU 0" in line)
    assert [cell.strip() for cell in line.split("│")][3:-1] == ["1/4", "0.5123", "43.20 %", "3:30"]
    assert "50.00 %" in text
    with display.SweepDisplay(Console(force_terminal=True, width=100, file=io.StringIO()), every=0) as shown:
        shown.update(states)
        shown.say("something [with] brackets")


@pytest.mark.parametrize(("others", "expected"), [((0, 2), 60.0), ((1, 2), None), ((None, 0), 60.0)])
def test_times_of_runs_that_shared_a_gpu_are_not_averaged(
    tmp_path: Path, template: Path, others: tuple[int | None, int], expected: float | None
) -> None:
    states = [RunProgress(run, tmp_path) for run in SweepPlan(["digits/static-dnw"], [0, 1], []).runs()]
    for state, many in zip(states, others, strict=True):
        slow = 1.0 if not many else 3.0
        state.result = replace(results.read(template), most_others=many, train_s=60.0 * slow)
    (line,) = schedule.summarize_sweep(states)
    assert line.train_s == expected


@pytest.mark.usefixtures("template")
def test_files_get_whole_lines(tmp_path: Path) -> None:
    """A file, such as that of `nohup`, has nothing cut off. A narrow terminal wraps names but loses none of them."""
    grid = [[f"optimizer.lr={lr}" for lr in (0.1, 0.05)], ["optimizer.weight_decay=0.0001", "optimizer.weight_decay=0"]]
    runs = SweepPlan(["ste/mobilenet-decayed_gradient", "digits/static-random"], [0], grid).runs()
    lines = schedule.summarize_sweep([RunProgress(run, tmp_path / run.path) for run in runs])
    file = io.StringIO()
    display.SweepDisplay(open_console(file)).console.print(display.results_table(lines))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in file.getvalue().splitlines() if "│" in line]
    assert rows == [[line.name, " ".join(line.changes)] for line in lines]
    terminal = io.StringIO()
    Console(force_terminal=True, width=60, file=terminal).print(display.results_table(lines))
    assert "…" not in terminal.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_narrow_tables_distinguish_runs(tmp_path: Path, width: int) -> None:
    runs = SweepPlan(["digits/static-dnw"], [0, 1], [["optimizer.lr=0.1", "optimizer.lr=0.25"]]).runs()
    states = [RunProgress(run, tmp_path / run.path, where="process 12345") for run in runs]
    states[0].status = schedule.RUNNING
    file = io.StringIO()
    Console(width=width, file=file).print(display.progress_table(states, width))
    first = [line.split("│")[1].strip() for line in file.getvalue().splitlines() if "│" in line]
    assert "".join(first) == "".join(run.path for run in runs)
    assert ("process 12345" in file.getvalue()) == (width == 120)


@pytest.mark.usefixtures("template")
def test_continues_if_a_runs_folder_cannot_be_created(tmp_path: Path) -> None:
    runs = SweepPlan(["digits/static-dnw"], [0, 1], []).runs()
    folder.claim_sweep_folder(tmp_path / "out", runs)
    (tmp_path / "out" / runs[0].path).parent.mkdir(parents=True)
    (tmp_path / "out" / runs[0].path).write_text("a file")
    states, recorder = go(tmp_path, runs, {})
    assert [state.status for state in states] == [FAILED, FINISHED]
    assert "cannot be used: File exists" in states[0].reason
    assert any("cannot be used" in text for text in recorder.said)


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
@pytest.mark.usefixtures("template")
def test_reports_waiting_for_another_process_once(tmp_path: Path) -> None:
    (run,) = SweepPlan(["digits/static-dnw"], [0], []).runs()
    here = tmp_path / "out" / run.path
    folder.claim_sweep_folder(tmp_path / "out", [run])
    here.mkdir(parents=True)
    threading.Timer(1.0, take(here).release).start()
    states, recorder = go(tmp_path, [run], {})
    assert states[0].status == FINISHED
    assert sum("waiting for another process" in text for text in recorder.said) == 1


def test_assigns_gpus_to_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_gpus", lambda: ["4", "6"])
    assert str(local.LocalExecutor()) == "2 at a time on 2 GPUs"
    assert str(local.LocalExecutor(per_gpu=3)) == "6 at a time on 2 GPUs"
    assert str(local.LocalExecutor(per_gpu=None)) == "as many at a time as train fastest on 2 GPUs"
    assert str(local.LocalExecutor(jobs=5, per_gpu=None)) == "5 at a time on 2 GPUs"
    with pytest.raises(WiringError, match="7 runs at a time do not fit on 2 GPUs with 3 each"):
        local.LocalExecutor(jobs=7, per_gpu=3)
    given: list[Any] = []
    monkeypatch.setattr(local, "somebody_elses", lambda: False)
    monkeypatch.setattr(process, "start_process", lambda words, folder, environment: given.append(environment) or given)
    executor = local.LocalExecutor(per_gpu=2)
    for _ in range(4):
        assert executor.is_free()
        executor.start([], Path())
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in given] == ["4", "6", "4", "6"]
    assert not executor.is_free()
    executor._running.clear()
    executor.stop()
    assert local.LocalExecutor(device="cpu").gpus == []


def test_rejects_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_gpus", list)
    with pytest.raises(WiringError, match="--device is cuda, but PyTorch finds no CUDA device"):
        local.LocalExecutor(device="cuda")


@pytest.mark.usefixtures("template")
def test_names_with_markup_and_control_characters_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "a[/b]\x1b[2Jc"
    (tmp_path / f"{name}.yaml".replace("/", "_")).write_text("base: digits/static-dnw\n")
    (run,) = SweepPlan([str(tmp_path / f"{name}.yaml".replace("/", "_"))]).runs()
    states = [RunProgress(run, tmp_path, where="GPU [/0]")]
    console = Console(width=150, file=io.StringIO())
    console.print(display.progress_table(states))
    console.print(display.results_table(schedule.summarize_sweep(states)))
    display.SweepDisplay(console).say(f"{run.name} [/bold]")
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert text.count(r"a[_b]\x1b[2Jc") == 3
    assert "GPU [/0]" in text
