"""Run the demo as `wirings demo` does, and keep what came out: the record and the picture that README shows.

python -m benchmarks.demo [--out results/demo.json] [--picture docs/images/demo.png]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

if not __package__:  # run as a file: this folder must not hide Python's own module `select`
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.common import machine, save
from wirings.demo import Settings, compare, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings, started = Settings(), time.perf_counter()
    outcomes = compare(settings, progress=print)
    seconds = time.perf_counter() - started
    if options.picture is not None:
        draw(outcomes, str(options.picture))
    rows = [
        {"rule": o.rule, "lr": o.lr, "edges": o.edges, "accuracies": o.accuracies, "swapped": o.swapped}
        for o in outcomes
    ]
    record = {"benchmark": "demo", "settings": dataclasses.asdict(settings), **machine("cpu"), "seconds": seconds}
    save(options.out, {**record, "outcomes": rows})


if __name__ == "__main__":
    main()
