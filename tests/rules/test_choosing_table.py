"""The table of rules in the docs: without results, with some, and with all."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from wirings import rules
from wirings.train import recipes, results
from wirings.train.settings import to_mapping

ROOT = Path(__file__).parents[2]
KNOWN: dict[str, Any] = {"steps": 1, "params": 1, "overrides": {}, "precision": "bf16", "hardware": "a machine"}
KNOWN |= {"versions": {}, "commit": None, "dirty": None, "started": "2026-11-15", "wall_s": 1.0}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "choosing.py"))


def add(folder: Path, name: str, *accuracies: float, seconds: float = 100.0) -> None:
    settings = recipes.get(name).settings
    for seed, accuracy in enumerate(accuracies):
        about: dict[str, Any] = {"recipe": name, "seed": seed, "accuracy": accuracy, "train_s": seconds}
        settled = {"epochs": settings.epochs, "settings": to_mapping(settings) | {"seed": seed}}
        results.write(results.Result(**about, **settled, **KNOWN), folder)


def cells(text: str) -> dict[str, list[str]]:
    """The cells after the description of when to use a rule."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    return {line[0].strip("`"): line[2:] for line in lines}


def test_table_without_with_some_and_with_all_results(page: dict[str, Any], tmp_path: Path) -> None:
    empty = cells(page["choosing"](tmp_path))
    assert set(empty) == set(rules.names())
    assert all(line[3:] == ["–"] * 5 for line in empty.values())
    assert empty["rigl"][:3] == ["some", "k", "2"]
    add(tmp_path, "table2/dnw", 89.0, 90.0)
    add(tmp_path, "table2/complete", 92.04)
    add(tmp_path, "ste/mobilenet-dnw_cubic", 91.0, seconds=120.0)
    add(tmp_path, "ste/mobilenet-soft_threshold", 90.0, seconds=130.0)
    add(tmp_path, "ste/resnet-rigl-2", 88.26)
    add(tmp_path, "resnet/dense", 95.5)
    measured = [{"recipe": "ste/mobilenet-soft_threshold", "ratio": 1.3}, {"recipe": "table2/dnw", "ratio": 1.0}]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "rules-h200.json").write_text(
        json.dumps({"date": "2026-11-16", "networks": [{"rows": measured}]})
    )
    some = cells(page["choosing"](tmp_path))
    assert some["dnw"][3:] == ["1.00 ×", "89.5 ± 0.7 (2†); 91.0 (1†, cubic)", "–", "–", "–"]
    assert some["soft_threshold"][3:] == ["1.30 ×", "90.0 (1†, cubic)", "–", "–", "–"]
    assert some["rigl"][3:] == ["–", "–", "–", "–", "88.3 (1†, erk)"]
    assert some["dense"][3:] == ["–", "92.0 (1†)", "95.5 (1†)", "95.5 (1†)", "95.5 (1†)"]
    add(tmp_path, "ste/mobilenet-soft_threshold_global", 90.5, 91.5)
    assert cells(page["choosing"](tmp_path))["soft_threshold"][4] == "91.0 ± 0.7 (2†, cubic, global)"
    add(tmp_path, "ste/mobilenet-soft_threshold_k", 88.0)
    assert cells(page["choosing"](tmp_path))["soft_threshold"][4] == "88.0 (1†); 91.0 ± 0.7 (2†, cubic, global)"
    for recipe in [*recipes.table("ste"), *recipes.table("cifar100")]:
        if not (tmp_path / recipe.name).exists():
            add(tmp_path, recipe.name, 80.0)
    everything = cells(page["choosing"](tmp_path))
    assert everything["targeted_dropout"][4] == "80.0 (1†)"
    assert everything["fine_tune"][4] == "80.0 (1†)"
    assert not [rule for rule, line in everything.items() if line[4] == "–" and rule != "keep"]
    board = page["ste"](tmp_path)
    assert "not measured yet" not in board
    assert board.count("\n### ") == 11  # six networks, at equal edges and at equal cost; one is at the beginning


def test_the_best_rule_of_every_network(page: dict[str, Any], tmp_path: Path) -> None:
    nothing = page["best"](tmp_path)
    assert nothing.count("| – | – | – | – |") == 4
    add(tmp_path, "table2/dnw", 89.0, 90.0)
    add(tmp_path, "ste/mobilenet-dnw_cubic", 89.4)
    add(tmp_path, "ste/mobilenet-soft_threshold_global", 92.0)
    add(tmp_path, "resnet/dense", 95.5)
    add(tmp_path, "resnet/random-2", 70.0)
    lines = page["best"](tmp_path).splitlines()
    assert lines[2].endswith("Table 2 | – | 89.5 ± 0.7 (2†) | `soft_threshold`: 92.0 (1†, cubic, global) | – |")
    assert lines[5].endswith("2 % of its weights | 70.0 (1†) | – | `random`: 70.0 (1†) | 95.5 (1†) |")
