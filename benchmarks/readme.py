"""Write the figures of README from the records in `results/`; with --check, only say whether they agree.

python -m benchmarks.readme [--check]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return found


def demo() -> str:
    found = record("demo")
    outcomes = found["outcomes"]
    lines = ["| rule | edges | edges swapped while training | test accuracy |", "|---|---|---|---|"]
    for o in outcomes:
        mean, std = statistics.mean(o["accuracies"]), statistics.stdev(o["accuracies"])
        swapped = statistics.mean(o["swapped"])
        lines.append(f"| `{o['rule']}` | {o['edges']:,} | {swapped:,.0f} | {mean:.1f} ± {std:.1f} % |")
    seeds, seconds = len(outcomes[0]["accuracies"]), found["seconds"]
    return "\n".join([*lines, "", f"({seeds} seeds each, mean ± standard deviation; {seconds:.0f} s on one CPU core.)"])


def cost() -> str:
    lines = ["| | time | against |", "|---|---|---|"]
    step = record("benchmarks/wired_step-cpu")
    settings = step["settings"]
    for row in step["rows"]:
        wired, dense = (1e3 * row["times"][side]["median_s"] for side in ("wired", "dense"))
        cores = "1 CPU core" if row["threads"] == 1 else f"{row['threads']} CPU cores"
        lines.append(
            f"| a training step, {settings['layers']} layers of width {settings['width']:,}, batch "
            f"{settings['batch']}, {100 * settings['density']:g} % of the edges, {cores} | {wired:.0f} ms | "
            f"dense: {dense:.0f} ms ({100 * (row['ratio'] - 1):+.0f} %) |"
        )
    for name, where in (("select-cpu", "2 CPU cores"), ("select-h200", "H200")):
        found = record(f"benchmarks/{name}")
        for row in found["rows"]:
            if row["n"] in (10**6, 10**8) and row["way"] == "called":
                lines.append(_selection(row, where))
    return "\n".join(lines)


def _selection(row: dict[str, Any], where: str) -> str:
    times = {name: taken["median_s"] for name, taken in row["times"].items()}
    best = min((times[name], name) for name in ("sort", "topk", "kthvalue") if name in times)
    power = len(str(row["n"])) - 1
    return (
        f"| choosing 10 % of 10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[power]} edges, {where} | {_time(times['choose'])} | "
        f"{best[1]}: {_time(best[0])} ({best[0] / times['choose']:.1f}×) |"
    )


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def rendered(text: str) -> str:
    for name, make in (("demo", demo), ("cost", cost)):
        before, found, rest = text.partition(f"<!-- results:{name} -->\n")
        assert found, f"README has no place for the results of {name}"
        text = f"{before}{found}{make()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def main() -> None:
    readme = ROOT / "README.md"
    before, after = readme.read_text(), rendered(readme.read_text())
    if "--check" in sys.argv[1:]:
        sys.exit("README does not agree with results/: run python -m benchmarks.readme" if before != after else 0)
    readme.write_text(after)


if __name__ == "__main__":
    main()
