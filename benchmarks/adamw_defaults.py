"""What wired transformers want of AdamW: the scale of starting weights, weight decay, and when edges are removed.

A small GPT trains with each variant at learning rates that differ by a factor of two, until the rate with the fewest
bits per byte of held-out text has a worse one on both sides; then the rates beside the best one, at a factor of √2,
are tried as well. The two best rates train again with the other seeds, and so does any other rate whose mean so far is
smaller, since the best rate of one seed may be too high for another. Another part of the text measures the result at
the rate that is best in the mean.

    python -m benchmarks.adamw_defaults FILE [--steps 600] [--seeds 0 1 2] [--only SIDE …] [--out RECORD.json]

Trainings that the record has already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import small_gpt
from benchmarks.common import machine, save
from wirings import rules
from wirings.rules import Rule
from wirings.utils.tables import markdown_table

RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
FEWEST, MOST = 1e-4, 1.0  # rates beyond which nobody would look


@dataclass(frozen=True)
class Side:
    """A variant: a rule with its options, and how its weights start and decay."""

    rule: str
    options: dict[str, Any] = field(default_factory=dict)
    scale_weights: bool = False
    decays: small_gpt.Decays = "all"
    schedule: tuple[float, float] | None = None

    def make(self, steps: int) -> Rule:
        """The rule for a training of so many steps."""
        options = dict(self.options)
        if self.schedule is not None:
            begin, end = self.schedule
            options["schedule"] = {"begin": begin, "end": end, "every": 10}
        if self.rule in ("set", "rigl"):
            options["every"] = max(steps // 20, 2)
        return rules.get(self.rule, **options)


SIDES = {
    "dense": Side("dense"),
    "dnw": Side("dnw"),
    "dnw, scaled": Side("dnw", scale_weights=True),
    "random": Side("random"),
    "random, scaled": Side("random", scale_weights=True),
    "soft_threshold": Side("soft_threshold"),
    "soft_threshold, scaled": Side("soft_threshold", scale_weights=True),
    "dnw, only real edges decay": Side("dnw", decays="real"),
    "dnw, no edge decays": Side("dnw", decays="none"),
    "soft_threshold, 0 to ½": Side("soft_threshold", schedule=(0.0, 0.5)),
    "soft_threshold, ¼ to ¾": Side("soft_threshold", schedule=(0.25, 0.75)),
    "soft_threshold, 0 to ¾": Side("soft_threshold", schedule=(0.0, 0.75)),
    "soft_threshold, 0 to ½, only real edges decay": Side("soft_threshold", decays="real", schedule=(0.0, 0.5)),
    "soft_threshold, 0 to ½, no edge decays": Side("soft_threshold", decays="none", schedule=(0.0, 0.5)),
    "dnw, 0 to ½": Side("dnw", schedule=(0.0, 0.5)),
    "dnw, ¼ to ¾": Side("dnw", schedule=(0.25, 0.75)),
    "gmp, 0 to ¾": Side("gmp"),
    "gmp, ¼ to ¾": Side("gmp", {"begin": 0.25}),
    "set": Side("set"),
    "set, scaled": Side("set", scale_weights=True),
    "rigl": Side("rigl"),
    "rigl, scaled": Side("rigl", scale_weights=True),
}
QUESTIONS = {
    "The scale of starting weights": [
        ("dnw", "dnw, scaled"), ("soft_threshold", "soft_threshold, scaled"), ("random", "random, scaled"),
        ("set", "set, scaled"), ("rigl", "rigl, scaled"),
    ],
    "Weight decay of edges": [
        ("dnw", "dnw, only real edges decay"), ("dnw", "dnw, no edge decays"),
        ("soft_threshold, 0 to ½", "soft_threshold, 0 to ½, only real edges decay"),
        ("soft_threshold, 0 to ½", "soft_threshold, 0 to ½, no edge decays"),
    ],
    "When edges are removed, in fractions of training": [
        ("soft_threshold", "soft_threshold, 0 to ½"), ("soft_threshold, 0 to ½", "soft_threshold, 0 to ¾"),
        ("soft_threshold, 0 to ½", "soft_threshold, ¼ to ¾"), ("dnw", "dnw, 0 to ½"), ("dnw, 0 to ½", "dnw, ¼ to ¾"),
        ("gmp, 0 to ¾", "gmp, ¼ to ¾"),
    ],
}  # fmt: skip
"""Pairs to compare: the usual way, and another."""


class Study:
    """Trainings of one text, kept in a record."""

    def __init__(self, text: Tensor, steps: int, seeds: list[int], rates: list[float], out: Path | None) -> None:
        self.steps, self.seeds, self.rates, self.out = steps, seeds, rates, out
        train, held = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
        self.train, self.choose, self.test = train, held[: len(held) // 2], held[len(held) // 2 :]
        settings = small_gpt.settings(text, steps) | {"weight_decay": small_gpt.DECAY}
        self.record = {"benchmark": "adamw_defaults", "settings": settings, **machine("cpu"), "rows": []}
        if out is not None and out.exists():
            earlier = json.loads(out.read_text())
            if earlier["settings"] != settings:
                raise SystemExit(f"{out} has trainings with other settings. Give another file.")
            self.record["rows"] = earlier["rows"]

    def tune(self, side: str) -> None:
        """Find the best learning rate of a variant with the first seed, and train with the others there."""
        values = {rate: self.value(side, rate, self.seeds[0]) for rate in self.rates}
        while True:  # until a rate on each side is worse
            best, low, high = min(values, key=lambda rate: values[rate]), min(values), max(values)
            further = low / 2 if best == low else 2 * high
            if low < best < high or not FEWEST < further < MOST:
                break
            values[further] = self.value(side, further, self.seeds[0])
        for beside in (best / math.sqrt(2), best * math.sqrt(2)):
            values[beside] = self.value(side, beside, self.seeds[0])
        means = {rate: self.mean(side, rate) for rate in sorted(values, key=lambda rate: values[rate])[:2]}
        values |= means
        while (best := min(values, key=lambda rate: values[rate])) not in means:
            values[best] = means[best] = self.mean(side, best)

    def mean(self, side: str, rate: float) -> float:
        """The mean of `value` over all seeds."""
        return statistics.mean(self.value(side, rate, seed) for seed in self.seeds)

    def value(self, side: str, rate: float, seed: int) -> float:
        """The bits per byte by which rates are chosen; trains if the record has no such training."""
        for row in self.record["rows"]:
            if row["side"] == side and math.isclose(row["rate"], rate, rel_tol=1e-3) and row["seed"] == seed:
                return row["choose"] if row["choose"] is not None else math.inf
        one = SIDES[side]
        model = small_gpt.train(
            one.make(self.steps), rate, seed, self.train, self.steps, scale_weights=one.scale_weights, decays=one.decays
        )
        found = {"choose": self.choose, "test": self.test}
        bits = {part: small_gpt.bits_per_byte(model, text) for part, text in found.items()}
        kept = {part: round(value, 4) if math.isfinite(value) else None for part, value in bits.items()}
        row = {"side": side, "rate": float(f"{rate:.4g}"), "seed": seed, **kept}
        self.record["rows"].append(row)
        print(row, flush=True)
        save(self.out, self.record)
        return row["choose"] if row["choose"] is not None else math.inf


@dataclass(frozen=True)
class Best:
    """A variant at its best rate."""

    rate: float
    values: list[float]
    """Bits per byte of the text that was not used to choose the rate, by seed."""
    bracketed: bool
    """Whether a lower and a higher rate were worse."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan


