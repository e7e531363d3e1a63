"""Training in two phases: a complete graph, which is shared, then a lottery ticket or fine-tuning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from breaking import BreakError, Heard, Stops, lines, same_runs
from safetensors.torch import load_file
from torch import nn

from wirings import Wiring, WiringError, choose, rules
from wirings.train import files, phases, recipes, results
from wirings.train import saved_runs as runs
from wirings.train.run import checkpoint, loop
from wirings.train.run.log import ConsoleLog, Log
from wirings.train.settings import Settings, with_overrides
from wirings.utils import locks

DATA = {"name": "synthetic", "options": {"shape": [1, 8, 8], "examples": 50, "test_examples": 40}}
EDGES = 200


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with three recipes of three steps per epoch: a complete graph, a lottery ticket and fine-tuning."""
    common = {"base": "digits/static-dnw", "data": DATA, "batch": 20, "epochs": 2, "optimizer": {"lr": 0.3}}
    first = str(tmp_path / "complete.yaml")
    write(tmp_path / "complete.yaml", common, rule={"name": "dense"})
    write(tmp_path / "lottery.yaml", common, rule={"name": "lottery"}, start={"recipe": first, "weights": "initial"})
    write(tmp_path / "tuned.yaml", common, rule={"name": "fine_tune"}, start={"recipe": first}, epochs=3)
    return tmp_path


def write(path: Path, common: dict[str, Any], **more: Any) -> None:
    path.write_text(yaml.safe_dump({**common, **more}))


def train(
    home: Path, name: str, *changes: str, runs: str = "runs", seed: int = 1, **more: Any
) -> results.Result | None:
    recipe = recipes.get(home / f"{name}.yaml")
    settings, overrides = with_overrides(recipe.settings, changes)
    settings = replace(settings, seed=seed)
    out = more.pop("out", home / runs / recipe.name / f"seed{seed}")
    return phases.train(recipe.name, settings, out, device="cpu", overrides=overrides, **more)


def tensors(out: Path, file: str = "last") -> dict[str, torch.Tensor]:
    found = load_file(out / f"{file}.safetensors")
    return {name.removeprefix("model."): value for name, value in found.items() if name.startswith("model.")}


