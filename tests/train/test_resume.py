"""A run that is interrupted, in whatever way, and resumed equals an uninterrupted one, bit for bit."""

import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import processes
import pytest
from breaking import BreakError, Stops, lines, same_runs
from soak import SOAK

from wirings.train import files, recipes, results
from wirings.train import saved_runs as runs
from wirings.train.run import checkpoint, loop
from wirings.train.run.log import Log
from wirings.train.settings import Settings, with_overrides

RECIPE = "digits/static-dnw"


def small(*changes: str) -> Settings:
    data = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}", "batch=20"]
    data += ["optimizer.lr=0.3", "optimizer.momentum=0.9", "schedule.kind=cosine"]
    return with_overrides(recipes.get(RECIPE).settings, ["epochs=4", *data, *changes])[0]


def train(out: Path, settings: Settings, **more: Any) -> results.Result | None:
    return loop.train(RECIPE, settings, out, device="cpu", **more)


@pytest.mark.parametrize(
    "changes",
    [
        ["data.name=digits", "data.options={}", "batch=500"],
        ["precision=bf16", "ema=0.9", "optimizer.nesterov=true"],
        ["rule.name=random", "optimizer.momentum=0", "accumulate=2", "channels_last=true"],
        ["optimizer.weight_decay_edges=0", "evaluate_every=2", "schedule.warmup_epochs=1.5"],
        ["rule.name=targeted_dropout", "rule.options={rho: 0.7}", "ema=0.9"],
        ["rule.name=l1_anneal", "rule.options={every: 2}"],
        ["rule.name=sparse_momentum", "rule.options={every: 2}"],
    ],
    ids=[
        "digits",
        "bf16 and average",
        "random, no momentum",
        "decay and warm-up",
        "random numbers in the forward pass",
        "edges removed by a schedule",
        "edges that move",
    ],
)
def test_resumes_bit_for_bit(changes: list[str], tmp_path: Path) -> None:
    settings = small(*changes)  # 3 steps per epoch
    whole = train(tmp_path / "whole", settings)
    assert whole is not None
    assert runs.measure(tmp_path / "whole", device="cpu")[:2] == (whole.test_loss, whole.accuracy)
    with pytest.raises(BreakError):  # in the third epoch; resumes from the end of the second
        train(tmp_path / "epoch", settings, log=Stops(8))
    train(tmp_path / "epoch", settings, resume=True)
    same_runs(tmp_path / "whole", tmp_path / "epoch")
    often = small(*changes, "checkpoint_every=1")
    for after in (2, 1, 5):  # in the middle of epochs, one step after a checkpoint
        with pytest.raises(BreakError):
            train(tmp_path / "often", often, resume=True, log=Stops(after))
    train(tmp_path / "often", often, resume=True)
    same_runs(tmp_path / "whole", tmp_path / "often")


def test_swapped_edges_are_counted_from_the_start_of_the_epoch(tmp_path: Path) -> None:
    settings = small("checkpoint_every=1", "epochs=2", "optimizer.lr=1")
    train(tmp_path / "whole", settings)
    with pytest.raises(BreakError):
        train(tmp_path / "broken", settings, log=Stops(5))
    train(tmp_path / "broken", settings, resume=True)
    swapped = [line["swapped"] for line in lines(tmp_path / "whole")]
    assert swapped == [line["swapped"] for line in lines(tmp_path / "broken")]
    assert int(swapped[1]) > 0


def test_time_limit_stops_at_a_checkpoint(tmp_path: Path) -> None:
    settings = small("epochs=2")
    train(tmp_path / "whole", settings)
    said: list[str] = []
    log = Log()
    log.say = said.append  # type: ignore[method-assign]
    for _ in range(5):
        assert train(tmp_path / "limited", settings, resume=True, max_minutes=0, log=log) is None
    assert "at epoch 2, batch 3." in said[-1]
    assert said[0].startswith("The time is up. Continue ")
    assert "with --resume, at epoch 1, batch 2." in said[0]
    assert "Resuming at epoch 1, batch 2." in said
    assert train(tmp_path / "limited", settings, resume=True, max_minutes=0) is not None, "only the last step was left"
    same_runs(tmp_path / "whole", tmp_path / "limited")


