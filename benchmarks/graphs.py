"""Cost of neural graphs: training steps of the paper's networks, and scaling with the number of allowed edges.

- ``tiny``: one training step (forward, loss, backward, SGD with momentum) of each tiny classifier on synthetic images,
  batch 512. On a GPU in bfloat16, float16, float32 with TF32 products, and float32; called eagerly, captured in a CUDA
  graph, and compiled and captured. The continuous classifier chooses its steps on the host, so it is only called. On a
  CPU, the wired graph is compared with the same graph with all edges and no rule.
- ``mobilenet``: the same for MobileNetV1-DNW on CIFAR-10 (batch 128) and on images of 224 pixels (batch 512); only on a
  GPU.
- ``scaling``: time and memory of a step of graphs with 100 to 10,000 nodes of scalar state.

    python -m benchmarks.graphs [tiny|mobilenet|scaling] [--device cuda] [--batch 512] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn

from benchmarks.common import captured, compare, machine, save, summary, time_once
from wirings import DiscreteGraph, Graph, StaticGraph, models, unwire_
from wirings.graph import ActivationNode

WAYS = ("called", "captured", "compiled and captured")
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def training_step(model: nn.Module, x: Tensor, y: Tensor, precision: str, fast: bool) -> Callable[[], None]:
    """Return a function that runs one training step; ``fast`` makes it suitable for capture in a CUDA graph."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=x.is_cuda)
    scaler = torch.amp.GradScaler(x.device.type, enabled=precision == "fp16")

    def step() -> None:
        optimizer.zero_grad()
        with autocast(x.device.type, precision, cache=not fast):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def autocast(device: str, precision: str, cache: bool = True) -> torch.autocast:
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    half = HALF.get(precision, torch.bfloat16)
    return torch.autocast(device, half, enabled=precision in HALF, cache_enabled=cache)


def evaluations(batch: int) -> list[dict[str, int]]:
    """Number of evaluations of a continuous graph in each precision, at the same weights, during training."""
    torch.manual_seed(0)
    model = models.get("tiny_continuous", rule="dnw").cuda()
    x, y = torch.randn(batch, 3, 32, 32, device="cuda"), torch.randint(10, (batch,), device="cuda")
    step = training_step(model, x, y, "fp16", fast=False)
    counts: list[dict[str, int]] = []
    for _ in range(12):
        counts.append({})
        for precision in PRECISIONS:
            with torch.no_grad(), autocast("cuda", precision):
                model(x)
            counts[-1][precision] = model.graph.effort.evaluations
        for _ in range(4):
            x.normal_()
            step()
    return counts


def tiny_on_gpu(name: str, batch: int, compiled: bool) -> list[dict[str, Any]]:
    rows = []
    for precision in PRECISIONS:
        if precision == "fp16" and name != "tiny_continuous":
            continue  # bfloat16 is precise enough for the others
        ways = WAYS if compiled and precision == "bf16" else WAYS[:2]
        rows.append(step_on_gpu(name, precision, batch, ways[:1] if name == "tiny_continuous" else ways))
    return rows


def mobilenet_on_gpu(compiled: bool, networks: Sequence[str], precisions: Sequence[str]) -> list[dict[str, Any]]:
    """MobileNetV1-DNW, and MobileNetV1 at the width with about the same number of multiply-adds."""
    rows = []
    for size, batch in ((32, 128), (224, 512)):
        for name, width in (("mobilenetv1_dnw", 0.225), ("mobilenetv1", 0.25)):
            if name not in networks:
                continue
            options = {"width": width, "image_size": size, "rule": "dnw" if name.endswith("dnw") else "dense"}
            for precision in [p for p in precisions if p == "bf16" or name.endswith("dnw")]:
                ways = WAYS if compiled and precision == "bf16" else WAYS[:2]
                rows.append(step_on_gpu(name, precision, batch, ways, **options))
    return rows


def step_on_gpu(name: str, precision: str, batch: int, ways: Sequence[str], **options: Any) -> dict[str, Any]:
    """Measure the training step of one model: called, captured, or compiled and captured."""
    sides: dict[str, Callable[[], object]] = {}
    alive: list[object] = []  # a CUDA graph does not keep its tensors alive
    row: dict[str, Any] = {"model": name, "precision": precision, "batch": batch, **options}
    for way in ways:
        torch.manual_seed(0)
        model = models.get(name, **{"rule": "dnw", **options}).cuda()
        size = options.get("image_size", 32)
        x, y = torch.randn(batch, 3, size, size, device="cuda"), torch.randint(10, (batch,), device="cuda")
        start = time.perf_counter()
        used = torch.compile(model, dynamic=False) if way.startswith("compiled") else model
        step = training_step(used, x, y, precision, fast=way != "called")
        alive.append((model, x, y, step))
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        if way == "called":
            torch.cuda.reset_peak_memory_stats()
            step()
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
            effort = getattr(getattr(model, "graph", None), "effort", None)
            if effort is not None:
                row["evaluations"], row["steps"] = effort.evaluations, effort.accepted
        sides[way] = step if way == "called" else captured(step)
        print(f"  {name} {precision} {way}: ready in {time.perf_counter() - start:.1f} s", flush=True)
    row["times"] = compare(sides, "cuda", seconds=0.7)
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    times = ", ".join(f"{way} {1e3 * t['median_s']:.2f} ms" for way, t in row["times"].items())
    more = f", {row['evaluations']} evaluations" if "evaluations" in row else ""
    memory = f", {row['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in row else ""
    size = f" {row['image_size']} px, batch {row['batch']}" if "image_size" in row else ""
    print(f"{row['model']:16}{size} {row.get('precision', ''):5} {times}{memory}{more}", flush=True)


