"""``wirings sweep``: what it refuses, and twelve real runs with a worker that is killed half-way."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from wirings import WiringError
from wirings.cli.app import app
from wirings.cli.sweep import _keep
from wirings.train import results
from wirings.train.sweep import folder, on_ray, plan, work
from wirings.train.sweep.on_ray import OnRay

ROWS = ["digits/static-dnw", "digits/static-random"]
TINY = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 60, test_examples: 20}", "batch=20"]
TINY += ["epochs=2", "optimizer.lr=0.1,0.3", "checkpoint_every=1"]
OPTIONS = [*ROWS, "--seed", "0-2", *(word for change in TINY for word in ("--set", change)), "--device", "cpu"]


def call(*words: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["sweep", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path: Path) -> None:
    said = call(*OPTIONS, "--out", tmp_path / "out", "--dry-run").split()
    assert len(said) == 12
    assert not (tmp_path / "out").exists()
    said = call("table2/lottery", "--out", tmp_path / "out", "--dry-run").splitlines()
    assert said == ["table2/complete/seed0", "table2/lottery/seed0 (starts from table2/complete/seed0)"]


def test_mistakes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for words, match in [
        (["--on", "ray"], r"needs the package Ray, which is not installed: pip install \"wirings\[ray\]\""),
        (["--on", "rya"], "unknown place for runs .* Did you mean 'ray'"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--per-gpu", "0"], "--per-gpu must be at least 1"),
        (["--retries", "-1"], "--retries must be at least 0"),
        (["--max-minutes", "nan"], "--max-minutes must be a number of minutes above 0, not nan"),
        (["--device", "gpu"], "device must be cuda or cpu, got 'gpu'"),
        (["--max-minutes", "0"], "--max-minutes must be a number of minutes above 0, not 0"),
        (["--data", "."], "none of these runs reads files; leave --data out"),
        (["--results", __file__], "--results takes a folder, but .* is a file"),
        (["--out", __file__], "--out takes a folder, but .* is a file"),
        (["--out", Path(__file__) / "new" / "one"], "--out takes a folder, but .*py is a file"),
    ]:
        with pytest.raises(WiringError, match=match):
            call(*OPTIONS, "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(WiringError, match=r"out cannot be written: Read-only file system\. Give another --out"):
        call(*OPTIONS, "--out", tmp_path / "out")


def test_results_that_could_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != locked)
    for words in (["sweep", *OPTIONS], ["train", ROWS[0]]):
        words += ["--out", str(tmp_path / "out"), "--results", str(locked / "results")]
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, WiringError)
        assert str(error) == f"--results: nothing can be written in {locked}; give another folder."
    assert not (tmp_path / "out").exists()


class FakeRay(SimpleNamespace):
    """Stands for the package: no cluster at all, or one that raises what a test wants."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error=error, asked=[])

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None = None, **more: Any) -> None:
        self.asked.append(address)
        if address is not None:
            raise self.error

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1}

    def remote(self, **more: Any) -> Any:
        return lambda function: function


@pytest.mark.parametrize("error", [ValueError("Invalid address format: nonsense"), ConnectionError("nobody there")])
def test_an_address_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(error))
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(WiringError, match=rf"no Ray cluster .* RAY_ADDRESS=nonsense \({error}\): mend it, or unset it"):
        call(*OPTIONS, "--out", tmp_path / "out", "--on", "ray")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", [None, ""])
