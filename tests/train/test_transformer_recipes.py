"""The recipes of the tables `translate` and `vit`: every rule trains, and rows differ in what their names say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import Heard

from wirings.train import data, phases, recipes, results
from wirings.train.build import build
from wirings.train.distributed import start
from wirings.train.settings import to_mapping, with_overrides
from wirings.train.tables import by_rule

TABLES = ("translate", "vit")
ROWS = [row.name for table in TABLES for row in recipes.table(table)]
SMALL = {
    "translate": [
        "data.options={vocabulary: 300, lengths: [24], beams: 1}",
        "steps=2",
        "schedule.warmup_steps=1",
        "model.options.layers=1",
        "model.options.width=32",
        "model.options.heads=2",
        "model.options.hidden=32",
    ],
    "vit": [
        "data.name=synthetic",
        "data.options={shape: [3, 32, 32], examples: 8, test_examples: 2}",
        "epochs=1",
        "schedule.warmup_epochs=0",
        "model.options.layers=2",
        "model.options.width=32",
        "model.options.heads=2",
    ],
}


@pytest.mark.filterwarnings("ignore:rule .* will not change the wiring")  # in so few steps
@pytest.mark.filterwarnings("ignore:structure='32x32' leaves")  # more than the density, in a network as small as this
@pytest.mark.parametrize("name", [name for name in ROWS if not name.endswith("-5")])
def test_recipe_trains_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    table, log, changes = name.partition("/")[0], Heard(), ["batch=4", "precision=fp32"]
    if table == "translate":
        data.get("multi30k").write_sample(tmp_path)
        changes.append(f"data.directory={tmp_path}")
    settings, overrides = with_overrides(recipes.get(name).settings, [*changes, *SMALL[table]])
    result = phases.train(name, settings, tmp_path / "run", device="cpu", overrides=overrides, log=log)
    assert result is not None
    assert (result.steps, result.epochs) == (2, 1)
    assert result.metric == ("bleu" if table == "translate" else None)
    assert any("cannot be captured (there is no CUDA device)" in text for text in log.said)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of the compiler
@pytest.mark.parametrize("name", ["translate/dense", "translate/soft_threshold_global-10", "vit/dense", "vit/dnw-10"])
def test_recipe_is_captured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    table, log, changes = name.partition("/")[0], Heard(), ["batch=4"]
    if table == "translate":
        data.get("multi30k").write_sample(tmp_path)
        two_lengths = "data.options={vocabulary: 300, lengths: [12, 24], beams: 2, bleu: false}"
        changes += [f"data.directory={tmp_path}", *SMALL[table], two_lengths, "steps=6"]
    else:
        changes += [*SMALL[table], "epochs=3"]
    settings, overrides = with_overrides(recipes.get(name).settings, changes)
    result = phases.train(name, settings, tmp_path / "run", device="cuda", overrides=overrides, log=log)
    assert not [text for text in log.said if "cannot be captured" in text]
    assert result is not None
    assert (result.steps, result.test_loss is None) == (6, False)


@pytest.mark.parametrize("name", [name for name in ROWS if name.endswith("-5")])
def test_rows_at_5_percent_differ_in_the_budget_and_the_learning_rate(name: str) -> None:
    five, ten = (recipes.get(other).settings for other in (name, f"{name.removesuffix('5')}10"))
    if "dense_small" in name:
        assert five.model.options["width"] < ten.model.options["width"]
        return
    rate = f"optimizer.lr={five.optimizer.lr}"
    assert five == with_overrides(ten, ["model.options.density=0.05", rate])[0]


@pytest.mark.parametrize("percent", [10, 5])
@pytest.mark.parametrize("table", TABLES)
def test_the_small_dense_network_has_as_many_weights(table: str, percent: int) -> None:
    classes = 8000 if table == "translate" else 10
    dense, _ = build(recipes.get(f"{table}/dense_small-{percent}").settings, classes, start("cpu"))
    sparse, wiring = build(recipes.get(f"{table}/random-{percent}").settings, classes, start("cpu"))
    assert wiring is not None
    reports = wiring.look()
    blocks = ("blocks.",) if table == "vit" else ("",)  # without a ViT's patches, positions and head, which are small
    few, many = (
        sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and name.startswith(blocks))
        for model in (dense, sparse)
    )
    assert few == pytest.approx(many - sum(r.possible - r.edges for r in reports), rel=0.05)


@pytest.mark.parametrize("table", TABLES)
def test_the_table_compares_rules(table: str, tmp_path: Path) -> None:
    rows = by_rule.table(table, tmp_path)
    assert [row.recipe for row in rows] == [name for name in ROWS if name.startswith(table)]
    assert (rows[0].rule, rows[0].density) == ("dense", 1.0)
    structures = {0.2, 0.5} if table == "vit" else set()  # blocks at 20 %, and 2:4
    assert {row.density for row in rows} == {1.0, 0.1, 0.05, 3 / 32} | structures
    small = next(row for row in rows if row.recipe.endswith("dense_small-10"))
    assert small.network == ("seq2seq 6 × 200" if table == "translate" else "vit 6 × 120")


def test_a_measured_row_has_its_metric(tmp_path: Path) -> None:
    recipe = recipes.get("translate/dnw-10")
    made: dict[str, Any] = {"recipe": recipe.name, "accuracy": 60.0, "epochs": 47, "steps": 3000, "params": 8_500_000}
    made |= {"metric": "bleu", "higher_is_better": True, "settings": to_mapping(recipe.settings), "overrides": {}}
    made |= {"precision": "bf16", "hardware": "a GPU", "versions": {}, "commit": None, "dirty": None}
    made |= {"started": "2026-01-01T00:00:00", "train_s": 60.0, "wall_s": 70.0}
    for seed, value in enumerate((36.0, 37.0)):
        settings = {**made["settings"], "seed": seed}
        results.write(results.Result(**{**made, "settings": settings, "seed": seed, "value": value}), tmp_path)
    text = by_rule.render(by_rule.table("translate", tmp_path))
    assert "36.50 ± 0.71" in text
    assert "BLEU" in text.splitlines()[0]
    assert "Higher is better." in text