def tiny_on_cpu(name: str, batch: int) -> dict[str, Any]:
    """Compare the wired graph with the same graph with all edges and no rule, in turns."""
    steps = {}
    for side in ("wired", "dense"):
        torch.manual_seed(0)
        fixed = (
            {"solver": "rk4", "steps": 4} if name == "tiny_continuous" else {}
        )  # so that both sides do the same work
        model = models.get(name, rule="dnw", **fixed)
        if side == "dense":
            unwire_(model)
        x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        steps[side] = training_step(model, x, y, "fp32", fast=False)
    times: dict[str, list[float]] = {side: [] for side in steps}
    for step in steps.values():
        step()
    for _ in range(7):
        for side, step in steps.items():
            times[side].append(time_once(step, "cpu"))
    row = {"model": name, "batch": batch, "times": {side: summary(taken) for side, taken in times.items()}}
    row["ratio"] = row["times"]["wired"]["median_s"] / row["times"]["dense"]["median_s"]
    show(row)
    print(f"  ratio {row['ratio']:.3f}")
    return row


def grown(kind: str, nodes: int, device: str) -> Graph:
    """A graph of scalar nodes with 10 % of its allowed edges real."""
    node, tenth = ActivationNode("tanh"), nodes // 10
    if kind == "blocks":
        sizes = [tenth] * 10
        return StaticGraph(sizes, edges=0.1, node=node).to(device)
    if kind == "complete":
        return DiscreteGraph(nodes, inputs=tenth, outputs=tenth, steps=3, edges=0.1, node=node).to(device)
    rows, columns = torch.arange(nodes)[:, None], torch.arange(nodes)[None, :]
    band = (rows - columns).abs() <= 10  # 20 neighbours and itself: edges grow linearly with nodes
    return DiscreteGraph(topology=band, inputs=tenth, outputs=tenth, steps=3, edges=0.1, node=node).to(device)


def scaling(device: str, batch: int) -> list[dict[str, Any]]:
    rows = []
    for kind in ("blocks", "complete", "band"):
        for nodes in (100, 300, 1000, 3000, 10_000):
            torch.manual_seed(0)
            gc.collect()  # a graph and its handle reference each other
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            graph = grown(kind, nodes, device)
            x = torch.randn(batch, len(graph.inputs), device=device)
            optimizer = torch.optim.SGD(graph.parameters(), 0.01)

            def step(graph: Graph = graph, x: Tensor = x, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.zero_grad()
                graph(x).square().mean().backward()
                optimizer.step()

            step()
            row: dict[str, Any] = {"kind": kind, "nodes": nodes, "allowed": graph.allowed, "batch": batch}
            row["bytes"] = memory_of(step, graph, device) - before
            row["times"] = compare({"called": step}, device, seconds=1.0)
            rows.append(row)
            taken = row["times"]["called"]["median_s"]
            print(
                f"{kind:9} {nodes:6,} nodes, {graph.allowed:11,} allowed edges: {1e3 * taken:8.2f} ms "
                f"({1e9 * taken / graph.allowed:8.2f} ns per edge), {row['bytes'] / 2**20:8.1f} MiB "
                f"({row['bytes'] / graph.allowed:6.1f} bytes per edge)",
                flush=True,
            )
            del graph, step, optimizer, x
    return rows


def memory_of(step: Callable[[], None], graph: Graph, device: str) -> int:
    """Peak memory of a step in bytes, weights included, from PyTorch's CUDA allocator or its CPU profiler."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    from torch.profiler import ProfilerActivity, profile

    held = sum(t.numel() * t.element_size() for t in [*graph.parameters(), *graph.buffers()])
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        step()
    numpy_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    now = peak = 0
    events = measured.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return held + peak + numpy_peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="?", choices=["tiny", "mobilenet", "scaling"], help="default: all parts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="default: 512 on a GPU, 64 on a CPU")
    parser.add_argument("--models", nargs="*", default=[n for n in models.names() if n.startswith("tiny")])
    parser.add_argument("--networks", nargs="*", default=["mobilenetv1_dnw", "mobilenetv1"], help="for mobilenet")
    parser.add_argument("--precisions", nargs="*", default=["bf16", "tf32"], help="for mobilenet")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = machine(options.device)
    print(f"{about['hardware']}, {about['versions']}")
    record: dict[str, Any] = {"benchmark": "graphs"}
    if options.out is not None and options.out.exists():  # keep the other parts of the record
        record = json.loads(options.out.read_text())
    batch = options.batch or (512 if options.device == "cuda" else 64)
    if options.part in (None, "tiny"):
        counts: dict[str, Any] = {}
        if options.device == "cuda":
            rows = [row for name in options.models for row in tiny_on_gpu(name, batch, not options.no_compile)]
            if "tiny_continuous" in options.models:
                counts["evaluations"] = evaluations(batch)
                print("evaluations at the same weights:", *counts["evaluations"], sep="\n  ")
        else:
            rows = [tiny_on_cpu(name, batch) for name in options.models]
        record["tiny"] = {**about, "rows": rows, **counts}
    if options.part in (None, "mobilenet") and options.device == "cuda":
        record["mobilenet"] = {
            **about,
            "rows": mobilenet_on_gpu(not options.no_compile, options.networks, options.precisions),
        }
    if options.part in (None, "scaling"):
        record["scaling"] = {**about, "rows": scaling(options.device, 64)}
    save(options.out, record)


if __name__ == "__main__":
    main()
