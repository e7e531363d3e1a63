"""``wirings sweep``: what it rejects, and four or twelve real runs with a worker that is killed half-way."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest
from soak import SOAK
from typer.testing import CliRunner

from wirings import WiringError
from wirings.cli.app import app
from wirings.cli.sweep import keep_results
from wirings.train import results
from wirings.train.sweep import folder, local, on_ray, process
from wirings.train.sweep.on_ray import RayExecutor
from wirings.train.sweep.plan import SweepPlan

ROWS = ["digits/static-dnw", "digits/static-random"]
TINY = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 60, test_examples: 20}", "batch=20"]
TINY += ["epochs=2", "optimizer.lr=0.1,0.3", "checkpoint_every=1"]
CHANGES = [*(word for change in TINY for word in ("--set", change)), "--device", "cpu"]
OPTIONS = [*ROWS, "--seed", "0-2", *CHANGES]
TRAINED, SEEDS = (ROWS, (0, 1, 2)) if SOAK else (ROWS[:1], (0, 1))  # with two learning rates: 12 runs, or 4
RUNS = 2 * len(TRAINED) * len(SEEDS)


call = partial(commands.call, "sweep")


def test_dry_run_lists_the_runs_and_writes_nothing(tmp_path: Path) -> None:
    said = call(*OPTIONS, "--out", tmp_path / "out", "--dry-run").split()
    assert len(said) == 12
    assert not (tmp_path / "out").exists()
    said = call("table2/lottery", "--out", tmp_path / "out", "--dry-run").splitlines()
    assert said == ["table2/complete/seed0", "table2/lottery/seed0 (starts from table2/complete/seed0)"]


def test_rejects_invalid_options_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(local, "_gpus", list)
    for words, match in [
        (["--on", "ray"], r"needs the package Ray, which is not installed: pip install \"wirings\[ray\]\""),
        (["--on", "rya"], "unknown place .* Did you mean 'ray'"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--per-gpu", "0"], "--per-gpu must be at least 1"),
        (["--retries", "-1"], "--retries must be at least 0"),
        (["--max-minutes", "nan"], "--max-minutes must be 0 or more, got nan"),
        (["--device", "gpu"], "--device must be cuda or cpu, got 'gpu'"),
        (["--device", "cuda:x"], "--device must be cuda or cpu, got 'cuda:x'"),
        (["--device", "cuda:0"], r"--device (must be cuda or cpu for a sweep|is cuda:0, but PyTorch finds)"),
        (["--device", "cuda"], "--device is cuda, but PyTorch finds no CUDA device"),
        (["--out", "x" * 300], r"the path x{60}… \(300 characters\) cannot be used: a name in it is too long"),
        (["--max-minutes", "0"], "--max-minutes must be more than 0 for a sweep"),
        (["--data", "."], "none of these runs reads files\\. Leave it out"),
        (["--results", __file__], "--results takes a folder, but .* is a file"),
        (["--out", __file__], "--out takes a folder, but .* is a file"),
        (["--out", Path(__file__) / "new" / "one"], "--out takes a folder, but .*py is a file"),
    ]:
        with pytest.raises(WiringError, match=match):
            call(*OPTIONS, "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_rejects_missing_data_before_anything_is_written(tmp_path: Path) -> None:
    for words, match in [
        (["table4/dense"], "table4/dense/seed0 reads the data set 'imagenet' from a folder. Give it with --data"),
        (["table1/static-dnw", "--data", "absent"], "--data absent does not exist"),
    ]:
        with pytest.raises(WiringError, match=match):
            call(*words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rejects_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(WiringError, match=r"out cannot be written: Read-only file system\. Give another --out"):
        call(*OPTIONS, "--out", tmp_path / "out")


def test_rejects_results_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Stands in for the package ray: without a cluster, or with one that raises an error."""

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
def test_rejects_addresses_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(error))
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    monkeypatch.setattr(on_ray, "PROBE", "")
    with pytest.raises(WiringError, match=rf"no Ray cluster .* RAY_ADDRESS=nonsense \({error}\)\. Fix or unset it"):
        call(*OPTIONS, "--out", tmp_path / "out", "--on", "ray")
    assert not (tmp_path / "out").exists()


