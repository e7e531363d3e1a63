"""What it costs to record a history: training with and without it, in turns, in one process.

python -m benchmarks.history [--device cuda] [--out results/benchmarks/history-cpu.json]

A turn is an epoch of a recipe's own loop (on a CPU the digits, on a GPU Table 1's static network), with as many records
as a run has by default. The thread that compresses is waited for within the turn. On a CPU the time is that of the
process, which others on the machine disturb less than the clock's; they still do, so beside the ratio of the two sides
stands the share of a turn that was spent in the recorder itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, save
from wirings import recipes
from wirings.history import History
from wirings.train import loop
from wirings.train.distributed import start
from wirings.train.log import Log
from wirings.train.recording import HISTORY, Recording, usual_every
from wirings.train.step import Step, make_fast, make_optimizer
from wirings.train.summary import Progress


class Timed(Recording):
    """Adds up the time that it takes."""

    spent, clock = 0.0, staticmethod(time.process_time)

    def after(self, number: int) -> None:
        began = self.clock()
        super().after(number)
        self.spent += self.clock() - began

    def flush(self) -> None:
        began = self.clock()
        super().flush()
        self.spent += self.clock() - began


RECIPES = {"cpu": "digits/static-dnw", "cuda": "table1/static-dnw"}


def measure(device: str, turns: int, data: Path | None) -> dict[str, Any]:
    name = RECIPES[device]
    settings = recipes.get(name).settings
    if data is not None:
        settings = replace(settings, data=replace(settings.data, directory=str(data)))
    place = start(device)
    torch.manual_seed(0)
    found = loop.load_data(settings, place)
    model, wiring = loop.build(settings, found.classes, place)
    assert wiring is not None
    step = Step(model, wiring, make_optimizer(model, wiring, settings, place.device), settings, place.device)
    fast = make_fast(step, found.train, print) if settings.fast else None
    steps = settings.epochs * len(found.train)
    clock = time.process_time if device == "cpu" else time.perf_counter
    every, log = usual_every(wiring, steps), Log()
    taken: dict[str, list[float]] = {"without": [], "with": []}
    inside: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path, progress = Path(folder) / HISTORY, Progress()
        Timed.clock = staticmethod(clock)
        recorder = Timed(step, settings, path, name, (0, steps), print)
        nobody = Recording(None, settings, path, name, (0, steps), print)
        for turn in range(2 * turns + 4):
            side = ("without", "with")[turn % 2]
            recording = recorder if side == "with" else nobody
            progress.batch, recorder.spent = 0, 0.0
            began = clock()
            loop._epoch(step, fast, found.train, progress, settings, place, float("inf"), log, None, recording)
            recording.flush()
            if turn >= 4:  # the first ones warm up
                taken[side].append(clock() - began)
                if side == "with":
                    inside.append(recorder.spent / (taken[side][-1] - recorder.spent))
            progress.epoch += 1
        recorder.close()
        size, records = path.stat().st_size, len(History.load(path))
    ratios = [b / a for a, b in zip(taken["without"], taken["with"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "recipe": name,
        "batches": len(found.train),
        "every": every,
        "turns": turns,
        "clock": clock.__name__,
        "times": {
            side: {"median_s": statistics.median(times), "least_s": min(times), "n": len(times)}
            for side, times in taken.items()
        },
        "ratio": statistics.median(ratios),
        "ratio_q1": quartiles[0],
        "ratio_q3": quartiles[2],
        "inside": statistics.median(inside),
        "bytes_a_record": size / records,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=list(RECIPES))
    parser.add_argument("--turns", type=int, default=30, help="epochs of each side")
    parser.add_argument("--data", type=Path, help="the folder with CIFAR-10")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)  # the maps are small: a second thread would only wait
    row = measure(chosen.device, chosen.turns, chosen.data)
    times = row["times"]
    ratio, low, high = (100 * (row[key] - 1) for key in ("ratio", "ratio_q1", "ratio_q3"))
    print(
        f"{row['recipe']}: an epoch of {row['batches']} steps, a record every {row['every']}: without "
        f"{1e3 * times['without']['median_s']:.1f} ms, with {1e3 * times['with']['median_s']:.1f} ms; {ratio:+.2f} % "
        f"({low:+.2f} to {high:+.2f}), {100 * row['inside']:.2f} % in the recorder"
    )
    save(chosen.out, {"machine": machine(chosen.device), "row": row})


if __name__ == "__main__":
    main()
