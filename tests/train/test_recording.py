"""Runs record their wiring: by default, as often as they are told, and so that it can be gone on with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breaking import BreakError, Heard, Stops, lines

import wirings
from wirings import models
from wirings.history import History, snapshot_of
from wirings.train import loop, recipes, runs
from wirings.train.recording import DAMAGED, HISTORY, usual_every
from wirings.train.settings import with_overrides

RECIPE = "digits/static-dnw"
SMALL = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}", "batch=20"]


def train(out: Path, *changes: str, **more: Any) -> Any:
    settings = with_overrides(recipes.get(RECIPE).settings, ["epochs=4", *SMALL, *changes])[0]
    return loop.train(RECIPE, settings, out, device="cpu", **more)


def test_a_run_records_its_wiring(tmp_path: Path) -> None:
    train(tmp_path, "history_every=1")
    history = History.load(tmp_path / HISTORY)
    assert history.steps == list(range(13))  # 12 steps, and the beginning
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


def test_how_often_is_a_setting_that_leaves_the_recipe_what_it_is(tmp_path: Path) -> None:
    assert train(tmp_path / "five", "history_every=5").overrides == {}
    assert History.load(tmp_path / "five" / HISTORY).steps == [0, 5, 10]
    train(tmp_path / "none", "history_every=0")
    assert not (tmp_path / "none" / HISTORY).exists()
    one, other = (lines(tmp_path / name) for name in ("five", "none"))
    assert one == other  # recording changes nothing
    train(tmp_path / "dense", "rule.name=dense")
    assert len(History.load(tmp_path / "dense" / HISTORY).state()) == 4880


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_a_history_that_cannot_be_read_begins_anew_and_says_so(lost: bool, tmp_path: Path) -> None:
    with pytest.raises(BreakError):
        train(tmp_path, log=Stops(8))
    if lost:
        (tmp_path / HISTORY).unlink()
    else:
        (tmp_path / HISTORY).write_text("nothing")
    log = Heard()
    train(tmp_path, resume=True, log=log)
    assert any(said.startswith("the history begins anew: ") for said in log.said)
    assert History.load(tmp_path / HISTORY).steps == [6, 8]


def broken(out: Path) -> bytes:
    """A run that stopped in its third epoch: its checkpoint is of step 6. Gives its history."""
    with pytest.raises(BreakError):
        train(out, "history_every=1", log=Stops(8))
    return (out / HISTORY).read_bytes()


def goes_on(out: Path) -> tuple[list[int], list[str]]:
    """The steps of a broken run's history at its end, and what was said of it."""
    log = Heard()
    assert train(out, "history_every=1", resume=True, log=log) is not None
    history = History.load(out / HISTORY)
    assert len(list(history.states())) == len(history)
    return history.steps, [said for said in log.said if "history" in said]


def test_a_history_that_two_processes_wrote_is_kept_as_far_as_it_can_be_replayed(tmp_path: Path) -> None:
    whole = broken(tmp_path)
    history = History.load(tmp_path / HISTORY)
    twice = [*history.chunks[:6], *history.chunks[3:]]  # records and losses of steps 0 to 3, then of 2 and so on
    mixed = History(history.structure, history.about, twice).to_bytes()
    assert len(mixed) > len(whole)
    (tmp_path / HISTORY).write_bytes(mixed)
    steps, said = goes_on(tmp_path)
    assert steps == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12]
    assert len(said) == 1
    assert "It is kept up to step 3; what followed, up to step 6, is lost." in said[0]
    assert said[0].endswith(f"The damaged file is {tmp_path / DAMAGED} now.")
    assert (tmp_path / DAMAGED).read_bytes() == mixed


def test_damage_is_told_only_where_something_is_lost(tmp_path: Path) -> None:
    whole = broken(tmp_path)
    train(tmp_path / "other", "history_every=1")
    end = History.load(tmp_path / HISTORY).until(6).to_bytes()
    assert whole.startswith(end)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for at in sorted({*range(7, len(end), len(end) // 12), len(end) - 1, len(end), len(end) + 5, len(whole) - 1}):
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
        for name in (DAMAGED, "result.json"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / HISTORY).write_bytes(whole[:at])
        steps, said = goes_on(tmp_path)
        assert len(said) == (at < len(end)) == (tmp_path / DAMAGED).exists(), at
        assert steps[-7:] == [6, 7, 8, 9, 10, 11, 12]
        if at >= len(end):
            assert (tmp_path / HISTORY).read_bytes() == (tmp_path / "other" / HISTORY).read_bytes()


def test_the_history_of_another_network_is_set_aside(tmp_path: Path) -> None:
    broken(tmp_path / "run")
    other = wirings.Recorder(wirings.wire_(torch.nn.Linear(4, 3), k=2), path=tmp_path / "run" / HISTORY)
    other.close()
    steps, said = goes_on(tmp_path / "run")
    assert steps == [6, 7, 8, 9, 10, 11, 12]
    assert [text.startswith("the history begins anew: ") for text in said] == [True]
    assert f"is of another network. That file is {tmp_path / 'run' / DAMAGED} now." in said[0]


def test_the_usual_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = models.get("tiny_static", rule="dnw").wiring
    assert usual_every(wiring, 15_680) == 78
    assert usual_every(wiring, 10) == 8
    monkeypatch.setattr(wiring, "masks", lambda: {"a large layer": torch.ones(2_000_000, dtype=torch.bool)})
    assert usual_every(wiring, 1000) == 100
    monkeypatch.setattr(wiring, "masks", lambda: {"a layer of Table 2": torch.ones(160_000, dtype=torch.bool)})
    assert usual_every(wiring, 62_000) == 1000