def test_waits_a_limited_time_for_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would wait without an end."""
    ray = FakeRay(ConnectionError("not asked"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.1:6379")
    monkeypatch.setattr(on_ray, "SECONDS", 0.5)
    monkeypatch.setattr(on_ray, "PROBE", "import time; time.sleep(60)")
    with pytest.raises(
        WiringError, match=r"RAY_ADDRESS=10\.255\.255\.1:6379 \(no answer within 0\.5 s\)\. Fix or unset it"
    ):
        call(*OPTIONS, "--out", tmp_path / "out", "--on", "ray")
    monkeypatch.setattr(on_ray, "SECONDS", 60.0)
    monkeypatch.setattr(on_ray, "PROBE", "raise ConnectionError('dead')")
    with pytest.raises(WiringError, match=r"\(ConnectionError: dead\)"):
        call(*OPTIONS, "--out", tmp_path / "out", "--on", "ray")
    assert not ray.asked


@pytest.mark.parametrize("address", [None, ""])
def test_starts_ray_without_a_cluster(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    ray = FakeRay(ConnectionError("nobody there"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    RayExecutor(jobs=1)
    assert ray.asked == ["auto", None]
    monkeypatch.setitem(sys.modules, "ray", FakeRay(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        RayExecutor(jobs=1)


def test_time_in_the_queue_of_ray_counts_against_max_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(process, "run_process", lambda words, *_: done.append(words[1:]) or 7)
    words = ["python", "train", "--max-minutes", "2", "--device", "cpu"]
    assert on_ray._execute(words, str(tmp_path), time.time() - 60) == 7
    assert [*done[0][:2], *done[0][3:]] == ["train", "--max-minutes", "--device", "cpu"]
    assert float(done[0][2]) == pytest.approx(1.0, abs=0.05)
    assert on_ray._execute(words, str(tmp_path), time.time() - 121) == 0
    assert on_ray._execute(words[:2], str(tmp_path), time.time() - 121) == 7
    assert done[1:] == [["train"]], "late runs are not started"


def test_runs_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = SweepPlan(["table2/lottery"], [0], []).runs()
    words = process.train_command(runs[1], Path("out"))
    assert words[words.index("--out") + 1] == str(tmp_path / "out" / "table2/lottery/seed0")
    assert words[words.index("--start") + 1] == str(tmp_path / "out" / "table2/complete/seed0")


def test_only_runs_that_read_files_get_the_data_folder(tmp_path: Path) -> None:
    runs = SweepPlan([ROWS[0], "table1/static-dnw", "table4/dense"], [0], []).runs()
    words = [process.train_command(run, tmp_path, data=tmp_path / "data") for run in runs]
    assert ["--data" in line for line in words] == [False, True, True]
    assert words[1][-2:] == ["--data", str(tmp_path / "data")]


def test_keeps_results_of_unchanged_recipes_once(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "results"
    runs = [*SweepPlan([ROWS[0]], [0, 1, 2], []).runs(), *SweepPlan([ROWS[0]], [3], [["epochs=2"]]).runs()]
    known: dict[str, Any] = {"recipe": ROWS[0], "epochs": 2, "steps": 4, "params": 10, "settings": {}}
    known |= {"precision": "fp32", "hardware": "none", "versions": {}, "commit": None, "dirty": None}
    known |= {"started": "2026-01-01", "train_s": 1.0, "wall_s": 1.0}
    for run in runs:
        if run.seed != 2:  # seed 2 is not finished
            changed = {"epochs": 2} if run.changes else {}
            result = results.Result(seed=run.seed, accuracy=50.0, overrides=changed, **known)
            results.write_json(out / run.path / "result.json", result)
            (out / run.path / "last.safetensors").touch()
    results.write(results.Result(seed=1, accuracy=60.0, overrides={}, **known), kept)
    said: list[str] = []
    keep_results(runs, out, kept, SimpleNamespace(say=said.append))
    assert [(r.seed, r.accuracy) for r in results.find(kept, ROWS[0])] == [(0, 50.0), (1, 60.0)]
    assert said == [
        f"wrote {kept / ROWS[0] / 'seed0.json'}",
        f"{kept / ROWS[0] / 'seed1.json'} holds another result, which was kept",
    ]
    keep_results(runs, out, kept, SimpleNamespace(say=said.append))
    assert len(said) == 3, "the existing result is reported again"


def words(out: Path, *more: str) -> list[str]:
    seeds = ["--seed", f"0-{SEEDS[-1]}"]
    return [sys.executable, "-m", "wirings", "sweep", *TRAINED, *seeds, *CHANGES, "--out", str(out), *more]


def run_folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("digits/*/*/seed*/output.txt"))


def children(out: Path) -> dict[int, tuple[int, Path]]:
    """The training processes of a sweep, with their parents and folders."""
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
    """Kill a run that has a checkpoint and no result, or the worker that executes it, and return its folder."""
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
        if not (place / "result.json").exists():  # otherwise it finished first
            return place


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.02)


def done(out: Path) -> dict[Path, tuple[str, int]]:
    """The finished runs, with the time each began and how often it was started."""
    finished = [path for path in run_folders(out) if folder.has_result(path)]
    noted = (out / folder.EVENTS).read_text().splitlines() if finished else []
    starts = {path: sum(line.endswith(f"started {path.relative_to(out)}") for line in noted) for path in finished}
    return {path: (results.read(path / "result.json").started, starts[path]) for path in finished}


def begin(out: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return subprocess.Popen(words(out, *more), **piped)


def check_all_there(out: Path, before: dict[Path, tuple[str, int]]) -> None:
    after = done(out)
    assert len(after) == RUNS
    assert before.items() <= after.items(), "finished runs are unchanged and were not restarted"
    found = [json.loads((path / "result.json").read_text()) for path in after]
    assert {(r["recipe"], r["seed"], r["settings"]["optimizer"]["lr"]) for r in found} == {
        (row, seed, lr) for row in TRAINED for seed in SEEDS for lr in (0.1, 0.3)
    }
    assert all(result["steps"] == 6 for result in found)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@needs_linux
def test_sweep_continues_after_a_run_and_the_sweep_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin(out, "--jobs", "2")
    wait_for(lambda: len(done(out)) >= max(RUNS // 6, 1), process)
    killed = kill_half_way(out, process, worker=False)
    wait_for(lambda: f" killed {killed.relative_to(out)}" in (out / folder.EVENTS).read_text(), process)
    wait_for(lambda: len(done(out)) >= RUNS // 2 and children(out), process)
    process.kill()  # the sweep itself
    process.communicate()
    deadline = time.monotonic() + 60
    while children(out) and time.monotonic() < deadline:  # its runs end with it
        time.sleep(0.1)
    assert not children(out)
    before = done(out)
    assert RUNS // 2 <= len(before) < RUNS
    with begin(out, "--jobs", "2", "--results", str(tmp_path / "results")) as again:
        said = again.communicate(timeout=500)[0]
        assert again.returncode == 0, said
    check_all_there(out, before)
    assert ",".join(map(str, SEEDS)) in said
    assert not (tmp_path / "results").exists(), "results with changed settings are not kept"


@pytest.mark.slow
@needs_linux
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")
def test_sweep_on_ray_continues_after_a_worker_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin(out, "--on", "ray", "--jobs", "2")
    wait_for(lambda: len(done(out)) >= RUNS // 3, process)
    before = done(out)
    kill_half_way(out, process, worker=True)
    said = process.communicate(timeout=500)[0]
    assert process.returncode == 0, said
    check_all_there(out, before)
    again = subprocess.run(words(out, "--on", "ray"), capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "started" not in again.stdout
