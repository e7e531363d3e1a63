"""RigL with AdamW: a small GPT on Tiny Shakespeare, with the gradient of one batch or of several deciding what grows.

Every side trains at several learning rates. Besides bits per byte of held-out text, the benchmark counts where new
edges go: the share of them that the tenth of each layer's output nodes with the most new edges receives, and the tenth
of its input nodes sends, in the mean over changes and layers. Edges that are drawn at random (`set`) show what chance
gives.

    python -m benchmarks.rigl_adam FILE [--steps 2000] [--seeds 0 1 2] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import wirings
from benchmarks.common import machine, save
from wirings import models
from wirings.rules import SET, Random, RigL, Rule

RATES = (1e-2, 2e-2)
CONTEXT, BATCH, DENSITY, TENTH = 64, 32, 0.1, 0.1
TEST_BATCHES = 64


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
    torch.manual_seed(seed)
    model = models.get("gpt", classes=256, context=CONTEXT, layers=2, heads=4, width=64, rule="dense")
    wiring = wirings.wire_(model, rule, density=DENSITY, skip=["head"])
    wiring.plan(steps)
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    warm = steps // 10
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 1.0) * (0.1 + 0.45 * (1 + math.cos(math.pi * max(i - warm, 0) / (steps - warm)))),
    )
    train, test = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
    draw = torch.Generator().manual_seed(seed)
    before = wiring.masks()
    received, sent = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, windows(train, draw)).backward()
        wiring.clip_grad_norm_(1.0)
        optimizer.step()
        cosine.step()
        wiring.step(optimizer)
        now = wiring.masks()
        for name, mask in now.items():
            new = mask & ~before[name]
            if new.any():
                received.append(top_share(new.sum(1)))
                sent.append(top_share(new.sum(0)))
        before = now
    model.eval()
    fixed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        loss = statistics.mean(float(loss_of(model, windows(test, fixed))) for _ in range(TEST_BATCHES))
    found: dict[str, Any] = {"rate": rate, "seed": seed, "bits_per_byte": round(loss / math.log(2), 4)}
    if received:
        found |= {"received": round(statistics.mean(received), 4), "sent": round(statistics.mean(sent), 4)}
    return found


def windows(text: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A batch of random windows, (batch, context + 1)."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


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
    text = torch.from_numpy(np.frombuffer(options.file.read_bytes(), np.uint8).astype(np.int64))
    settings: dict[str, Any] = {
        "network": "gpt 2 × 64, 4 heads", "context": CONTEXT, "batch": BATCH, "density": DENSITY, "bytes": len(text),
        "steps": options.steps, "seeds": options.seeds, "rates": options.rates,
    }  # fmt: skip
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
