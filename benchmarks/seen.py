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
    median, machine = found["median"], found["machine"]
    size = f"{found['nodes']:,} nodes, {found['edges']:,} edges, {found['swapped_a_record']:,.0f} swapped a record"
    where = f"Chromium {found['chromium']} without a graphics card, {machine['hardware']}"
    return "\n".join(
        [
            f"| {size} | |",
            "|---|---|",
            f"| first drawing | {median['first_ms']:.0f} ms |",
            f"| while it plays | {median['frames_a_second']:.0f} frames a second |",
            f"| one frame in twenty takes longer than | {median['slowest_of_20_ms']:.0f} ms |",
            "",
            f"({where}, others computing beside it, load {median['load']:.1f}; median of {len(found['tries'])}.)",
        ]
    )


def recording() -> str:
    lines = ["| | an epoch without | with | (quartiles) | in the recorder |", "|---|---|---|---|---|"]
    for name in ("history-cpu", "history-h200"):
        if not (ROOT / "results" / "benchmarks" / f"{name}.json").exists():
            continue
        found = _record(name)
        row, machine = found["row"], found["machine"]
        without, recorded = (f"{1e3 * row['times'][side]['median_s']:.1f} ms" for side in ("without", "with"))
        ratio, low, high = (f"{100 * (row[key] - 1):+.2f}" for key in ("ratio", "ratio_q1", "ratio_q3"))
        cost = f"{ratio} % ({low} to {high})"
        where = f"`{row['recipe']}`, {row['batches']} steps, a record every {row['every']}, {machine['hardware']}"
        lines.append(f"| {where} | {without} | {recorded} | {cost} | {100 * row['inside']:.2f} % |")
    return "\n".join(lines)


FIGURES = {"page": page, "recording": recording}
