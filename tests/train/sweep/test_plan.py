"""Which runs a sweep has, and which folders it accepts."""

import re
from pathlib import Path
from typing import Any

import pytest

from wirings import WiringError
from wirings.cli.sweep import plan_of
from wirings.train import results
from wirings.train.settings import with_overrides
from wirings.train.sweep import folder, plan, preflight
from wirings.train.sweep.plan import SweepPlan, SweepRun

DNW, RANDOM = "digits/static-dnw", "digits/static-random"


def paths(*args: Any) -> list[str]:
    return [run.path for run in SweepPlan(*args).runs()]


def test_plans_every_combination_of_recipes_settings_and_seeds() -> None:
    grid = [["epochs=2"], ["optimizer.lr=0.1", "optimizer.lr=0.30"]]
    runs = SweepPlan([DNW, RANDOM], [0, 3], grid).runs()
    assert [run.path for run in runs] == [
        f"digits/static-{rule}/epochs=2,optimizer.lr={lr}/seed{seed}"
        for seed in (0, 3)
        for rule in ("dnw", "random")
        for lr in ("0.1", "0.3")
    ]
    assert {(run.settings.epochs, run.settings.optimizer.lr, run.settings.seed) for run in runs[:2]} == {
        (2, 0.1, 0),
        (2, 0.3, 0),
    }
    assert paths(["digits/static-*"], [0], []) == [f"{DNW}/seed0", f"{RANDOM}/seed0"]
    assert paths([DNW], [1], []) == ["digits/static-dnw/seed1"]
    assert paths([DNW], [0], [], [["epochs=2", "batch=50"], ["epochs=1"]]) == [
        "digits/static-dnw/batch=50,epochs=2/seed0",
        "digits/static-dnw/epochs=1/seed0",
    ]


def test_folder_names_distinguish_settings() -> None:
    lists = [["schedule.milestones=[1, 2]", "schedule.milestones=[1,3]"]]
    found = paths([DNW], [0], lists)
    assert len(set(found)) == 2
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-=,/") for name in found)
    long = paths([DNW], [0], [[f"data.options={{shape: [1, 8, 8], examples: {n * 'a'}}}" for n in (200, 201)]])
    assert len(set(long)) == 2
    assert all(len(part) < 120 for name in long for part in name.split("/"))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (([], [0], []), "a sweep needs a recipe, such as"),
        ((["table2/dwn"], [0], []), "Did you mean 'table2/dnw'"),
        ((["table2/dnv*"], [0], []), r"no recipe matches 'table2/dnv\*'"),
        (([DNW, DNW], [0], []), "the recipe 'digits/static-dnw' is given twice"),
        (([DNW, "digits/*"], [0], []), "the recipe 'digits/static-dnw' is given twice"),
        (([DNW], [1, 1], []), "the seed 1 is given twice"),
        (([DNW], [0], [["optimizer.rl=0.1"]]), "optimizer.lr"),
        (([DNW], [0], [["epochs=0"]]), "epochs must be 1 or more"),
        (([DNW], [0], [["seed=3"]]), "are set with --seed"),
        (([DNW], [0], [["epochs=1"], ["epochs=2"]]), "the setting 'epochs' is given twice for one run"),
    ],
)
def test_rejects_mistakes_in_the_plan(asked: Any, match: str) -> None:
    with pytest.raises(WiringError, match=match):
        SweepPlan(*asked).runs()


def test_runs_that_others_start_from_come_once_and_first() -> None:
    names = ["table2/lottery", "table2/fine_tune-0.1", "table2/dnw"]
    runs = SweepPlan(names, [0, 1], [["epochs=2"], ["optimizer.lr=0.1", "optimizer.lr=0.2"]]).runs()
    found = [run.path for run in runs]
    firsts = [place for place in found if place.startswith("table2/complete")]
    # A change of the optimizer is the second phase's own; one of the epochs is for both.
    assert firsts == ["table2/complete/epochs=2/seed0", "table2/complete/epochs=2/seed1"]
    for run in runs:
        if run.name != "table2/dnw" and run.requested:
            assert run.start is not None
            assert run.start.seed == run.seed
            assert found.index(run.start.path) < found.index(run.path)
            assert run.start.settings.epochs == 2
            assert run.start.settings.optimizer.lr == 0.1
    assert sum(run.requested for run in runs) == 12
    asked_for = SweepPlan(["table2/lottery", "table2/complete"], [0], [["epochs=2"]]).runs()
    assert [(run.path, run.requested) for run in asked_for] == [
        ("table2/complete/epochs=2/seed0", True),
        ("table2/lottery/epochs=2/seed0", True),
    ]


