"""The figures of docs/your_model.md, from records and recipes; `benchmarks.readme` writes them."""

from __future__ import annotations

import statistics

from benchmarks.common import RESULTS, record
from wirings.train import recipes


def densities() -> str:
    """The authors' published accuracies of ResNet50 on ImageNet, by density."""
    percent = range(10, 100, 10)
    lines = ["| weights kept | " + " | ".join(f"{n} %" for n in (*percent, 100)) + " |", "|---" * 11 + "|"]
    dense = (recipes.get("table4/dense").paper or {})["published"]
    for title, row in (("every layer sparse", "all"), ("all but the first", "first_dense")):
        figures = [(recipes.get(f"table4/{row}-{n}").paper or {})["published"] for n in percent]
        lines.append(f"| {title} | " + " | ".join(f"{figure:.1f}" for figure in (*figures, dense)) + " |")
    return "\n".join(lines)


def pretrained() -> str:
    """Ways to continue from a dense network."""
    titles = {
        "dense": "the dense network",
        "cut": "the largest tenth of its weights, without further training",
        "fine_tune": "`fine_tune`: the largest tenth, fixed, trained further",
        "dnw": "`dnw`, trained further",
        "dnw, schedule": "`dnw`, with the density falling to 10 % over the first half of that",
        "dnw, new": "`dnw` from new weights, trained as long as both trainings together",
    }
    outcomes = {outcome["way"]: outcome for outcome in record("examples/pretrained_digits")["outcomes"]}
    lines = ["| | edges | test accuracy |", "|---|---|---|"]
    for way, title in titles.items():
        found = outcomes[way]
        mean, std = statistics.mean(found["accuracies"]), statistics.stdev(found["accuracies"])
        lines.append(f"| {title} | {found['edges']:,} | {mean:.1f} ± {std:.1f} % |")
    return "\n".join(lines)


def cost() -> str:
    """Time and memory of training steps, wired and dense."""
    lines = ["| a training step | wired, 10 % | dense | time | memory |", "|---|---|---|---|---|"]
    path = RESULTS / "benchmarks" / "sparse_step-h200.json"
    if path.exists():
        found = record("benchmarks/sparse_step-h200")
        title = f"ResNet50, {found['settings']['size']} px, batch {found['settings']['batch']}, bf16, H200"
        for row in found["rows"]:
            times = [f"{1e3 * row['times'][side]['median_s']:.1f} ms" for side in ("wired", "dense")]
            peaks = row["peak_bytes"]
            more = f"{100 * (row['ratios']['wired'] - 1):+.1f} % | {100 * (peaks['wired'] / peaks['dense'] - 1):+.1f} %"
            lines.append(f"| {title}, {row['way']} | {' | '.join(times)} | {more} |")
    step = record("benchmarks/wired_step-cpu")
    settings = step["settings"]
    for row in step["rows"]:
        times = [f"{1e3 * row['times'][side]['median_s']:.0f} ms" for side in ("wired", "dense")]
        title = f"{settings['layers']} linear layers of width {settings['width']:,}, batch {settings['batch']}"
        cores = f"{row['threads']} CPU core{'s' if row['threads'] > 1 else ''}"
        lines.append(f"| {title}, {cores} | {' | '.join(times)} | {100 * (row['ratio'] - 1):+.0f} % | |")
    dense, wired = record("benchmarks/billion-cpu")["rows"]
    peaks = [f"{row['peak_bytes'] / 1e9:.1f} GB" for row in (wired, dense)]
    more = 100 * (wired["peak_bytes"] / dense["peak_bytes"] - 1)
    lines.append(f"| 100 linear layers, 10⁹ weights, CPU, at the peak | {' | '.join(peaks)} | | {more:+.0f} % |")
    return "\n".join(lines)


FIGURES = {"densities": densities, "pretrained": pretrained, "cost": cost}
