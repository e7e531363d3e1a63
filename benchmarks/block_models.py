"""What blocks and 2:4 gain on a GPU: one linear layer, and inference and training steps of GPT-2 small.

- ``linear``: 4096 x 4096 and 8,192 tokens in bfloat16, 10 % of the blocks: the forward pass, and the forward pass with
  both gradients (of real blocks alone), compared with cuBLAS. Both sides are captured in CUDA graphs.
- ``inference``: 16 x 1,024 tokens in bfloat16, the layers of the perceptrons (MLPs) in random blocks, or all layers of
  the blocks 2:4, after `wirings.speed_up_`; compared with the dense network: as a whole, with the logits of all tokens
  or of the last ones, and the MLPs alone.
- ``training``: ten steps with AdamW under autocast, the MLPs wired in blocks: `dnw` with the gradient of hallucinated
  blocks in the first of them, or other rules, compared with the dense network.

Networks are compiled on all sides; for inference block by block, which are alike. Sides take turns in one process. The
record is written after each part.

    python -m benchmarks.block_models [--blocks 32 64] [--rules dnw random] [--parts linear inference training]
        [--out results/benchmarks/block_models-h200.json]
    python -m benchmarks.block_models --device cpu --small
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wirings
from benchmarks.block_products import make
from benchmarks.common import captured, compare, machine, save
from wirings.models import GPT
from wirings.wire.block_products import choose
from wirings.wire.block_products.linear import block_linear

PARTS = ("linear", "inference", "training")
MLPS = ["blocks.*.up", "blocks.*.down"]
DENSITY = 0.1


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    linear: tuple[int, int, int] = (4096, 4096, 8192)
    """Outputs, inputs and tokens."""
    batch: int = 16
    tokens: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    classes: int = 50257
    every: int = 10
    """Steps from one gradient of hallucinated blocks to the next."""


SMALL = Sizes(linear=(128, 128, 256), batch=1, tokens=64, layers=1, heads=2, width=64, classes=100, every=2)


class Bench:
    """The options of a run, and its rows."""

    def __init__(self, device: str, sizes: Sizes, blocks: list[int], rules: list[str], seconds: float) -> None:
        self.device, self.sizes, self.blocks, self.rules, self.seconds = device, sizes, blocks, rules, seconds
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    @property
    def spent(self) -> str:
        """The time since the beginning."""
        return f"{time.perf_counter() - self.began:.0f} s"

    def compile(self, module: nn.Module) -> None:
        """Compile in place. A CPU needs no compiler for it, since it is there to try the benchmark."""
        module.compile(backend="inductor" if self.device == "cuda" else "eager")

    def gpt(self) -> GPT:
        torch.manual_seed(0)
        size = self.sizes
        options = {"layers": size.layers, "heads": size.heads, "width": size.width, "bias": True}
        return GPT(size.classes, size.tokens, **options).to(self.device)  # type: ignore[arg-type]

    def batch(self) -> Tensor:
        return torch.randint(self.sizes.classes, (self.sizes.batch, self.sizes.tokens), device=self.device)

    def replayed(self, run: Callable[[], object]) -> tuple[Callable[[], object], str]:
        """A call without the host's overhead, if it can be captured; and how it is run."""
        if self.device != "cuda":
            return run, "called"
        run()
        try:
            return captured(run), "captured"
        except RuntimeError as error:
            print(f"  not captured: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            return run, "called"

    def compare(self, part: str, what: str, sides: dict[str, Callable[[], object]], capture: bool = True) -> None:
        """Measure sides in turns, one of which is ``"dense"``."""
        runs, ways = {}, {}
        for name, run in sides.items():
            try:
                run()
            except Exception as error:  # PyTorch may not compile or support it
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                print(f"{part:9} {what:32} {name:24} failed: {why}", flush=True)
                self.rows.append({"part": part, "what": what, "side": name, "error": why})
                continue
            runs[name], ways[name] = self.replayed(run) if capture else (run, "called")
        times = compare(runs, self.device, self.seconds)
        dense = times["dense"]["median_s"]
        for name, taken in times.items():
            gain = dense / taken["median_s"]
            self.rows.append({"part": part, "what": what, "side": name, "way": ways[name], "gain": gain, **taken})
            shown = f"{1e3 * taken['median_s']:9.4f} ms, {gain:5.2f} x dense"
            print(f"{part:9} {what:32} {name:24} {shown}, {ways[name]} ({self.spent})", flush=True)


def linear(bench: Bench) -> None:
    """One layer, against cuBLAS."""
    for block in bench.blocks:
        torch.manual_seed(0)
        x, weight, grad, layout = make(*bench.sizes.linear, block, DENSITY, bench.device)

        def dense(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return F.linear(x, weight)

        def sparse(x: Tensor = x, weight: Tensor = weight, layout: Any = layout) -> Tensor:
            return block_linear(x, weight, layout)

        def without_gradients(run: Callable[[], Tensor]) -> Callable[[], object]:
            return torch.no_grad()(run)

        def step(run: Callable[[], Tensor], x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> Any:
            return lambda: torch.autograd.grad(run(), (x, weight), grad)

        name = f"{block}x{block}"
        bench.compare(
            "linear", f"forward, {name}", {"dense": without_gradients(dense), name: without_gradients(sparse)}
        )
        bench.compare("linear", f"forward and gradients, {name}", {"dense": step(dense), name: step(sparse)})
    for key, tile in choose._found.items():
        print(f"  {key[0]}, {key[3:]}: {tile}")


def finalized(bench: Bench, structure: str) -> GPT:
    """A network of which some layers have a structure, in bfloat16, with the fastest kernels."""
    model = bench.gpt()
    if structure == "2:4":
        wirings.wire_(model, "dnw", structure=structure, include=["blocks"])
    elif structure != "dense":
        wirings.wire_(model, "random", structure=structure, density=DENSITY, include=MLPS)
    if structure != "dense":
        wirings.finalize_(model)
    model = model.bfloat16().eval()
    if structure != "dense":
        report = wirings.speed_up_(model, bench.batch())
        lines = str(report).splitlines()
        print("\n".join(["  " + line for line in (lines if len(lines) < 14 else [*lines[:12], *lines[-1:]])]))
        if report.before_ms is not None:
            bench.rows.append({"part": "inference", "what": "speed_up_, called", "side": structure, "way": "called",
                               "gain": report.gain, "before_ms": report.before_ms, "after_ms": report.after_ms,
                               "layers": [vars(layer) for layer in report.layers]})  # fmt: skip
    for block in model.blocks:
        bench.compile(block)
    return model


def inference(bench: Bench) -> None:
    """GPT-2 small, and its perceptrons alone."""
    networks = {name: finalized(bench, name) for name in ("dense", *(f"{b}x{b}" for b in bench.blocks), "2:4")}
    tokens = bench.batch()
    x = torch.randn(bench.sizes.batch, bench.sizes.tokens, bench.sizes.width, device=bench.device, dtype=torch.bfloat16)

    def states(model: GPT) -> Tensor:
        y = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in model.blocks:
            y = block(y)
        return model.norm(y)

    def mlps(model: GPT) -> Callable[[], object]:
        alone = [nn.Sequential(b.up, b.activation, b.down) for b in model.blocks]  # type: ignore[arg-type]
        for one in alone:
            bench.compile(one)

        def run() -> object:
            y = x
            for one in alone:
                y = one(y)
            return y

        return run

    def all_logits(model: GPT) -> Callable[[], object]:
        return lambda: model.head(states(model))

    def last_logits(model: GPT) -> Callable[[], object]:
        return lambda: model.head(states(model)[:, -1])

    with torch.no_grad():
        for what, side in (("logits of the last tokens", last_logits), ("logits of all tokens", all_logits),
                           ("MLPs alone", mlps)):  # fmt: skip
            bench.compare("inference", what, {name: side(model) for name, model in networks.items()})


class Loss(nn.Module):
    """The loss of a network that predicts the next token."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten())


def training(bench: Bench) -> None:
    """Several training steps of GPT-2 small."""
    x, y = bench.batch(), bench.batch()
    sides: dict[str, dict[str, Any] | None] = {"dense": None}
    for block in bench.blocks:
        for rule in bench.rules:
            more = {"gradient_every": bench.sizes.every} if rule == "dnw" else {}
            sides[f"{block}x{block}, {rule}"] = {"rule": rule, "structure": f"{block}x{block}", **more}
    runs = {name: steps(bench, options, x, y) for name, options in sides.items()}
    for name, run in runs.items():
        run()  # compiles, and measures its products
        print(f"  {name} is compiled ({bench.spent})", flush=True)
    bench.compare("training", f"{bench.sizes.every} steps", runs, capture=False)


def steps(bench: Bench, options: dict[str, Any] | None, x: Tensor, y: Tensor) -> Callable[[], object]:
    """A few steps of a network that is wired in this way."""
    loss_of = Loss(bench.gpt())
    wiring = None
    if options is not None:
        wiring = wirings.wire_(loss_of, density=DENSITY, include=[f"model.{name}" for name in MLPS], **options)
    optimizer = torch.optim.AdamW(loss_of.parameters(), lr=1e-4, fused=bench.device == "cuda")
    bench.compile(loss_of)

    def run() -> None:
        for _ in range(bench.sizes.every):
            with torch.autocast(bench.device, torch.bfloat16):
                loss = loss_of(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if wiring is not None:
                wiring.step(optimizer)

    return run


def table(record: dict[str, Any] | None) -> str:
    """The gains as a Markdown table; a sentence if they were not measured yet."""
    if record is None:
        return "(Not measured yet: `python -m benchmarks.block_models` on a GPU writes the record.)"
    lines = ["| | dense | in blocks or 2:4 | gain |", "|---|---:|---:|---:|"]
    dense: dict[tuple[str, str], float] = {}
    for row in record["rows"]:
        at = row["part"], row["what"]
        if "median_s" not in row:
            continue
        if row["side"] == "dense":
            dense[at] = row["median_s"]
        elif at in dense:
            side = "" if row["side"] in row["what"] else f", {row['side']}"
            times = (f"{1e3 * seconds:.3g} ms" for seconds in (dense[at], row["median_s"]))
            lines.append(f"| {row['part']}, {row['what']}{side} | {' | '.join(times)} | {row['gain']:.2f} × |")
    settings = record["settings"]
    text = (
        f"({record['hardware']}, bfloat16, {100 * settings['density']:g} % of the blocks, chosen at random, or 2:4. "
        f"linear: {' × '.join(f'{size:,}' for size in settings['linear'][:2])} and {settings['linear'][2]:,} tokens "
        f"against cuBLAS. Others: GPT-2 small, {settings['batch']} × {settings['tokens']:,} tokens, compiled; blocks "
        f"in the MLPs, 2:4 in all layers of its blocks; training with `gradient_every={settings['every']}`.)"
    )
    return "\n".join([*lines, "", text])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small networks, to try the benchmark")
    parser.add_argument("--blocks", nargs="+", type=int, default=[32])
    parser.add_argument("--rules", nargs="+", default=["dnw"], help="rules of the training steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of calls per side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about, sizes = machine(options.device), SMALL if options.small else Sizes()
    print(f"{about['hardware']}, {about['versions']}")
    bench = Bench(options.device, sizes, options.blocks, options.rules, options.seconds)
    settings = {"density": DENSITY, "blocks": options.blocks, "rules": options.rules, "seconds": options.seconds}
    settings |= vars(sizes)
    for part in options.parts:
        {"linear": linear, "inference": inference, "training": training}[part](bench)
        torch._dynamo.reset()
        spent = round(time.perf_counter() - bench.began, 1)
        record = {"benchmark": "block_models", "settings": settings, **about, "device": options.device}
        save(options.out, {**record, "spent_s": spent, "rows": bench.rows})


if __name__ == "__main__":
    main()
