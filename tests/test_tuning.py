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
