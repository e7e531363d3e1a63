"""The figures of docs/gallery.md: how fast the page is, and what recording costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text())
    return found


def page() -> str:
    found = _record("page")
    row = found["rows"][0]
    median = row["median"]
    size = f"{row['nodes']:,} nodes, {row['edges']:,} edges, {row['swapped_a_record']:,.0f} swapped a record"
    where = f"Chromium {row['chromium']} without a graphics card, {found['hardware']}"
    return "\n".join(
        [
            f"| {size} | |",
            "|---|---|",
            f"| first drawing | {median['first_ms']:.0f} ms |",
            f"| while it plays | {median['frames_a_second']:.0f} frames a second |",
            f"| one frame in twenty takes longer than | {median['slowest_of_20_ms']:.0f} ms |",
            "",
            f"({where}, others computing beside it, load {median['load']:.1f}; median of {len(row['tries'])}.)",
        ]
    )


def recording() -> str:
    lines = ["| | a step without | with | more | in the recorder |", "|---|---|---|---|---|"]
    for name in ("history-cpu", "history-h200"):
        if not (ROOT / "results" / "benchmarks" / f"{name}.json").exists():
            continue
        found = _record(name)
        for row in found["rows"]:
            sides = (row["times"][side]["median_s"] / row["steps"] for side in ("without", "with"))
            without, recorded = (f"{1e3 * seconds:.3g} ms" for seconds in sides)
            ratio, low, high = (f"{100 * (row[key] - 1):+.1f}" for key in ("ratio", "ratio_low", "ratio_high"))
            where = f"`{row['recipe']}`, a record every {row['every']} steps, {found['hardware']}"
            cost = f"{ratio} % ({low} to {high})"
            lines.append(f"| {where} | {without} | {recorded} | {cost} | {100 * row['inside']:.2f} % |")
    return "\n".join([*lines, "", "(Medians of turns side by side; in brackets where the median is with 95 %.)"])


FIGURES = {"page": page, "recording": recording}
