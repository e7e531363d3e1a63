"""Cost of wiring: one training step of a wired model compared with the dense model, in turns, in one process.

By default: a 20-layer perceptron of width 1,024, batch 512, density 10 %, SGD with momentum; on a CPU with one thread
and with PyTorch's default number. The ratio is the median over pairs of steps that run one right after the other.

    python -m benchmarks.wired_step [--device cuda] [--rule dnw] [--out results/benchmarks/wired_step-cpu.json]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn

import wirings
from benchmarks.common import machine, save, summary, time_once


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
    parser.add_argument("--pairs", type=int, default=60, help="steps per side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, width = options.device, options.width
    about = machine(device)
    print(f"{about['hardware']}, {about['versions']}")
    torch.manual_seed(0)
    dense = nn.Sequential(*[layer for _ in range(options.layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    dense.to(device)
    model = copy.deepcopy(dense)
    wiring = wirings.wire_(model, options.rule, density=options.density)
    x = torch.randn(options.batch, width, device=device)
    sides = {"dense": stepper(dense, x, None), "wired": stepper(model, x, wiring)}
    rows = []
    for threads in [1] if device == "cuda" else sorted({1, about["threads"]}):
        torch.set_num_threads(threads)
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for pair in range(options.pairs + 3):
            for name, step in sides.items():
                seconds = time_once(step, device)
                if pair >= 3:  # the first pairs are a warm-up
                    taken[name].append(seconds)
        ratio = statistics.median(w / d for w, d in zip(taken["wired"], taken["dense"], strict=True))
        times = {name: summary(each) for name, each in taken.items()}
        for name, each in times.items():
            low, high = 1e3 * each["q1_s"], 1e3 * each["q3_s"]
            print(
                f"{threads} threads, {name}: {1e3 * each['median_s']:.2f} ms per step "
                f"(quartiles {low:.2f} to {high:.2f})"
            )
        verdict = "met" if ratio <= 1.1 else "NOT met"
        print(f"{threads} threads, wired / dense: {ratio:.3f} ({verdict}: at most 1.1)")
        rows.append({"threads": threads, "times": times, "ratio": ratio})
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    save(options.out, {"benchmark": "wired_step", "settings": settings, **about, "rows": rows})


if __name__ == "__main__":
    main()