def best_of(rows: list[dict[str, Any]], side: str) -> Best:
    """The rate that is best in the mean among those with the most seeds, judged by the text for choosing."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["side"] == side:
            by_rate.setdefault(row["rate"], []).append(row)
    most = max(len(runs) for runs in by_rate.values())
    means = {
        rate: statistics.mean(run["choose"] for run in runs)
        for rate, runs in by_rate.items()
        if len(runs) == most and all(run["choose"] is not None for run in runs)
    }
    rate = min(means, key=lambda rate: means[rate])
    return Best(rate, [run["test"] for run in by_rate[rate]], min(by_rate) < rate < max(by_rate))


def tables(record: dict[str, Any]) -> str:
    """A Markdown table for every question, with the variants that the record has."""
    rows = record["rows"]
    there = {row["side"] for row in rows}
    parts = []
    for question, pairs in QUESTIONS.items():
        cells = []
        for usual, other in pairs:
            if not {usual, other} <= there:
                continue
            a, b = best_of(rows, usual), best_of(rows, other)
            noise = math.sqrt(a.deviation**2 / len(a.values) + b.deviation**2 / len(b.values))
            gain = f"{b.mean - a.mean:+.3f} ± {noise:.3f}"
            cells.append((f"`{usual}`", _shown(a), f"`{other}`", _shown(b), gain))
        if cells:
            head = ("usual", "bits per byte (rate)", "other", "bits per byte (rate)", "difference")
            parts += [f"**{question}**", "", *markdown_table(head, cells, align="lrlrr"), ""]
    dense = f"`dense`: {_shown(best_of(rows, 'dense'))}. " if "dense" in there else ""
    seeds = len({row["seed"] for row in rows})
    note = f"({dense}Mean ± deviation of {seeds} seeds; of a difference, its standard error. Lower is better.)"
    return "\n".join([*parts, note])


def _shown(best: Best) -> str:
    sure = "" if best.bracketed else "*"
    return f"{best.mean:.3f} ± {best.deviation:.3f} ({best.rate:.2g}{sure})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the text")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES))
    parser.add_argument("--only", nargs="*", choices=SIDES, default=list(SIDES), metavar="SIDE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    study = Study(small_gpt.read(options.file), options.steps, options.seeds, options.rates, options.out)
    for side in options.only:
        study.tune(side)
    print(tables(study.record))


if __name__ == "__main__":
    main()