def test_without_a_cluster_ray_is_started_here(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    ray = FakeRay(ConnectionError("nobody there"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    OnRay(jobs=1)
    assert ray.asked == ["auto", None]
    monkeypatch.setitem(sys.modules, "ray", FakeRay(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        OnRay(jobs=1)


def test_time_in_the_queue_of_ray_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(work, "work", lambda words, *_: done.append(words[1:]) or 7)
    words = ["python", "train", "--max-minutes", "2", "--device", "cpu"]
    assert on_ray._work(words, str(tmp_path), time.time() - 60) == 7
    assert [*done[0][:2], *done[0][3:]] == ["train", "--max-minutes", "--device", "cpu"]
    assert float(done[0][2]) == pytest.approx(1.0, abs=0.05)
    assert on_ray._work(words, str(tmp_path), time.time() - 121) == 0
    assert on_ray._work(words[:2], str(tmp_path), time.time() - 121) == 7
    assert done[1:] == [["train"]], "what comes too late is not begun"


def test_runs_are_told_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = plan.make(["table2/lottery"], [0], [])
    words = work.command(runs[1], Path("out"))
    assert words[words.index("--out") + 1] == str(tmp_path / "out" / "table2/lottery/seed0")
    assert words[words.index("--start") + 1] == str(tmp_path / "out" / "table2/complete/seed0")


def test_a_folder_of_data_is_for_runs_that_read_files(tmp_path: Path) -> None:
    runs = plan.make([ROWS[0], "table1/static-dnw", "table4/dense"], [0], [])
    words = [work.command(run, tmp_path, data=tmp_path / "data") for run in runs]
    assert ["--data" in line for line in words] == [False, True, True]
    assert words[1][-2:] == ["--data", str(tmp_path / "data")]


def test_results_of_whole_recipes_are_kept_once(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "results"
    runs = [*plan.make([ROWS[0]], [0, 1, 2], []), *plan.make([ROWS[0]], [3], [["epochs=2"]])]
    known: dict[str, Any] = {"recipe": ROWS[0], "epochs": 2, "steps": 4, "params": 10, "settings": {}}
    known |= {"precision": "fp32", "hardware": "none", "versions": {}, "commit": None, "dirty": None}
    known |= {"started": "2026-01-01", "train_s": 1.0, "wall_s": 1.0}
    for run in runs:
        if run.seed != 2:  # which is not finished
            changed = {"epochs": 2} if run.changes else {}
            result = results.Result(seed=run.seed, accuracy=50.0, overrides=changed, **known)
            results.write_json(out / run.place / "result.json", result)
            (out / run.place / "last.safetensors").touch()
    results.write(results.Result(seed=1, accuracy=60.0, overrides={}, **known), kept)
    said: list[str] = []
    _keep(runs, out, kept, SimpleNamespace(say=said.append))
    assert [(r.seed, r.accuracy) for r in results.find(kept, ROWS[0])] == [(0, 50.0), (1, 60.0)]
    assert said == [
        f"wrote {kept / ROWS[0] / 'seed0.json'}",
        f"{kept / ROWS[0] / 'seed1.json'} holds another result already and was left as it is",
    ]
    _keep(runs, out, kept, SimpleNamespace(say=said.append))
    assert len(said) == 3, "the one that is left as it is"


def words(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "wirings", "sweep", *OPTIONS, "--out", str(out), *more]


def run_folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("digits/*/*/seed*/output.txt"))


def children(out: Path) -> dict[int, tuple[int, Path]]:
    """The training processes of a sweep: their parents, and their folders."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            asked = (
                (entry / "cmdline").read_bytes().decode(errors="replace").split("\0") if entry.name.isdecimal() else []
            )
            if "train" in asked and any(word.startswith(str(out)) for word in asked):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                found[int(entry.name)] = parent, Path(asked[asked.index("--out") + 1])
        except OSError:
            continue
    return found


def kill_half_way(out: Path, process: subprocess.Popen[str], worker: bool) -> Path:
    """Kill a run that has a checkpoint and no result, or the worker that does it; its folder."""
    while True:
        half_way: list[tuple[int, int, Path]] = []

        def some(found: Any = half_way) -> bool:
            found[:] = [
                (pid, parent, place)
                for pid, (parent, place) in children(out).items()
                if (place / "last.safetensors").exists() and not (place / "result.json").exists()
            ]
            return bool(found)

        wait_for(some, process)
        pid, parent, place = half_way[0]
        assert worker == (parent != process.pid)
        os.kill(parent if worker else pid, signal.SIGKILL)
        time.sleep(0.5)
        if not (place / "result.json").exists():  # else it was faster
            return place


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.02)


def done(out: Path) -> dict[Path, tuple[str, int]]:
    """The finished runs: when each was begun, and how often one has been started."""
    finished = [path for path in run_folders(out) if folder.finished(path)]
    noted = (out / folder.NOTES).read_text().splitlines() if finished else []
    starts = {path: sum(line.endswith(f"started {path.relative_to(out)}") for line in noted) for path in finished}
    return {path: (results.read(path / "result.json").started, starts[path]) for path in finished}


def begin(out: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return subprocess.Popen(words(out, *more), **piped)


def check_all_there(out: Path, before: dict[Path, tuple[str, int]]) -> None:
    after = done(out)
    assert len(after) == 12
    assert before.items() <= after.items(), "what had finished is as it was, and was not started again"
    found = [json.loads((path / "result.json").read_text()) for path in after]
    assert {(r["recipe"], r["seed"], r["settings"]["optimizer"]["lr"]) for r in found} == {
        (row, seed, lr) for row in ROWS for seed in (0, 1, 2) for lr in (0.1, 0.3)
    }
    assert all(result["steps"] == 6 for result in found)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")


@pytest.mark.slow
@needs_linux
def test_twelve_runs_with_a_worker_killed_and_the_sweep_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin(out, "--jobs", "2")
    wait_for(lambda: len(done(out)) >= 3, process)
    killed = kill_half_way(out, process, worker=False)
    wait_for(lambda: f" killed {killed.relative_to(out)}" in (out / folder.NOTES).read_text(), process)
    wait_for(lambda: len(done(out)) >= 6 and children(out), process)
    process.kill()  # and the sweep itself
    process.communicate()
    deadline = time.monotonic() + 60
    while children(out) and time.monotonic() < deadline:  # its runs end with it
        time.sleep(0.1)
    assert not children(out)
    before = done(out)
    assert 6 <= len(before) < 12
    with begin(out, "--jobs", "2", "--results", str(tmp_path / "results")) as again:
        said = again.communicate(timeout=500)[0]
        assert again.returncode == 0, said
    check_all_there(out, before)
    assert "0,1,2" in said
    assert not (tmp_path / "results").exists(), "results with changed settings are no table's"


@pytest.mark.slow
@needs_linux
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")
def test_twelve_runs_on_ray_with_a_worker_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin(out, "--on", "ray", "--jobs", "2")
    wait_for(lambda: len(done(out)) >= 4, process)
    before = done(out)
    kill_half_way(out, process, worker=True)
    said = process.communicate(timeout=500)[0]
    assert process.returncode == 0, said
    check_all_there(out, before)
    again = subprocess.run(words(out, "--on", "ray"), capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "started" not in again.stdout
