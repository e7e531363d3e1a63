"""How nodes lose their edges in the first steps of MobileNetV1-DNW on CIFAR-10 (docs/theory.md explains why).

The network and the settings are those of Table 2. Its first graph has 103 edges into 64 nodes. The benchmark counts the
nodes with an incoming edge and finds the smallest real weight, before the first step and after the last: in float32, in
bfloat16, with a larger epsilon in the norms, and with norm scales initialized as in PyTorch before 1.2.

    python -m benchmarks.collapse [--data FOLDER] [--steps 40] [--seeds 0 1 2] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, save, training
from wirings.train import recipes
from wirings.train.settings import with_overrides

SIDES = (("fp32", 1e-5, "ones"), ("bf16", 1e-5, "ones"), ("fp32", 1e-3, "ones"), ("fp32", 1e-5, "uniform"))
SCALES = {"ones": "1", "uniform": "U(0, 1)"}


def run(precision: str, eps: float, scales: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train for a few steps, and describe the first graph before and after."""
    changes = [f"precision={precision}", f"model.options.eps={eps}", f"norm_scales={scales}", f"seed={seed}"]
    settings, _ = with_overrides(recipes.get("table2/dnw").settings, changes)
    if options.data is not None:
        settings = replace(settings, data=replace(settings.data, directory=str(options.data)))
    data, step = training(settings, options.device)
    step.model.train()
    before = look(step.model)
    for _, (x, y) in zip(range(options.steps), data.train.epoch(0), strict=False):
        step(x, y, len(y))
    return {"seed": seed, "before": before, "after": look(step.model), "loss": step.read()[0]}


def look(model: Any) -> dict[str, float]:
    """The first graph: its number of nodes with an incoming edge, and its smallest and largest real weight."""
    graph = model.stages[0]
    real = graph.real()
    received, _ = graph.joined(real)
    weights = graph.all_weights().detach()[real].abs()
    return {"nodes": int(received.sum()), "least": float(weights.min()), "largest": float(weights.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder that contains CIFAR-10")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for precision, eps, scales in SIDES:
        runs = [run(precision, eps, scales, seed, options) for seed in options.seeds]
        rows.append({"precision": precision, "eps": eps, "norm_scales": scales, "runs": runs})
        for each in runs:
            print(precision, eps, scales, each, flush=True)
    save(options.out, {"benchmark": "collapse", "steps": options.steps, **machine(options.device), "rows": rows})


def table(found: dict[str, Any]) -> str:
    """The record as a Markdown table with one row per configuration."""
    head = f"| after {found['steps']} steps | nodes with an edge, of 64 (before) | smallest real weight (before) |"
    lines = [head, "|---|---|---|"]
    for row in found["rows"]:
        cells = []
        for key in ("nodes", "least"):
            now, then = (", ".join(_short(run[when][key]) for run in row["runs"]) for when in ("after", "before"))
            cells.append(f"{now} ({then})")
        name = {"fp32": "float32", "bf16": "bfloat16"}[row["precision"]]
        lines.append(f"| {name}, ε = {row['eps']:g}, scales from {SCALES[row['norm_scales']]} | {' | '.join(cells)} |")
    seeds = len(found["rows"][0]["runs"])
    return "\n".join([*lines, "", f"({seeds} seeds; batch 128, lr 0.1; `python -m benchmarks.collapse`.)"])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    main()
