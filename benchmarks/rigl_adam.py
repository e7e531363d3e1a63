"""RigL with AdamW: a small GPT on Tiny Shakespeare, with the gradient of one batch or of several deciding what grows.

Every side trains at several learning rates. Besides bits per byte of held-out text, the benchmark counts where new
edges go: the share of them that the tenth of each layer's output nodes with the most new edges receives, and the tenth
of its input nodes sends, in the mean over changes and layers. Edges that are drawn at random (`set`) show what chance
gives.

    python -m benchmarks.rigl_adam FILE [--steps 2000] [--seeds 0 1 2] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

import wirings
from benchmarks import small_gpt
from benchmarks.common import machine, save
from wirings.rules import SET, Random, RigL, Rule

RATES = (1e-2, 2e-2)
TENTH = 0.1


def sides(steps: int) -> dict[str, Rule]:
    """The rules, which change the wiring equally often."""
    every = max(steps // 20, 2)
    return {
        "random": Random(),
        "set": SET(every=every),
        "rigl, listen=1": RigL(every=every, listen=1),
        "rigl": RigL(every=every),
    }


def run(rule: Rule, rate: float, seed: int, text: torch.Tensor, steps: int) -> dict[str, Any]:
    """Train once."""
    before: dict[str, torch.Tensor] = {}
    received, sent = [], []

    def count(wiring: wirings.Wiring) -> None:
        now = wiring.masks()
        for name, mask in now.items():
            new = mask & ~before.get(name, mask)
            if new.any():
                received.append(top_share(new.sum(1)))
                sent.append(top_share(new.sum(0)))
        before.update(now)

    train, test = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
    model = small_gpt.train(rule, rate, seed, train, steps, watch=count)
    found: dict[str, Any] = {
        "rate": rate,
        "seed": seed,
        "bits_per_byte": round(small_gpt.bits_per_byte(model, test), 4),
    }
    if received:
        found |= {"received": round(statistics.mean(received), 4), "sent": round(statistics.mean(sent), 4)}
    return found


def top_share(counts: torch.Tensor) -> float:
    """The share of all that the tenth of entries with the largest counts has."""
    top = counts.sort(descending=True).values[: max(1, round(TENTH * len(counts)))]
    return float(top.sum() / counts.sum())


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table: the mean over seeds at every rate, the best rate of each side in bold."""
    rates, seeds = record["settings"]["rates"], len(record["settings"]["seeds"])
    head = ["rule", *(f"{rate:g}" for rate in rates), "to a tenth of the outputs", "from a tenth of the inputs"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for side in dict.fromkeys(row["rule"] for row in record["rows"]):
        runs = [row for row in record["rows"] if row["rule"] == side]
        means = {rate: statistics.mean(one["bits_per_byte"] for one in runs if one["rate"] == rate) for rate in rates}
        best = min(means, key=lambda rate: means[rate])
        cells = [f"**{means[rate]:.3f}**" if rate == best else f"{means[rate]:.3f}" for rate in rates]
        for key in ("received", "sent"):
            found = [one[key] for one in runs if one["rate"] == best and key in one]
            cells.append(f"{100 * statistics.mean(found):.0f} %" if found else "")
        lines.append(f"| `{side}` | {' | '.join(cells)} |")
    of = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    return "\n".join([*lines, "", f"(Bits per byte, {of}; the shares are those at the best rate.)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = small_gpt.read(options.file)
    settings = small_gpt.settings(text, options.steps) | {"seeds": options.seeds, "rates": options.rates}
    about = machine("cpu")
    rows: list[dict[str, Any]] = []
    for i, seed in enumerate(options.seeds):
        for side in sides(options.steps):
            for rate in options.rates:
                rows.append({"rule": side, **run(sides(options.steps)[side], rate, seed, text, options.steps)})
                print(rows[-1], flush=True)
        settings["seeds"] = options.seeds[: i + 1]
        record = {"benchmark": "rigl_adam", "settings": settings, **about, "rows": rows}
        save(options.out, record)  # after every seed, since it takes a while
    print(table(record))


if __name__ == "__main__":
    main()
