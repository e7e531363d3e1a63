"""What runs of a sweep tell while they train, and what their results say about the runs beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from wirings.train import recipes, results
from wirings.train.phases import train
from wirings.train.run import heartbeat
from wirings.train.run.heartbeat import Beat, Heartbeat, read_beat, write_sharing
from wirings.train.settings import with_overrides

TINY = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 60, test_examples: 20}", "batch=20"]


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_counts_the_others_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    device = tmp_path / "gpu.json"
    monkeypatch.setenv(heartbeat.VARIABLE, str(device))
    write_sharing(device, runs=1, mps=True)
    run = Heartbeat(tmp_path)
    clock.now += 0.5
    run.step(7, 0)
    assert read_beat(tmp_path) is None, "too early"
    clock.now += 9.5
    run.step(100, 1)
    assert read_beat(tmp_path) == Beat(1010.0, 100, 1)
    write_sharing(device, runs=4, mps=True)
    clock.now += 10
    run.step(150, 1)
    clock.now += 3600  # killed, and resumed after an hour
    resumed = Heartbeat(tmp_path)
    device.unlink()  # the sweep has ended; the run goes on to its end
    clock.now += 10
    assert resumed.end(200, 2) == {"most_others": 3, "mean_others": 1.5, "mps": True}
    assert read_beat(tmp_path) == Beat(clock.now, 200, 2)


@pytest.mark.parametrize("text", ["", "[1]", '{"time": "soon"}', '{"time": 1, "steps": 2, "epoch": 0, "shared": {}}'])
def test_damaged_files_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    assert Heartbeat(tmp_path).end(1, 1) == {}
    assert read_beat(tmp_path) == (Beat(1.0, 2, 0) if "shared" in text else None)


@pytest.mark.parametrize("runs", [None, 1, 3])
def test_results_say_what_a_run_shared_its_device_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int | None
) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    if runs is not None:
        write_sharing(tmp_path / "device.json", runs=runs, mps=False)
        monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "device.json"))
    settings, overrides = with_overrides(recipes.get("digits/static-dnw").settings, [*TINY, "epochs=1"])
    result = train("digits/static-dnw", settings, tmp_path / "run", overrides=overrides, device="cpu")
    assert result is not None
    kept: dict[str, Any] = json.loads((tmp_path / "run" / "result.json").read_text())
    if runs is None:
        assert result.most_others is None
        assert not {"most_others", "mean_others", "mps"} & kept.keys()
        assert not (tmp_path / "run" / "progress.json").exists()
    else:
        assert (kept["most_others"], kept["mean_others"], kept["mps"]) == (runs - 1, runs - 1, False)
        assert results.read(tmp_path / "run" / "result.json") == result
        beat = read_beat(tmp_path / "run")
        assert beat is not None
        assert (beat.steps, beat.epoch) == (3, 1)
