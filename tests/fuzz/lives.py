"""Many lives in one process: wire, train, finalize, compile, drop. The memory that is in use must not grow."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import wirings
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import compact, engine
from wirings.compaction.program import Program

WARM_UP, EVERY, TRACED = 40, 20, 20
"""Lives before memory is measured; between measurements; between two that trace their model with torch.export."""
BYTES, TRACED_BYTES = 40e6, 0.5e6
"""The growth that counts as none, and what PyTorch itself keeps of each trace."""


@dataclass
class Life:
    """What the lives of one process share."""

    program: Program
    lived: int = 0
    traced: int = 0
    before: tuple[int, int, int] | None = None


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def prepare(folder: Path) -> Life:
    """Trace the program that most lives compile."""
    return Life(compact(network().eval(), torch.randn(1, 3, 6, 6)).program)


def live(number: int, program: Program | None) -> None:
    """Wire, train, finalize and compile a small network. Without a program, its own is traced."""
    torch.manual_seed(number)
    model = network()
    wiring = wirings.wire_(model, ("dnw", "rigl", "set", "gmp")[number % 4], density=0.3)
    wiring.plan(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(2, 3, 6, 6)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
    wirings.finalize_(model)
    small = compact(model.eval(), images) if program is None else program
    made = engine.compile(small, engine=("sparse", "dense")[number % 2], threads=1 + number % 3)
    with torch.no_grad():
        made(images)


def in_use() -> tuple[int, int, int]:
    """The resident memory, and the numbers of Python's threads and of the system's."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages, threading.active_count(), len(list(Path("/proc/self/task").iterdir()))


def case(life: Life, folder: Path, seed: int) -> str:
    """One more life of this process."""
    life.lived += 1
    traced = life.lived % TRACED == 0
    life.traced += traced and life.before is not None
    live(seed, None if traced else life.program)
    what = "traced and compiled" if traced else "compiled"
    if life.lived == WARM_UP:
        life.before = in_use()
    if life.before is None or life.lived % EVERY:
        return what
    memory, threads, tasks = (now - then for now, then in zip(in_use(), life.before, strict=True))
    if threads > 0 or tasks > 0:
        return f"{MISTAKE}: {threads} more threads of Python, {tasks} more of the system after {life.lived} lives"
    if memory > BYTES + life.traced * TRACED_BYTES:
        return f"{MISTAKE}: {memory / 1e6:.0f} MB more after {life.lived} lives"
    return f"{what}, memory flat"


FUZZERS = {"lives": Fuzzer(prepare, case, chunk=1000, short=100)}
