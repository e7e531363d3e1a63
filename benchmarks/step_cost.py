"""Cost of wiring with every rule: a training step compared with the dense network, called and compiled.

Networks: two GPTs, a perceptron and ResNet50, in bfloat16 (`torch.autocast`) with fused AdamW, 10 % of the weights of
all blocks. Inputs are synthetic and already on the device. All sides of a network run in turns in one process; a ratio
is the median over rounds, in which each side runs its steps after the others. Memory is the peak of a side in a step,
including its weights and the optimizer's state. Work that a rule does only every few steps is included as often as it
occurs, except that rounds are too short to include more than the first removal of `gmp` and the first exchange of
`rigl` (every 100 steps).

    python -m benchmarks.step_cost [--network gpt2 gpt perceptron resnet50] [--ways called compiled]
        [--out results/benchmarks/step_cost-h200.json]
    python -m benchmarks.step_cost --device cpu --network perceptron --small --rounds 2 --steps 1
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wirings
from benchmarks.common import machine, peak_bytes, save, summary, time_once
from wirings import models

DENSITY = 0.1
SIDES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "dnw": {"rule": "dnw"},
    "soft_threshold": {"rule": "soft_threshold", "schedule": "cubic"},
    "soft_threshold, global": {"rule": "soft_threshold", "schedule": "cubic", "share": "global"},
    "gmp": {"rule": "gmp"},
    "rigl": {"rule": "rigl"},
    "top_kast": {"rule": "top_kast"},
    "decayed_gradient": {"rule": "decayed_gradient"},
    "no_update": {"rule": "no_update"},
    "set": {"rule": "set"},
    "str": {"rule": "str"},
    "l1_anneal": {"rule": "l1_anneal"},
}
WARM_UP = {"perceptron": 40}
"""Steps before measuring, where 5 are too few: a step that takes the host longer than the GPU settles late."""
MAIN = ["dense", "dnw", "soft_threshold", "soft_threshold, global", "gmp", "rigl", "top_kast"]
"""The sides that goals are set for."""


class Block(nn.Module):
    """A transformer block with causal attention and a multilayer perceptron, both after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.projection(attended)
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT that returns its loss of predicting the next token."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(states))).flatten(0, 1), y.flatten())


class Perceptron(nn.Module):
    """Equally wide layers and a mean-square loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


class Classifier(nn.Module):
    """An image network and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.blocks = network

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.blocks(x), y)


@dataclass(frozen=True)
class Network:
    """How to make a network and its batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[str], tuple[Tensor, Tensor]]


def _tokens(batch: int, tokens: int, vocabulary: int) -> Callable[[str], tuple[Tensor, Tensor]]:
    return lambda device: tuple(torch.randint(vocabulary, (2, batch, tokens), device=device))  # type: ignore[return-value]


def _images(batch: int, size: int, classes: int) -> Callable[[str], tuple[Tensor, Tensor]]:
    def make(device: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(classes, (batch,), device=device)

    return make


def _resnet(name: str, size: int, classes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        network = models.get(name, classes=classes, image_size=size, rule="dense")
        return Classifier(network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]

    return make


def _vectors(batch: int, width: int) -> Callable[[str], tuple[Tensor, Tensor]]:
    return lambda device: tuple(torch.randn(2, batch, width, device=device))  # type: ignore[return-value]


NETWORKS = {
    "gpt2": Network(lambda: GPT(12, 768, 12, 1024, 50304), _tokens(16, 1024, 50304)),
    "gpt": Network(lambda: GPT(6, 512, 8, 512, 256), _tokens(64, 512, 256)),
    "perceptron": Network(lambda: Perceptron(20, 1024), _vectors(512, 1024)),
    "resnet50": Network(_resnet("resnet50", 224, 1000), _images(256, 224, 1000)),
}
SMALL = {
    "gpt2": Network(lambda: GPT(2, 32, 2, 16, 64), _tokens(2, 16, 64)),
    "gpt": Network(lambda: GPT(2, 32, 2, 16, 64), _tokens(2, 16, 64)),
    "perceptron": Network(lambda: Perceptron(3, 32), _vectors(8, 32)),
    "resnet50": Network(_resnet("resnet18", 32, 10), _images(2, 32, 10)),
}


def stepper(side: str, network: Network, compiled: bool, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs one training step of a side: forward, backward, optimizer, rule."""
    torch.manual_seed(0)
    model = network.make().to(options.device)
    x, y = network.batch(options.device)
    wiring, settings = None, SIDES[side]
    if settings is not None:
        rule = wirings.rules.get(settings["rule"], schedule=settings.get("schedule"))
        wiring = wirings.wire_(
            model, rule, density=DENSITY, include=["blocks*"], share=settings.get("share", "uniform")
        )
        wiring.plan(10_000)
    fused = {"fused": True} if options.device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    used: Any = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(options.device, torch.bfloat16):
            loss = used(x, y)
        loss.backward()
        optimizer.step()
        if wiring is not None:
            wiring.step(optimizer)

    return step