def test_reads_the_command_line() -> None:
    asked = plan_of([DNW, "1", "2"], ["0"], ["optimizer.lr=0.1,0.05", "epochs=3"])
    assert list(asked.recipes) == [DNW]
    assert asked.seeds == [0, 1, 2]
    assert asked.grid == [["optimizer.lr=0.1", "optimizer.lr=0.05"], ["epochs=3"]]
    assert list(plan_of([DNW], None, None).seeds) == [0]
    with pytest.raises(WiringError, match="expects numbers, such as 0,1,2 or 0-4, got 'x'"):
        plan_of([DNW], ["x"], None)
    for wrong in ("epochs", "=3", "epochs=", "epochs=1,,2"):
        with pytest.raises(WiringError, match=r"--set expects name=value|between commas is empty"):
            plan_of([DNW], None, [wrong])


def test_reads_a_sweep_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"base: {DNW}\nepochs: 7\n")
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "recipes: [mine.yaml, digits/static-random]\nseeds: [0, 2]\n"
        "settings:\n  optimizer.lr: [0.1, 0.2]\n  schedule.milestones: [[1, 2]]\n  batch: 50\n"
        "variants:\n  - {clip: 1}\n  - {clip: 2, ema: 0.9}\n"
    )
    runs = plan_of([str(path)], None, None).runs()
    assert len(runs) == 2 * 2 * 2 * 2
    assert {run.name for run in runs} == {"mine", RANDOM}
    assert {run.settings.schedule.milestones for run in runs} == {(1, 2)}
    assert {(run.settings.clip, run.settings.ema) for run in runs} == {(1, None), (2, 0.9)}
    assert runs[0].recipe == str(tmp_path / "mine.yaml")
    assert runs[0].settings.epochs == 7
    fewer = plan_of([str(path)], ["5"], ["optimizer.lr=0.4"]).runs()  # the command line wins
    assert {(run.seed, run.settings.optimizer.lr) for run in fewer} == {(5, 0.4)}
    with pytest.raises(WiringError, match="describes a whole sweep\\. Give it alone"):
        plan_of([str(path), DNW], None, None)
    for text, match in [
        ("recipes: [a]\nseed: 1\n", "unknown key of a sweep 'seed'. Did you mean 'seeds'"),
        ("recipes: [a]\nsettings: [1]\n", "settings must be a mapping"),
        ("recipes: [a]\nsettings: {epochs: []}\n", "settings has no value for epochs"),
        ("recipes: [a]\nsettings: {epochs: 2020-12-24}\n", "the value of epochs must be plain"),
        ("recipes: [a]\nseeds: [x]\n", "expects numbers, such as 0,1,2 or 0-4, got 'x'"),
        ("recipes: [a]\n", "unknown recipe 'a'"),
        (f"recipes: [{DNW}]\nsettings: {{epochs: x}}\n", "epochs must be an integer, got 'x'"),
    ]:
        path.write_text(text)
        with pytest.raises(WiringError, match=f"^{re.escape(str(path))}: .*{match}"):
            plan_of([str(path)], None, None).runs()


def _begin(out: Path, runs: list[SweepRun]) -> None:
    for run in runs:
        (out / run.path).mkdir(parents=True, exist_ok=True)
        (out / run.path / "last.safetensors").touch()


def test_runs_that_trained_nothing_may_be_left_out(tmp_path: Path) -> None:
    first = SweepPlan([DNW], [0], [["epochs=2", "epochs=3"]]).runs()
    folder.claim_sweep_folder(tmp_path, first)
    _begin(tmp_path, first[1:])
    (tmp_path / first[0].path).mkdir(parents=True)
    (tmp_path / first[0].path / "output.txt").write_text("failed")
    folder.claim_sweep_folder(tmp_path, first[1:])
    assert [line["place"] for line in folder._listed(tmp_path / folder.PLAN)] == [first[1].path]
    with pytest.raises(WiringError, match="holds another sweep"):
        folder.claim_sweep_folder(tmp_path, first[:1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("rule.options.every=0", "rigl: every must be a whole number, at least 1, got 0"),
        ("rule.options.evry=2", "rule 'rigl' does not take these settings"),
        ("rule.options.schedule=slow", "unknown kind of schedule 'slow'"),
    ],
)
def test_rejects_rules_that_cannot_be_created(change: str, match: str) -> None:
    with pytest.raises(WiringError, match=match):
        SweepPlan([DNW], [0], [["rule.name=rigl"], [change]]).runs()
    assert len(SweepPlan([DNW], [0], [["rule.name=rigl"], ["rule.options.every=2"]]).runs()) == 1


