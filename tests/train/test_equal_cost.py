"""The leaderboard at equal cost: which rows it shows, with and without results, CIFAR-100, and the picture."""

from pathlib import Path
from typing import Any

import pytest
from test_results import make
from typer.testing import CliRunner

from wirings import models
from wirings.cli.app import app
from wirings.profiling import profile
from wirings.train import recipes, results
from wirings.train.tables import equal_cost, leaderboard


def add(folder: Path, recipe: str, accuracy: float, mult_adds: float, seeds: int = 1, **values: Any) -> None:
    for seed in range(seeds):
        known: dict[str, Any] = {"edges": 158_939, "mult_adds": mult_adds, "train_s": 100.0}
        results.write(make(recipe, seed, accuracy, **known | values), folder)


def test_rows_that_cost_more_than_dnw_are_left_out(tmp_path: Path) -> None:
    add(tmp_path, "table2/dnw", 89.0, 3_000_000, seeds=3)
    add(tmp_path, "ste/mobilenet-soft_threshold_global", 92.0, 7_000_000)
    add(tmp_path, "ste/mobilenet-soft_threshold_priced", 90.5, 2_999_999)
    add(tmp_path, "ste/mobilenet-gmp", 88.0, 3_000_000)
    add(tmp_path, "ste/mobilenet-rigl", 88.5, 3_000_001)
    free, equal = equal_cost.boards(tmp_path)[:2]
    assert equal.title == f"{free.title}; at most the multiply-adds of `dnw` (3.00M)"
    measured = [one.row.recipe for one in equal.standings if one.row.mean is not None]
    assert measured == ["ste/mobilenet-soft_threshold_priced", "table2/dnw", "ste/mobilenet-gmp"]
    waiting = {one.row.recipe for one in equal.standings} - set(measured)
    assert waiting == {
        name for name in recipes.names() if name.startswith("ste/mobilenet") and name.endswith("_priced")
    } - set(measured)
    text = leaderboard.render([equal])
    assert "1†" in next(line for line in text.splitlines() if line.startswith("ste/mobilenet-gmp"))


def test_without_results_bounded_rows_are_listed(tmp_path: Path) -> None:
    titles = [board.title for board in equal_cost.boards(tmp_path)]
    assert len(titles) == 12
    assert titles[0] + "; at most the multiply-adds of `dnw`" == titles[1]
    assert titles[8:] == [
        f"CIFAR-100, ResNet18 × 0.5 with {percent} % of its weights; 60 epochs{cost}"
        for percent in (5, 2)
        for cost in ("", "; at most the multiply-adds of `dnw`")
    ]
    shown = {one.row.recipe for board in equal_cost.boards(tmp_path) for one in board.standings}
    assert shown == {
        recipe.name
        for table in ("ste", "cifar100")
        for recipe in recipes.table(table)
        if recipe.settings.rule.name != "dense"
    }


def test_points_have_the_baselines_of_the_paper(tmp_path: Path) -> None:
    add(tmp_path, "table2/dnw", 89.0, 3_000_000, seeds=3)
    add(tmp_path, "ste/mobilenet-ham_dnw", 90.0, 3_100_000)
    add(tmp_path, "table2/mobilenetv1-0.5", 91.0, 12_000_000)
    board, resnet = leaderboard.boards(tmp_path)[:2]
    assert sorted(equal_cost.points(tmp_path, board)) == [
        (3_000_000, 89.0, "dnw", 0.0, False),
        (3_000_000, 89.7, "DNW, paper", 0.2, False),
        (3_100_000, 90.0, "dnw with HAM", 0.0, True),
        (12_000_000, 91.0, "MobileNetV1", 0.0, True),
    ]
    assert equal_cost.points(tmp_path, resnet) == []


def test_table_command_draws_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    add(tmp_path / "results", "table2/dnw", 89.0, 3_000_000)
    arguments = ["table", "ste", "--results", str(tmp_path / "results"), "--plot", str(tmp_path / "cost.png")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert "at most the multiply-adds of `dnw` (3.00M)" in done.stdout
    assert [path.name for path in tmp_path.glob("*.png")] == ["cost-1.png"]
    assert CliRunner().invoke(app, ["table", "2", "--plot", "x.png"]).exit_code != 0


BOUNDED = [
    recipe.name
    for table in ("ste", "cifar100")
    for recipe in recipes.table(table)
    if "mult_adds" in recipe.settings.model.options
    and recipe.settings.rule.name in ("dnw", "rigl", "set")
    and not recipe.settings.rule.options.get("schedule")
    and not recipe.settings.optimizer.ham_alpha
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_rows_begin_with_a_network_that_spends_most_of_the_bound(name: str) -> None:
    """If hardly anything passed through a layer, the row would say nothing about its rule."""
    found = recipes.get(name).settings
    classes = 100 if found.data.name == "cifar100" else 10
    given = {"image_size": 32} if found.model.name == "resnet18" else {}
    model = models.get(found.model.name, rule=found.rule.name, classes=classes, **given, **found.model.options)
    counted, bound = profile(model), found.model.options["mult_adds"]
    assert bound / 2 < counted.live_mult_adds <= counted.mult_adds <= bound
