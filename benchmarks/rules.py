"""Cost of a training step with every rule of the leaderboard, relative to ``dnw``: in turns, in one process.

On a GPU the step is captured, as in training; ``--compile`` also compiles it, which takes half a minute per rule.
Images are synthetic. In every round, each rule runs its steps after the others, and a ratio is the median over rounds.
Work that a rule does only every few steps, such as the updates of `rigl`, is included as often as it occurs.

    python -m benchmarks.rules [--network resnet] [--compile] [--out results/benchmarks/rules-h200.json]
    python -m benchmarks.rules --device cpu --batch 2 --rounds 2 --steps 1 --only dnw random
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.common import machine, save, summary, time_once, training
from wirings.train import recipes
from wirings.train.run.captured_step import CapturedStep, capture
from wirings.train.run.step import acts_between_steps
from wirings.train.settings import DataSettings

NETWORKS = {"mobilenet": "mobilenetv1_dnw", "resnet": "resnet18"}


def rows_of(network: str) -> list[recipes.Recipe]:
    """The leaderboard's recipes on one network; for the ResNet, those with 10 % of the weights."""
    found = [recipe for recipe in recipes.table("ste") if recipe.settings.model.name == NETWORKS[network]]
    return [recipe for recipe in found if network == "mobilenet" or recipe.name.endswith("-10")]


def stepper(recipe: recipes.Recipe, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs one training step of a recipe, including the rule's update."""
    images = DataSettings(name="synthetic", options={"examples": 4 * options.batch})
    settings = replace(recipe.settings, data=images, batch=options.batch)
    data, step = training(settings, options.device)
    wiring = step.wiring
    if wiring is not None:
        wiring.plan(recipe.settings.epochs * 50_000 // recipe.settings.batch)
    train: Any = data.train
    fast: Any = None
    batches: Any = None
    if step.device.type == "cuda":
        fast = capture(step, train, print) if options.compile else CapturedStep(step, train)
    between = acts_between_steps(wiring)

    def run() -> None:
        nonlocal batches
        if fast is not None:
            fast(options.batch)
        else:
            batches = batches or itertools.cycle(train.epoch(0))
            x, y = next(batches)
            step(x, y, options.batch)
        if between and wiring is not None:
            wiring.step(step.optimizer)

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    steps = {}
    for recipe in rows_of(options.network):
        if not options.only or recipe.settings.rule.name in options.only:
            steps[recipe.name] = stepper(recipe, options)
            for _ in range(3):
                steps[recipe.name]()
            print(f"  {recipe.name}: ready", flush=True)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            taken[name].append(time_once(step, options.device, options.steps))
    dnw = next(name for name in steps if recipes.get(name).settings.rule.name == "dnw")
    rows = []
    for name, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times, taken[dnw], strict=True))
        rows.append({"recipe": name, "times": summary(times), "ratio": ratio})
        print(f"{name:40} {1e3 * statistics.median(times):8.3f} ms per step, {ratio:5.2f} × dnw", flush=True)
    return {"network": options.network, "batch": options.batch, "compiled": options.compile, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", choices=list(NETWORKS), help="default: both")
    parser.add_argument("--batch", type=int, help="default: the recipe's batch size")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--only", nargs="*", help="names of rules to measure; default: all")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "rules", **machine(options.device), "networks": []}
    for network in [options.network] if options.network else list(NETWORKS):
        chosen = argparse.Namespace(**{**vars(options), "network": network})
        chosen.batch = options.batch or rows_of(network)[0].settings.batch
        record["networks"].append(measure(chosen))
    save(options.out, record)


if __name__ == "__main__":
    main()