def changed(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_trains_both_phases_and_shares_the_first(home: Path) -> None:
    log = Heard()
    ticket = train(home, "lottery", log=log)
    assert ticket is not None
    complete, lottery, tuned = (home / "runs" / name / "seed1" for name in ("complete", "lottery", "tuned"))
    assert log.said[0] == f"lottery starts from the network of complete, which is trained first, in {complete}."
    assert any(text.startswith("complete, seed 1: ") and text.endswith("%. Next is lottery.") for text in log.said)
    before = changed(complete)
    result = train(home, "tuned", log=log)
    assert result is not None
    assert changed(complete) == before, "it exists, so it is not trained again"
    assert log.said[-1] == f"Starting from {complete}, trained weights."

    trained, initial = tensors(complete), tensors(complete, "initial")
    real = choose(trained["graph.weight"], EDGES)
    for run in (lottery, tuned):
        began, ended = tensors(run, "initial"), tensors(run)
        assert torch.equal(began["graph.weight.wiring.wiring"], real)
        assert torch.equal(ended["graph.weight.wiring.wiring"], real), "the wiring is fixed"
        for name, value in (initial if run == lottery else trained).items():
            assert torch.equal(began[name], value), name
            assert not torch.equal(ended[name], value), "it was trained"
    assert not any(torch.equal(trained[name], value) for name, value in initial.items())

    assert (ticket.recipe, ticket.steps, ticket.edges, ticket.overrides) == ("lottery", 6, EDGES, {})
    assert (result.recipe, result.steps, result.edges, result.overrides) == ("tuned", 9, EDGES, {})
    first = results.read(complete / "result.json")
    assert (first.recipe, first.steps, first.seed) == ("complete", 6, 1)
    assert first.edges is not None
    assert first.edges > EDGES
    assert ticket.settings["start"] == {"recipe": str(home / "complete.yaml"), "weights": "initial", "prune": False}
    about = checkpoint.read(lottery / "last.safetensors")[1]
    assert ticket.train_s == about["progress"]["seconds"], "of the second phase only"
    assert [line["swapped"] for line in lines(lottery)] == ["0", "0"]
    assert runs.measure(lottery, device="cpu")[1] == ticket.accuracy


def test_uses_a_first_run_that_was_trained_separately(home: Path) -> None:
    recipe = recipes.get(home / "complete.yaml")
    loop.train("complete", replace(recipe.settings, seed=1), home / "runs" / "complete" / "seed1", device="cpu")
    train(home, "lottery")
    train(home, "lottery", runs="others")
    same_runs(home / "runs" / "lottery" / "seed1", home / "others" / "lottery" / "seed1")
    same_runs(home / "runs" / "complete" / "seed1", home / "others" / "complete" / "seed1")


def test_resumes_bit_for_bit_in_either_phase(home: Path) -> None:
    train(home, "lottery")
    for after in (2, 4, 6, 7, 8, 11):  # 6 batches in each phase, with a checkpoint every 3
        with pytest.raises(BreakError):
            train(home, "lottery", runs=f"broken{after}", log=Stops(after))
        train(home, "lottery", runs=f"broken{after}", resume=True)
        for name in ("complete", "lottery"):
            same_runs(home / "runs" / name / "seed1", home / f"broken{after}" / name / "seed1")


def test_resumes_after_a_kill_before_any_file_is_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(home, "tuned", "epochs=1")
    put, count = files.write_file, 0

    def dies(path: Path, what: Any, *rest: Any) -> None:
        nonlocal count
        count += 1
        if count == limit:
            raise BreakError
        put(path, what, *rest)

    monkeypatch.setattr(files, "write_file", dies)
    for limit in range(1, 30):
        count, runs = 0, f"killed{limit}"
        try:
            train(home, "tuned", "epochs=1", runs=runs)
        except BreakError:
            count = 100
            train(home, "tuned", "epochs=1", runs=runs, resume=True)
            for name in ("complete", "tuned"):
                same_runs(home / "runs" / name / "seed1", home / runs / name / "seed1")
        else:
            break
    assert 10 <= limit < 29


def test_resuming_the_second_phase_does_not_need_the_first(home: Path) -> None:
    train(home, "lottery", "epochs=1")
    with pytest.raises(BreakError):
        train(home, "lottery", "epochs=1", "checkpoint_every=1", runs="broken", log=Stops(5))
    (home / "broken" / "complete").rename(home / "away")
    log = Heard()
    result = train(home, "lottery", "epochs=1", "checkpoint_every=1", runs="broken", resume=True, log=log)
    assert result is not None
    assert log.said == ["Resuming at epoch 1, batch 2."]
    assert not (home / "broken" / "complete").exists()
    assert result.overrides == {"epochs": 1, "start.epochs": 1}, "the overrides of the first phase are kept"
    same_runs(home / "runs" / "lottery" / "seed1", home / "broken" / "lottery" / "seed1")
    assert train(home, "lottery", "epochs=1", "checkpoint_every=1", runs="broken", resume=True) == result


def test_time_limit_covers_both_phases(home: Path) -> None:
    train(home, "lottery", "epochs=1")
    said: list[str] = []
    log = Log()
    log.say = said.append  # type: ignore[method-assign]
    stops = 0
    while train(home, "lottery", "epochs=1", runs="limited", resume=True, max_minutes=0, log=log) is None:
        stops += 1
        assert stops < 10
    assert [text.partition("/limited/")[2].partition("/")[0] for text in said if text.startswith("The time is up")] == [
        "complete", "complete", "lottery", "lottery",
    ]  # fmt: skip
    for name in ("complete", "lottery"):
        same_runs(home / "runs" / name / "seed1", home / "limited" / name / "seed1")


def test_time_of_the_first_phase_is_deducted_from_the_second(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    inner = loop.Run.train

    def spy(self: loop.Run, max_minutes: float | None, signals: Any) -> Any:
        seen.append(max_minutes)
        return inner(self, max_minutes, signals)

    monkeypatch.setattr(loop.Run, "train", spy)
    train(home, "lottery", max_minutes=10)
    assert seen[0] == 10
    assert seen[1] is not None
    assert 9 < seen[1] < 10


def test_overrides_apply_to_the_right_phase(home: Path) -> None:
    changes = [
        "batch=25",
        "data.augment=false",
        "optimizer.lr=0.2",
        "schedule.kind=constant",
        "model.options.edges=100",
    ]
    result = train(home, "lottery", *changes)
    assert result is not None
    _, first, overrides = results.load_settings(home / "runs" / "complete" / "seed1" / "settings.yaml")
    assert overrides == {"batch": 25, "data.augment": False}
    assert (first.seed, first.batch, first.data.augment, first.optimizer.lr) == (1, 25, False, 0.3)
    assert first.schedule.kind == "cosine"
    assert result.edges == 100
    expected = {"start.batch": 25, "start.data.augment": False, "batch": 25, "data.augment": False}
    assert result.overrides.items() > expected.items()
    assert {"optimizer.lr", "schedule.kind", "model.options.edges"} < result.overrides.keys()


def test_first_phase_uses_the_data_of_the_recipe(home: Path) -> None:
    mine = yaml.safe_load((home / "lottery.yaml").read_text())
    write(home / "other.yaml", mine, data={"name": "digits", "options": {"holdout": 200}}, batch=500, epochs=1)
    train(home, "other", "epochs=1")
    _, first, overrides = results.load_settings(home / "runs" / "complete" / "seed1" / "settings.yaml")
    assert (first.data.name, first.data.options) == ("digits", {"holdout": 200})
    assert overrides["data.options"] == {"holdout": 200}


def test_starts_from_a_given_folder(home: Path) -> None:
    train(home, "lottery", "epochs=1", runs="short")
    named = home / "short" / "complete" / "seed1"
    result = train(home, "lottery", first_run=named, out=home / "ticket")
    assert result is not None
    assert not (home / "complete").exists()
    assert result.overrides == {"start.epochs": 1}, "so that tables do not count it"
    assert torch.equal(tensors(home / "ticket", "initial")["stem.weight"], tensors(named, "initial")["stem.weight"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "missing",
            r"none is not the folder of a run to start from: .*`wirings train complete --seed 1 --out .*leave --start",
        ),
        ("unfinished", r"is not finished. Continue it with `wirings train complete --seed 1 --out .*seed1 --resume`"),
        ("recipe", r"is a run of 'tuned', but 'complete' is needed"),
        ("seed", r"has seed = 2, but must have 1 to be started from"),
        ("model", r"has model.name = 'tiny_static', but must have 'digits_static'"),
        ("data", r"has data.options = \{.*\}, but must have \{'examples': 50"),
        ("initial", r"has no initial.safetensors, which start.weights=initial needs"),
        ("damaged", r"last.safetensors is damaged or not a checkpoint"),
        ("shapes", r"cannot start from .*last.safetensors: rewind_: graph.weight has shape"),
    ],
)
def test_rejects_invalid_first_runs(case: str, message: str, home: Path) -> None:
    train(home, "tuned", "epochs=1")
    complete = home / "runs" / "complete" / "seed1"
    name, settings, overrides = results.load_settings(complete / "settings.yaml")
    if case == "missing":
        complete = home / "none"
    elif case == "unfinished":
        (complete / "result.json").unlink()
    elif case == "recipe":
        complete = home / "runs" / "tuned" / "seed1"
    elif case == "seed":
        results.save_settings(complete / "settings.yaml", name, replace(settings, seed=2), overrides)
    elif case == "model":
        other = replace(settings, model=replace(settings.model, name="tiny_static"))
        results.save_settings(complete / "settings.yaml", name, other, overrides)
    elif case == "data":
        data = replace(settings.data, options={**settings.data.options, "examples": 60})
        results.save_settings(complete / "settings.yaml", name, replace(settings, data=data), overrides)
    elif case == "initial":
        (complete / "initial.safetensors").unlink()
    elif case == "damaged":
        (complete / "last.safetensors").write_bytes(b"")
    elif case == "shapes":
        whole = load_file(complete / "last.safetensors")
        cut = {key: value[:-1] if key == "model.graph.weight" else value for key, value in whole.items()}
        checkpoint.write_tensors(complete / "last.safetensors", cut, {})
    with pytest.raises(WiringError, match=message):
        train(home, "lottery", first_run=complete)
    assert not (home / "runs" / "lottery").exists(), "no run was started"


def test_rejects_a_default_first_run_with_other_settings(home: Path) -> None:
    train(home, "lottery", "epochs=1")
    with pytest.raises(WiringError) as caught:
        train(home, "tuned")
    complete = home / "runs" / "complete" / "seed1"
    assert f"the run in {complete}, which would be started from, was trained with epochs = 1, but now it is 2" in str(
        caught.value
    )
    assert f"Give --start {complete} to use it anyway" in str(caught.value)
    assert train(home, "tuned", first_run=complete) is not None


def test_resumes_an_unfinished_first_phase_only_if_asked(home: Path) -> None:
    with pytest.raises(BreakError):
        train(home, "lottery", log=Stops(4))
    with pytest.raises(WiringError, match=r"complete.seed1 already holds a run. Continue it with --resume"):
        train(home, "lottery")


def test_rejects_an_occupied_folder_before_the_first_phase(home: Path) -> None:
    train(home, "lottery")
    with pytest.raises(WiringError, match=r"lottery.seed1 already holds a run"):
        train(home, "lottery")
    out = home / "new" / "lottery" / "seed1"
    (home / "runs" / "lottery" / "seed1").rename(home / "taken")
    out.parent.mkdir(parents=True)
    (home / "taken").rename(out)
    with pytest.raises(WiringError, match="already holds a run"):
        train(home, "lottery", runs="new")
    assert not (home / "new" / "complete").exists()


def test_rejects_networks_that_do_not_fit_before_the_first_phase(home: Path) -> None:
    mine = yaml.safe_load((home / "lottery.yaml").read_text())
    write(home / "other.yaml", mine, model={"name": "tiny_static"})
    with pytest.raises(
        WiringError, match=r"other cannot start from complete: .* Overrides of model\.… apply to other only"
    ):
        train(home, "other")
    assert not (home / "runs").exists()


def test_says_what_to_do_if_another_process_trains_the_first_phase(home: Path) -> None:
    pytest.importorskip("fcntl", reason="needs fcntl")
    first = home / "runs" / "complete" / "seed1"
    with (
        locks.held(first, print),
        pytest.raises(locks.BusyError, match=r"give the folder of a finished run of complete with --start, or another"),
    ):
        train(home, "lottery")
    assert train(home, "lottery") is not None
    with (
        locks.held(home / "runs" / "tuned" / "seed1", print),
        pytest.raises(locks.BusyError, match=r"stop it, or give another --out\.$"),
    ):
        train(home, "tuned")


def test_rejects_invalid_starts(home: Path) -> None:
    settings = recipes.get(home / "lottery.yaml").settings
    with pytest.raises(WiringError, match=r"lottery starts from .*complete.yaml. Use wirings.train.phases.train"):
        loop.train("lottery", settings, home / "run", device="cpu")
    with pytest.raises(WiringError, match=r"complete starts from a new network, not from here. Leave --start out"):
        train(home, "complete", first_run=Path("here"))
    with pytest.raises(
        WiringError, match=r"rule 'lottery' takes its wiring from a trained network, but complete starts"
    ):
        train(home, "complete", "rule.name=lottery")
    with pytest.raises(WiringError, match=r"unknown recipe 'table2/compleet'. Did you mean 'table2/complete'"):
        train(home, "lottery", "start.recipe=table2/compleet")
    with pytest.raises(WiringError, match=r"unknown start.weights 'first'"):
        train(home, "lottery", "start.weights=first")
    with pytest.raises(WiringError, match=r"start.recipe must be a recipe's name"):
        train(home, "lottery", 'start.recipe=""')
    mine = yaml.safe_load((home / "lottery.yaml").read_text())
    write(home / "again.yaml", mine, start={"recipe": str(home / "lottery.yaml")})
    with pytest.raises(WiringError, match=r"again starts from lottery, which itself starts from "):
        train(home, "again")
    assert not (home / "runs").exists()


def test_asks_any_rule_whether_it_needs_trained_weights(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name in rules.names() if rules.get(name).needs_trained_weights] == [
        "fine_tune",
        "keep",
        "lottery",
    ]
    monkeypatch.setattr(rules.Random, "needs_trained_weights", True)
    with pytest.raises(WiringError, match=r"rule 'random' takes its wiring from a trained network"):
        train(home, "complete", "rule.name=random")
    with pytest.raises(WiringError, match=r"rule 'keep' keeps the zeros of a pruned model.*set start.prune=true"):
        train(home, "lottery", "rule.name=keep")
    assert not (home / "runs").exists()
    write(home / "random.yaml", yaml.safe_load((home / "lottery.yaml").read_text()), rule={"name": "random"})
    assert train(home, "random") is not None


def test_runs_folder() -> None:
    usual = Path("runs/table2/lottery/seed1")
    assert phases.runs_folder(usual, "table2/lottery", 1) == Path("runs")
    assert phases.runs_folder(Path("/a") / usual, "table2/lottery", 1) == Path("/a/runs")
    assert phases.runs_folder(usual, "table2/lottery", 2) == Path("runs/table2/lottery")
    assert phases.runs_folder(Path("run"), "table2/lottery", 1) == Path()
    assert phases.runs_folder(Path("runs/mine/seed0"), "mine", 0) == Path("runs")


def test_starts_from_the_average(home: Path) -> None:
    train(home, "tuned", "ema=0.9")
    complete, tuned = (home / "runs" / name / "seed1" for name in ("complete", "tuned"))
    average = load_file(complete / "last.safetensors")["average.stem.weight"]
    assert torch.equal(tensors(tuned, "initial")["stem.weight"], average)


@pytest.mark.parametrize("rule", ["dnw", "random", "dense", "no_update"])
def test_any_rule_can_start_from_a_trained_network(rule: str, home: Path) -> None:
    result = train(home, "tuned", f"rule.name={rule}", "epochs=1")
    assert result is not None
    assert rule == "dense" or result.edges == EDGES
    trained = tensors(home / "runs" / "complete" / "seed1")
    assert torch.equal(tensors(home / "runs" / "tuned" / "seed1", "initial")["graph.weight"], trained["graph.weight"])


def test_tensorboard_files_of_both_phases(home: Path) -> None:
    pytest.importorskip("tensorboard")
    train(home, "lottery", "epochs=1", log=ConsoleLog(tensorboard=True))
    for name in ("complete", "lottery"):
        assert list((home / "runs" / name / "seed1" / "tensorboard").glob("events.*"))


def test_norms_and_their_statistics_are_rewound(tmp_path: Path) -> None:
    """On MobileNetV1-DNW, which has batch norms, unlike the graph for digits."""
    recipe = recipes.get("table2/lottery")
    changes = ["data.name=synthetic", "data.options={examples: 4, test_examples: 2}", "batch=2", "epochs=1"]
    settings, overrides = with_overrides(recipe.settings, changes)
    phases.train(recipe.name, settings, tmp_path / "run", device="cpu", overrides=overrides)
    first = tensors(tmp_path / "table2" / "complete" / "seed0", "initial")
    began, ended = tensors(tmp_path / "run", "initial"), tensors(tmp_path / "run")
    means = [name for name in first if name.endswith("running_mean")]
    assert len(means) > 10
    for name in means:
        assert torch.equal(began[name], torch.zeros_like(began[name]))
        assert not torch.equal(ended[name], began[name])
    assert all(torch.equal(began[name], value) for name, value in first.items())


def test_plan_is_called_in_new_and_resumed_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def plan(wiring: Wiring, steps: int) -> None:
        if isinstance(wiring.rule, rules.FineTune):
            planned.append(steps)

    monkeypatch.setattr(Wiring, "plan", plan)
    with pytest.raises(BreakError):
        train(home, "tuned", log=Stops(12))
    train(home, "tuned", resume=True)
    assert planned == [9, 9], "also in a resumed run"


def test_initialize_is_only_called_for_new_runs(home: Path) -> None:
    begun: list[type[nn.Module]] = []
    settings: Settings = recipes.get(home / "complete.yaml").settings
    more: dict[str, Any] = {"device": "cpu", "initialize": lambda model, wiring: begun.append(type(model))}
    with pytest.raises(BreakError):
        loop.train("complete", settings, home / "run", log=Stops(4), **more)
    loop.train("complete", settings, home / "run", resume=True, **more)
    assert len(begun) == 1
