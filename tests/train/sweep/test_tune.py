"""The search for learning rates, with fake training processes."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
from fake_sweep import command_of, go, write_template

from wirings import WiringError
from wirings.train import recipes
from wirings.train.sweep import folder, schedule
from wirings.train.sweep.plan import SweepPlan, SweepRun
from wirings.train.sweep.rate_records import lines_of
from wirings.train.sweep.tuning import Tuning
from wirings.train.tables import by_rule
from wirings.train.tables.tuned import rates_of

call = partial(commands.call, "tune")


@pytest.fixture(autouse=True)
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(schedule, "PAUSE", 0.01)
    return write_template(tmp_path / "template.json")


def accuracy(run: SweepRun) -> str:
    """What a fake run does: 0.4 is best for the learned wiring, 1.6 for the random one, and 3 diverges."""
    rate, best = run.settings.optimizer.lr, 1.6 if "random" in run.path else 0.4
    return "diverge" if rate > 3 else f"gives {80 - 10 * abs(math.log2(rate / best)) + run.seed}"


def search(tmp_path: Path, tuning: Tuning, **more: Any) -> list[schedule.RunProgress]:
    states, _ = go(tmp_path, tuning.first_runs(tmp_path / "out"), accuracy, more=tuning.more, **more)
    return states


def test_every_recipe_has_its_own_best_rate_and_worse_ones_on_both_sides(tmp_path: Path) -> None:
    names = ["digits/static-dnw", "digits/static-r*"]
    tuning = Tuning(names, seeds=[0, 1], changes=["optimizer.lr=0.4", "epochs=2"])
    states = search(tmp_path, tuning)
    dnw, random = tuning.recipes
    assert (dnw.best, dnw.over, dnw.bracketed) == (0.4, True, True)
    assert dnw.values == pytest.approx({0.2: 70.5, 0.283: 75.5, 0.4: 80.5, 0.566: 75.5, 0.8: 70.5}, abs=0.1)
    assert (random.best, random.bracketed) == (1.6, True)
    assert random.values[3.2] == math.inf  # it diverged, which counts as worse
    assert sorted(random.values) == [0.2, 0.4, 0.8, 1.13, 1.6, 2.26, 3.2]
    assert all("holdout" in state.run.path for state in states)
    assert len(states) == 2 * sum(len(recipe.values) for recipe in tuning.recipes)


def test_continues_where_it_was_stopped(tmp_path: Path) -> None:
    """Runs that are over are not repeated, diverged ones included."""
    first = Tuning(["digits/static-random"], changes=["optimizer.lr=1.6"])
    search(tmp_path, first)
    assert first.recipes[0].values[3.2] == math.inf
    (tmp_path / "out/digits/static-random/data.options.holdout=200,optimizer.lr=1.13/seed0/result.json").unlink()
    second = Tuning(["digits/static-random"], changes=["optimizer.lr=1.6"])
    states = search(tmp_path, second)
    assert second.recipes[0].values == first.recipes[0].values
    starts = {state.run.settings.optimizer.lr: (state.folder / "starts").read_text().count("once") for state in states}
    assert starts == {0.8: 1, 1.13: 2, 1.6: 1, 2.26: 1, 3.2: 1}


def test_a_run_that_fails_ends_the_search_of_its_recipe_alone(tmp_path: Path) -> None:
    tuning = Tuning(["digits/static-dnw", "digits/static-random"], changes=["optimizer.lr=0.4"])

    def how(run: SweepRun) -> str:
        return "fail" if "dnw" in run.path and run.settings.optimizer.lr == 0.8 else accuracy(run)

    states, _ = go(tmp_path, tuning.first_runs(tmp_path / "out"), how, more=tuning.more)
    dnw, random = tuning.recipes
    assert (dnw.over, sorted(dnw.values)) == (False, [0.2, 0.4])
    assert (random.over, random.best) == (True, 1.6)
    assert [state.run.path for state in states if state.status == schedule.FAILED and "dnw" in state.run.path] == [
        "digits/static-dnw/data.options.holdout=200,optimizer.lr=0.8/seed0"
    ]


def test_recipes_that_start_from_another_one_share_its_run(tmp_path: Path) -> None:
    tuning = Tuning(["table2/lottery"], changes=["epochs=2"])
    runs = tuning.first_runs(tmp_path / "out")
    assert [run.requested for run in runs] == [False, True, True, True]
    assert runs[0].settings.data.options == {"holdout": 5000}
    assert {run.start.path for run in runs if run.start is not None} == {runs[0].path}


@pytest.mark.parametrize(
    ("recipe", "changes", "match"),
    [
        (
            "digits/static-dnw",
            ["data.name=synthetic"],
            "'synthetic' does not say how to hold out training data, so that",
        ),
        ("digits/static-dnw", ["optimizer.lr=0.1,0.2"], r"optimizer\.lr"),
        ("digits/static-dnw", ["optimizer.rate=1"], r"unknown setting .optimizer\.rate."),
        ("digits/no-such", [], "unknown recipe"),
    ],
)
def test_rejects_what_cannot_be_tuned(recipe: str, changes: list[str], match: str) -> None:
    with pytest.raises(WiringError, match=match):
        Tuning([recipe], changes=changes)


@pytest.fixture
def fake_command(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "run_sweep", partial(schedule.run_sweep, command=command_of(template, accuracy)))


@pytest.mark.usefixtures("fake_command")
def test_command_prints_and_records_all_rates(tmp_path: Path) -> None:
    words = ["digits/static-dnw", "digits/static-random", "--set", "optimizer.lr=0.4", "--out", tmp_path / "out"]
    words += ["--results", tmp_path / "results", "--jobs", 3, "--device", "cpu"]
    said = call(*words, columns=200)
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith("digits/") and " yes " in line}
    assert rows["digits/static-dnw"].split()[1:4] == ["0.4", "80.00", "%"]
    assert "3.2: diverged" in rows["digits/static-random"]
    path = tmp_path / "results/tuning/digits.json"
    lines = json.loads(path.read_text())
    assert len(lines) == len(path.read_text().splitlines()) - 2 == 12
    assert lines[0] == {
        "recipe": "digits/static-dnw", "lr": 0.2, "scale_weights": False, "seed": 0, "steps": 4, "holdout": 200,
        "metric": "accuracy", "value": 70.0, "commit": None,
    }  # fmt: skip
    assert [line["value"] for line in lines if line["lr"] == 3.2] == [None]
    assert not list((tmp_path / "out").rglob("last.safetensors"))  # nobody needs these networks
    call(*words)
    assert json.loads(path.read_text()) == lines


@pytest.mark.usefixtures("fake_command")
def test_command_reports_failures_and_time(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = command_of(template, lambda run: "fail")
    monkeypatch.setattr(schedule, "run_sweep", partial(schedule.run_sweep, command=broken))
    said = call("digits/static-dnw", "--out", tmp_path / "out", "--device", "cpu", status=1)
    assert "failed for a reason" in said
    assert "not yet" in said


def test_command_rejects_what_it_cannot_record(tmp_path: Path) -> None:
    words = ["digits/static-dnw", "--out", tmp_path / "out", "--results", tmp_path]
    with pytest.raises(WiringError, match=r"--results keeps the rates of recipes as they are, but batch is changed"):
        call(*words, "--set", "batch=10")
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning/digits.json").write_text("{")
    with pytest.raises(WiringError, match=r"digits\.json is not a record of learning rates"):
        call(*words)
    with pytest.raises(WiringError, match="unknown place"):
        call(*words, "--on", "mars")
    assert not (tmp_path / "out").exists()


def test_dry_run_lists_the_first_rates(tmp_path: Path) -> None:
    said = call("digits/static-dnw", "--set", "optimizer.lr=1", "--out", tmp_path / "out", "--dry-run").split()
    rates = [line.split("optimizer.lr=")[1].split("/")[0] for line in said]
    assert rates == ["0.5", "1.0", "2.0"]
    assert not (tmp_path / "out").exists()


def test_tables_count_the_rates(tmp_path: Path) -> None:
    """A row is tuned if its rate is the best of those tried with its settings, and worse ones are on both sides."""
    lr, common = recipes.get("text/dnw-10").settings.optimizer.lr, {"seed": 0, "metric": "bits_per_byte", "steps": 2500}
    values = {lr / 2: 1.2, lr: 1.0, 2 * lr: None}
    lines = [{"recipe": "text/dnw-10", "lr": rate, "value": value, **common} for rate, value in values.items()]
    lines += [{**lines[0], "lr": 9.0, "steps": 10}, {**lines[0], "lr": 8.0, "scale_weights": True}]
    lines += [{**lines[0], "recipe": "text/set-10", "lr": rate} for rate in (1e-3, 2e-3)]
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning/text.json").write_text(json.dumps(lines))
    rows = {row.recipe: (row.rates, row.tuned) for row in by_rule.table("text", tmp_path)}
    assert rows["text/dnw-10"] == (3, True)
    assert rows["text/set-10"] == (2, False)
    assert rows["text/dense"] == (0, False)
    printed = by_rule.render(by_rule.table("text", tmp_path))
    assert "‡: worse ones are not known on both sides" in printed
    for text in ("{", "[1]", '[{"recipe": "text/dense", "lr": "x", "seed": 0, "metric": "accuracy", "value": 1}]'):
        (tmp_path / "tuning/text.json").write_text(text)
        with pytest.raises(WiringError, match=r"text\.json is not a record of learning rates"):
            by_rule.table("text", tmp_path)


def test_seeds_can_be_added_and_runs_be_trained_again(tmp_path: Path) -> None:
    """Runs of later rates belong to the search, though they are not known before the first ones are over."""
    states = search(tmp_path, Tuning(["digits/static-random"], changes=["optimizer.lr=0.4"]))
    folder.claim_sweep_folder(tmp_path / "out", [state.run for state in states])
    first = tmp_path / "out/digits/static-random/data.options.holdout=200,optimizer.lr=0.2/seed0"
    (first / "result.json").unlink()
    tuning = Tuning(["digits/static-random"], seeds=[0, 1], changes=["optimizer.lr=0.4"])
    runs = tuning.first_runs(tmp_path / "out")
    folder.check_sweep_folder(tmp_path / "out", runs, tuning.belongs)
    with pytest.raises(WiringError, match="holds another sweep"):
        folder.check_sweep_folder(tmp_path / "out", runs)
    other = Tuning(["digits/static-random"], changes=["optimizer.lr=0.4", "epochs=2"])
    with pytest.raises(WiringError, match="holds another sweep"):
        folder.check_sweep_folder(tmp_path / "out", other.first_runs(tmp_path / "out"), other.belongs)


def test_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    for part, base in (("a", "digits/static-dnw"), ("b", "digits/static-random")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "mine.yaml").write_text(f"base: {base}\n")
    with pytest.raises(WiringError, match=r"have the same name, mine, and so the same folders\. Rename one of them"):
        Tuning([str(tmp_path / part / "mine.yaml") for part in "ab"])
    with pytest.raises(WiringError, match="a search needs a recipe"):
        call("0", "--seed", "1", "--out", tmp_path / "out")
    (tmp_path / "sweep.yaml").write_text("recipes: [digits/static-dnw]\n")
    with pytest.raises(WiringError, match=r"sweep\.yaml describes a sweep\. Give the recipes"):
        Tuning([str(tmp_path / "sweep.yaml")])


@pytest.mark.usefixtures("fake_command")
def test_networks_of_other_sweeps_are_kept(tmp_path: Path) -> None:
    plan = SweepPlan(["digits/static-dnw"], [0], [["data.options.holdout=200"], ["optimizer.lr=0.4"]])
    go(tmp_path, plan.runs(), accuracy)
    call("digits/static-dnw", "--set", "optimizer.lr=0.4", "--out", tmp_path / "out", "--device", "cpu")
    assert [path.parent.parent.name for path in (tmp_path / "out").rglob("last.safetensors")] == [
        "data.options.holdout=200,optimizer.lr=0.4"
    ]


def test_diverged_runs_are_recorded_like_the_others(tmp_path: Path) -> None:
    tuning = Tuning(["digits/static-random"], changes=["optimizer.lr=1.6"])
    states = search(tmp_path, tuning)
    assert {line["steps"] for line in lines_of(tuning.recipes[0])} == {4}
    (recipe,) = tuning.recipes
    recipe.found = {rate: runs for rate, runs in recipe.found.items() if rate > 3}
    assert lines_of(recipe) == [], "without a result, neither metric nor steps are known"
    assert len(states) == 5


def test_lines_of_other_trainings_are_not_mixed(tmp_path: Path) -> None:
    common = {"recipe": "vit/dnw-10", "seed": 0, "metric": "accuracy"}
    settings = recipes.get("vit/dnw-10").settings
    full = [{**common, "lr": lr, "value": 90.0 + lr, "steps": 5280, "holdout": 5000} for lr in (0.1, 0.2)]
    (tmp_path / "tuning").mkdir()
    path = tmp_path / "tuning/vit.json"
    path.write_text(json.dumps([{**full[0], "steps": 10, "value": 10.0}, *full, {**full[1], "holdout": 9, "value": 1}]))
    found = rates_of("vit/dnw-10", settings, tmp_path)
    assert found is not None
    assert found.values == {0.1: 90.1, 0.2: 90.2}
