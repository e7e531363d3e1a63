"""What every benchmark needs: timing with warm-up and synchronisation, and a record of the machine."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def time_once(run: Callable[[], object], device: str, calls: int = 10) -> float:
    """Seconds that one call takes; on a GPU by CUDA events around several calls, on a CPU by the clock."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    for _ in range(calls):
        run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / calls


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same call, replayed from a CUDA graph: what the GPU takes, without the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compare(sides: dict[str, Callable[[], object]], device: str, seconds: float = 2.0) -> dict[str, dict[str, float]]:
    """Median and spread (quartiles) of each side in seconds, all sides in turn, after a warm-up.

    Taking turns shares out what else the machine does. Each side runs at least 3 times, and about ``seconds`` long.
    """
    times: dict[str, list[float]] = {}
    for name, run in sides.items():
        first = time_once(run, device)
        times[name] = []
        if first < seconds / 4:
            time_once(run, device)
    while any(len(taken) < 3 or (sum(taken) < seconds and len(taken) < 200) for taken in times.values()):
        for name, run in sides.items():
            taken = times[name]
            if len(taken) < 3 or (sum(taken) < seconds and len(taken) < 200):
                taken.append(time_once(run, device))
    return {name: summary(taken) for name, taken in times.items()}


def summary(taken: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(taken, n=4)
    return {"median_s": statistics.median(taken), "q1_s": quartiles[0], "q3_s": quartiles[2], "n": len(taken)}


def machine(device: str) -> dict[str, Any]:
    """Hardware, versions and commit, for the head of a benchmark and for its record."""
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "hardware": name,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "commit": commit.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()


def save(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")
