"""What wiring costs: one training step of a wired model against the same model dense, in turn, in one process.

By default a 20-layer perceptron of width 1,024, batch 512, density 10 %, SGD with momentum.

    python -m benchmarks.wired_step [--device cuda] [--rule dnw] [--out results/benchmarks/wired_step-cpu.json]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a file: this folder must not hide Python's own module `select`
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn

import wirings
from benchmarks.common import compare, machine, save


def stepper(model: nn.Module, x: Tensor, wiring: wirings.Wiring | None) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if wiring is not None:
            wiring.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rule", default="dnw")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to time each side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, width = options.device, options.width
    about = machine(device)
    print(f"{about['hardware']}, {about['threads']} threads, {about['versions']}")
    torch.manual_seed(0)
    dense = nn.Sequential(*[layer for _ in range(options.layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    dense.to(device)
    model = copy.deepcopy(dense)
    wiring = wirings.wire_(model, options.rule, density=options.density)
    x = torch.randn(options.batch, width, device=device)
    taken = compare({"dense": stepper(dense, x, None), "wired": stepper(model, x, wiring)}, device, options.seconds)
    for name, times in taken.items():
        low, high = 1e3 * times["q1_s"], 1e3 * times["q3_s"]
        print(
            f"{name}: {1e3 * times['median_s']:.1f} ms a step (quartiles {low:.1f} to {high:.1f}, {times['n']} steps)"
        )
    ratio = taken["wired"]["median_s"] / taken["dense"]["median_s"]
    print(f"wired / dense: {ratio:.3f}")
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    save(options.out, {"benchmark": "wired_step", "settings": settings, **about, "times": taken, "ratio": ratio})


if __name__ == "__main__":
    main()