@pytest.mark.parametrize("limit", [None, 0])
def test_checkpoint_epochs_keeps_the_same_best_and_last(limit: float | None, tmp_path: Path) -> None:
    changes = ["data.name=digits", "data.options={}", "batch=700", "epochs=7"]
    settings, seldom = small(*changes), small(*changes, "checkpoint_epochs=3")
    train(tmp_path / "whole", settings)
    if limit is None:  # in the sixth epoch; resumes from the end of the third
        with pytest.raises(BreakError):
            train(tmp_path / "seldom", seldom, log=Stops(11))
        _, about = checkpoint.read(tmp_path / "seldom" / "last.safetensors")
        assert about["progress"]["epoch"] == 3
        train(tmp_path / "seldom", seldom, resume=True)
    else:  # the best epoch before the time was up is written with the checkpoint
        while train(tmp_path / "seldom", seldom, resume=True, max_minutes=limit) is None:
            pass
    same_runs(tmp_path / "whole", tmp_path / "seldom")


def test_resumes_after_a_kill_before_any_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small("epochs=2")
    train(tmp_path / "whole", settings)
    write = files.write_file
    count = 0

    def dies(path: Path, put: Any, *rest: Any) -> None:
        nonlocal count
        count += 1
        if count == limit:
            raise BreakError
        write(path, put, *rest)

    monkeypatch.setattr(files, "write_file", dies)
    for limit in range(1, 20):  # before each file that a run writes
        count, out = 0, tmp_path / str(limit)
        try:
            train(out, settings)
        except BreakError:
            count = 100
            train(out, settings, resume=True)
            same_runs(tmp_path / "whole", out)
        else:
            break
    assert 7 <= limit < 19


def test_removes_partial_files_only(tmp_path: Path) -> None:
    for name in (".last.safetensors.0a1b2c3d4e5f.part", ".tmpNgYPxj", ".notes", ".tmp", "last.safetensors"):
        (tmp_path / name).write_text("")  # safetensors 0.8 writes to the second kind and renames it
    files.remove_partial_files(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".notes", ".tmp", "last.safetensors"]


@pytest.mark.slow
def test_resumes_after_several_kills(tmp_path: Path) -> None:
    kills = 10 if SOAK else 4
    settings = ["epochs=12", "batch=100", "checkpoint_every=1"]
    settings += ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 1000, test_examples: 40}"]
    changes = [text for change in settings for text in ("--set", change)]

    def start() -> BaseProcess:
        words = ["train", RECIPE, "--device", "cpu", "--out", str(tmp_path / "killed"), "--resume", *changes]
        return processes.start(processes.command, *words, output=tmp_path / "output.txt")

    changed_settings, overrides = with_overrides(recipes.get(RECIPE).settings, settings)
    train(tmp_path / "whole", changed_settings, overrides=overrides)
    draw, reached = random.Random(0), [0]
    began, last = tmp_path / "killed" / "settings.yaml", tmp_path / "killed" / "last.safetensors"

    def changed(path: Path) -> int:
        return path.stat().st_mtime_ns if path.exists() else 0

    for _ in range(kills):
        before = changed(began)
        process = start()
        while process.is_alive() and changed(began) == before:
            time.sleep(0.005)
        for _ in range(draw.randrange(9)):  # a few checkpoints and a moment later
            written = changed(last)
            while process.is_alive() and changed(last) == written:
                time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        assert process.is_alive(), "it finished before it could be killed: make it longer"
        process.kill()
        process.join()
        if last.exists():
            _, about = checkpoint.read(last)
            reached.append(about["progress"]["steps"])
    assert reached == sorted(reached)
    assert len(set(reached)) > kills // 2, "some kills must follow progress"
    process = start()
    assert processes.wait(process) == 0, (tmp_path / "output.txt").read_text()
    same_runs(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob(".*"))
