"""Helpers of all benchmarks: timing with warm-up and synchronization, and records that describe the machine."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wirings.train import build
from wirings.train.data.base import Data
from wirings.train.distributed import start
from wirings.train.results import environment
from wirings.train.run.optimizer import make_optimizer
from wirings.train.run.step import TrainingStep
from wirings.train.settings import Settings

RESULTS = Path(__file__).parents[1] / "results"


def time_once(run: Callable[[], object], device: str, calls: int = 1) -> float:
    """Mean seconds per call over ``calls`` calls, by CUDA events on a GPU and by the clock on a CPU."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    for _ in range(calls):
        run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / calls


def training(settings: Settings, device: str) -> tuple[Data, TrainingStep]:
    """Build the data and the training step of a recipe as the training loop does."""
    place = start(device)
    torch.manual_seed(settings.seed)
    data = build.load_data(settings, place)
    model, wiring = build.build(settings, data.classes, place)
    optimizer = make_optimizer(model, wiring, settings, place.device)
    return data, TrainingStep(model, wiring, optimizer, settings, place.device, padded=data.train.padded)


def peak_bytes(step: Callable[[], object], device: str, before: int) -> int | None:
    """The peak memory of a step beyond the bytes allocated ``before``; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Capture a call in a CUDA graph, whose replay takes the GPU's time without the host's overhead."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compare(sides: dict[str, Callable[[], object]], device: str, seconds: float = 2.0) -> dict[str, dict[str, float]]:
    """Median and quartiles of each side in seconds, measured in turns after a warm-up.

    Taking turns spreads disturbances by other processes over all sides. A turn consists of as many calls as fit into a
    few milliseconds, at least one. Each side has at least 3 turns and runs for about ``seconds`` in total.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    calls: dict[str, int] = {}
    for name, run in sides.items():
        time_once(run, device)
        calls[name] = max(1, min(50, int(5e-3 / time_once(run, device))))
    while unfinished := [n for n, t in times.items() if len(t) < 3 or (sum(t) * calls[n] < seconds and len(t) < 200)]:
        for name in unfinished:
            times[name].append(time_once(sides[name], device, calls[name]))
    return {name: summary(taken) for name, taken in times.items()}


def summary(taken: list[float]) -> dict[str, float]:
    """Median, quartiles and number of the times, in seconds."""
    quartiles = statistics.quantiles(taken, n=4)
    return {"median_s": statistics.median(taken), "q1_s": quartiles[0], "q3_s": quartiles[2], "n": len(taken)}


def machine(device: str) -> dict[str, Any]:
    """Hardware, versions and commit, for a benchmark's output and its record."""
    about = environment(device)
    return {
        "hardware": about["hardware"],
        "threads": torch.get_num_threads(),
        "versions": about["versions"],
        "commit": _git("rev-parse", "--short", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain", "--", "wirings", "benchmarks")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def record(name: str) -> dict[str, Any]:
    """Read a committed record in ``results``, such as ``"benchmarks/select-cpu"``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def save(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record as JSON, unless ``path`` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")


def picture_options(about: str, picture: str) -> argparse.Namespace:
    """Parse the options of a benchmark that draws results: ``--results``, and ``--out`` for the picture.

    Args:
        about: the benchmark's docstring.
        picture: the name of the picture in ``docs/images``.
    """
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "docs" / "images" / picture)
    return parser.parse_args()
