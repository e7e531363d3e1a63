"""Run the demo or one of the digits examples, and save its record and the picture shown in README.

python -m benchmarks.demo [--out results/demo.json] [--picture docs/images/demo.png]
python -m benchmarks.demo digits_sequence [--out results/examples/digits_sequence.json]
python -m benchmarks.demo pretrained_digits [--out results/examples/pretrained_digits.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import runpy
import sys
import time
from pathlib import Path

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.common import machine, save
from wirings.cli.comparison import ComparisonSettings, compare, draw_networks, perceptron

CHOICES = ["demo", "digits_sequence", "digits_static", "pretrained_digits"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="demo", choices=CHOICES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings, build = ComparisonSettings(), perceptron
    if options.what == "pretrained_digits":
        example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / f"{options.what}.py"))
        started = time.perf_counter()
        found = example["compare"]()
        seconds = time.perf_counter() - started
        save(options.out, {"benchmark": options.what, **machine("cpu"), "seconds": seconds, **found})
        return
    if options.what != "demo":
        example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / f"{options.what}.py"))
        settings, build = example["SETTINGS"], example["network"]
    started = time.perf_counter()
    outcomes = compare(settings, progress=print, build=build)
    seconds = time.perf_counter() - started
    if options.picture is not None:
        draw_networks(outcomes, str(options.picture))
    rows = [
        {"rule": o.rule, "lr": o.lr, "gain": o.gain, "edges": o.edges, "accuracies": o.accuracies, "swapped": o.swapped}
        for o in outcomes
    ]
    record = {"benchmark": options.what, "settings": dataclasses.asdict(settings), **machine("cpu"), "seconds": seconds}
    save(options.out, {**record, "outcomes": rows})


if __name__ == "__main__":
    main()