def prepared(
    side: str, network: Network, way: str, warmup: int, options: argparse.Namespace
) -> tuple[Callable[[], None], Any]:
    """Return the step of a side after ``warmup`` steps, and its peak memory in bytes (None on a CPU)."""
    gc.collect()
    before, started = torch.cuda.memory_allocated() if options.device == "cuda" else 0, time.perf_counter()
    step = stepper(side, network, way == "compiled", options)
    for _ in range(warmup):
        step()
    peak = peak_bytes(step, options.device, before)
    print(f"  {side}, {way}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return step, peak


def measure(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides of a network in turns, either called or compiled."""
    network = (SMALL if options.small else NETWORKS)[name]
    warmup = WARM_UP.get(name, 5) if options.warmup is None else options.warmup
    ready = {side: prepared(side, network, way, warmup, options) for side in options.sides}
    if options.prepare:
        return {}
    taken: dict[str, list[float]] = {side: [] for side in ready}
    for round_ in range(options.rounds):
        for side in ready if round_ % 2 else reversed(ready):  # alternate the order
            taken[side].append(time_once(ready[side][0], options.device, options.steps))
    rows = []
    for side, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times, taken["dense"], strict=True))
        peak, dense = ready[side][1], ready["dense"][1]
        memory = None if peak is None else peak / dense
        rows.append({"side": side, "times": summary(times), "ratio": ratio, "peak_bytes": peak, "memory_ratio": memory})
        extra = "" if memory is None else f", memory {100 * (memory - 1):+.1f} %"
        print(
            f"{name}, {way}, {side}: {1e3 * statistics.median(times):.3f} ms per step, {100 * (ratio - 1):+.1f} % "
            f"compared with dense{extra}",
            flush=True,
        )
    return {"network": name, "way": way, "rows": rows}


TITLES = {
    "gpt2": "GPT-2 small, 1,024 tokens, batch 16",
    "gpt": "GPT, 6 × 512, 512 tokens, batch 64",
    "perceptron": "perceptron, 20 × 1,024, batch 512",
    "resnet50": "ResNet50, 224 px, batch 256",
}


def table(record: dict[str, Any]) -> str:
    """A row for each network and way, a column for each rule: the time of a step compared with the dense network's."""
    sides = [side for side in MAIN if side != "dense"]
    lines = ["| a training step | dense | " + " | ".join(f"`{side}`" for side in sides) + " |"]
    lines.append("|---|---:|" + "---:|" * len(sides))
    for part in record["rows"]:
        rows = {row["side"]: row for row in part["rows"]}
        cells = [f"{100 * (rows[side]['ratio'] - 1):+.1f} %" for side in sides]
        dense = f"{1e3 * rows['dense']['times']['median_s']:.1f} ms"
        lines.append(f"| {TITLES[part['network']]}, {part['way']} | {dense} | " + " | ".join(cells) + " |")
    most = max(row["memory_ratio"] for part in record["rows"] for row in part["rows"])
    return "\n".join([*lines, "", f"(Memory at the peak of a step: at most {100 * (most - 1):+.1f} %.)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="*", choices=["called", "compiled"], default=["called", "compiled"])
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=MAIN, help="dense is always measured")
    parser.add_argument("--rounds", type=int, default=12, help="turns per side")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--warmup", type=int, help="steps before measuring; default: 5, perceptron 40")
    parser.add_argument("--small", action="store_true", help="small networks, to try the benchmark")
    parser.add_argument("--prepare", action="store_true", help="compile only, to fill the compiler's cache")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.prepare:
        options.sides = ["dense", *[side for side in options.sides if side != "dense"]]
    about = machine(options.device)
    print(f"{about['hardware']}, {about['versions']}")
    if options.device == "cuda":
        torch.backends.cudnn.benchmark = True
    settings = {"density": DENSITY, **{name: getattr(options, name) for name in ("rounds", "steps", "warmup", "small")}}
    parts = []
    for name in options.network:
        for way in options.ways:
            if way == "compiled" and name == "perceptron":
                continue  # the plain loop is what it is about
            parts.append(measure(name, way, options))
            if not options.prepare:  # after every network: the next one may take too long
                save(options.out, {"benchmark": "step_cost", "settings": settings, **about, "rows": parts})
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