def test_rejects_the_folder_of_another_sweep_and_leaves_it_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, more = SweepPlan([DNW], [0], [["epochs=2"]]).runs(), SweepPlan([DNW, RANDOM], [0, 1], [["epochs=2"]]).runs()
    folder.claim_sweep_folder(out, first)
    _begin(out, first)
    kept = (out / folder.PLAN).read_text()
    with pytest.raises(WiringError, match=r"of its 1 runs, this one lacks digits/static-dnw/epochs=2/seed0\."):
        folder.claim_sweep_folder(out, SweepPlan([DNW], [1], [["epochs=2"]]).runs())
    assert (out / folder.PLAN).read_text() == kept
    folder.claim_sweep_folder(out, more)  # the same runs and more
    _begin(out, more)
    with pytest.raises(WiringError, match=r"of its 4 runs, this one lacks .* and 2 more"):
        folder.check_sweep_folder(out, first)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(WiringError, match="is not empty and holds no sweep"):
        folder.claim_sweep_folder(other, first)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_rejects_recipes_named_like_the_sweeps_files(tmp_path: Path) -> None:
    for name in (folder.EVENTS, folder.PLAN):
        (tmp_path / f"{name}.yaml").write_text(f"base: {DNW}\n")
        runs = SweepPlan([str(tmp_path / f"{name}.yaml")]).runs()
        with pytest.raises(WiringError, match=f"cannot be called '{name}'"):
            folder.claim_sweep_folder(tmp_path / "out", runs)
    (tmp_path / "a[1].yaml").write_text(f"base: {DNW}\n")
    assert [run.name for run in SweepPlan([str(tmp_path / "a[1].yaml")]).runs()] == ["a[1]"]
    with pytest.raises(WiringError, match="--seed 3-1 is an empty range"):
        plan.parse_seeds(["3-1"])


def test_reports_a_plan_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WiringError, match="cannot be written: No space left on device"):
        folder.claim_sweep_folder(tmp_path, SweepPlan([DNW], [0], []).runs())


def test_rejects_recipes_that_have_changed(tmp_path: Path) -> None:
    runs = SweepPlan([DNW], [0], [["epochs=2"]]).runs()
    then = with_overrides(runs[0].settings, ["optimizer.momentum=0.5"])[0]
    results.save_settings(tmp_path / runs[0].path / "settings.yaml", DNW, then, {})
    (tmp_path / folder.PLAN).write_text("schema: 1\nruns: []\n")
    with pytest.raises(WiringError, match=r"momentum = 0.5, but the recipe has changed: this sweep has 0.9"):
        folder.claim_sweep_folder(tmp_path, runs)
    (tmp_path / folder.PLAN).write_text("no sweep at all")
    with pytest.raises(WiringError, match="does not describe a sweep"):
        folder.claim_sweep_folder(tmp_path, runs)


def test_rejects_missing_data_and_functions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def check(name: str, data: Path | None = None, *changes: str) -> None:
        preflight.check_runs(SweepPlan([name], [0, 1], [[change] for change in changes]).runs(), data)

    check(DNW)
    check("table1/static-dnw")
    check("table1/static-dnw", tmp_path)
    for arguments, match in [
        ((DNW, tmp_path), "none of these runs reads files. Leave it out"),
        (("table1/static-dnw", tmp_path / "absent"), "--data .*absent does not exist"),
        (("table1/static-dnw", None, "data.directory=absent"), "seed0: data.directory absent does not exist"),
        (("table4/dense",), "table4/dense/seed0 reads the data set 'imagenet' from a folder. Give it with --data"),
        ((DNW, None, "data.name=digist"), "unknown data set 'digist'. Did you mean 'digits'"),
        ((DNW, None, "data.name=absent_module:load"), "there is no module 'absent_module'"),
        ((DNW, None, "model.name=absent_module:net", "model.options={}"), "there is no module 'absent_module'"),
    ]:
        with pytest.raises(WiringError, match=match):
            check(*arguments)


def test_limits_the_number_of_seeds() -> None:
    assert plan.parse_seeds(["3", "0-1"]) == [3, 0, 1]
    for text in ("0-99999999", "9" * 30, "1-", "-1", "\u0663"):
        with pytest.raises(WiringError, match="--seed"):
            plan.parse_seeds([text])


def test_a_files_name_cannot_lead_out_of_the_sweeps_folder(tmp_path: Path) -> None:
    (tmp_path / "...yaml").write_text(f"base: {DNW}\n")
    with pytest.raises(WiringError, match="is not a name"):
        SweepPlan([str(tmp_path / "...yaml")]).runs()


def test_rejects_sweep_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(b"recipes: [digits/static-dnw] # \xf4\x01")
    with pytest.raises(WiringError, match=r"sweep\.yaml cannot be read as a sweep: it is not UTF-8 text"):
        plan.read_sweep_file(path)
