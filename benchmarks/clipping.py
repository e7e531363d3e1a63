"""Cost of clipping gradients by the edges in use: a training step with and without it, in turns, in one process.

python -m benchmarks.clipping [--device cuda] [--rule dnw] [--out results/benchmarks/clipping-cpu.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import nn
from torch.nn import functional as F

import wirings
from benchmarks.common import compare, machine, save
from wirings import models

DENSITY = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rule", default="dnw")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = options.device
    about = machine(device)
    print(f"{about['hardware']}, {about['versions']}")
    torch.manual_seed(0)
    sizes = {"layers": options.layers, "width": options.width, "heads": options.width // 64, "context": options.tokens}
    model = models.get("gpt", classes=256, **sizes).to(device)
    wiring = wirings.wire_(model.blocks, options.rule, density=DENSITY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (options.batch, options.tokens), device=device)

    def step(clip: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            clip()
            optimizer.step()
            wiring.step(optimizer)

        return run

    sides = {
        "no clipping": step(lambda: None),
        "all edges": step(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "edges in use": step(lambda: wiring.clip_grad_norm_(1.0)),
    }
    times = compare(sides, device, options.seconds)
    rows = [{"clipping": name, **taken} for name, taken in times.items()]
    for row in rows:
        more = row["median_s"] / rows[0]["median_s"] - 1
        print(f"{row['clipping']}: {1e3 * row['median_s']:.2f} ms per step ({100 * more:+.1f} %)")
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    save(options.out, {"benchmark": "clipping", "settings": settings, **about, "rows": rows})


if __name__ == "__main__":
    main()
