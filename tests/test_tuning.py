"""Tables of tuned learning rates."""

import json
from pathlib import Path

from benchmarks import tuning


def test_best_rates_and_their_sides(tmp_path: Path) -> None:
    def run(recipe: str, lr: float, value: float, **more: object) -> dict[str, object]:
        plain = {"scale_weights": False, "seed": 0, "steps": 10, "holdout": 0.1, "metric": "bits_per_byte"}
        return {"recipe": f"text/{recipe}", "lr": lr, "value": value, **plain, **more}

    runs = [
        run("dense", 1e-3, 2.0), run("dense", 2e-3, 1.0), run("dense", 4e-3, 1.5),
        run("dnw-10", 4e-3, 1.25), run("dnw-10", 4e-3, 1.75, seed=1), run("dnw-10", 8e-3, 1.25),
        run("dnw-10", 4e-3, 1.0, scale_weights=True), run("dnw-10", 8e-3, 3.0, steps=20),
        run("set-10", 4e-3, 1.0), run("set-10", 8e-3, 1.1),
    ]  # fmt: skip
    (tmp_path / "text.json").write_text(json.dumps(runs))
    assert tuning.table("text", tmp_path).splitlines()[2:] == [
        "| `dense` | 2.000 | **1.000** | 1.500 |  |  | yes |",
        "| `dnw-10` |  |  | 1.500 | **1.250** | 4 × | no higher rate |",
        "| `dnw-10`, `scale_weights` |  |  | **1.000** |  | 2 × | only this rate |",
        "| `dnw-10`, 20 steps |  |  |  | **3.000** | 4 × | only this rate |",
        "| `set-10` |  |  | **1.000** | 1.100 | 2 × | no lower rate |",
    ]


def test_higher_can_be_better(tmp_path: Path) -> None:
    common = {"scale_weights": False, "seed": 0, "steps": 10, "holdout": 0.1, "metric": "accuracy"}
    runs = [{"recipe": "vit/dense", "lr": lr, "value": value, **common} for lr, value in ((1e-3, 90.0), (2e-3, 91.0))]
    (tmp_path / "vit.json").write_text(json.dumps(runs))
    (row,) = tuning.read("vit", tmp_path)
    assert (row.best, row.bracketed) == (2e-3, "no higher rate")


def test_a_rate_at_which_training_diverged_is_worse(tmp_path: Path) -> None:
    common = {"recipe": "vit/dense", "scale_weights": False, "seed": 0, "steps": 10, "holdout": 5000}
    values = {1e-3: 90.0, 2e-3: 91.0, 4e-3: None}
    runs = [{"lr": lr, "value": value, "metric": "accuracy", **common} for lr, value in values.items()]
    (tmp_path / "vit.json").write_text(json.dumps(runs))
    assert tuning.table("vit", tmp_path).splitlines()[-1] == "| `dense` | 90.000 | **91.000** | diverged |  | yes |"


def test_tables_of_all_files(tmp_path: Path) -> None:
    common = {"scale_weights": False, "seed": 0, "steps": 1000, "holdout": 0.1}
    for name, metric in (("text", "bits_per_byte"), ("vit", "accuracy")):
        runs = [{"recipe": f"{name}/dense", "lr": 1e-3, "value": 1.0, "metric": metric, **common}]
        runs.append({**runs[0], "recipe": f"{name}/dnw-10", "lr": 2e-3})
        (tmp_path / f"{name}.json").write_text(json.dumps(runs))
    lines = tuning.tables(tmp_path).splitlines()
    assert lines[0] == "`text/…`: bits per byte on held-out data after 1,000 steps, one seed; lower is better."
    assert "`vit/…`: accuracy on held-out data after 1,000 steps, one seed; higher is better." in lines
    assert tuning.ratios("vit", tmp_path).startswith(
        "In the runs on `vit` so far, the best rates of 1 wired networks are 2 to 2 times that of the dense one (0.001)"
    )
