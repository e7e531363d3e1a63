"""Cost of recording a history: training with and without a recorder, in turns, in one process.

python -m benchmarks.history [--out results/benchmarks/history-cpu.json]
python -m benchmarks.history --device cuda [--data FOLDER] [--out results/benchmarks/history-h200.json]

The recipe is the digits' on a CPU and Table 1's static network on a GPU, where the step is captured. A turn is a few
epochs of the recipe's own loop, with the default number of records, and ends when the last record is in the file. Turns
come in pairs, one of each side, in alternating order. On a CPU, a pair starts when other processes are idle, and is
discarded if they disturb it. The cost is the median over the pairs, with its 95 % confidence interval (by
bootstrapping). The share of time that the host spends in the recorder is measured, too; on a GPU it overlaps with the
steps already launched. On a CPU, time is process time, and a second row records after every step, which makes a cost
visible that is lost in the noise of the first.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, save, summary
from wirings.history import History
from wirings.train import recipes
from wirings.train.distributed import start
from wirings.train.run.folder import HISTORY
from wirings.train.run.log import Log
from wirings.train.run.loop import Run
from wirings.train.run.recording import Recording
from wirings.train.settings import Settings, with_overrides

RECIPES = {"cpu": "digits/static-dnw", "cuda": "table1/static-dnw"}
WARM_UP = 2
"""Number of pairs that are run but not counted."""


class Timed(Recording):
    """A recording that measures the time it takes from the loop."""

    spent, clock = 0.0, staticmethod(time.perf_counter)

    def after_step(self, number: int) -> None:
        began = self.clock()
        super().after_step(number)
        self.spent += self.clock() - began

    def flush(self) -> None:
        began = self.clock()
        super().flush()
        self.spent += self.clock() - began


def measure(
    name: str, settings: Settings, device: str, pairs: int, epochs: int, disturbed: float | None
) -> dict[str, Any]:
    """A row of the record."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    Timed.clock = staticmethod(clock)
    taken: dict[str, list[float]] = {"without": [], "with": []}
    inside: list[float] = []
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        context, path = start(device), Path(folder) / HISTORY
        run = Run(name, settings, Path(folder), context, Log())
        recorder = Timed(run.step, settings, path, name, context)
        recorder.start(run.progress, run.total_steps, print)
        sides = {"without": run.recording, "with": recorder}  # the first is not started, so it records nothing
        assert recorder.recorder is not None
        while len(inside) < pairs:
            if disturbed is not None and tried >= WARM_UP:
                wait_for_quiet(disturbed)
            others, began_at, now = others_used(), time.perf_counter(), dict[str, float]()
            recorder.spent = 0.0
            for side in sorted(sides, reverse=tried % 2 == 0):
                run.recording = sides[side]
                began = clock()
                for _ in range(epochs):
                    run.progress.batch = 0
                    run.train_epoch()
                    run.progress.epoch += 1
                sides[side].flush()
                now[side] = clock() - began
            tried += 1
            others = others_used() - others
            passed = time.perf_counter() - began_at
            if tried > WARM_UP and (disturbed is None or others <= disturbed * passed):
                for side, seconds in now.items():
                    taken[side].append(seconds)
                inside.append(recorder.spent / (now["with"] - recorder.spent))
        recorder.close()
        size, records = path.stat().st_size, len(History.load(path))
    ratios = [b / a for a, b in zip(taken["without"], taken["with"], strict=True)]
    low, high = interval(ratios)
    return {
        "recipe": name,
        "captured": run.captured is not None,
        "steps": epochs * run.per_epoch,
        "every": recorder.recorder.every,
        "pairs": pairs,
        "left_out": tried - WARM_UP - pairs,
        "times": {side: summary(times) for side, times in taken.items()},
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "inside": statistics.median(inside),
        "bytes_a_record": size / records,
    }


def others_used() -> float:
    """CPU seconds used by other processes since the machine started, over all cores; 0 if unknown."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = ticks[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def wait_for_quiet(disturbed: float) -> None:
    """Wait until other processes use less than this share of a core."""
    while True:
        before, began = others_used(), time.perf_counter()
        time.sleep(0.3)
        if others_used() - before <= disturbed * (time.perf_counter() - began):
            return


def interval(values: list[float], share: float = 0.95, draws: int = 4000) -> tuple[float, float]:
    """Bootstrap confidence interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[int((1 - share) / 2 * draws)], medians[int((1 + share) / 2 * draws) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(RECIPES))
    parser.add_argument("--recipe", help="recipe to train instead of the default one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of the recipe"
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--epochs", type=int, help="epochs per turn; default: 1 on a CPU, 4 on a GPU")
    parser.add_argument(
        "--disturbed", type=float, default=0.1, help="CPU only: share of a core that other processes may use"
    )
    parser.add_argument("--data", type=Path, help="folder that contains CIFAR-10")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)  # the maps are too small for a second thread
    name = chosen.recipe or RECIPES[chosen.device]
    settings, _ = with_overrides(recipes.get(name).settings, chosen.set)
    if chosen.data is not None:
        settings = replace(settings, data=replace(settings.data, directory=str(chosen.data)))
    epochs = chosen.epochs or (1 if chosen.device == "cpu" else 4)
    disturbed = chosen.disturbed if chosen.device == "cpu" else None
    rows = [measure(name, settings, chosen.device, chosen.pairs, epochs, disturbed)]
    tell(rows[-1])
    if chosen.device == "cpu":
        rows.append(measure(name, replace(settings, history_every=1), "cpu", chosen.pairs, epochs, disturbed))
        tell(rows[-1])
    about = {"set": chosen.set, "disturbed": disturbed}
    save(chosen.out, {"benchmark": "history", "settings": about, **machine(chosen.device), "rows": rows})


def tell(row: dict[str, Any]) -> None:
    ratio, low, high = (100 * (row[key] - 1) for key in ("ratio", "ratio_low", "ratio_high"))
    without, recorded = (1e3 * row["times"][side]["median_s"] for side in ("without", "with"))
    print(
        f"{row['recipe']}, {'captured' if row['captured'] else 'called'}: {row['steps']} steps, a record every "
        f"{row['every']}: without {without:.1f} ms, with {recorded:.1f} ms; {ratio:+.2f} % ({low:+.2f} to "
        f"{high:+.2f}), {100 * row['inside']:.2f} % in the recorder, {row['bytes_a_record']:,.0f} bytes per record"
    )


if __name__ == "__main__":
    main()
