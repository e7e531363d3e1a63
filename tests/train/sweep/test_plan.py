"""Which runs a sweep has, and which folders may hold it."""

from pathlib import Path
from typing import Any

import pytest

from wirings import WiringError
from wirings.cli.sweep import _asked
from wirings.train import results
from wirings.train.settings import with_overrides
from wirings.train.sweep import folder, plan

DNW, RANDOM = "digits/static-dnw", "digits/static-random"


def places(*args: Any, **more: Any) -> list[str]:
    return [run.place for run in plan.make(*args, **more)]


def test_every_combination_of_recipes_settings_and_seeds() -> None:
    grid = [["epochs=2"], ["optimizer.lr=0.1", "optimizer.lr=0.30"]]
    runs = plan.make([DNW, RANDOM], [0, 3], grid)
    assert [run.place for run in runs] == [
        f"digits/static-{rule}/epochs=2,optimizer.lr={lr}/seed{seed}"
        for seed in (0, 3)
        for rule in ("dnw", "random")
        for lr in ("0.1", "0.3")
    ]
    assert {(run.settings.epochs, run.settings.optimizer.lr, run.settings.seed) for run in runs[:2]} == {
        (2, 0.1, 0),
        (2, 0.3, 0),
    }
    assert places(["digits/static-*"], [0], []) == [f"{DNW}/seed0", f"{RANDOM}/seed0"]
    assert places([DNW], [1], []) == ["digits/static-dnw/seed1"]
    assert places([DNW], [0], [], [["epochs=2", "batch=50"], ["epochs=1"]]) == [
        "digits/static-dnw/batch=50,epochs=2/seed0",
        "digits/static-dnw/epochs=1/seed0",
    ]


def test_folders_tell_settings_apart() -> None:
    lists = [["schedule.milestones=[1, 2]", "schedule.milestones=[1,3]"]]
    found = places([DNW], [0], lists)
    assert len(set(found)) == 2
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-=,/") for name in found)
    long = places([DNW], [0], [[f"data.options={{shape: [1, 8, 8], examples: {n * 'a'}}}" for n in (200, 201)]])
    assert len(set(long)) == 2
    assert all(len(part) < 120 for name in long for part in name.split("/"))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (([], [0], []), "a sweep needs a recipe at least"),
        ((["table2/dwn"], [0], []), "Did you mean 'table2/dnw'"),
        ((["table2/dnv*"], [0], []), r"no recipe matches 'table2/dnv\*'"),
        (([DNW, DNW], [0], []), "the recipe 'digits/static-dnw' is given twice"),
        (([DNW, "digits/*"], [0], []), "the recipe 'digits/static-dnw' is given twice"),
        (([DNW], [1, 1], []), "the seed 1 is given twice"),
        (([DNW], [0], [["optimizer.rl=0.1"]]), "optimizer.lr"),
        (([DNW], [0], [["epochs=0"]]), "epochs must be 1 or more"),
        (([DNW], [0], [["seed=3"]]), "is set by --seed"),
        (([DNW], [0], [["epochs=1"], ["epochs=2"]]), "cannot have the setting 'epochs' twice"),
    ],
)
def test_mistakes_are_told_before_anything_starts(asked: Any, match: str) -> None:
    with pytest.raises(WiringError, match=match):
        plan.make(*asked)


def test_what_others_start_from_is_trained_once_and_first() -> None:
    names = ["table2/lottery", "table2/fine_tune-0.1", "table2/dnw"]
    runs = plan.make(names, [0, 1], [["epochs=2"], ["optimizer.lr=0.1", "optimizer.lr=0.2"]])
    found = [run.place for run in runs]
    firsts = [place for place in found if place.startswith("table2/complete")]
    # A change of the optimizer is the second phase's own; one of the epochs is for both.
    assert firsts == ["table2/complete/epochs=2/seed0", "table2/complete/epochs=2/seed1"]
    for run in runs:
        if run.name != "table2/dnw" and run.wanted:
            assert run.start is not None
            assert run.start.seed == run.seed
            assert found.index(run.start.place) < found.index(run.place)
            assert run.start.settings.epochs == 2
            assert run.start.settings.optimizer.lr == 0.1
    assert sum(run.wanted for run in runs) == 12
    asked_for = plan.make(["table2/lottery", "table2/complete"], [0], [["epochs=2"]])
    assert [(run.place, run.wanted) for run in asked_for] == [
        ("table2/complete/epochs=2/seed0", True),
        ("table2/lottery/epochs=2/seed0", True),
    ]


def test_the_command_line() -> None:
    asked = _asked([DNW, "1", "2"], ["0"], ["optimizer.lr=0.1,0.05", "epochs=3"])
    assert asked["names"] == [DNW]
    assert asked["seeds"] == [0, 1, 2]
    assert asked["grid"] == [["optimizer.lr=0.1", "optimizer.lr=0.05"], ["epochs=3"]]
    assert _asked([DNW], None, None)["seeds"] == [0]
    with pytest.raises(WiringError, match="takes numbers, such as 0,1,2 or 0-4, but 'x' came"):
        _asked([DNW], ["x"], None)
    for wrong in ("epochs", "=3", "epochs=", "epochs=1,,2"):
        with pytest.raises(WiringError, match=r"changes no setting|an empty value"):
            _asked([DNW], None, [wrong])


