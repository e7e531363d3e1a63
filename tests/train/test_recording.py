"""Runs record their wiring, and continue the record when they are resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breaking import BreakError, Heard, Stops, lines

import wirings
from wirings import models
from wirings.history import History, snapshot_of
from wirings.train import recipes
from wirings.train import saved_runs as runs
from wirings.train.run import loop
from wirings.train.run.folder import DAMAGED_HISTORY, HISTORY
from wirings.train.run.recording import default_interval
from wirings.train.settings import with_overrides

RECIPE = "digits/static-dnw"
SMALL = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}", "batch=20"]


def train(out: Path, *changes: str, **more: Any) -> Any:
    settings = with_overrides(recipes.get(RECIPE).settings, ["epochs=4", *SMALL, *changes])[0]
    return loop.train(RECIPE, settings, out, device="cpu", **more)


def test_a_run_records_its_wiring(tmp_path: Path) -> None:
    train(tmp_path, "history_every=1")
    history = History.load(tmp_path / HISTORY)
    assert history.steps == list(range(13))  # the initial wiring and 12 steps
    assert history.about == {
        "rule": "dnw",
        "recipe": RECIPE,
        "seed": 0,
        "model": "digits_static",
        "data": "synthetic",
    }
    model = runs.open_run(tmp_path, device="cpu")[0]
    assert np.array_equal(history.state().indices, snapshot_of(model).state().indices)
    assert np.array_equal(history.state().codes, snapshot_of(model).state().codes)
    log = lines(tmp_path)
    assert history.series("accuracy")[1] == pytest.approx([float(line["accuracy"]) for line in log])
    assert history.series("test_loss")[1] == pytest.approx([float(line["loss"]) for line in log])
    steps, loss = history.series("loss")
    assert steps.tolist() == list(range(1, 13))
    assert loss[2::3] == pytest.approx([float(line["train_loss"]) for line in log])  # at the ends of epochs
    swapped = [int(line["swapped"]) for line in log]
    indices = [state.indices for state in history.states()]
    assert [len(np.setdiff1d(indices[i + 3], indices[i])) for i in (0, 3, 6, 9)] == swapped


def test_history_every_does_not_change_the_recipe(tmp_path: Path) -> None:
    assert train(tmp_path / "five", "history_every=5").overrides == {}
    assert History.load(tmp_path / "five" / HISTORY).steps == [0, 5, 10, 12], "every 5 steps, and after the last"
    train(tmp_path / "none", "history_every=0")
    assert not (tmp_path / "none" / HISTORY).exists()
    one, other = (lines(tmp_path / name) for name in ("five", "none"))
    assert one == other  # recording does not affect training
    train(tmp_path / "dense", "rule.name=dense")
    assert len(History.load(tmp_path / "dense" / HISTORY).state()) == 4880


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_an_unreadable_history_is_replaced_and_reported(lost: bool, tmp_path: Path) -> None:
    with pytest.raises(BreakError):
        train(tmp_path, log=Stops(8))
    if lost:
        (tmp_path / HISTORY).unlink()
    else:
        (tmp_path / HISTORY).write_text("nothing")
    log = Heard()
    train(tmp_path, resume=True, log=log)
    assert any(said.startswith("A new history begins: ") for said in log.said)
    assert History.load(tmp_path / HISTORY).steps == [6, 8, 12]


def broken(out: Path) -> bytes:
    """Train until the third epoch, so that the checkpoint is of step 6. Returns the history."""
    with pytest.raises(BreakError):
        train(out, "history_every=1", log=Stops(8))
    return (out / HISTORY).read_bytes()


def resume(out: Path) -> tuple[list[int], list[str]]:
    """Resume an interrupted run. Returns the steps of its history and the messages about it."""
    log = Heard()
    assert train(out, "history_every=1", resume=True, log=log) is not None
    history = History.load(out / HISTORY)
    assert len(list(history.states())) == len(history)
    return history.steps, [said for said in log.said if "history" in said]


def test_keeps_the_intact_part_of_a_damaged_history(tmp_path: Path) -> None:
    whole = broken(tmp_path)
    history = History.load(tmp_path / HISTORY)
    twice = [*history.chunks[:6], *history.chunks[3:]]  # as if two processes had written to it
    mixed = History(history.structure, history.about, twice).to_bytes()
    assert len(mixed) > len(whole)
    (tmp_path / HISTORY).write_bytes(mixed)
    steps, said = resume(tmp_path)
    assert steps == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12]
    assert len(said) == 1
    assert "Records up to step 3 are kept; those up to step 6 are lost." in said[0]
    assert said[0].endswith(f"The damaged file was renamed to {tmp_path / DAMAGED_HISTORY}.")
    assert (tmp_path / DAMAGED_HISTORY).read_bytes() == mixed


@pytest.mark.parametrize("structure", ["row", "2x2", "3x5, padded"])
def test_the_history_of_a_structure_goes_on(structure: str, tmp_path: Path) -> None:
    options = ("history_every=1", f"model.options={{structure: '{structure}', edges: 0.3}}")
    with pytest.raises(BreakError):
        train(tmp_path, *options, log=Stops(8))
    train(tmp_path, *options, resume=True)
    assert History.load(tmp_path / HISTORY).steps == list(range(13))


def test_damage_is_reported_only_if_records_are_lost(tmp_path: Path) -> None:
    whole = broken(tmp_path)
    train(tmp_path / "other", "history_every=1")
    end = History.load(tmp_path / HISTORY).until(6).to_bytes()
    assert whole.startswith(end)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for at in sorted({*range(7, len(end), len(end) // 12), len(end) - 1, len(end), len(end) + 5, len(whole) - 1}):
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
        for name in (DAMAGED_HISTORY, "result.json"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / HISTORY).write_bytes(whole[:at])
        steps, said = resume(tmp_path)
        assert len(said) == (at < len(end)) == (tmp_path / DAMAGED_HISTORY).exists(), at
        assert steps[-7:] == [6, 7, 8, 9, 10, 11, 12]
        if at >= len(end):
            assert (tmp_path / HISTORY).read_bytes() == (tmp_path / "other" / HISTORY).read_bytes()


def test_renames_the_history_of_another_network(tmp_path: Path) -> None:
    broken(tmp_path / "run")
    other = wirings.Recorder(wirings.wire_(torch.nn.Linear(4, 3), k=2), path=tmp_path / "run" / HISTORY)
    other.close()
    steps, said = resume(tmp_path / "run")
    assert steps == [6, 7, 8, 9, 10, 11, 12]
    assert [text.startswith("A new history begins: ") for text in said] == [True]
    assert (
        f"is the history of another network. The old file was renamed to {tmp_path / 'run' / DAMAGED_HISTORY}."
        in said[0]
    )


def test_default_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = models.get("tiny_static", rule="dnw").wiring
    assert default_interval(wiring, 15_680) == 78
    assert default_interval(wiring, 10) == 8
    monkeypatch.setattr(wiring, "masks", lambda: {"a large layer": torch.ones(2_000_000, dtype=torch.bool)})
    assert default_interval(wiring, 1000) == 100
    monkeypatch.setattr(wiring, "masks", lambda: {"a layer of Table 2": torch.ones(160_000, dtype=torch.bool)})
    assert default_interval(wiring, 62_000) == 1000
