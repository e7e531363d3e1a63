"""The figures of docs/gallery.md from records: committed histories, how fast the page is, what recording costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.common import record
from wirings.history import History

ROOT = Path(__file__).parents[1]


def histories() -> dict[str, Path]:
    """The committed histories by recipe name; those of the paper's tables come first."""
    folder = ROOT / "results" / "histories"
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.glob("**/*.wirings")}
    return {name: found[name] for name in sorted(found, key=lambda name: (not name.startswith("table"), name))}


def moment(history: History) -> int:
    """The record that screenshots show: an early one, in which many edges change."""
    return min(range(len(history)), key=lambda i: abs(history.steps[i] - history.steps[-1] / 12))


def _film(recipe: str, path: Path) -> tuple[str, str]:
    """A history's screenshot, which links to its page, and a text."""
    history, name = History.load(path), recipe.replace("/", "-")
    step, last = history.steps[moment(history)], history.state()
    size = f"{np.count_nonzero(last.alive):,} of {history.structure.nodes:,} nodes used, {len(last):,} edges"
    accuracy = history.series("accuracy")[1][-1]
    page = f"pages/{name}.html"
    picture = (
        f"[![The page of {recipe} at step {step:,} of its training: blocks of nodes, and edges between them, new ones "
        f"with an outline, dying ones dashed](images/{name}-desktop.png)]({page})"
    )
    text = (
        f"`{recipe}`, {history.steps[-1]:,} steps, {len(history)} records: {size}; {history.births[1:].sum():,} were "
        f"swapped from record to record; {accuracy:.1f} % accuracy at the end. [Its history](../results/histories/"
        f"{recipe}.wirings) has {_bytes(path)}, [its page]({page}), to download and open, "
        f"{_bytes(ROOT / 'docs' / 'pages' / f'{name}.html')}."
    )
    return picture, text


def _bytes(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def films() -> str:
    """Every committed history: screenshot, sizes and links."""
    parts: list[str] = []
    for recipe, path in histories().items():
        parts += _film(recipe, path)
        if recipe.startswith("table"):  # the digits' are below
            picture = f"images/{recipe.replace('/', '-')}-edges.png"
            parts.append(f"![Edges of {recipe} that were born and that died, over training]({picture})")
    return "\n\n".join(parts)


def page() -> str:
    found = record("benchmarks/page")
    row = found["rows"][0]
    median = row["median"]
    size = f"{row['nodes']:,} nodes, {row['edges']:,} edges, {row['swapped_a_record']:,.0f} swapped per record"
    where = f"Chromium {row['chromium']} without a graphics card, {found['hardware']}"
    return "\n".join(
        [
            f"| {size} | |",
            "|---|---|",
            f"| first drawing | {median['first_ms']:.0f} ms |",
            f"| playback | {median['frames_a_second']:.0f} frames per second |",
            f"| one frame in twenty takes longer than | {median['slowest_of_20_ms']:.0f} ms |",
            "",
            f"({where}, shared with other processes, load {median['load']:.1f}; median of {len(row['tries'])} tries.)",
        ]
    )


def recording() -> str:
    lines = ["| | step without recording | with | overhead | time in the recorder |", "|---|---|---|---|---|"]
    for name in ("history-cpu", "history-h200"):  # the second only if it was measured
        if not (ROOT / "results" / "benchmarks" / f"{name}.json").exists():
            continue
        found = record(f"benchmarks/{name}")
        for row in found["rows"]:
            sides = (row["times"][side]["median_s"] / row["steps"] for side in ("without", "with"))
            without, recorded = (f"{1e3 * seconds:.3g} ms" for seconds in sides)
            ratio, low, high = (f"{100 * (row[key] - 1):+.1f}" for key in ("ratio", "ratio_low", "ratio_high"))
            often = "every step" if row["every"] == 1 else f"every {row['every']} steps"
            where = f"`{row['recipe']}`, a record {often}, {found['hardware']}"
            cost = f"{ratio} % ({low} to {high})"
            lines.append(f"| {where} | {without} | {recorded} | {cost} | {100 * row['inside']:.2f} % |")
    said = (
        "Medians of turns side by side, with 95 % confidence intervals in brackets. On a GPU, the host's time in the "
        "recorder overlaps with the steps."
    )
    rows = record("benchmarks/history-cpu")["rows"]
    if len(rows) > 1:
        usual, often = rows
        more, low, high = (100 * (often[key] - 1) / usual["every"] for key in ("ratio", "ratio_low", "ratio_high"))
        said += (
            " The noise of a shared machine is larger than the cost, so the second row records after every step: "
            f"from this, a record every {usual['every']} steps costs {more:.1f} % ({low:.1f} to {high:.1f})."
        )
    return "\n".join([*lines, "", f"({said})"])


FIGURES = {"films": films, "page": page, "recording": recording}
