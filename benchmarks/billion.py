"""Memory of a model with a billion weights on a CPU: wired, trained for two steps and finalized, compared with dense.

The model has 100 residual layers of width 3,163, or 10⁹ weights. Both training steps run forward, backward and SGD with
momentum; the second one starts with the optimizer's state allocated. Each side runs in a process of its own, whose peak
resident memory the operating system reports. A limit on its data segment stops a process that needs more.

    python -m benchmarks.billion [--layers 100] [--width 3163] [--limit 24] [--out results/benchmarks/billion-cpu.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn

import wirings
from benchmarks.common import machine, save

SIDES = ("dense", "wired")


class Residual(nn.Module):
    """A residual linear layer: the skip connection lets the signal pass through a hundred of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(nn.functional.layer_norm(x, x.shape[1:]).relu())


def measure(side: str, layers: int, width: int, density: float, rule: str, batch: int) -> dict[str, Any]:
    """Run all phases of one side, and return the seconds and the peak memory in bytes of each."""
    torch.manual_seed(0)
    phases: dict[str, dict[str, float]] = {}
    clock = time.perf_counter()

    def done(phase: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        phases[phase] = {"seconds": now - clock, "peak_bytes": peak()}
        clock = now

    model = nn.Sequential(*[Residual(width) for _ in range(layers)])
    weights = sum(layer.linear.weight.numel() for layer in model)  # type: ignore[union-attr, operator]
    done("built")
    wiring = None
    if side == "wired":
        wiring = wirings.wire_(model, rule, density=density)
        wiring.plan(2)
        done("wired")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
    x = torch.randn(batch, width)
    for step in ("first step", "second step"):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if wiring is not None:
            wiring.step(optimizer)
        done(step)
    found: dict[str, Any] = {"side": side, "weights": weights, "loss": loss.item()}
    if wiring is not None:
        wirings.finalize_(model)
        done("finalized")
        found["edges"] = sum(int(torch.count_nonzero(layer.linear.weight)) for layer in model)  # type: ignore[union-attr, arg-type]
    return {**found, "phases": phases, "peak_bytes": peak()}


def peak() -> int:
    """Peak resident memory of this process so far, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=3163)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rule", default="dnw")
    parser.add_argument("--limit", type=float, default=24.0, help="largest data segment of a process, in GB")
    parser.add_argument("--side", choices=SIDES, help="measure only this side, and print JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("layers", "width", "density", "rule", "batch")}
    if options.side is not None:
        limit = int(options.limit * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        print(json.dumps(measure(options.side, **settings)))
        return
    about, rows = machine("cpu"), []
    print(f"{about['hardware']}, {about['versions']}")
    for side in SIDES:
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "benchmarks.billion", f"--side={side}", f"--limit={options.limit}", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[1])
        if done.returncode:
            sys.exit(
                f"{side}: exited with status {done.returncode}; it may need more than {options.limit:g} GB (--limit)."
            )
        rows.append(json.loads(done.stdout))
        phases = ", ".join(
            f"{name} {phase['seconds']:.1f} s ({phase['peak_bytes'] / 1e9:.2f} GB)"
            for name, phase in rows[-1]["phases"].items()
        )
        print(f"{side}: {rows[-1]['weights']:,} weights; peak {rows[-1]['peak_bytes'] / 1e9:.2f} GB; {phases}")
    dense, wired = (row["peak_bytes"] for row in rows)
    print(f"wired / dense: {wired / dense:.3f}; {'within' if wired < 24e9 else 'NOT within'} 24 GB")
    save(options.out, {"benchmark": "billion", "settings": settings, **about, "rows": rows})


if __name__ == "__main__":
    main()
