"""Cost of sparse training of a real network: a step of ResNet50 with 10 % of its weights, compared with a dense step.

By default: ResNet50, 224 pixels, batch 256, bfloat16, channels_last, the settings of Table 4, and synthetic images that
are already on the device. Each side runs eagerly and compiled (`torch.compile`), in turns in one process. A ratio is
the median over rounds, in which the sides run their steps one right after the other. Memory is the peak of a side,
including its weights and the optimizer's state.

``authors`` works like the authors' code: every layer sorts all magnitudes in every step and sets the smallest ones to
zero in a copy of the weight.

    python -m benchmarks.sparse_step [--density 0.1] [--rule dnw] [--out results/benchmarks/sparse_step-h200.json]
    python -m benchmarks.sparse_step --device cpu --model resnet18 --batch 8 --size 32 --rounds 5 --no-compile
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.common import machine, peak_bytes, save, summary, time_once
from wirings import models
from wirings.train.run.optimizer import make_optimizer
from wirings.train.settings import ModelSettings, OptimizerSettings, Settings

OPTIMIZER = OptimizerSettings(lr=0.256, momentum=0.875, weight_decay=2**-15, no_decay=("*bn?",))
LIMITS = {"time": 1.03, "memory": 1.05}


class SortedAway(torch.autograd.Function):
    """A copy of a weight with its smallest entries set to zero; the gradient reaches all entries."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, density: float) -> Tensor:
        kept = weight.clone(memory_format=torch.contiguous_format)
        order = weight.abs().reshape(-1).sort().indices
        kept.view(-1)[order[: int((1 - density) * order.numel())]] = 0
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Authors(nn.Module):
    """The authors' method as a parametrization."""

    def __init__(self, density: float) -> None:
        super().__init__()
        self.density = density

    def forward(self, weight: Tensor) -> Tensor:
        return SortedAway.apply(weight, self.density)


def make(side: str, options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Make the network of one side and its wiring."""
    torch.manual_seed(0)
    wired = {"rule": options.rule, "density": options.density} if side == "wired" else {"rule": "dense"}
    size = {"width": options.width, "classes": options.classes, "image_size": options.size}
    model = models.get(options.model, **size, **wired)
    if side == "authors":
        for module in list(model.modules()):
            if isinstance(module, nn.Conv2d):
                parametrize.register_parametrization(module, "weight", Authors(options.density))
    model.to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, model.wiring


def stepper(side: str, compiled: bool, options: argparse.Namespace, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a function that runs one training step of a side: forward, loss, backward, optimizer, rule."""
    model, wiring = make(side, options)
    settings = Settings(ModelSettings(options.model), optimizer=OPTIMIZER)
    optimizer = make_optimizer(model, wiring, settings, torch.device(options.device))
    used: Any = torch.compile(model) if compiled else model
    if wiring is not None:
        wiring.plan(10**6)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = nn.functional.cross_entropy(used(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        if wiring is not None:
            wiring.step(optimizer)

    return step


def allocated(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def prepared(side: str, way: str, options: argparse.Namespace, x: Tensor, y: Tensor) -> tuple[Callable[[], None], Any]:
    """Return the step of a side after a warm-up, and its peak memory in bytes (None on a CPU)."""
    before, started = allocated(options.device), time.perf_counter()
    step = stepper(side, way == "compiled", options, x, y)
    for _ in range(options.warmup):
        step()
    peak = peak_bytes(step, options.device, before)
    memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
    print(f"  {side}, {way}: ready after {time.perf_counter() - started:.1f} s{memory}", flush=True)
    return step, peak


def measure(way: str, sides: list[str], options: argparse.Namespace, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Measure all sides in turns, either called or compiled."""
    ready = {side: prepared(side, way, options, x, y) for side in sides}
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for round_ in range(options.rounds):
        for side in sides if round_ % 2 else reversed(sides):  # alternate the order
            taken[side].append(time_once(ready[side][0], options.device, options.steps))
    row: dict[str, Any] = {"way": way, "times": {side: summary(each) for side, each in taken.items()}}
    row["peak_bytes"] = {side: peak for side, (_, peak) in ready.items()}
    row["ratios"] = {
        side: statistics.median(a / b for a, b in zip(taken[side], taken["dense"], strict=True)) for side in sides
    }
    for side in sides:
        each, peak, dense = row["times"][side], row["peak_bytes"][side], row["peak_bytes"]["dense"]
        memory = "" if peak is None else f", {peak / 2**30:.2f} GiB ({100 * (peak / dense - 1):+.1f} %)"
        print(
            f"{way}, {side}: {1e3 * each['median_s']:.2f} ms per step (quartiles {1e3 * each['q1_s']:.2f} to "
            f"{1e3 * each['q3_s']:.2f}, {each['n']} × {options.steps} steps), {100 * (row['ratios'][side] - 1):+.1f} % "
            f"compared with dense{memory}",
            flush=True,
        )
    if options.device == "cuda":
        holds = row["ratios"]["wired"] <= LIMITS["time"]
        holds &= row["peak_bytes"]["wired"] <= LIMITS["memory"] * row["peak_bytes"]["dense"]
        print(f"{way}: {'met' if holds else 'NOT met'}: at most 3 % more time and 5 % more memory than dense")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet50", choices=["resnet50", "resnet18"])
    parser.add_argument("--width", type=float, default=1.0, help="channels, relative to those of ResNet")
    parser.add_argument("--rule", default="dnw")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="height and width of images in pixels")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--rounds", type=int, default=12, help="turns per side")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps before measuring")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-authors", action="store_true", help="skip the authors' method")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    about = machine(options.device)
    print(f"{about['hardware']}, {about['versions']}")
    if options.device == "cuda":
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    x = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(options.classes, (options.batch,), device=options.device)
    sides = ["dense", "wired"]
    rows = [measure("called", [*sides, *([] if options.no_authors else ["authors"])], options, x, y)]
    if not options.no_compile:
        gc.collect()
        torch.cuda.empty_cache()
        rows.append(measure("compiled", sides, options, x, y))
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    save(options.out, {"benchmark": "sparse_step", "settings": settings, **about, "rows": rows})


if __name__ == "__main__":
    main()
