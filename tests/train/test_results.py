"""Results: writing, reading and finding them; and the tables made from them."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wirings import WiringError
from wirings.train import recipes, results
from wirings.train.results import Result
from wirings.train.settings import to_mapping, with_overrides
from wirings.train.tables import paper as tables
from wirings.utils import files

NAME = "table1/static-dnw"


def make(recipe: str = NAME, seed: int = 1, accuracy: float = 80.5, **values: Any) -> Result:
    settings = to_mapping(recipes.get(recipe if recipe in recipes.names() else NAME).settings) | {"seed": seed}
    known: dict[str, Any] = {
        "top5": 99.0,
        "best_accuracy": 81.0,
        "test_loss": 0.6,
        "epochs": 160,
        "steps": 15_680,
        "edges": 32_000,
        "usable_edges": 31_000,
        "dead_nodes": 12,
        "params": 41_458,
        "settings": settings,
        "overrides": {},
        "precision": "bf16",
        "started": "2026-11-15T06:20:43+00:00",
        "train_s": 900.5,
        "wall_s": 1000.0,
        "data_md5": "0" * 32,
        "hardware": "a machine",
        "versions": {"torch": "2", "numpy": "2", "python": "3"},
        "commit": "abc1234",
        "dirty": False,
    }
    return Result(recipe=recipe, seed=seed, accuracy=accuracy, **{**known, **values})


def test_results_round_trip(tmp_path: Path) -> None:
    result = make()
    path = results.write(result, tmp_path / "results")
    assert path == tmp_path / "results" / "table1" / "static-dnw" / "seed1.json"
    assert [file.name for file in path.parent.iterdir()] == ["seed1.json"]  # no temporary file
    assert results.read(path) == result
    written = json.loads(path.read_text())
    assert set(written) == {
        *("schema", "recipe", "seed", "accuracy", "top5", "best_accuracy", "epochs", "steps", "edges", "params"),
        *("mult_adds", "live_params", "live_mult_adds", "settings", "overrides", "precision", "hardware", "versions"),
        *("commit", "dirty", "started", "train_s", "wall_s", "data_md5"),
        *("dead_nodes", "usable_edges", "test_loss"),
    }
    assert written["schema"] == 1
    assert results.read(path).mult_adds is None


def test_numpy_numbers_become_plain_ones(tmp_path: Path) -> None:
    result = make(accuracy=np.float64(80.5), train_s=3, test_loss=float("nan"))
    assert type(result.accuracy) is float
    assert result.test_loss is None
    assert results.read(results.write(result, tmp_path)) == result


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accuracy": torch.tensor(80.0)}, "accuracy must be a finite number"),
        ({"accuracy": float("nan")}, "accuracy must be a finite number"),
        ({"accuracy": 100.1}, "accuracy must be a percentage, got 100.1."),
        ({"top5": -1}, "top5 must be a percentage"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"edges": 3.5}, "edges must be an integer or null, got 3.5 (float)."),
        ({"recipe": "../elsewhere"}, "recipe must be a name such as 'table1/static-dnw'"),
        ({"recipe": "/elsewhere"}, "recipe must be a name"),
        ({"recipe": ""}, "recipe must be a name"),
        ({"started": "yesterday"}, "started must be a date and time in ISO 8601, got 'yesterday'."),
        ({"versions": {"torch": 2}}, "versions.torch must be a string, got 2 (int)."),
        ({"schema": 2}, "schema must be 1, got 2."),
        ({"settings": {"a": Path()}}, "settings.a must be a string, a finite number"),
    ],
)
def test_rejects_invalid_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(WiringError) as caught:
        make(**values)
    assert message in str(caught.value)


def test_writing_never_loses_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = results.write(make(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(WiringError, match=r"seed1.json already holds a result of table1/static-dnw, seed 1"):
        results.write(make(accuracy=10, commit="def5678"), tmp_path)
    assert path.read_bytes() == before

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", broken)
        with pytest.raises(WiringError, match=r"seed1.json could not be written: the disk is full"):
            results.write(make(accuracy=10), tmp_path, overwrite=True)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["seed1.json"]
    results.write(make(accuracy=10), tmp_path, overwrite=True)
    assert results.read(path).accuracy == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it is not valid JSON"),
        (lambda text: "", "is damaged: it is not valid JSON"),
        (lambda text: "[1]", "is not a result: the file must be a mapping (schema, recipe,"),
        (
            lambda text: text.replace('"schema": 1', '"schema": 2'),
            "its schema is 2, but this version of wirings only reads 1",
        ),
        (lambda text: text.replace('"schema": 1', '"scheme": 1'), "it has no schema (expected 1)."),
        (
            lambda text: text.replace('"accuracy"', '"acuracy"'),
            "unknown field of a result 'acuracy'. Did you mean 'acc",
        ),
        (lambda text: text.replace('"seed": 1,\n "acc', '"acc'), "the field of a result 'seed' is missing"),
        (lambda text: text.replace("80.5", '"high"'), "accuracy must be a finite number, got 'high' (str)."),
        (lambda text: text.replace("80.5", "NaN"), "accuracy must be a finite number"),
    ],
)
def test_errors_name_damaged_files(tmp_path: Path, change: Any, message: str) -> None:
    path = results.write(make(), tmp_path)
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    for attempt in (lambda: results.read(path), lambda: results.find(tmp_path, NAME)):
        with pytest.raises(WiringError) as caught:
            attempt()
        assert message in str(caught.value)
        assert str(path) in str(caught.value)


def test_errors_name_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"none.json cannot be read: No such file or directory"):
        results.read(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(WiringError, match=r"bytes.json is damaged"):
        results.read(tmp_path / "bytes.json")


def test_find_sorts_by_seed(tmp_path: Path) -> None:
    assert results.find(tmp_path, NAME) == []
    for seed in (10, 2, 0):
        results.write(make(seed=seed), tmp_path)
    results.write(make("table1/static-random"), tmp_path)
    assert [result.seed for result in results.find(tmp_path, NAME)] == [0, 2, 10]
    path = results.path_of(tmp_path, NAME, 2)
    path.rename(path.with_name("seed3.json"))
    with pytest.raises(WiringError, match=r"seed3.json is misplaced: it is the result of table1/static-dnw, seed 2"):
        results.find(tmp_path, NAME)


def test_settings_of_a_run_round_trip(tmp_path: Path) -> None:
    settings, overrides = with_overrides(recipes.get(NAME).settings, ["epochs=3", "model.options.edges=7", "seed=4"])
    path = tmp_path / "run" / "settings.yaml"
    results.save_settings(path, NAME, settings, overrides)
    assert results.load_settings(path) == (NAME, settings, {"epochs": 3, "model.options.edges": 7})
    path.write_text("epochs: 3\n")
    with pytest.raises(
        WiringError, match=r"settings.yaml does not hold the settings of a run: expected the keys recipe, over"
    ):
        results.load_settings(path)
    path.write_text("recipe: a\noverrides: {}\nsettings: {epoch: 3}\n")
    with pytest.raises(
        WiringError, match=r"settings.yaml does not hold the settings of a run: unknown setting 'epoch'"
    ):
        results.load_settings(path)
    with pytest.raises(WiringError, match=r"none.yaml cannot be read"):
        results.load_settings(tmp_path / "none.yaml")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results.environment(torch.device("cpu"))
    assert set(found) == {"hardware", "versions", "commit", "dirty"}
    assert set(found["versions"]) == {"torch", "numpy", "python"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["hardware"]
    json.dumps(found)
    assert results.environment("cpu") == found
    assert dataclasses.replace(make(), **found).hardware == found["hardware"]

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert (results.environment("cpu")["commit"], results.environment("cpu")["dirty"]) == (None, None)


def test_commit_is_the_one_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "wirings"
    (package / "train").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "other").write_text("")
    monkeypatch.setattr(results, "__file__", str(package / "train" / "results.py"))
    git("init")
    git("add", "other")
    git("commit", "-m", "one")
    known = results.environment("cpu")  # installed inside another repository
    assert (known["commit"], known["dirty"]) == (None, None)
    git("add", ".")
    git("commit", "-m", "two")
    known = results.environment("cpu")
    assert (known["commit"], known["dirty"]) == (git("rev-parse", "--short", "HEAD").strip(), False)
    (tmp_path / "other").write_text("changed")  # not part of the package
    assert results.environment("cpu")["dirty"] is False
    (package / "__init__.py").write_text("changed")
    assert results.environment("cpu")["dirty"] is True


def test_results_of_a_changed_recipe_do_not_count(tmp_path: Path) -> None:
    results.write(make(seed=0), tmp_path)
    then = to_mapping(recipes.get(NAME).settings)
    results.write(make(seed=1, settings={**then, "epochs": 150}), tmp_path)
    results.write(make(seed=2, settings={**then, "once": "known"}), tmp_path)
    neutral = {**then["data"], "workers": 9}
    results.write(make(seed=3, settings={**then, "data": neutral}), tmp_path)
    row = next(row for row in tables.table(1, tmp_path) if row.recipe == NAME)
    assert (row.seeds, row.left_out) == ((0, 3), 2)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, accuracy, dead in [(0, 80.0, 10), (1, 82.0, 20)]:
        results.write(make(seed=seed, accuracy=accuracy, dead_nodes=dead, train_s=600 * (seed + 1)), Path("results"))
    results.write(make(seed=2, accuracy=10, overrides={"epochs": 1}), Path("results"))
    results.write(make("table1/static-random", seed=5, accuracy=75, dead_nodes=None, train_s=7200), Path("results"))
    rows = tables.table(1, Path("results"))
    assert [row.recipe for row in rows] == [recipe.name for recipe in recipes.table(1)]
    random, dnw, discrete = rows[:3]
    assert (dnw.paper, dnw.paper_std, dnw.mean, dnw.seeds, dnw.left_out) == (80.9, 0.6, 81.0, (0, 1), 1)
    assert (dnw.edges, dnw.usable_edges, dnw.dead_nodes, dnw.train_s) == (32_000, 31_000, 15, 900)
    assert dnw.std == pytest.approx(2**0.5)
    assert dnw.difference == pytest.approx(0.1)
    assert dnw.files == (Path("results/table1/static-dnw/seed0.json"), Path("results/table1/static-dnw/seed1.json"))
    assert (random.mean, random.std, random.dead_nodes, random.left_out) == (75, None, None, 0)
    assert (discrete.mean, discrete.seeds, discrete.difference, discrete.files) == (None, (), None, ())

    lines = tables.render(rows).splitlines()
    files = "results/table1/static-dnw/seed{0,1}.json"
    parts = ["80.9 ± 0.6 %", "81.00 ± 1.41 %", "+0.10 (+0.1 se)", "81.00 ± 0.00 %", "+0.10 (+0.4 se)", "both", "2†"]
    parts += ["32,000", "31,000", "15", "≤ 15 min", files]
    assert lines[3].split("  ")[0] == "table1/static-dnw"
    assert [part.strip() for part in lines[3].split("  ") if part.strip()][1:] == parts
    assert lines[2].endswith("results/table1/static-random/seed5.json")
    assert "75.00 %" in lines[2]
    assert "2.0 h" in lines[2]
    assert lines[-1] == "table1/static-dnw: 1 more with settings that differ from the recipe, which do not count."
    assert "†: fewer than three seeds." in lines
    assert any("√(s²/n + σ²/5)" in line for line in lines)

    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables.markdown(rows).splitlines()]
    assert cells[0] == list(tables.HEADER)
    assert {len(line) for line in cells[: len(rows) + 2]} == {len(tables.HEADER)}
    links = "[0](results/table1/static-dnw/seed0.json), [1](results/table1/static-dnw/seed1.json)"
    assert cells[3] == ["`table1/static-dnw`", *parts[:-1], links]
    assert cells[-1] == ["table1/static-dnw: 1 more with settings that differ from the recipe, which do not count."]
    with pytest.raises(WiringError, match="unknown table"):
        tables.table(99, Path("results"))


def test_differences_in_standard_errors(tmp_path: Path) -> None:
    """81.0 ± 0.4 over four runs and 80.9 ± 0.6 over the paper's five: 0.1 over the square root of 0.04 + 0.072."""
    deviations = (-0.6, -0.2, 0.2, 0.6)  # with a variance of 0.8 / 3
    for seed, deviation in enumerate(deviations):
        results.write(make(seed=seed, accuracy=81 + deviation, best_accuracy=82 + 2 * deviation), tmp_path)
    row = next(row for row in tables.table(1, tmp_path) if row.recipe == NAME)
    assert row.standard_errors == pytest.approx(0.1 / (0.8 / 3 / 4 + 0.36 / 5) ** 0.5)
    assert row.best_difference == pytest.approx(1.1)
    assert row.best_std == pytest.approx((3.2 / 3) ** 0.5)
    assert row.best_standard_errors == pytest.approx(1.1 / (3.2 / 3 / 4 + 0.36 / 5) ** 0.5)
    text = tables.render([row])
    assert "+0.10 (+0.3 se)" in text
    assert "+1.10 (+1.9 se)" in text
    assert "both" in text
    assert "†" not in text
    far = dataclasses.replace(row, paper=79.9)
    assert "best" not in tables.render([far]).splitlines()[2]
    assert "neither" in tables.render([far])
    assert "neither" not in tables.render([dataclasses.replace(far, std=None, best_std=None)])


