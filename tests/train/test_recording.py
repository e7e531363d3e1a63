"""Runs record their wiring: by default, as often as they are told, and so that it can be gone on with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breaking import BreakError, Heard, Stops, lines

from wirings import models
from wirings.history import History, still
from wirings.train import loop, recipes, runs
from wirings.train.recording import HISTORY, usual_every
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
    assert np.array_equal(history.state().places, still(model).state().places)
    assert np.array_equal(history.state().codes, still(model).state().codes)
    log = lines(tmp_path)
    assert history.series("accuracy")[1] == pytest.approx([float(line["accuracy"]) for line in log])
    assert history.series("test_loss")[1] == pytest.approx([float(line["loss"]) for line in log])
    steps, loss = history.series("loss")
    assert steps.tolist() == list(range(1, 13))
    assert loss[2::3] == pytest.approx([float(line["train_loss"]) for line in log])  # at the ends of epochs
    swapped = [int(line["swapped"]) for line in log]
    places = [state.places for state in history.states()]
    assert [len(np.setdiff1d(places[i + 3], places[i])) for i in (0, 3, 6, 9)] == swapped


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


def test_the_usual_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = models.get("tiny_static", rule="dnw").wiring
    assert usual_every(wiring, 15_680) == 78
    assert usual_every(wiring, 10) == 8
    monkeypatch.setattr(wiring, "masks", lambda: {"a large layer": torch.ones(2_000_000, dtype=torch.bool)})
    assert usual_every(wiring, 1000) == 100
    monkeypatch.setattr(wiring, "masks", lambda: {"a layer of Table 2": torch.ones(160_000, dtype=torch.bool)})
    assert usual_every(wiring, 62_000) == 1000