def test_a_file_describes_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"base: {DNW}\nepochs: 7\n")
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "recipes: [mine.yaml, digits/static-random]\nseeds: [0, 2]\n"
        "settings:\n  optimizer.lr: [0.1, 0.2]\n  schedule.milestones: [[1, 2]]\n  batch: 50\n"
        "variants:\n  - {clip: 1}\n  - {clip: 2, ema: 0.9}\n"
    )
    runs = plan.make(**_asked([str(path)], None, None))
    assert len(runs) == 2 * 2 * 2 * 2
    assert {run.name for run in runs} == {"mine", RANDOM}
    assert {run.settings.schedule.milestones for run in runs} == {(1, 2)}
    assert {(run.settings.clip, run.settings.ema) for run in runs} == {(1, None), (2, 0.9)}
    assert runs[0].recipe == str(tmp_path / "mine.yaml")
    assert runs[0].settings.epochs == 7
    fewer = plan.make(**_asked([str(path)], ["5"], ["optimizer.lr=0.4"]))  # the line's words take the file's place
    assert {(run.seed, run.settings.optimizer.lr) for run in fewer} == {(5, 0.4)}
    with pytest.raises(WiringError, match="describes a whole sweep: give it alone"):
        _asked([str(path), DNW], None, None)
    for text, match in [
        ("recipes: [a]\nseed: 1\n", "unknown key of a sweep 'seed'. Did you mean 'seeds'"),
        ("recipes: [a]\nsettings: [1]\n", "settings is a mapping"),
        ("recipes: [a]\nsettings: {epochs: []}\n", "settings has no value for epochs"),
    ]:
        path.write_text(text)
        with pytest.raises(WiringError, match=match):
            _asked([str(path)], None, None)


def _begin(out: Path, runs: list[plan.Run]) -> None:
    for run in runs:
        (out / run.place).mkdir(parents=True, exist_ok=True)
        (out / run.place / "last.safetensors").touch()


def test_runs_that_came_to_nothing_may_be_left_out(tmp_path: Path) -> None:
    first = plan.make([DNW], [0], [["epochs=2", "epochs=3"]])
    folder.enter(tmp_path, first)
    _begin(tmp_path, first[1:])
    (tmp_path / first[0].place).mkdir(parents=True)
    (tmp_path / first[0].place / "output.txt").write_text("it has failed")
    folder.enter(tmp_path, first[1:])
    assert folder._places(tmp_path / folder.PLAN) == [first[1].place]
    with pytest.raises(WiringError, match="holds another sweep"):
        folder.enter(tmp_path, first[:1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("rule.options.every=0", "rigl: every must be a whole number, at least 1, not 0"),
        ("rule.options.evry=2", "rule 'rigl' does not take these settings"),
        ("rule.options.schedule=slow", "unknown kind of schedule 'slow'"),
    ],
)
def test_a_rule_that_cannot_be_made_is_told_before_anything_runs(change: str, match: str) -> None:
    with pytest.raises(WiringError, match=match):
        plan.make([DNW], [0], [["rule.name=rigl"], [change]])
    assert len(plan.make([DNW], [0], [["rule.name=rigl"], ["rule.options.every=2"]])) == 1


def test_a_folder_of_another_sweep_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, more = plan.make([DNW], [0], [["epochs=2"]]), plan.make([DNW, RANDOM], [0, 1], [["epochs=2"]])
    folder.enter(out, first)
    _begin(out, first)
    kept = (out / folder.PLAN).read_text()
    with pytest.raises(WiringError, match=r"out holds another sweep: digits/static-dnw/epochs=2/seed0 of its 1 runs"):
        folder.enter(out, plan.make([DNW], [1], [["epochs=2"]]))
    assert (out / folder.PLAN).read_text() == kept
    folder.enter(out, more)  # the same and more
    _begin(out, more)
    with pytest.raises(WiringError, match="and 2 more of its 4 runs"):
        folder.check(out, first)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(WiringError, match="is not empty and holds no sweep"):
        folder.enter(other, first)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_names_of_recipes_that_are_in_the_way(tmp_path: Path) -> None:
    for name in (folder.NOTES, folder.PLAN):
        (tmp_path / f"{name}.yaml").write_text(f"base: {DNW}\n")
        runs = plan.make([str(tmp_path / f"{name}.yaml")], [0], [])
        with pytest.raises(WiringError, match=f"cannot be called '{name}'"):
            folder.enter(tmp_path / "out", runs)
    (tmp_path / "a[1].yaml").write_text(f"base: {DNW}\n")
    assert [run.name for run in plan.make([str(tmp_path / "a[1].yaml")], [0], [])] == ["a[1]"]
    with pytest.raises(WiringError, match="--seed 3-1 has no seeds in it"):
        plan.seeds_of(["3-1"])


def test_a_plan_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WiringError, match="cannot be written: No space left on device"):
        folder.enter(tmp_path, plan.make([DNW], [0], []))


def test_a_recipe_that_has_changed_since(tmp_path: Path) -> None:
    runs = plan.make([DNW], [0], [["epochs=2"]])
    then = with_overrides(runs[0].settings, ["optimizer.momentum=0.5"])[0]
    results.save_settings(tmp_path / runs[0].place / "settings.yaml", DNW, then, {})
    (tmp_path / folder.PLAN).write_text("schema: 1\nruns: []\n")
    with pytest.raises(WiringError, match=r"was trained with optimizer.momentum = 0.5, in this sweep it is 0.9"):
        folder.enter(tmp_path, runs)
    (tmp_path / folder.PLAN).write_text("no sweep at all")
    with pytest.raises(WiringError, match="does not describe a sweep"):
        folder.enter(tmp_path, runs)