@pytest.mark.parametrize(
    ("others", "seconds", "shown"),
    [
        ((0, 3, None), 60.0, "60 s"),  # of the run that was alone
        ((2, 3, None), 3600.0, "≤ 60 min"),  # of the run that does not say
        ((2, 3, 1), None, None),
        ((0, 0, 3), 330.0, "6 min"),
    ],
)
def test_times_of_runs_that_shared_a_gpu_do_not_count(
    tmp_path: Path, others: tuple[int | None, ...], seconds: float | None, shown: str | None
) -> None:
    for seed, (many, taken) in enumerate(zip(others, (60, 600, 3600), strict=True)):
        results.write(make(seed=seed, train_s=taken, most_others=many, mean_others=many), tmp_path)
    row = next(row for row in tables.table(1, tmp_path) if row.recipe == NAME)
    assert row.train_s == seconds
    line = tables.render([row]).splitlines()[2]
    if shown is None:
        assert " min" not in line
        assert " s " not in line
    else:
        assert f"  {shown}  " in line
    assert len(row.seeds) == 3, "their accuracies do"


def test_table_4_has_top5_and_names_rows_without_data(tmp_path: Path) -> None:
    for seed, accuracy, top5 in [(0, 74.5, 92.0), (1, 75.5, 92.5)]:
        results.write(make("table4/all-10", seed=seed, accuracy=accuracy, top5=top5), tmp_path)
    rows = tables.table(4, tmp_path)
    text = tables.render(rows)
    head, _, *lines = text.splitlines()
    assert head.index("paper's top 5") < head.index("  top 5") < head.index("edges")
    cells = {line.split()[0]: line.split("  ") for line in lines if line.startswith("table4/")}
    assert len(cells) == 23
    shown = [cell.strip() for cell in cells["table4/all-10"] if cell.strip()]
    assert shown[:4] == ["table4/all-10", "74.0 %", "75.00 ± 0.71 %", "+1.00"], "the paper has no deviation there"
    assert shown[4:7] == ["81.00 ± 0.00 %", "+7.00", "2†"]
    assert shown[7:9] == ["92.0 %", "92.25 %"]
    assert [cell.strip() for cell in cells["table4/dense"] if cell.strip()] == ["table4/dense", "77.5 %", "0", "93.7 %"]
    assert [cell.strip() for cell in cells["table4/all-70"] if cell.strip()] == ["table4/all-70", "77.60 %*", "0"]
    star = (
        "Figures with a star were published by the authors with their code; the paper's table does not have these rows."
    )
    assert star in lines
    assert lines[-1].startswith("ImageNet was not available: 22 rows were not trained here. `wirings train table4/")
    assert "no row of this table was trained" in tables.render(tables.table(4, tmp_path / "none"))
    widths = {line.count("|") for line in tables.markdown(rows).splitlines() if line.startswith("|")}
    assert widths == {len(tables.HEADER) + 3}
    legend = "The number in a name is the percentage of weights that are kept. `all`: in every convolution "
    assert [line.startswith(legend) for line in lines].count(True) == 1
    assert legend in tables.markdown(rows)
    others = tables.render(tables.table(1, tmp_path))
    assert "ImageNet" not in others, "CIFAR-10 can be downloaded"
    assert "The number in a name" not in others
