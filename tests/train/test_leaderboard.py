"""The leaderboard: with and without results, its order, the comparison with DNW and the cost of rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_results import make
from typer.testing import CliRunner

from wirings import WiringError, rules
from wirings.cli.app import app
from wirings.train import recipes, results
from wirings.train.tables import leaderboard
from wirings.train.tables.leaderboard import Leaderboard, RuleNeeds, Standing, boards


def add(folder: Path, recipe: str, *accuracies: float, **values: Any) -> None:
    for seed, accuracy in enumerate(accuracies):
        known: dict[str, Any] = {"edges": 158_939, "mult_adds": 12_345_678, "train_s": 100.0}
        results.write(make(recipe, seed, accuracy, **known | values), folder)


def by_name(found: list[Leaderboard]) -> dict[str, Standing]:
    return {one.row.recipe: one for board in found for one in board.standings}


def test_rows_without_results_say_so(tmp_path: Path) -> None:
    found = boards(tmp_path)
    assert [board.title for board in found] == [
        "MobileNetV1-DNW × 0.225, the network of Table 2; 160 epochs",
        *(f"ResNet18 × 0.5 with {percent} % of its weights; 60 epochs" for percent in (10, 5, 2)),
    ]
    assert set(by_name(found)) == {recipe.name for recipe in recipes.table("ste")}
    for text in (leaderboard.render(found), leaderboard.markdown(found)):
        assert text.count("not measured yet") == len(recipes.table("ste"))


def test_rows_are_sorted_and_show_accuracy_above_dnw_and_cost(tmp_path: Path) -> None:
    add(tmp_path, "table2/dnw", 89.0, 90.0, hardware="H200")
    add(tmp_path, "ste/mobilenet-rigl", 88.25, hardware="H200", train_s=150.0)
    add(tmp_path, "ste/mobilenet-soft_threshold", 90.75, hardware="A100", train_s=300.0)
    add(tmp_path, "table2/complete", 92.0, hardware="H200", train_s=40.0)
    add(tmp_path, "table2/lottery", 87.0, hardware="H200", train_s=110.0)
    add(tmp_path, "table2/fine_tune-0.01", 80.0, overrides={"epochs": 1})
    add(tmp_path, "resnet/dnw-10", 93.0, hardware="H200")
    measured = [{"recipe": "table2/dnw", "ratio": 1.0}, {"recipe": "ste/mobilenet-rigl", "ratio": 1.25}]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "rules-h200.json").write_text(
        json.dumps({"date": "2026-11-16", "networks": [{"rows": measured}]})
    )
    board = boards(tmp_path)[0]
    shown = [(one.row.recipe, one.above, one.seconds, one.ratio) for one in board.standings[:4]]
    assert shown == [
        ("ste/mobilenet-soft_threshold", 1.25, 300.0, None),
        ("table2/dnw", 0.0, 100.0, 1.0),
        ("ste/mobilenet-rigl", -1.25, 150.0, 1.25),
        ("table2/lottery", -2.5, 150.0, None),  # includes the training of the complete graph
    ]
    assert all(one.row.mean is None for one in board.standings[4:])
    text = leaderboard.render([board])
    line = next(line for line in text.splitlines() if line.startswith("ste/mobilenet-rigl"))
    assert line.split()[1:-1] == [
        *("88.25", "%", "1†", "-1.25", "158,939", "12.3M", "≤", "2", "min", "1.25", "×", "k", "some", "2"),
    ]
    assert line.endswith("ste/mobilenet-rigl/seed0.json")
    assert "89.50 ± 0.71 %" in text
    assert "†: fewer than three seeds." in text
    for others, alone in ((0, True), (None, False)):
        folder = tmp_path / f"beside {others}"
        add(folder, "table2/complete", 92.0, train_s=40.0, most_others=others)
        add(folder, "table2/lottery", 87.0, train_s=110.0, most_others=0)
        one = by_name(boards(folder))["table2/lottery"]
        assert (one.seconds, one.alone) == (150.0, alone)
    linked = leaderboard.markdown([board])
    assert f"[1]({tmp_path.as_posix()}/table2/dnw/seed1.json)" in linked
    add(tmp_path, "ste/mobilenet-gmp", 91.0, hardware="H200")
    assert by_name(boards(tmp_path))["ste/mobilenet-gmp"].above == 1.5
    assert by_name(boards(tmp_path))["ste/resnet-gmp-10"].above is None


def test_the_latest_record_of_a_step_time_counts(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name, date, rows in (
        ("z", "2026-01-01T10:00:00+00:00", {"ste/mobilenet-rigl": 3.0, "ste/mobilenet-gmp": 2.0}),
        ("a", "2026-01-02T09:00:00+00:00", {"ste/mobilenet-rigl": 1.5}),
    ):
        measured = [{"recipe": recipe, "ratio": ratio} for recipe, ratio in rows.items()]
        record = {"date": date, "networks": [{"rows": measured}]}
        (tmp_path / "benchmarks" / f"rules-{name}.json").write_text(json.dumps(record))
    assert leaderboard.step_costs(tmp_path) == {"ste/mobilenet-rigl": 1.5, "ste/mobilenet-gmp": 2.0}


def test_training_time_is_unknown_without_the_first_phase(tmp_path: Path) -> None:
    add(tmp_path, "table2/dnw", 89.0)
    add(tmp_path, "table2/lottery", 87.0)
    one = by_name(boards(tmp_path))["table2/lottery"]
    assert (one.above, one.seconds, one.ratio) == (-2.0, None, None)


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("dnw", {}, RuleNeeds("k", "all", 0)),
        ("dnw", {"schedule": "cubic"}, RuleNeeds("all", "all", 0)),
        ("random", {}, RuleNeeds("k", "real", 1)),
        ("rigl", {}, RuleNeeds("k", "some", 2)),
        ("gmp", {}, RuleNeeds("all", "some", 1)),
        ("targeted_dropout", {"rho": 0.95}, RuleNeeds("14 %", "some", 0)),
        ("fine_tune", {}, RuleNeeds("k", "real", 5)),
    ],
)
def test_needs_of_rules(rule: str, options: dict[str, Any], expected: RuleNeeds) -> None:
    assert leaderboard.needs(rules.get(rule, **options), 0.1) == expected


def test_table_command_shows_the_leaderboard(tmp_path: Path) -> None:
    add(tmp_path, "table2/dnw", 89.0)
    for words, expected in (([], "table2/dnw"), (["--markdown"], "| `table2/dnw` | 89.00 % | 1† | +0.00 |")):
        result = CliRunner().invoke(app, ["table", "ste", "--results", str(tmp_path), *words])
        assert result.exit_code == 0
        assert expected in result.output
        assert "There is no folder" not in result.output


@pytest.mark.parametrize("table", ["ste", "1"])
def test_a_missing_folder_of_results_is_reported_once(tmp_path: Path, table: str) -> None:
    result = CliRunner().invoke(app, ["table", table, "--results", str(tmp_path / "none"), "--markdown"])
    assert result.exit_code == 0
    message = f"There is no folder {tmp_path / 'none'}, so no row has a result. Give another one with --results.\n"
    assert result.stderr == message
    assert "There is no folder" not in result.stdout, "stdout may be written to a page"


@pytest.mark.parametrize("text", ["{", "[]", '{"date": 1, "networks": [{"rows": [{"recipe": "x"}]}]}', "\udcff", "3"])
def test_rejects_damaged_records(text: str, tmp_path: Path) -> None:
    path = tmp_path / "benchmarks" / "rules-x.json"
    path.parent.mkdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WiringError, match=r"rules-x\.json is not a record of benchmarks\.rules: .*Remove it"):
        leaderboard.step_costs(tmp_path)


def test_above_dnw_in_pooled_deviations(tmp_path: Path) -> None:
    """Three seeds of 88, 89, 90 and two of 91, 93: pooled variance (2 · 1 + 1 · 2) / 3."""
    for recipe, accuracies in (("table2/dnw", (88, 89, 90)), ("ste/mobilenet-gmp", (91, 93)), ("table2/random", (80,))):
        for seed, accuracy in enumerate(accuracies):
            results.write(make(recipe, seed, float(accuracy), edges=158_939), tmp_path)
    found = by_name(boards(tmp_path))
    assert found["ste/mobilenet-gmp"].deviations == pytest.approx(3 / (4 / 3) ** 0.5)
    assert found["table2/random"].deviations is None
    assert found["table2/dnw"].deviations is None
    text = leaderboard.render(boards(tmp_path)[:1])
    assert "+3.00 (+2.6 sd)" in text
    assert "pooled standard deviations" in text
